"""A fitted normal as the prior of the latent sites: yesterday's posterior is today's prior."""

from collections.abc import Sequence
from dataclasses import dataclass
import math
from typing import Any

from jax import Array
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import ReshapeTransform
from numpyro.primitives import Messenger

from numpyro_ext._checks import check_positive
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.normal import Normal, as_factor
from numpyro_ext._model.read import Shapes, frames, latent_shapes, sample_sites, unconstrained_shape
from numpyro_ext._numpyro import triangular_root
from numpyro_ext._typing import Model


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
    The result is a model as any other, with the same sites, arguments, supports and parameters. The
    sum of its log evidences over the days is the log evidence of all rows, exactly so where each
    day's posterior is normal.

    **Forgetting.** The factor f in (0, 1] multiplies the precision of yesterday's posterior, so
    that after a day without rows the standard deviations are larger by :math:`1/\sqrt f`. The rows
    of k days ago count :math:`f^k` times, and so does the prior of the first day.

    **Sites.** A latent site inside a plate of observed sites belongs to yesterday's rows. It is
    integrated out of the normal and keeps its prior given the others, unless ``sites`` names it.

    **Begin at yesterday's parameters**, ``svi.run(..., init_params=fit.params)`` as below: errors
    add up, and from a new start each day has to find the correlations of all days anew.

    An engine of :mod:`numpyro_ext.ep` takes the fit itself, as ``EP(model, prior=fit)``. The model
    may be one of this function: a prior of all its sites replaces the one before.

    :param model: Python callable with NumPyro primitives.
    :param tuple fit: a normal guide, such as ``AutoMultivariateNormal``, with its parameters,
        ``(guide, params)``, or ``(svi, result)`` or ``(engine, result)`` of a run.
    :param float forgetting_factor: the power f, 1 to forget nothing.
    :param sites: the names of the sites that get a new prior, the normal of these alone; None for
        all outside the plates of the observed sites.

    >>> from numpyro.infer.autoguide import AutoMultivariateNormal
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
    check_positive("forgetting_factor", forgetting_factor)
    if not is_traced(forgetting_factor) and forgetting_factor > 1:
        raise ValueError(f"forgetting_factor is {forgetting_factor!r}; it must be in (0, 1].")
    pair: Any = fit if isinstance(fit, tuple) and len(fit) == 2 else (None, None)
    guide, params = getattr(pair[0], "guide", pair[0]), getattr(pair[1], "params", pair[1])
    if not isinstance(params, dict):
        raise TypeError(
            f"the prior is {type(fit).__name__}; it must be (engine, result), (svi, result) or"
            " (guide, params)."
        )
    normal = Normal.from_guide(guide, params)
    shapes = dict(latent_shapes(guide.prototype_trace))
    names = _choose_sites(guide.prototype_trace, list(shapes), sites)
    owner = np.concatenate([[name] * math.prod(shape) for name, shape in shapes.items()])
    chosen = np.flatnonzero(np.isin(owner, names))
    center, factor = normal.center[chosen], normal.factor[chosen]
    if factor.ndim == 2 and len(chosen) < len(owner):
        factor = triangular_root(factor)
    kept = tuple((name, shapes[name]) for name in names)
    # A prior of all sites of the one before leaves nothing of it.
    if isinstance(model, PosteriorAsPrior) and {n for n, _ in model.shapes} <= set(names):
        model = model.model
    return PosteriorAsPrior(model, kept, Normal(center, factor / forgetting_factor**0.5))


def _choose_sites(trace: Any, latents: list[str], sites: Sequence[str] | None) -> list[str]:
    """The sites that get a new prior, in the order of the model."""
    if sites is not None:
        if not sites or not set(sites) <= set(latents):
            raise ValueError(f"sites is {sites!r}; it must be a list of sites of {latents}.")
        return [name for name in latents if name in set(sites)]
    observed = [site for site in sample_sites(trace) if site["is_observed"]]
    plates = {name for site in observed for name in frames(site)}
    names = [name for name in latents if not plates & set(frames(trace[name]))]
    if not names:
        raise ValueError(
            f"all latent sites {latents} of the fit belong to its rows, in the plates"
            f" {sorted(plates)}; name those that the new rows share in sites=[...]."
        )
    return names


@dataclass(frozen=True, eq=False, repr=False)
class PosteriorAsPrior:
    """A model with a joint normal prior of some of its latent sites in unconstrained space."""

    model: Model
    shapes: Shapes
    normal: Normal

    @property
    def numbers(self) -> tuple[Array, Array]:
        return self.normal.center, self.normal.factor

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
        if replaced.waiting:
            raise ValueError(
                f"the model has no latent sites {replaced.waiting} of the fit that is its prior;"
                " name those of the model in sites=[...]."
            )
        return result


class _WithSupport(dist.TransformedDistribution):
    """One event with the support of a site itself, as bounds of transforms may be old tracers."""

    pytree_data_fields = ("of_site",)

    def __init__(self, base: Any, transforms: list[Any], of_site: Any) -> None:
        super().__init__(base, transforms)
        self.of_site = of_site

    @property
    def support(self) -> Any:
        more = self.event_dim - self.of_site.event_dim
        return constraints.independent(self.of_site, more) if more else self.of_site


class _replace_sites(Messenger):
    r"""Give site after site its distribution given the sites before it, from one joint normal.

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
                f"the model samples '{name}' in another order than its prior, {list(self.shapes)}."
            )
        self.waiting.pop(0)
        support, shape = msg["fn"].support, self.shapes[name]
        own = unconstrained_shape(support, msg["fn"].shape())
        if own != shape:
            raise ValueError(
                f"the latent site '{name}' has the unconstrained shape {own} in the model and"
                f" {shape} in the fit; leave a site whose size follows the rows out of sites."
            )
        start = sum(map(len, self.noise))
        place = slice(start, start + math.prod(shape))
        m, L = self.loc[place], self.factor[place]
        if L.ndim == 2:
            if self.noise:
                m = m + L[:, :start] @ jnp.concatenate(self.noise)
            L = L[:, place]
            # L is one, and to look at it would compile a program for each operation.
            base = dist.MultivariateNormal(m, scale_tril=L, validate_args=False)
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
        self.noise.append(as_factor(L).solve(moved))
