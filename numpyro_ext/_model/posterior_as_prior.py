"""A fitted normal as the prior of the latent sites: yesterday's posterior is today's prior."""

from collections.abc import Sequence
from dataclasses import dataclass
import math
from typing import Any

from jax import Array
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import ReshapeTransform
from numpyro.primitives import Messenger

from numpyro_ext._checks import check_positive
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.read import frames, latent_sites, sample_sites, unconstrained_shape
from numpyro_ext._numpyro import normal_of_guide
from numpyro_ext._typing import Model, Params

__all__ = ["PosteriorAsPrior", "WithPrior", "posterior_as_prior"]

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""The unconstrained shape of each site, in the order of the flat vector."""


def posterior_as_prior(
    model: Model,
    fit: tuple[Any, Any],
    forgetting_factor: float = 1.0,
    *,
    sites: Sequence[str] | None = None,
) -> "PosteriorAsPrior":
    r"""The model with a fitted normal in place of the priors of its latent sites.

    .. math:: p_t(x) = \mathrm N(x \mid m, C / f) \propto q_{t-1}(x)^f

    with the mean m and the covariance C of the fit :math:`q_{t-1}` in unconstrained space, over all
    its sites together, so that their correlations and the Jacobians of their constraints are kept.
    The result is a model as any other: it has the same sites, arguments, supports and parameters,
    for every guide, loss, kernel and engine and for ``Predictive``. Its evidence is
    :math:`p(y_t \mid y_{1:t-1})` as the fit has it; the sum of its logarithms over the days is the
    log evidence of all rows, exactly so where each day's posterior is normal.

    **Forgetting.** The factor f in (0, 1] is the power of yesterday's posterior: its precision is
    multiplied by f, and its mean kept, so that after a day without rows the standard deviations are
    larger by :math:`1/\sqrt f`. The rows of k days ago count :math:`f^k` times, and so does the
    prior of the first day.

    **Sites.** A latent site inside a plate of observed sites belongs to yesterday's rows. It is
    integrated out of the normal and keeps its prior given the others, unless ``sites`` names it.

    **Begin at yesterday's parameters**, ``svi.run(..., init_params=fit.params)`` as below: errors
    add up, and ``diagnose`` judges the fit of today, with yesterday's normal as its prior, so that
    it sees no error of the days before. From a new start each day has to find the correlations of
    all days anew, and falls short by what is within its limits. After six days of f = 0.9 standard
    deviations are then 0.70 of the right ones, and 0.99 to 1.02 from yesterday's parameters
    (``python benchmarks/newcomers/systems.py --only streaming``).

    An engine of :mod:`numpyro_ext.ep` takes the fit itself, as ``EP(model, prior=fit)``, and
    compiles nothing anew from the second such day on. A model that already has a prior by this
    function may be given, or the first one: a prior of all sites of the one before replaces it.

    :param model: Python callable with NumPyro primitives.
    :param tuple fit: a normal guide with its parameters, ``(guide, params)``, or ``(svi, result)``
        or ``(engine, result)`` of a run. Normal guides are ``AutoMultivariateNormal``,
        ``AutoDiagonalNormal``, ``AutoNormal``, ``AutoLowRankMultivariateNormal`` and
        ``AutoLaplaceApproximation``.
    :param float forgetting_factor: the power f, 1 to forget nothing.
    :param sites: the names of the sites whose priors are replaced, by the normal of these alone;
        None for all outside the plates of the observed sites.

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> from numpyro.infer.autoguide import AutoMultivariateNormal
        >>> from numpyro_ext.guides import posterior_as_prior
        >>> def model(y):
        ...     loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))
        ...     scale = numpyro.sample("scale", dist.HalfNormal(5.0))
        ...     with numpyro.plate("rows", len(y)):
        ...         numpyro.sample("y", dist.Normal(loc, scale), obs=y)
        >>> today, params = model, None
        >>> for day in range(3):
        ...     y = 2.0 + jax.random.normal(jax.random.key(day), (50,))
        ...     svi = SVI(today, AutoMultivariateNormal(today), numpyro.optim.Adam(0.02),
        ...               Trace_ELBO())
        ...     fit = svi.run(jax.random.key(day), 1000, y, init_params=params, progress_bar=False)
        ...     today = posterior_as_prior(model, (svi, fit), forgetting_factor=0.95)
        ...     params = fit.params
        >>> print(today)
        PosteriorAsPrior(model, loc, scale)

    References: Opper, *A Bayesian approach to on-line learning* (1998); Kulhavy and Zarrop, *On a
    general concept of forgetting* (International Journal of Control 58, 1993).
    """
    if not callable(model):
        raise TypeError(f"model is {model!r}; it must be a callable, a NumPyro model.")
    check_positive("forgetting_factor", forgetting_factor)
    if not is_traced(forgetting_factor) and forgetting_factor > 1:
        raise ValueError(
            f"forgetting_factor is {forgetting_factor!r}; it must be in (0, 1], the power of the"
            " posterior of the fit, where 1 forgets nothing."
        )
    guide, params = _guide_and_params(fit)
    loc, factor = normal_of_guide(guide, params)
    numbers = loc, factor
    if not is_traced(numbers) and not all(bool(np.all(np.isfinite(x))) for x in numbers):
        raise ValueError(
            f"the mean or the scale of the {type(guide).__name__} is not finite, so it is no prior;"
            " fit it at a smaller learning rate."
        )
    trace = guide.prototype_trace
    shapes = {
        site["name"]: unconstrained_shape(site["fn"].support, jnp.shape(site["value"]))
        for site in latent_sites(trace)
    }
    names = _choose_sites(trace, list(shapes), sites)
    place, start = {}, 0
    for name, shape in shapes.items():
        place[name] = np.arange(start, start + math.prod(shape))
        start += math.prod(shape)
    at = np.concatenate([place[name] for name in names])
    loc, factor = loc[at], factor[at]
    if factor.ndim == 2 and len(at) < start:
        R = jnp.linalg.qr(factor.T, mode="r")  # a root of the covariance of these alone
        factor = R.T * jnp.sign(jnp.diagonal(R))
    kept = tuple((name, shapes[name]) for name in names)
    # A prior of all sites of the one before leaves nothing of it.
    if isinstance(model, PosteriorAsPrior) and {n for n, _ in model.shapes} <= set(names):
        model = model.model
    return PosteriorAsPrior(model, kept, loc, factor / forgetting_factor**0.5)


def _guide_and_params(fit: Any) -> tuple[Any, Params]:
    if isinstance(fit, tuple) and len(fit) == 2:
        guide, params = getattr(fit[0], "guide", fit[0]), getattr(fit[1], "params", fit[1])
        if isinstance(params, dict):
            return guide, params
    raise TypeError(
        f"the prior is {type(fit).__name__}; it must be a pair (engine, result), (svi, result) or"
        " (guide, params): what was fitted, and the result of its run or the parameters in it."
    )


def _choose_sites(trace: Any, known: list[str], given: Sequence[str] | None) -> list[str]:
    """The sites whose priors are replaced, in the order of the model."""
    observed = [site for site in sample_sites(trace) if site["is_observed"]]
    plates = {name for site in observed for name in frames(site)}
    if given is None:
        names = [name for name in known if not plates & set(frames(trace[name]))]
        if not names:
            raise ValueError(
                f"all latent sites {known} of the fit are inside the plates {sorted(plates)} of the"
                " observed sites, so they belong to its rows; name those that the rows of the new"
                " data share in sites=[...]."
            )
        return names
    bad = [name for name in given if name not in known]
    if bad or not given or isinstance(given, str):
        raise ValueError(
            f"sites is {given!r}; it must be a list of latent sites of the fit, which are {known}."
        )
    return [name for name in known if name in set(given)]


@dataclass(frozen=True, eq=False, repr=False)
class PosteriorAsPrior:
    """A model with a joint normal prior of some of its latent sites in unconstrained space.

    - **model** - the model before.
    - **shapes** - the unconstrained shape of each of these sites, in the order of the vector.
    - **loc, factor** - the mean, and a lower triangular root of the covariance or its diagonal.
    """

    model: Model
    shapes: Shapes
    loc: Array
    factor: Array

    @property
    def numbers(self) -> tuple[Array, Array]:
        return self.loc, self.factor

    @property
    def of_numbers(self) -> "WithPrior":
        """The model as a function of the numbers of its prior too."""
        return WithPrior(self.model, self.shapes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.of_numbers(self.numbers, *args, **kwargs)

    def __repr__(self) -> str:
        name = getattr(self.model, "__name__", repr(self.model))
        return f"{type(self).__name__}({', '.join([name, *(n for n, _ in self.shapes)])})"


@dataclass(frozen=True)
class WithPrior:
    """The same model of any numbers, which are its first argument: equal for all days."""

    model: Model
    shapes: Shapes

    def __call__(self, numbers: tuple[Array, Array], *args: Any, **kwargs: Any) -> Any:
        replaced = _replace_sites(self.model, self.shapes, *numbers)
        result = replaced(*args, **kwargs)
        replaced.check_all()
        return result


class _WithSupport(dist.TransformedDistribution):
    """One event with the support of a site, as it is: that of the transforms would be computed
    from their bounds, which may be tracers of a reading that is over."""

    pytree_data_fields = ("of_site",)

    def __init__(self, base: Any, transforms: list[Any], of_site: Any) -> None:
        super().__init__(base, transforms)
        self.of_site = of_site

    @property
    def support(self) -> Any:
        more = self.event_dim - self.of_site.event_dim
        return constraints.independent(self.of_site, more) if more else self.of_site


class _replace_sites(Messenger):
    r"""Give site after site its distribution given those before it, from one joint normal.

    With the root L of the covariance, :math:`x_k = m_k + L_{k, <k} e_{<k} + L_{kk} e_k`.
    """

    def __init__(self, fn: Model, shapes: Shapes, loc: Array, factor: Array) -> None:
        super().__init__(fn)
        self.shapes, self.loc, self.factor = dict(shapes), loc, factor
        self.waiting = list(self.shapes)
        self.noise: list[Array] = []
        self.now: dict[str, tuple[Any, Array, Array]] = {}

    def process_message(self, msg: dict[str, Any]) -> None:
        name = msg.get("name")
        if msg["type"] != "sample" or name not in self.shapes:
            return
        if name not in self.waiting[:1]:
            raise ValueError(
                f"the model samples '{name}' where the fit that is its prior has"
                f" {self.waiting[:1] or 'no further site'}, of the sites {list(self.shapes)}; the"
                " order of a model's latent sites must be that of the fit."
            )
        self.waiting.pop(0)
        support, shape = msg["fn"].support, self.shapes[name]
        found = unconstrained_shape(support, msg["fn"].shape())
        if found != shape:
            raise ValueError(
                f"the latent site '{name}' has the unconstrained shape {found} in the model and"
                f" {shape} in the fit that is its prior; a site whose size follows the rows keeps"
                " its own prior: leave it out of sites."
            )
        start = sum(map(len, self.noise))
        at = slice(start, start + math.prod(shape))
        m, L = self.loc[at], self.factor[at]
        if L.ndim == 2:
            if self.noise:
                m = m + L[:, :start] @ jnp.concatenate(self.noise)
            L = L[:, at]
            base = dist.MultivariateNormal(m, scale_tril=L)
        else:
            base = dist.Normal(m, L).to_event(1)
        # One event, outside all plates: no element is independent of the others.
        bijection = biject_to(support)
        transforms = [ReshapeTransform(shape, m.shape), bijection]
        msg["fn"] = _WithSupport(base, transforms, support)
        msg["cond_indep_stack"], msg["scale"] = [], None
        self.now[name] = bijection, m, L

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or msg["name"] not in self.now:
            return
        bijection, m, L = self.now.pop(msg["name"])
        moved = jnp.ravel(bijection.inv(msg["value"])) - m
        self.noise.append(solve_triangular(L, moved, lower=True) if L.ndim == 2 else moved / L)

    def check_all(self) -> None:
        if self.waiting:
            raise ValueError(
                f"the model has no latent sites {self.waiting}, of which the fit that is its prior"
                " knows; name those that it has in sites=[...]."
            )
