"""A mixture of normals as a guide."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.handlers import block, substitute

from numpyro_ext._checks import check_choice, check_count, check_nonnegative
from numpyro_ext._model.modes import Modes
from numpyro_ext._typing import Params
from numpyro_ext.guides.base import AutoAtModes
from numpyro_ext.guides.networks import random_param
from numpyro_ext.guides.normal_mixture import DiagonalNormalMixture, FullNormalMixture

SPREAD = 0.7  # of several components at one mode, with half of its variance


@dataclass(kw_only=True, eq=False, repr=False)
class AutoMixtureNormal(AutoAtModes):
    r"""A mixture of C normals over all latent sites together.

    In the model's unconstrained space of dimension :math:`d`,

    .. math::
        q(z) = \sum_{c=1}^{C} w_c\, N(z; m_c, S_c), \qquad w = \mathrm{softmax}(logits) .

    At ``svi.init`` the modes of the posterior are found, by 16 searches, and each has components by
    its share of the mass, at least one. One that is alone starts as the normal approximation at its
    mode, several around it, at 0.7 of its scale. What is trained are :math:`m_c` and :math:`S_c` in
    units of that approximation. Where there is no search (:class:`AutoAtModes`), or ``init_spread``
    is given, the weights start equal, and the centres at draws of :math:`N(init\_loc,
    init\_spread^2 I)`.

    **Train it by** :class:`~numpyro_ext.objectives.MixtureELBO`, which evaluates the model at a
    draw of every component. With ``covariance="diag"`` the draws carry implicit gradients, with
    which every loss is unbiased; but between components that lie apart their variance is not
    finite, so the weights of separated modes are hardly learnt. With ``covariance="full"`` the
    draws carry no gradient, and to ask for it is an error.

    **When it fails.** The loss has local optima: fit from several keys and compare the losses. A
    minimised ``KL(q || p)`` leaves out modes near which no component starts (the searches begin
    within 2 of 0 in unconstrained space), which ``pareto_khat`` does not see.

    :param int num_components: the number C of normals.
    :param float init_scale: initial standard deviation of every component, in unconstrained units.
    :param float init_spread: initial standard deviation of the centres, in unconstrained units.
    :param str covariance: ``"diag"`` or ``"full"``.

    **References:** *Nonparametric variational inference*, section 3, Gershman, Hoffman and Blei
    (ICML 2012); *Implicit reparameterization gradients*, section 3, Figurnov et al. (NeurIPS 2018)

    >>> from numpyro_ext.objectives import MixtureELBO
    >>> def model():
    ...     z = numpyro.sample("z", dist.Normal(0, 1))
    ...     numpyro.sample("x", dist.Normal(z**2, 0.3), obs=1.0)
    >>> guide = AutoMixtureNormal(model, num_components=8)  # was: AutoNormal(model)
    >>> svi = SVI(model, guide, optax.adam(2e-2), MixtureELBO())  # was: Trace_ELBO()
    >>> params = svi.run(jax.random.key(0), 500, progress_bar=False).params
    >>> z = guide.sample_posterior(jax.random.key(1), params, sample_shape=(1000,))["z"]
    >>> bool(0.1 < (z > 0).mean() < 0.9)  # the modes at -1 and 1 have half of the mass each
    True
    """

    num_components: int = 5
    init_spread: float = 1.0
    covariance: str = "diag"

    num_searches = 16
    start_arguments = ("init_loc_fn", "init_scale", "init_spread")

    def __post_init__(self) -> None:
        check_nonnegative("init_spread", self.init_spread)
        check_choice("covariance", self.covariance, ("diag", "full"))
        self.num_components = check_count("num_components", self.num_components)
        if self.num_components > 1 and self.init_spread == 0:
            raise ValueError(
                f"init_spread is {self.init_spread!r}; it must be positive, because components that"
                " start at one point never part."
            )
        super().__post_init__()

    @property
    def num_modes(self) -> int:
        return self.num_components

    def latent_distribution(self) -> dist.MixtureSameFamily:
        prefix, d = self.prefix, self.latent_dim
        start, fixed = self._begin()
        logits: Any = numpyro.param(f"{prefix}_logits", start.logits)
        loc = random_param(f"{prefix}_loc", start.draw_loc)
        if self.covariance == "diag":
            scale: Any = numpyro.param(
                f"{prefix}_scale",
                jnp.broadcast_to(start.scale[:, None], (len(start.scale), d)),
                constraint=constraints.softplus_positive,
            )
            if fixed:
                center, root = fixed
                loc, scale = center + root * loc, root * scale
            return DiagonalNormalMixture(logits, loc, scale)
        scale_tril: Any = numpyro.param(
            f"{prefix}_scale_tril",
            start.scale[:, None, None] * jnp.eye(d),
            constraint=constraints.scaled_unit_lower_cholesky,
        )
        if fixed:
            center, root = fixed
            loc, scale_tril = center + jnp.einsum("cij,cj->ci", root, loc), root @ scale_tril
        return FullNormalMixture(logits, loc, scale_tril)

    def _begin(self) -> tuple["_Start", tuple[Array, Array] | None]:
        """The start of what is trained, and the fixed centers and roots of its units, if any."""
        C, d = self.num_components, self.latent_dim
        origin = jnp.broadcast_to(self.init_latent, (C, d))
        usual = _Start(
            jnp.zeros(C),
            lambda key: origin + self.init_spread * random.normal(key, (C, d)),
            jnp.full(C, self.init_scale),
        )
        if not self.is_mapped:
            return usual, None
        start, units = usual, self.known_map()
        if units is None:
            modes, full = self.modes(), self.covariance == "full"
            x, A = jnp.zeros((C, d)), jnp.ones((C, d))
            A = A[..., None] * jnp.eye(d) if full else A
            if modes is not None:
                start, x, A = _at_modes(modes, C, full=full)
            units = self.new_map(x, A)
        return start, units

    def get_posterior(self, params: Params) -> dist.MixtureSameFamily:
        """The mixture, in unconstrained space."""
        self.check_fitted(params)
        with block(), substitute(data=params):
            return self.latent_distribution()

    def components(self, params: Params) -> tuple[Array, dist.Distribution]:
        """The weights ``(C,)``, and the normals as one distribution of batch ``(C,)``."""
        q = self.get_posterior(params)
        weights: Any = q.mixing_distribution.probs
        return weights, q.component_distribution

    def get_base_dist(self) -> NoReturn:
        raise ValueError(
            "AutoMixtureNormal is not one normal that is transformed, so there is no transform of"
            " it, for NeuTraReparam or otherwise; use a flow, such as AutoRealNVPNormal."
        )

    def get_transform(self, params: Params) -> NoReturn:
        self.get_base_dist()


class _Start(NamedTuple):
    """The start of what is trained, in the units of each component."""

    logits: Array
    draw_loc: Callable[[Array], Array]
    scale: Array


def _at_modes(every: Modes, C: int, *, full: bool) -> tuple[_Start, Array, Array]:
    """The start of C components at the modes, and the center and root of each component."""
    modes = every.modes[:C]
    shares = np.array([mode.share for mode in modes])
    counts = np.ones(len(shares), int)
    while counts.sum() < C:  # one more to the mode with the largest weights of components
        counts[np.argmax(shares / counts)] += 1
    which = np.repeat(np.arange(len(shares)), counts)
    roots = np.stack([np.asarray(mode.factor, float) for mode in modes])
    if roots.ndim == 2:
        roots = roots[..., None] * np.eye(roots.shape[1])
    units = roots
    if not full:
        units = np.stack([mode.conditional_sds for mode in modes])
    several = counts[which] > 1
    spread = np.where(several, SPREAD, 0.0)[:, None]

    def draw_loc(key: Array) -> Array:
        xi = jnp.asarray(spread) * random.normal(key, (C, roots.shape[1]))
        if full:
            return xi
        return jnp.einsum("cij,cj->ci", jnp.asarray(roots[which]), xi) / jnp.asarray(units[which])

    logits, scale = jnp.log(shares / counts)[which], jnp.where(several, SPREAD, 1.0)
    center = jnp.stack([mode.center for mode in modes])[which]
    return _Start(logits, draw_loc, scale), center, jnp.asarray(units[which])
