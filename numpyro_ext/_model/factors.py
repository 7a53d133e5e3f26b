r"""The factors of a model: one term for each row of data, and one for each element of the prior.

.. math:: \log p(x, y) = \sum_n l_n(x) + \sum_s \sum_j t_{sj}(x)

at a flat vector x of unconstrained latent sites. Expectation propagation replaces one factor after
another, each at latent vectors of its own, so that no factor may cost a pass over all the data.
"""

from collections.abc import Collection
import copy
from dataclasses import replace
from functools import partial
from itertools import product
import math
from typing import Any, Self

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute
from numpyro.infer import init_to_uniform

from numpyro_ext._model.arguments import split_arguments
from numpyro_ext._model.checks import valid_data
from numpyro_ext._model.density import log_prob, row_log_lik, scaled
from numpyro_ext._model.handlers import every_row
from numpyro_ext._model.masked import is_masked, masks_filled
from numpyro_ext._model.potential import Program
from numpyro_ext._model.read import (
    Site,
    frames,
    latent_sites,
    model_info,
    plate_sizes,
    refuse_scaled,
    sample_sites,
    scaled_latents,
    shape_trace,
)
from numpyro_ext._numpyro import default_key, site_of_log_det
from numpyro_ext._typing import Model, Params, Sites, Trace
from numpyro_ext.data._ahead import read_ahead, with_rows
from numpyro_ext.data._rows import is_on_host

LARGEST_STATES = 64
"""The number of joint states of the discrete local sites up to which they are summed out."""
TOLERANCE = 1e-4
"""The largest error of the log likelihood l of a row, in units of 1 + |l|."""
_MOST_CHECKED = 10_000
"""Rows on the host that are read for a comparison of rows alone with all of them."""
_BLOCK = 1000
"""Rows that are computed alone at the same time."""


class Factors:
    r"""The log density of a model in unconstrained space, Jacobian included, factor by factor.

    A row is an index n of the data plate. Its factor :math:`l_n` is the sum of the observed sites
    in that plate at this row, without the scale of the plate. Every other factor :math:`t_{sj}` is
    batch element j of a latent site, or of an observed one outside the plate. The sum of all
    factors is minus NumPyro's potential of all rows.

    A latent site inside the data plate is local. It is no part of x: :meth:`row` takes its value in
    that row and adds its log prior.

     - **info** - the :class:`ModelInfo` of the model, with its global latent sites
       alone; x, of length D, is their flat vector.
     - **program** - the :class:`Program` of the model, on all rows of its plates.
     - **plate, size** - the data plate and the number N of its rows.
     - **local** - the continuous local sites in one row: zeros of their unconstrained shapes.
     - **states** - the joint states of the discrete ones: arrays with a leading axis.
     - **axes** - the axis of the data plate in each of them, in unconstrained space.
     - **rows_by** - how a row is computed: by ``"plate"`` or ``"arguments"``.

    :param str data_plate: name of the data plate; needed if observed sites are in several plates.
    """

    def __init__(
        self,
        model: Model,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        *,
        data_plate: str | None = None,
        params: Params | None = None,
    ) -> None:
        self.program = Program(masks_filled(default_key(model)), args, kwargs, params)
        self.program.model = every_row(self.program.model)
        trace = self._valid_trace()
        refuse_scaled(scaled_latents(trace), "EP")
        self.plate = _data_plate(trace, data_plate)
        self.size = plate_sizes(trace)[self.plate][0]
        latent = (x for x in latent_sites(trace) if self.plate in frames(x))
        discrete = {x["name"]: x for x in latent if x["fn"].support.is_discrete}
        info = model_info({n: x for n, x in trace.items() if n not in discrete})
        inside = {n: x for n, x in info.latents.items() if self.plate in x.plates}
        outside = {n: x for n, x in info.latents.items() if n not in inside}
        self.info = replace(info, latents=outside)
        # The axis of the plate in an unconstrained value, which has one row in ``local``.
        axes = {n: len(x.constrained.shape) - x.support.event_dim for n, x in inside.items()}
        axes = {n: axis + frames(trace[n])[self.plate] for n, axis in axes.items()}
        rows = {n: list(x.unconstrained.shape) for n, x in inside.items()}
        for n, axis in axes.items():
            rows[n][axis] = 1
        self.local = {n: jnp.zeros(shape) for n, shape in rows.items()}
        self.axes = axes | {n: frames(x)[self.plate] for n, x in discrete.items()}
        self.states = _joint_states(discrete, self.plate)
        self._masked = [name for name in self.axes if is_masked(trace[name])]
        self._index: Array | None = None  # of the row that has been read
        self.rows_by = self.choose_rows_by()

    def _valid_trace(self) -> Trace:
        fn = seed(valid_data(self.program.model), random.key(0))
        fn = substitute(fn, substitute_fn=init_to_uniform)
        return shape_trace(fn, *self.program.arguments)

    def row(self, x: Array, n: Array, local: Sites | None = None) -> Array:
        """The log likelihood of row ``n`` at ``x``, ``(D,)``, with the log prior of the
        unconstrained values ``local`` in this row."""
        return self._alone(x, n, {**self._first_states(), **(local or {})})[0]

    @property
    def local_size(self) -> int:
        """The number of coordinates of the continuous local sites of a row."""
        return sum(math.prod(z.shape) for z in self.local.values())

    def read_rows(self, n: Array) -> Any:
        """What M rows have on the host, for :meth:`with_row`; None if nothing is there."""
        if self.rows_by != "plate":
            return None
        return read_ahead(self.program.arguments, {self.plate: self.size}, {self.plate: n})

    def with_row(self, n: Array, read: Any) -> Self:
        """The same for row ``n`` alone, with what has been read of it."""
        if read is None:
            return self
        other, index = self.on(*self.program.arguments), {self.plate: n[None]}
        row = jax.tree.map(lambda x: x[None], read)
        arguments = with_rows(self.program.arguments, {self.plate: self.size}, index, row)
        other.program.arguments, other._index = arguments, index[self.plate]
        return other

    def _first_states(self) -> Sites:
        return {name: values[0] for name, values in self.states.items()}

    def check(self) -> None:
        """An error that names the site if the data do not fit the model, and one if a row alone,
        which was right on other data, is wrong on these."""
        self._valid_trace()
        if not self._rows_are_right():
            raise ValueError(
                f"on these data a row of the plate '{self.plate}' computed alone differs from that"
                f" of a pass over all; {self._remedy}, or make a new engine for these data."
            )

    def check_masks(self) -> None:
        """An error that names the site if a row has data of a local site without a prior there."""
        if self._masked:
            raise ValueError(
                f"the prior of the local latent site '{self._masked[0]}' is masked in rows whose"
                " data depend on it; mask the observed sites of these rows too, or no latent site."
            )

    @property
    def key(self) -> tuple:
        """What a program compiled for these factors depends on, beside the arguments."""
        local = tuple(self.local), tuple(self.states)
        return self.plate, self.size, self.info.shapes, local, self.rows_by

    def on(self, args: tuple, kwargs: dict[str, Any]) -> Self:
        """The same factors of other arguments of the same shapes, which may be traced."""
        other = copy.copy(self)
        other.program = Program(self.program.model, args, kwargs)
        return other

    def elements(self, x: Array, names: Collection[str]) -> Array:
        """The terms of these sites at ``x``, one after the other: a vector."""
        terms = self.terms(x)
        return jnp.concatenate([jnp.ravel(terms[name]) for name in names])

    def owners(self, name: str, size: int) -> np.ndarray:
        """``(size, e)``, the places in x of each batch element of a site; e is 0 if observed."""
        if name not in self.info.latents:
            return np.zeros((size, 0), int)
        return np.arange(self.info.size)[self.info.slices[name]].reshape(size, -1)

    def terms(self, x: Array) -> dict[str, Array]:
        """The other factors at ``x``, an array of the batch shape of each site."""
        terms: dict[str, Array] = {}
        local = {**self.local, **self._first_states()}
        trace = self._trace(x, jnp.arange(self.size), local)
        for site in sample_sites(trace):
            if self.plate not in frames(site):
                name = site_of_log_det(site["name"], self.info.latents)
                terms[name] = terms.get(name, 0.0) + scaled(site, log_prob(site))
        return terms

    def draw_prior(self, rng_key: Array, num_samples: int) -> Array:
        """Draws of the prior, ``(num_samples, D)``."""

        def draw(rng_key: Array) -> Array:
            trace = self.program.trace(rng_key=rng_key)
            sites = {name: trace[name] for name in self.info.latents}
            z = {n: biject_to(site["fn"].support).inv(site["value"]) for n, site in sites.items()}
            return self.info.ravel(z)

        return jax.jit(jax.vmap(draw))(random.split(rng_key, num_samples))

    def choose_rows_by(self) -> str:
        """The way to compute a row alone that gives every row the number of a pass over all."""
        local = {**self.local, **self._first_states()}
        every = jax.device_put(np.arange(self.size))
        # An error in a pass over all rows is one of the model.
        jax.eval_shape(lambda x: self._log_lik(x, every, local), jnp.zeros(self.info.size))
        for self.rows_by in ("plate", "arguments"):
            # One program for all data, which are its arguments.
            self._is_right_on = jax.jit(
                lambda words, arrays: self.on(*words.whole(arrays))._is_right(), static_argnums=0
            )
            try:
                if self._rows_are_right():
                    return self.rows_by
            except (TypeError, ValueError):  # what is not indexed may not broadcast with a row
                pass
        raise ValueError(
            f"no row of the plate '{self.plate}' can be computed alone, because the model does not"
            f" use the plate's indices; {self._remedy}."
        )

    @property
    def _remedy(self) -> str:
        return (
            f"write `with numpyro.plate('{self.plate}', {self.size}) as idx:` and index everything"
            " that has a row for each datum, as in X[idx] and obs=y[idx]"
        )

    def _rows_are_right(self) -> bool:
        try:
            return bool(self._is_right_on(*split_arguments(*self.program.arguments)))
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # the model looks at its data
            return bool(jax.jit(self._is_right)())

    def _is_right(self) -> Array | bool:
        """Whether each row alone has the number that it has in a pass over all, at two points; of
        rows on the host, which may not fit into memory, each of 10,000."""
        generator = np.random.default_rng(0)  # which compiles nothing
        x = jnp.asarray(generator.uniform(-1, 1, (2, self.info.size)), float)
        local, n = {**self.local, **self._first_states()}, jnp.arange(self.size)
        if is_on_host(self.program.arguments) and self.size > _MOST_CHECKED:
            n = jnp.asarray(np.linspace(0, self.size - 1, _MOST_CHECKED).astype(int))
        expected = jax.vmap(lambda x: self._log_lik(x, n, local))(x)

        alone = jax.vmap(partial(self._alone, local=local), (0, None))
        # Some rows at a time, at all points.
        each = lax.map(lambda n: alone(x, n)[:, 0], n, batch_size=_BLOCK).swapaxes(0, 1)
        if each.shape != expected.shape:
            return False
        return jnp.allclose(each, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)

    def _alone(self, x: Array, n: Array, local: Sites) -> Array:
        """The log likelihood of row ``n``, ``(1,)``."""
        if self.rows_by == "plate":
            return self._log_lik(x, n[None] if self._index is None else self._index, local)

        def of_row(leaf: Any) -> Any:
            has_rows = jnp.shape(leaf)[:1] == (self.size,)
            return jnp.asarray(leaf)[n][None] if has_rows else leaf

        sliced = self.on(*jax.tree.map(of_row, self.program.arguments))
        return sliced._log_lik(x, jnp.zeros(1, int), local)

    def _log_lik(self, x: Array, idx: Array, local: Sites) -> Array:
        """The log likelihood of each of the rows that the model has at ``idx``."""
        return row_log_lik(self._trace(x, idx, local), self.plate)

    def _trace(self, x: Array, idx: Array, local: Sites) -> Trace:
        z, states = self.values_at(x, local)
        return self.program.trace(z, {self.plate: idx}, values=states)

    def values_at(self, x: Array, local: Sites) -> tuple[Sites, Sites]:
        """Unconstrained values of the continuous sites, and values of the discrete ones."""
        z, states = self.info.unravel(x), {}
        for name, value in local.items():
            (states if name in self.states else z)[name] = value
        return z, states


def _joint_states(discrete: dict[str, Site], plate: str) -> Sites:
    """All values that the discrete local sites of one row can have together."""
    values: list[np.ndarray] = []  # of each number of each site
    shapes: dict[str, tuple[int, ...]] = {}
    for name, site in discrete.items():
        if not site["fn"].has_enumerate_support or site["fn"].event_shape:
            raise ValueError(
                f"the local latent site '{name}' is discrete with no finite support; sum it out."
            )
        shape = list(jnp.shape(site["value"]))
        shape[frames(site)[plate]] = 1
        shapes[name] = tuple(shape)
        with jax.ensure_compile_time_eval():
            support = np.ravel(np.asarray(site["fn"].enumerate_support(expand=False)))
        values += [support] * math.prod(shape)
    number = math.prod(map(len, values))
    if number > LARGEST_STATES:
        raise ValueError(
            f"the discrete local sites {sorted(discrete)} of one row have {number} joint states,"
            f" more than {LARGEST_STATES}; sum them out of the model."
        )
    table, states, start = np.array(list(product(*values))), {}, 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        states[name] = jnp.asarray(table[:, start:stop].reshape(number, *shape))
        start = stop
    return states


def _data_plate(trace: Trace, name: str | None) -> str:
    """The plate with the rows of data, or an error that lists the plates."""
    around = [frames(site) for site in sample_sites(trace) if site["is_observed"]]
    if not around:
        raise ValueError(
            "the model has no observed site, so it has no factors of data; give a sample site obs=."
        )
    plates = sorted(set().union(*around))
    chosen = plates[0] if name is None and len(plates) == 1 else name
    if chosen is not None and chosen in plates:
        return chosen
    if not plates:
        raise ValueError(
            "the observed sites are in no numpyro.plate, so the model does not say what its rows"
            " are; put them into `with numpyro.plate('rows', N) as idx:`."
        )
    which = "data_plate is not given" if name is None else f"data_plate is {name!r}"
    raise ValueError(
        f"the observed sites are in the plates {plates}, and {which}; name the one whose rows are"
        " the data by data_plate."
    )
