"""A mixture of normals as a guide.

Gershman, Hoffman, Blei, "Nonparametric variational inference" (ICML 2012), and for the gradient of
draws Figurnov, Mohamed, Mnih, "Implicit reparameterization gradients" (NeurIPS 2018).
"""

from dataclasses import dataclass
from typing import Any

from jax import Array, random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform
from numpyro.handlers import block, substitute

from numpyro_ext._checks import check_choice, check_count, check_nonnegative
from numpyro_ext._typing import Params
from numpyro_ext.guides.base import AutoJoint
from numpyro_ext.guides.networks import random_param
from numpyro_ext.guides.normal_mixture import DiagonalNormalMixture, FullNormalMixture

__all__ = ["AutoMixtureNormal"]


@dataclass(kw_only=True, eq=False, repr=False)
class AutoMixtureNormal(AutoJoint):
    r"""A mixture of C normals over all latent sites together.

    In the model's unconstrained space of dimension :math:`d`,

    .. math::

        q(z) = \sum_{c=1}^{C} w_c\, N(z; m_c, S_c), \qquad w = \mathrm{softmax}(logits) .

    The weights start equal, and the centres :math:`m_c` at draws of :math:`N(init\_loc,
    init\_spread^2 I)`; centres that start at one point have the same gradient and never part. The
    density is exact, at a cost of :math:`O(C d)`, or :math:`O(C d^2)` for full covariances.

    **Train it by** :class:`~numpyro_ext.objectives.MixtureELBO`, which evaluates the model at a
    draw of every component. A draw of the whole mixture is not a smooth function of the weights,
    and a loss that ignores this trains them wrongly. With ``covariance="diag"`` the draws carry
    implicit gradients, also for the weights, which take :math:`d` sequential steps; every loss then
    has an unbiased gradient. But these gradients divide by the density at the draw, and between
    components that lie apart their variance is not finite, so the weights of separated modes are
    hardly learnt. On the eight schools ``Trace_ELBO(4)`` ends with standard deviations of 0.35 to
    0.89 of those of NUTS (with a k-hat of 1.0, which says so), and ``MixtureELBO()`` with 0.92 to
    0.96 (``python benchmarks/guides/structured.py``). With ``covariance="full"`` the draws carry no
    gradient, and that of another loss is an error.

    **When it fails.** The loss has local optima. A minimised ``KL(q || p)`` leaves out modes near
    which no component starts: the start covers a region of ``init_spread`` around ``init_loc``, in
    unconstrained units. Components that meet on the way share one mode, and a component whose
    weight has fallen to zero has no gradient and does not return. ``pareto_khat`` looks only where
    the guide draws, and the search of ``diagnose`` may miss a mode too, so fit from several keys
    and compare the losses.

    :param int num_components: the number C of normals.
    :param float init_scale: initial standard deviation of every component, in unconstrained units.
    :param float init_spread: initial standard deviation of the centres, in unconstrained units.
    :param str covariance: ``"diag"`` or ``"full"``.

    The other arguments are those of :class:`AutoJoint`.

    **References**

    1. *Nonparametric variational inference*, section 3, Samuel J. Gershman, Matthew D. Hoffman,
       David M. Blei (ICML 2012)
    2. *Implicit reparameterization gradients*, section 3, Michael Figurnov, Shakir Mohamed,
       Andriy Mnih (NeurIPS 2018)

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer import SVI
        >>> from numpyro_ext.guides import AutoMixtureNormal
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

    def __post_init__(self) -> None:
        check_nonnegative("init_spread", self.init_spread)
        check_choice("covariance", self.covariance, ("diag", "full"))
        self.num_components = check_count("num_components", self.num_components)
        if self.num_components > 1 and self.init_spread == 0:
            raise ValueError(
                f"init_spread is {self.init_spread!r}; components that start at one point have the"
                " same gradient and never part, so give a positive one."
            )
        super().__post_init__()

    def latent_distribution(self) -> dist.MixtureSameFamily:
        C, d = self.num_components, self.latent_dim
        logits: Any = numpyro.param(f"{self.prefix}_logits", jnp.zeros(C))
        loc = random_param(
            f"{self.prefix}_loc",
            lambda key: self.init_latent + self.init_spread * random.normal(key, (C, d)),
        )
        if self.covariance == "diag":
            scale: Any = numpyro.param(
                f"{self.prefix}_scale",
                jnp.full((C, d), self.init_scale),
                constraint=constraints.softplus_positive,
            )
            return DiagonalNormalMixture(logits, loc, scale)
        scale_tril: Any = numpyro.param(
            f"{self.prefix}_scale_tril",
            jnp.broadcast_to(self.init_scale * jnp.eye(d), (C, d, d)),
            constraint=constraints.scaled_unit_lower_cholesky,
        )
        return FullNormalMixture(logits, loc, scale_tril)

    def get_posterior(self, params: Params) -> dist.MixtureSameFamily:
        """The mixture, in unconstrained space."""
        self.check_fitted(params)
        with block(), substitute(data=params):
            return self.latent_distribution()

    def components(self, params: Params) -> tuple[Array, dist.Distribution]:
        """The weights ``(C,)``, and the normals as one distribution of batch ``(C,)``.

        :param dict params: the guide's parameters, from ``svi.get_params``.
        """
        q = self.get_posterior(params)
        weights: Any = q.mixing_distribution.probs
        return weights, q.component_distribution

    def get_base_dist(self) -> dist.Distribution:
        raise self._no_transform()

    def get_transform(self, params: Params) -> Transform:
        raise self._no_transform()

    def _no_transform(self) -> ValueError:
        return ValueError(
            "AutoMixtureNormal is not one normal that is transformed, so there is no transform of"
            " it, for NeuTraReparam or otherwise; use a flow, such as AutoRealNVPNormal."
        )
