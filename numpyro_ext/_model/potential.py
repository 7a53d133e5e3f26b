"""A model on its arguments: its traces, and its potential in unconstrained space, at values and on
rows that the caller chooses."""

from collections.abc import Callable, Iterator
import copy
from dataclasses import replace
from functools import cached_property
from itertools import product
import math
from typing import Any, Self

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to
from numpyro.handlers import block, infer_config, seed, substitute
from numpyro.infer.util import constrain_fn, potential_energy, transform_fn, unconstrain_fn

from numpyro_ext._model.arguments import indexed, is_traced
from numpyro_ext._model.circles import is_circle, on_circles
from numpyro_ext._model.density import log_prob, row_log_lik
from numpyro_ext._model.enumeration import parallel, summed_log_density
from numpyro_ext._model.handlers import (
    at_rows,
    given_rows,
    latents_only,
    on_first_rows,
    weighted_rows,
)
from numpyro_ext._model.masked import masks_filled
from numpyro_ext._model.minibatch import plate_indices, replace_indices
from numpyro_ext._model.operations import (
    has_forward_mode,
    in_either_mode,
    linearized,
    traced_once,
)
from numpyro_ext._model.read import (
    ModelInfo,
    check_all_rows,
    has_fixed_bounds,
    latent_sites,
    moving_supports,
    sample_sites,
    trace_of,
)
from numpyro_ext._numpyro import at_unconstrained, default_key, site_of_log_det
from numpyro_ext._typing import Model, Params, Sites, Trace
from numpyro_ext.data._ahead import bytes_of_rows, read_ahead, with_rows
from numpyro_ext.data._rows import is_on_host, is_stream

ROWS = 50_000
"""Rows of an array that a pass takes at once, and the most from the host."""
_BYTES = 2**22


class Program:
    """A model on its arguments.

    :param dict params: values of the model's ``param`` and ``mutable`` sites.
    :param dict plates: ``{plate: (size, subsample_size)}`` of the plates with rows to be chosen.
    """

    def __init__(
        self,
        model: Model,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        params: Params | None = None,
        *,
        plates: dict[str, tuple[int, int]] | None = None,
    ) -> None:
        self.model = substitute(model, data=params) if params else model
        self.plates = plates or {}
        self.arguments: tuple[tuple, dict[str, Any]] = indexed(args), indexed(kwargs or {})
        # Whether there are rows on the host, of a plate that takes a minibatch.
        self.reads_ahead = bool(self.plates) and is_on_host(self.arguments)

    def trace(
        self,
        z: Sites | None = None,
        rows: dict[str, Array] | None = None,
        *,
        values: Sites | Callable[[Any], Array | None] | None = None,
        rng_key: Array | None = None,
    ) -> Trace:
        """The trace of one run.

        :param dict z: unconstrained values of latent sites; each log Jacobian is a factor.
        :param dict rows: indices of any number for plates; None for the model's own.
        :param values: values of sites as they are, a dict or a function of a site.
        :param rng_key: the key of all that is drawn, where the model has none.
        """
        fn = self._on(rows)
        if callable(values):
            fn = substitute(fn, substitute_fn=values)
        elif values:
            fn = substitute(fn, data=values)
        fn = fn if z is None else at_unconstrained(fn, z)
        return trace_of(fn if rng_key is None else seed(fn, rng_key), *self.arguments)

    def rows_log_lik(self, z: Sites, rows: dict[str, Array]) -> Array:
        """The log likelihood of each of these rows of one plate, without the plate's scale."""
        (plate,) = rows
        return row_log_lik(self.trace(z, rows), plate)

    def read_ahead(self, idx: dict[str, Array]) -> Any:
        """Rows on the host for one step or several, ``(*steps, B)`` of each plate, by one callback,
        for :meth:`with_rows`; None without such rows."""
        return read_ahead(self.arguments, self._sizes, idx)

    def with_rows(self, idx: dict[str, Array], rows: Any = None) -> Self:
        """The same with the rows ``idx`` on the host read in one callback, or read before."""
        rows = self.read_ahead(idx) if rows is None and self.reads_ahead else rows
        if rows is None:
            return self
        arguments = with_rows(self.arguments, self._sizes, idx, rows)
        return self.changed(arguments=arguments, reads_ahead=False)

    def changed(self, **parts: Any) -> Self:
        """The same but for these parts, without the programs of :func:`surface_of`."""
        other = copy.copy(self)
        vars(other).update({"surface": None, "flat": None, **parts})
        return other

    @property
    def _sizes(self) -> dict[str, int]:
        return {name: size for name, (size, _) in self.plates.items()}

    @property
    def piece_size(self) -> int:
        """The rows that a pass takes at once: 50,000, or about four megabytes from the host."""
        num_bytes = bytes_of_rows(self.arguments, self._sizes)
        return min(ROWS, max(1, _BYTES // num_bytes)) if num_bytes else ROWS

    def _on(self, rows: dict[str, Array] | None) -> Model:
        if rows is None:
            return self.model
        return at_rows(self.model, {n: jnp.asarray(i) for n, i in rows.items()}, self.plates)


def supports_of(
    guide: Any,
    args: tuple,
    kwargs: dict[str, Any],
    z: Sites | None = None,
    values: Sites | None = None,
) -> dict[str, Any]:
    """``{site: support}`` of the model of an auto guide, at unconstrained values or at values as
    they are. Handlers around see only the ``param`` sites of the run."""
    model, trace = guide.seen_model, guide.prototype_trace
    if moving_supports(model, args, kwargs, trace):
        with block(hide_fn=lambda site: site["type"] != "param"):
            program = Program(on_first_rows(model), args, kwargs)
            trace = program.trace(z, values=values, rng_key=random.key(0))
    return {site["name"]: site["fn"].support for site in latent_sites(trace)}


class Potential(Program):
    r"""
    The potential :math:`U(z) = -\log p(x, z)` of a model on given data, and its gradient.

    U is NumPyro's: unconstrained sites, Jacobian included, and the likelihood of the rows ``idx``
    scaled by ``size / len(idx)`` of their plates, so that it estimates the potential of all rows
    without bias. This is the object through which a gradient estimator sees the model.

     - **info** - the static parts of the model: ``info.latents`` in the flat order, the length
       ``info.size`` of the flat vector, ``info.ravel(z)`` and ``info.unravel(x)`` between sites and
       that vector, and ``info.slices`` of each site in it.
     - **plates** - ``{plate: (size, subsample_size)}`` of the plates that take a minibatch.
     - **arguments** - positional and keyword arguments of the model.

    Discrete latent sites are summed out, and then the deterministic sites are left out.

    ``z`` and gradients are dicts of unconstrained sites; ``idx`` holds indices, of any number, for
    every plate in ``plates``. Kernels make the object; a gradient estimator is given it.

    :param ModelInfo info: the result of :func:`read_model` on these arguments.
    :param dict params: values of the model's ``param`` and ``mutable`` sites.
    :param bool forward_mode: whether to differentiate in forward mode, as is done in any case where
        a primitive has no derivative in reverse.

    >>> from numpyro_ext.mcmc import SGLD, MinibatchGradient
    >>> def model(x):
    ...     loc = numpyro.sample("loc", dist.Normal(0, 10))
    ...     with numpyro.plate("data", len(x), subsample_size=2) as idx:
    ...         numpyro.sample("x", dist.Normal(loc, 1), obs=x[idx])
    >>> class FullGradient(MinibatchGradient):
    ...     def estimate(self, rng_key, i, z, idx, potential, state):
    ...         value, grad = potential.full_value_and_grad(z)
    ...         return value, grad, state
    >>> kernel, x = SGLD(model, 1e-3, gradient=FullGradient()), jnp.array([1.0, 2.0, 3.0, 6.0])
    >>> _, grad = kernel.estimate_gradient(random.key(0), {"loc": jnp.array(3.0)}, (x,))
    >>> print(f"{grad['loc']:.4f}")    # 3 / 100 of the prior, 0 of the likelihood
    0.0300
    """

    surface: Any = None
    """The programs of :func:`surface_of`, once they are made."""
    flat: Any = None
    """:meth:`value_and_grad_flat` as a program that is put into others, of :meth:`read_once`."""

    def __init__(
        self,
        model: Model,
        info: ModelInfo,
        params: Params,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        forward_mode: bool = False,
    ) -> None:
        model = default_key(given_rows(model, info.given) if info.given else model)
        model = on_circles(model, info)
        if info.masked:
            model = masks_filled(model)
        if info.summed:  # they have a value where no density is taken
            model = infer_config(seed(model, random.key(0)), parallel)
        super().__init__(model, args, kwargs, params, plates=info.plates)
        self.info = info
        self._forward_mode = forward_mode

    def __call__(self, z: Sites, idx: dict[str, Array]) -> Array:
        """U at ``z`` on the rows ``idx``."""
        if self.info.summed:
            return self._summed(z, idx)
        model, (args, kwargs) = at_rows(self.model, idx, self.plates), self.arguments
        return jnp.asarray(potential_energy(model, args, kwargs, z))

    def value_and_grad(self, z: Sites, idx: dict[str, Array]) -> tuple[Array, Sites]:
        """U and its gradient: one minibatch."""

        def differentiate(forward: bool) -> tuple[Array, Sites]:
            if forward:
                return jax.jacfwd(lambda z: (self(z, idx),) * 2, has_aux=True)(z)[::-1]
            return jax.value_and_grad(self)(z, idx)

        return in_either_mode(differentiate, self._forward_mode)

    def value_and_grad_flat(self, x: Array, idx: dict[str, Array]) -> tuple[Array, Array]:
        """:meth:`value_and_grad` of the ``(n,)`` flat vector: U, and its ``(n,)`` gradient."""
        if self.flat is not None:
            return self.flat(x, idx)
        value, grad = self.value_and_grad(self.info.unravel(x), idx)
        return value, self.info.ravel(grad)

    def read_once(self) -> Self:
        """The same for several programs with :meth:`value_and_grad_flat` in them: the model is run
        once for each number of rows, and not for each program."""
        return self.changed(flat=traced_once(self.value_and_grad_flat))

    @cached_property
    def has_curvature(self) -> bool:
        """Whether the gradient has a derivative, see :func:`has_forward_mode`."""
        x, rows = np.zeros(self.info.size, jnp.result_type(float)), self.first_rows()
        return has_forward_mode(lambda x: self.value_and_grad_flat(x, rows)[1], x)

    def linearized_grad(
        self, x: Array, idx: dict[str, Any], **options: Any
    ) -> tuple[Array, Callable[[Array], Array]]:
        """The gradient on the rows ``idx`` at a flat vector, and the product of the Hessian there
        with a direction; ``options`` are those of :func:`linearized`."""

        def grad(x: Array) -> tuple[Array, None]:
            return self.value_and_grad_flat(x, idx)[1], None

        y, _, along = linearized(grad, x, **options)
        return y, along

    def draw_rows(self, rng_key: Array) -> dict[str, Array]:
        """The rows of one minibatch of each plate."""
        return {n: plate_indices(rng_key, n, N, M) for n, (N, M) in self.plates.items()}

    def full_value_and_grad(self, z: Sites, chunk_size: int | None = None) -> tuple[Array, Sites]:
        """U and its gradient over all rows, ``chunk_size`` (by default :attr:`piece_size`) rows of
        a plate at a time: a mean over pieces, each with the whole prior and the scale of all."""
        chunk_size = self.piece_size if chunk_size is None else chunk_size

        def average(names: list[str], idx: dict[str, Array]) -> Any:
            if not names:
                return self.with_rows(idx).value_and_grad(z, idx)
            name, *rest = names
            size = self.plates[name][0]
            chunk = min(chunk_size, size)

            def add(total: Any, here: Array) -> Any:
                part, weight = average(rest, idx | {name: here}), len(here) / size
                return jax.tree.map(lambda a, b: a + weight * b, total, part)

            def body(k: Array, total: Any) -> Any:
                return add(total, k * chunk + jnp.arange(chunk))

            shapes = jax.eval_shape(self.value_and_grad, z, self.first_rows())
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            total = lax.fori_loop(0, size // chunk, body, zeros)
            rest_of_rows = jnp.arange(size - size % chunk, size)
            return add(total, rest_of_rows) if len(rest_of_rows) else total

        return average(list(self.plates), {})

    def pieces(self, rows: int | None = None) -> Iterator[tuple[float, dict[str, Array]]]:
        """``(weight, rows)`` of pieces. The weighted mean of U over them is U on all rows, or on so
        many rows of each plate, evenly spread."""
        parts = []
        for name, (size, _) in self.plates.items():
            chunk = min(self.piece_size, size)
            end = size if rows is None else min(size, -(-rows // chunk) * chunk)
            bounds = [(k, min(k + chunk, end)) for k in range(0, end, chunk)]
            parts.append([(name, (b - a) / end, a, b, size // end) for a, b in bounds])
        for combination in product(*parts):
            weight = math.prod(share for _, share, *_ in combination)
            yield weight, {name: step * jnp.arange(a, b) for name, _, a, b, step in combination}

    @property
    def takes_minibatches(self) -> bool:
        """True if a value is an estimate from a minibatch, of rows that are chosen or given."""
        return bool(self.plates or self.info.given)

    def on_one_batch(self) -> Self:
        """The same on one batch of a stream; itself where rows can be chosen."""
        if not is_stream(self.arguments):
            return self
        info = replace(self.info, plates={}, given={**self.info.given, **self.plates})
        model = given_rows(self.model, self.plates)
        return self.changed(model=model, info=info, plates={}, reads_ahead=False)

    def resampled(self, rng_key: Array) -> Self:
        """The same on as many rows, drawn with replacement from the given ones."""
        keys = random.split(rng_key, len(self.info.given))
        weights = {
            name: jnp.zeros(rows).at[replace_indices(key, rows, rows)].add(1.0)
            for (name, (_, rows)), key in zip(self.info.given.items(), keys, strict=True)
        }
        return self.changed(model=weighted_rows(self.model, weights))

    def check_all_rows(self, who: str) -> None:
        """An error where the rows of a minibatch are all that ``who`` can read."""
        check_all_rows(who, self.info.given, *self.arguments)

    def first_rows(self) -> dict[str, Array]:
        """Rows ``0 .. B-1`` of every plate: a batch where any will do."""
        return {name: jnp.arange(batch) for name, (_, batch) in self.plates.items()}

    def prior(self) -> Self:
        """The same without the observed sites: minus the log prior, Jacobian included."""
        return self.changed(model=latents_only(self.model))

    def unconstrain(self, what: str, values: Sites) -> Sites:
        """Constrained values of all latent sites, unconstrained; ``what`` is for an error."""
        values = self.info.check_constrained(what, values)
        fn = seed(on_first_rows(self.model), random.key(0))
        return self.info.check_unconstrained(what, unconstrain_fn(fn, *self.arguments, values))

    def postprocess(self) -> Callable[[Sites], Sites]:
        """From unconstrained sites to constrained and deterministic ones, on first rows."""
        supports = {name: latent.support for name, latent in self.info.latents.items()}
        # Bounds that are arrays may depend on other sites, or were traced when the model was read.
        others = [support for support in supports.values() if not is_circle(support)]
        if has_fixed_bounds(others) and not self.info.deterministic:
            transforms = {name: biject_to(support) for name, support in supports.items()}
            return lambda z: transform_fn(transforms, z)
        fn = on_first_rows(self.model)
        # What depends on a site that is summed out has no value.
        dropped = self.info.deterministic if self.info.summed else ()

        def constrain(z: Sites) -> Sites:
            sites = constrain_fn(fn, *self.arguments, z, return_deterministic=True)
            return {name: x for name, x in sites.items() if name not in dropped}

        return constrain

    def _summed(self, z: Sites, idx: dict[str, Array]) -> Array:
        """U, summed over the values of the sites that are marked as ``parallel``."""
        from numpyro.contrib.funsor import enum, plate_to_enum_plate
        from numpyro.contrib.funsor import trace as packed_trace

        batches = {n: (N, len(idx[n])) for n, (N, _) in self.plates.items() if len(idx[n]) < N}
        fn, (args, kwargs) = enum(self._on(idx), -self.info.nesting - 1), self.arguments
        # Scales of whole rows belong outside of the sum, where NumPyro has them inside.
        if not batches and not self.info.scaled:
            return jnp.asarray(potential_energy(fn, args, kwargs, z, enum=True))
        with plate_to_enum_plate():
            sites = packed_trace(at_unconstrained(fn, z)).get_trace(*args, **kwargs)
        return -summed_log_density(sites, batches)

    def check_start(
        self,
        z: Sites,
        idx: dict[str, Array],
        potential: Array,
        grad: Sites | None = None,
        *,
        give: str = "another init_strategy or init_params",
    ) -> None:
        """A ``ValueError`` that names the site if U or its gradient is not finite at a start, or at
        one of several along a leading axis, and what to ``give``."""
        if is_traced((potential, grad)):
            return
        starts = (z, idx, potential, grad)
        if jnp.ndim(potential) == 0:
            starts = jax.tree.map(lambda x: jnp.asarray(x)[None], starts)
        grads = [np.reshape(g, (len(g), -1)) for g in jax.tree.leaves(starts[3])]
        fine = np.isfinite(np.concatenate([np.reshape(starts[2], (-1, 1)), *grads], axis=1))
        if np.all(fine):  # nothing to compile
            return
        first = int(np.argmin(np.all(fine, axis=1)))
        z, idx, _, grad = jax.tree.map(lambda x: x[first], starts)

        @jax.jit  # or values out of the support would warn first
        def densities(z: Sites) -> dict[str, Array]:
            sites = {site["name"]: site for site in sample_sites(self.trace(z, idx))}
            own = [n for n in sites if site_of_log_det(n, self.info.latents) == n]
            return {name: jnp.sum(log_prob(sites[name])) for name in own}

        numbers = [*densities(z).items(), *(grad or {}).items()]
        bad = [name for name, x in numbers if not jnp.all(jnp.isfinite(x))]
        place = f"the initial point: see site '{bad[0]}'" if bad else "the initial point"
        raise ValueError(
            f"the potential or its gradient is not finite at {place}; check the data, or give"
            f" {give}."
        )
