"""The Laplace approximation with the Gauss-Newton curvature, and its linearised predictive."""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
import copy
from dataclasses import dataclass, field
from typing import Any

from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.util import cholesky_of_inverse
from numpyro.handlers import block, seed

from numpyro_ext._checks import check_choice, check_count
from numpyro_ext._model.arguments import is_traced, split_arguments
from numpyro_ext._model.handlers import every_row, refuse_mutable, refuse_noise
from numpyro_ext._model.operations import jit_on_data, on_numbers
from numpyro_ext._model.potential import Program
from numpyro_ext._model.read import Site, drawn_names, read_model
from numpyro_ext._model.same import is_same, mark_of
from numpyro_ext._model.start import params_in_scope
from numpyro_ext._numpyro import default_key
from numpyro_ext._typing import Params, Shape, Sites
from numpyro_ext.guides.base import AutoJoint, levels_of
from numpyro_ext.guides.gauss_newton import Linearised, Outputs
from numpyro_ext.guides.init_to_fan_in import init_to_fan_in
from numpyro_ext.guides.likelihoods import predictor

LARGEST_FULL = 10_000
"""Coordinates up to which a full covariance is made."""
_SAME = 1e-3
"""The share of the largest number of a factor by which two of one curvature may differ."""


@dataclass(kw_only=True, eq=False, repr=False)
class AutoLaplaceGGN(AutoJoint):
    r"""A normal at the mode; its precision is the Gauss-Newton matrix and never singular.

    In unconstrained space, at the mode :math:`\hat z` of the posterior density there,

    .. math::
        q(z) = N(z; \hat z, S), \qquad
        S^{-1} = \sum_{n=1}^{N} J_n^\top F_n J_n - \nabla^2 \log p(\hat z),

    where :math:`J_n` is the Jacobian of the parameters of row n's distribution (the outputs of the
    network) and :math:`F_n` its Fisher information in them. For canonical links this is the Hessian
    without the curvature of the network. For a linear model with normal noise q is the posterior.

    **In training** the guide is a point, ``{prefix}_loc``, and ``Trace_ELBO()`` finds the mode, on
    minibatches too. Each method takes the curvature of all rows of the first call at its
    parameters; called without observed data, as by ``Predictive``, the guide draws from the normal.

    **Predict by the linearised network**, :meth:`linearised_predictive` and
    :meth:`linearised_draws`. Draws of q in the network itself, by ``Predictive``, predict badly.

    :param model: a NumPyro model with observed sites in one plate that are Normal, Bernoulli,
        Binomial, Categorical or Poisson. The noise scale of a Normal may be a latent site.
    :param sites: names of the latent sites that vary; the others stay at the mode. By default all.
    :param str structure: ``"full"`` covariance, up to 10,000 coordinates; ``"diag"``, the inverse
        of the diagonal of the precision, without correlations; or ``"last_layer"``, a full
        covariance of ``sites``, by default of those in which the linear predictors are affine.

    ``init_scale`` has no effect, and ``init_loc_fn`` is ``init_to_fan_in()`` unless it is given.

    **When it fails.** One mode, in unconstrained space. The parameters must be at it: fit until the
    loss is flat. The cost is :math:`O(N k d^2 + d^3)` for a full covariance with k outputs.

    **References:** *Improving predictions of Bayesian neural nets via local linearization*,
    equations 8-11, Immer et al. (AISTATS 2021); *Laplace redux*, Daxberger et al. (NeurIPS 2021)

    >>> from functools import partial
    >>> from numpyro_ext.targets import bayesian_mlp
    >>> model = partial(bayesian_mlp, hidden=(10,), activation=jnp.tanh, noise_prior=100.0)
    >>> X = jnp.linspace(-1, 1, 30)[:, None]
    >>> guide = AutoLaplaceGGN(model)  # was: AutoLaplaceApproximation(model)
    >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    >>> y = jnp.sin(X[:, 0])
    >>> params = svi.run(jax.random.key(0), 1000, X, y, progress_bar=False).params
    >>> f = guide.linearised_predictive(params, jnp.array([[0.0], [5.0]]))
    >>> bool(f.variance[1] > 10 * f.variance[0])  # far from the data
    True
    """

    sites: Collection[str] | None = None
    structure: str = "full"
    init_loc_fn: Callable[..., Any] = field(default_factory=init_to_fan_in)

    def __post_init__(self) -> None:
        check_choice("structure", self.structure, ("full", "diag", "last_layer"))
        self.coords: np.ndarray | None = None
        """The coordinates that vary, in the guide that :meth:`as_normal` gives."""
        self._later: Any = None
        """The arguments on which the last fit began, if they are not the ones of the first call."""
        self._kept: tuple = (None,)
        """A mark of model and arguments, with the coordinates and the function from there."""
        super().__post_init__()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kept": (None,)}

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        names = self.read(*args, **kwargs).latents
        for name in () if self.sites is None else self.sites:
            if name not in names:
                raise ValueError(f"sites names '{name}'; the latent sites are {sorted(names)}.")
        return args, kwargs

    def begin_fit(self, *args: Any, **kwargs: Any) -> bool:
        is_new, now = super().begin_fit(*args, **kwargs), (args, kwargs)
        if not (is_new or is_traced(now)) and numpyro.param(self.first_param) is None:
            self._later = None if is_same(self.prepared, now) else now
        return is_new

    def latent_distribution(self) -> dist.Distribution:
        """The point of the training."""
        loc: Any = numpyro.param(f"{self.prefix}_loc", self.init_latent)
        return dist.Delta(loc, event_dim=1)

    def sample_vector(self, sample_shape: Shape, args: tuple, kwargs: Params) -> Array:
        in_training = drawn_names(self.model, args, kwargs) == set(self.latent_sites)
        if in_training and self.coords is None:
            return super().sample_vector(sample_shape, args, kwargs)
        loc: Any = numpyro.param(f"{self.prefix}_loc", self.init_latent)
        if self.coords is not None:
            coords, root = self.coords, jnp.asarray(numpyro.param(f"{self.prefix}_root"))
        else:
            params = {f"{self.prefix}_loc": loc, **params_in_scope(self.model, args, kwargs)}
            with block():  # the model is run for its curvature
                coords, root = self._normal(params)
        drawn: Any = numpyro.sample(
            f"_{self.prefix}_latent", _normal(loc[coords], root), infer={"is_auxiliary": True}
        )
        return loc.at[coords].set(drawn)

    def get_posterior(self, params: Params, *args: Any, **kwargs: Any) -> dist.Distribution:
        """The normal, in unconstrained space, over the sites that vary; its curvature is at the
        rows of ``args``, or of the first call."""
        coords, root = self._normal(params, (args, kwargs) if args or kwargs else None)
        return _normal(params[f"{self.prefix}_loc"][coords], root)

    def draw(
        self,
        rng_key: Array,
        params: Params,
        sample_shape: Shape = (),
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Array:
        coords, root = self._normal(params)
        loc = jnp.asarray(params[f"{self.prefix}_loc"])
        drawn = _normal(loc[coords], root).sample(rng_key, sample_shape)
        return jnp.broadcast_to(loc, (*sample_shape, len(loc))).at[..., coords].set(drawn)

    def median(self, params: Params) -> Sites:
        """The mode, with the deterministic sites there."""
        self.check_fitted(params)
        return self.constrain(params[f"{self.prefix}_loc"], params)

    def quantiles(self, params: Params, quantiles: Any) -> Sites:
        """As :meth:`AutoJoint.quantiles`, in closed form."""
        coords, root = self._normal(params)
        loc = params[f"{self.prefix}_loc"]
        sd = root if root.ndim == 1 else jnp.linalg.norm(root, axis=1)
        z = dist.Normal().icdf(levels_of(quantiles).astype(loc.dtype))
        return self.constrain(loc + z[..., None] * jnp.zeros_like(loc).at[coords].set(sd), params)

    def linearised_predictive(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        r"""Mean and variance of the linear predictor :math:`\eta` of each observed site,
        :math:`\eta(z) \approx \eta(\hat z) + J (z - \hat z)`, in closed form.

        For a Normal that is its mean, otherwise log odds, logits or a log rate.

        :param args: the model's arguments at which to predict, without observed values.
        :return: a pair with the fields ``mean`` and ``variance``, each in the shape of the site
            (and a last axis of categories), or a dict of these if several sites are observed.
        """
        coords, root = self._normal(params)
        moments = {
            name: self._linearised(params, coords, name, args, kwargs).moments(root)
            for name in self._observed()
        }
        return moments if len(moments) > 1 else next(iter(moments.values()))

    def linearised_draws(
        self, rng_key: Array, params: Params, *args: Any, num_samples: int = 100, **kwargs: Any
    ) -> Sites:
        """Draws ``(num_samples, *site)`` of the observed sites under the linearised network, each
        of one latent vector for all rows; a latent noise scale stays at the mode.

        :param args: the model's arguments at which to predict, without observed values.
        """
        num_samples = check_count("num_samples", num_samples)
        coords, root = self._normal(params)
        key_z, key_y = random.split(rng_key)
        moves: Any = _normal(jnp.zeros(len(coords)), root).sample(key_z, (num_samples,))
        draws = {}
        for i, name in enumerate(self._observed()):
            linearised = self._linearised(params, coords, name, args, kwargs)
            draws[name] = linearised.draws(random.fold_in(key_y, i), moves)
        return draws

    def linearised_site(
        self, rng_key: Array, params: Params, name: str, args: tuple, kwargs: dict[str, Any]
    ) -> Site:
        """An observed site under one draw, by the parameters that :meth:`as_normal` gives."""
        assert self.coords is not None
        moves: Any = _normal(jnp.zeros(len(self.coords)), params[f"{self.prefix}_root"])
        return self._linearised(params, self.coords, name, args, kwargs).moved(
            moves.sample(rng_key)
        )

    def as_normal(self, params: Sequence[Params]) -> tuple["AutoLaplaceGGN", list[Params]]:
        """A guide that draws from the normal in every call, and its parameters, for diagnostics."""
        other = copy.copy(self)
        with_roots = []
        for each in params:
            other.coords, root = self._normal(each)
            with_roots.append({**each, f"{self.prefix}_root": root})
        return other, with_roots

    def _linearised(
        self, params: Params, coords: np.ndarray, name: str, args: tuple, kwargs: dict[str, Any]
    ) -> Linearised:
        loc = jnp.asarray(params[f"{self.prefix}_loc"])

        def site(v: Array) -> Site:
            model = seed(every_row(default_key(self.model)), random.key(0))
            program = Program(model, args, kwargs, self._model_params(params))
            return program.trace(self.unpack(loc.at[coords].set(v)))[name]

        return Linearised(site, loc[coords])

    def _observed(self) -> tuple[str, ...]:
        args, kwargs = self._data()
        return read_model(self.model, args, kwargs).data

    def _data(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments of the first call."""
        if self.prepared is None or is_traced(self.prepared):
            raise ValueError(
                "AutoLaplaceGGN has not seen its model on data with values; call svi.init or"
                " svi.run with the data first, outside jax.jit."
            )
        return self.prepared

    def _model_params(self, params: Params) -> Params:
        trace: Any = self.prototype_trace
        return {n: x for n, x in params.items() if n in trace and trace[n]["type"] == "param"}

    def _normal(self, params: Params, data: Any = None) -> tuple[np.ndarray, Array]:
        """The coordinates that vary, and a root of their covariance, or its diagonal, of the rows
        of ``data``; None for the rows of the first call."""
        first = self._data() if data is None else data
        self.check_fitted(params)
        coords, root = self._root_on(first, params)
        if data is None and self._later is not None and not is_traced(root):
            _, other = self._root_on(self._later, params)
            if not np.allclose(root, other, rtol=_SAME, atol=_SAME * np.max(np.abs(root))):
                raise ValueError(
                    "this AutoLaplaceGGN has begun on two sets of arguments, with which its"
                    " curvature differs; give get_posterior the arguments of the model, or make a"
                    " guide for each set."
                )
        return coords, root

    def _root_on(self, data: Any, params: Params) -> tuple[np.ndarray, Array]:
        """As :meth:`_normal`, of what the model is now: what it reads from outside may have
        changed."""
        inputs = jnp.asarray(params[f"{self.prefix}_loc"]), self._model_params(params)
        traced = is_traced(inputs)
        mark = mark_of(inputs, self.model, data, self.structure, self.sites)
        if mark is None or mark != self._kept[0]:
            self._kept = mark, *self._program(*data)
        _, coords, root_of = self._kept
        with nullcontext() if traced else on_numbers():
            root = root_of(*inputs)
            if not traced and not bool(jnp.all(jnp.isfinite(root))):
                raise ValueError(
                    "the precision of AutoLaplaceGGN is not positive at these parameters, which"
                    " may not be at a mode; train longer, or use AutoNormal."
                )
        return coords, root

    def _program(
        self, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[np.ndarray, Callable[..., Array]]:
        """The coordinates that vary, and the function from parameters to a root."""
        words, arrays = split_arguments(args, kwargs)
        with on_numbers():
            outputs = self._outputs(args, kwargs)
            coords = self._coords(outputs)
        diagonal = self.structure == "diag"

        @jit_on_data
        def root_of(loc: Array, params: Params, arrays: list[Any]) -> Array:
            here = outputs.with_params(params, *words.whole(arrays))
            if diagonal:
                precision = here.diagonal_curvature(loc, coords)
                return (precision + here.diagonal_prior_curvature(loc, coords)) ** -0.5
            precision = here.curvature(loc, coords) + here.prior_curvature(loc, coords)
            return cholesky_of_inverse(precision)

        return coords, lambda loc, params: root_of(loc, params, arrays)

    def _outputs(self, args: tuple, kwargs: dict[str, Any]) -> Outputs:
        because = "for which there is no curvature of one network"
        model = refuse_noise(refuse_mutable(self.model), because)
        # With parameters, because modules of Flax draw their first ones by numpyro.prng_key.
        for plate, (size, batch) in self.read(*args, **kwargs).given.items():
            raise ValueError(
                f"the curvature is of all rows, and the guide was given {batch} of the {size}"
                f" in the plate '{plate}'; call svi.init with all of them, and svi.update with"
                " batches; or, after training, make the guide and its SVI anew, call svi.init with"
                " all rows, and use the params of the training."
            )
        trace: Any = self.prototype_trace
        params = self._model_params({name: site["value"] for name, site in trace.items()})
        outputs = Outputs(model, args, kwargs, params=params)
        if local := sorted([*outputs.local, *outputs.states]):
            raise ValueError(
                f"the latent sites {local} lie in the data plate '{outputs.plate}'; AutoLaplaceGGN"
                " takes sites that all rows share. Use AutoLaplaceApproximation."
            )
        return outputs

    def _coords(self, outputs: Outputs) -> np.ndarray:
        info, names = outputs.info, self.sites
        if names is None and self.structure == "last_layer":
            names = self._affine_sites(outputs)
        chosen = info.latents if names is None else names
        coords = np.concatenate(
            [np.arange(info.size)[info.slices[n]] for n in info.latents if n in chosen]
        )
        if self.structure != "diag" and len(coords) > LARGEST_FULL:
            raise ValueError(
                f"a full covariance is of {LARGEST_FULL} coordinates at most, and these are"
                f" {len(coords)}; use structure='last_layer' or 'diag', or name some sites."
            )
        return coords

    def _affine_sites(self, outputs: Outputs) -> list[str]:
        """The latent sites in which the linear predictors are affine, all of them together."""
        info = outputs.info
        keys = random.split(random.key(0), 2)
        start = self.init_latent + 0.5 * random.normal(keys[0], self.init_latent.shape)
        step = random.normal(keys[1], start.shape)

        def predictors(x: Array) -> Array:
            sites = outputs.data_sites(outputs.program.trace(info.unravel(x)))
            return jnp.concatenate([jnp.ravel(predictor(site)) for site in sites])

        @jit_on_data
        def bends(mask: Array) -> tuple[Array, Array]:
            a, b, c = (predictors(start + t * mask * step) for t in (0.0, 1.0, 2.0))
            change = jnp.max(jnp.abs(b - a)) + jnp.max(jnp.abs(c - b))
            return change > 0, jnp.max(jnp.abs(c - 2 * b + a)) > 1e-3 * change

        def is_affine(names: list[str]) -> bool:
            mask = np.zeros(info.size)
            for name in names:
                mask[info.slices[name]] = 1.0
            moves, bent = bends(jnp.asarray(mask, start.dtype))
            return bool(moves) and not bool(bent)

        names = [name for name in info.latents if is_affine([name])]
        if not is_affine(names):
            raise ValueError(
                "the linear predictor is affine in no set of sites that stands out as the last"
                f" layer; name it by sites=[...] out of {list(info.latents)}."
            )
        return names


def _normal(loc: Array, root: Array) -> dist.Distribution:
    if root.ndim == 2:
        return dist.MultivariateNormal(loc, scale_tril=root)
    return dist.Normal(loc, root).to_event(1)
