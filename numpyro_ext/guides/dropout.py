"""Dropout as a guide: whole inputs of each weight matrix are left out at random."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.handlers import block, seed, substitute
from numpyro.infer import init_to_uniform
from numpyro.infer.util import constrain_fn

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.checks import read_global
from numpyro_ext._model.handlers import on_first_rows
from numpyro_ext._model.operations import on_numbers
from numpyro_ext._model.read import ModelInfo, latent_sites, layers, trace_of
from numpyro_ext._model.start import draw_params, guide_start
from numpyro_ext._numpyro import StartGiven
from numpyro_ext._typing import Model, Params, Shape, Sites, Trace
from numpyro_ext.guides.base import check_model, check_params, draws_of
from numpyro_ext.guides.init_to_fan_in import init_to_fan_in


class Matrix(NamedTuple):
    """A weight matrix: the precision of its prior, in its shape, and the axis of its inputs."""

    precision: np.ndarray
    axis: int
    keep_prob: float
    event_dim: int


@dataclass(kw_only=True, eq=False, repr=False)
class AutoDropout(StartGiven):
    r"""Dropout of the inputs of each weight matrix, as a guide of a network with normal priors.

    A matrix W of shape (out, in) is, with keep probability p,

    .. math::
        W = M \operatorname{diag}(e), \qquad e_i \sim \mathrm{Bernoulli}(p),
        \quad i = 1, \dots, in,

    one draw of the masks e for all rows of the data. ``M``, the parameter ``{site}_{prefix}_loc``,
    is not scaled up by 1/p: code with inverted dropout has :math:`M' = p M`. Every other latent
    site (bias vectors, a noise precision) is a point mass, and its prior counts. With prior
    precision :math:`\lambda_l` of :math:`W_l`, the KL divergence of wide layers is, up to a
    constant,

    .. math::
        \mathrm{KL} = \sum_l \tfrac{1}{2}\, p_l \lambda_l \lVert M_l \rVert_F^2 ,

    and the guide states it: its log density of W is :math:`\log p(W) + \frac{1}{2} p_l \lambda_l
    \lVert M_l \rVert_F^2`. So ``Trace_ELBO(10)`` is the loss of dropout, and ``BBAlphaELBO(alpha,
    10)`` is, without any other change, dropout with alpha-divergences.

    **Which axis is the input.** A name that ends in ``kernel`` is (in, out), as in Flax, one that
    ends in ``weight`` (out, in), as in Equinox; a site may say it by ``infer={"in_axis": -2}``. Any
    other matrix is taken as (out, in), with a warning. Convolutions need ``in_axis``.

    **When it fails.** The stated log density is not one (``has_density`` is False), so bounds of
    the evidence and ``pareto_khat`` are not defined. The KL leaves out what depends on p alone:
    choose p by the predictive density of held-out rows, not by the loss. The spread comes from the
    masks alone, and does not shrink as rows are added.

    :param model: a NumPyro model with weight matrices of prior ``Normal(0, scale)``, with a fixed
        scale that is read at the first call.
    :param keep_prob: p in (0, 1], a number or a dict by site; sites that the dict lacks keep all.
    :param sites: names of the matrices; by default all sites of two or more event dimensions.
    :param in_axis: the axis of the inputs, counted from the last (-1 or -2).

    **References:** *Dropout as a Bayesian approximation*, section 3, Gal and Ghahramani (ICML
    2016); *Dropout inference in Bayesian neural networks with alpha-divergences*, equations 5 and
    10, Li and Gal (ICML 2017), which drops activations

    >>> from numpyro_ext.objectives import BBAlphaELBO
    >>> from numpyro_ext.targets import bayesian_mlp
    >>> X = jnp.linspace(-2, 2, 50)[:, None]
    >>> guide = AutoDropout(bayesian_mlp, keep_prob={"w1": 0.9})  # was: AutoNormal(bayesian_mlp)
    >>> svi = SVI(bayesian_mlp, guide, optax.adam(1e-2), BBAlphaELBO(0.5, 10))
    >>> run = svi.run(jax.random.key(0), 20, X, jnp.sin(X[:, 0]), progress_bar=False)
    >>> guide.sample_posterior(jax.random.key(1), run.params, sample_shape=(9,))["w1"].shape
    (9, 50, 1)
    """

    model: Model = field(kw_only=False)
    keep_prob: float | Mapping[str, float] = 0.95
    sites: Collection[str] | None = None
    in_axis: int | None = None
    prefix: str = "auto"
    init_loc_fn: Callable[..., Any] = field(default_factory=init_to_fan_in)

    has_density: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_model(type(self), self.model)
        each = self.keep_prob
        for p in each.values() if isinstance(each, Mapping) else (each,):
            if not 0 < p <= 1:
                raise ValueError(f"keep_prob is {p!r}; it must be in (0, 1].")
        if self.in_axis is not None and self.in_axis >= 0:
            raise ValueError(
                f"in_axis is {self.in_axis!r}; it is counted from the last axis: -1 for a weight"
                " (out, in), -2 for one (in, out) as in x @ w."
            )
        self.matrices: dict[str, Matrix] = {}
        self.arguments: tuple[tuple, dict[str, Any]] = (), {}
        super().__init__(self.model, prefix=self.prefix, init_loc_fn=self.init_loc_fn)

    def start(self, *args: Any, **kwargs: Any) -> tuple[Array, Sites]:
        self.arguments = args, kwargs
        because = "AutoDropout is one distribution over all latents together"
        info = read_global(self.model, args, kwargs, because=because)
        priors = normal_priors(self.model, info, args, kwargs)
        dims = {name: prior.event_dim for name, prior in priors.items()}
        matrices = [name for name, dim in dims.items() if dim >= 2]
        chosen = matrices if self.sites is None else list(self.sites)
        for name in [*chosen, *(self.keep_prob if isinstance(self.keep_prob, Mapping) else ())]:
            if name not in matrices:
                raise ValueError(f"'{name}' is named; the weight matrices are {matrices}.")
        if not chosen:
            raise ValueError(
                f"the model has no latent site of two event dimensions but {sorted(dims)}; declare"
                " weight matrices by .to_event(2)."
            )
        for name in chosen:
            prior = priors[name]
            if prior.precision is None:
                raise ValueError(
                    f"the prior of '{name}' {prior.problem}; it must be Normal(0, scale) with a"
                    " fixed scale, or leave the site out of `sites`, which makes it a point mass."
                )
            p = self.keep_prob
            p = p.get(name, 1.0) if isinstance(p, Mapping) else p
            axis = self._axis(name, prior.event_dim, prior.infer)
            self.matrices[name] = Matrix(prior.precision, axis, float(p), prior.event_dim)
        return guide_start(self, info, args, kwargs)

    def _axis(self, name: str, event_dim: int, infer: dict[str, Any]) -> int:
        """The axis of the inputs of a matrix."""
        axis = infer.get("in_axis") if self.in_axis is None else self.in_axis
        if axis is None and event_dim > 2:
            raise ValueError(
                f"'{name}' has {event_dim} event dimensions; say which one holds the inputs, by"
                f" in_axis=-2 (Flax) or -{event_dim - 1} (Equinox)."
            )
        if axis is None and not name.endswith(("kernel", "weight")):
            message = (
                f"AutoDropout takes '{name}' as (out, in), as in w @ x; give in_axis=-2 for x @ w,"
                " or its outputs are dropped, or in_axis=-1 for no warning."
            )
            warnings.warn(InferenceWarning(message), stacklevel=2)
        if axis is None:
            axis = -2 if name.endswith("kernel") else -1
        if -axis > event_dim:
            raise ValueError(f"in_axis of '{name}' is {axis}, but it has {event_dim} dimensions.")
        return axis

    def __call__(self, *args: Any, **kwargs: Any) -> Sites:
        self.set_up(*args, **kwargs)
        result = {}
        for name, site in self._latents().items():
            fn = site["fn"]
            value: Any = numpyro.param(
                f"{name}_{self.prefix}_loc", site["value"], constraint=fn.support
            )
            log_density = 0.0
            if name in self.matrices:
                key = numpyro.prng_key()
                if key is None and self.matrices[name].keep_prob < 1:
                    raise ValueError("AutoDropout draws masks; put it under numpyro.handlers.seed.")
                value, log_density = self._drop(name, value, key)
            point = dist.Delta(value, log_density=log_density, event_dim=fn.event_dim)
            result[name] = numpyro.sample(name, point)
        return result

    def _drop(self, name: str, loc: Array, rng_key: Any) -> tuple[Array, Array]:
        """A draw of a matrix, and the log density that the guide states for it."""
        precision, axis, p, event_dim = self.matrices[name]
        value = loc
        if p < 1:
            events = [1] * event_dim
            events[axis] = loc.shape[axis]
            shape = (*loc.shape[: loc.ndim - event_dim], *events)
            value = loc * random.bernoulli(rng_key, p, shape)
        # log p(W), which the model has too, and minus the KL divergence.
        each = dist.Normal(0.0, precision**-0.5).log_prob(value) + p / 2 * precision * loc**2
        return value, jnp.sum(each, axis=tuple(range(-event_dim, 0)))

    def sample_posterior(
        self, rng_key: Array, params: Params, *args: Any, sample_shape: Shape = (), **kwargs: Any
    ) -> Sites:
        """As :meth:`AutoJoint.sample_posterior`."""
        if self.prototype_trace is None:
            raise ValueError("AutoDropout has not seen its model; call svi.init or svi.run first.")
        names = {name: f"{name}_{self.prefix}_loc" for name in self._latents()}
        check_params(params, names.values(), self)
        locs = {name: jnp.asarray(params[loc]) for name, loc in names.items()}

        def draw(rng_key: Array) -> Sites:
            keys = dict(zip(self.matrices, random.split(rng_key, len(self.matrices)), strict=True))
            dropped = {name: self._drop(name, locs[name], key)[0] for name, key in keys.items()}
            return self._with_deterministic({**locs, **dropped}, params, args, kwargs)

        return draws_of(draw, rng_key, sample_shape)

    def _latents(self) -> Trace:
        """The latent sites of the model, at their start."""
        trace: Any = self.prototype_trace
        return {site["name"]: site for site in latent_sites(trace)}

    def _with_deterministic(
        self, values: Sites, params: Params, args: tuple, kwargs: dict[str, Any]
    ) -> Sites:
        trace: Any = self.prototype_trace
        if not any(site["type"] == "deterministic" for site in trace.values()):
            return values
        if not (args or kwargs):
            args, kwargs = self.arguments
        z = {n: biject_to(trace[n]["fn"].support).inv(x) for n, x in values.items()}
        own = {n: x for n, x in params.items() if n in trace and trace[n]["type"] == "param"}
        with block(), substitute(data=own):
            model = seed(self.model, 0)  # for minibatch indices alone
            sites = constrain_fn(model, args, kwargs, z, return_deterministic=True)
        return {**{n: x for n, x in sites.items() if n in trace}, **values}


class NormalPrior(NamedTuple):
    """The prior of a site: its precision if ``Normal(0, scale)`` of a fixed scale, else why not."""

    event_dim: int
    infer: dict[str, Any]
    precision: np.ndarray | None
    problem: str


_PLAIN = (dist.ExpandedDistribution, dist.Independent)


def normal_priors(
    model: Model, info: ModelInfo, args: tuple, kwargs: dict[str, Any]
) -> dict[str, NormalPrior]:
    """The prior of each latent site; a scale is fixed if it is the same at two random values."""
    traces = []
    with block(), on_numbers():
        params = draw_params(random.key(0), model, info, args, kwargs)
        for i in range(2):
            key = random.key(i)

            def elsewhere(site: dict[str, Any], i: int = i) -> Any:
                if site["type"] != "param":
                    return init_to_uniform(site)
                link = biject_to(site["kwargs"].get("constraint", constraints.real))
                return jax.tree.map(lambda x: link(link.inv(x) + 0.1 * i), params[site["name"]])

            fn = substitute(seed(on_first_rows(model), key), substitute_fn=elsewhere)
            traces.append(trace_of(fn, args, kwargs))
    priors = {}
    for name, latent in info.latents.items():
        (fn, other), problem, precision = (trace[name]["fn"] for trace in traces), "", None
        plain = [layer for layer in layers(fn) if not isinstance(layer, _PLAIN)]
        if type(plain[0]) is not dist.Normal:
            problem = f"is {type(plain[0]).__name__}"
        elif np.any(fn.variance != other.variance) or np.any(fn.mean != other.mean):
            problem = "depends on other sites or on parameters"
        elif np.any(fn.mean):
            problem = "has a mean that is not 0"
        else:
            precision = np.broadcast_to(1 / np.asarray(fn.variance), latent.constrained.shape)
        priors[name] = NormalPrior(fn.event_dim, traces[0][name]["infer"], precision, problem)
    return priors
