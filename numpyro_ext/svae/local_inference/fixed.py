"""Local inference without global variables: the variational auto-encoder."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jax import Array

from numpyro_ext.expfam import Gaussian, GaussianNatural
from numpyro_ext.svae.local_inference.base import LocalPosterior, Means, Rule, no_iterations
from numpyro_ext.svae.potentials import GaussianPotential, MixturePotential


class FixedGaussian(Rule):
    r"""x has a known normal prior, and q is prior times potential, normalised.

    .. math:: q_n(x) \propto N(x \mid \eta)\, \psi_n(x), \qquad KL_n = KL(q_n \| p).

    A mixture potential is replaced by the normal of the same mean and covariance. With it
    :class:`SVAEGuide` is the guide of a variational auto-encoder, with ``prior={}``.

    :param GaussianNatural natural: the prior's natural parameters, ``(d,)`` and ``(d, d)``.

    References: Kingma and Welling, *Auto-encoding variational Bayes* (ICLR 2014).

    >>> from numpyro_ext.expfam import Gaussian
    >>> from numpyro_ext.svae import FixedGaussian, GaussianPotential
    >>> rule = FixedGaussian(Gaussian.from_standard(jnp.zeros(1), jnp.eye(1)))
    >>> local = rule.infer({}, GaussianPotential(jnp.full((1, 1), 3.0), -jnp.ones((1, 1, 1))))
    >>> print(f"{local.mean['x'].x.item():.3f}")
    1.000
    """

    families: ClassVar[Mapping[str, Any]] = {}
    local_families: ClassVar[Mapping[str, Any]] = {"x": Gaussian}

    def __init__(self, natural: GaussianNatural) -> None:
        self.natural = natural

    def infer(
        self, global_mean: Means, potential: GaussianPotential | MixturePotential
    ) -> LocalPosterior:
        self.check_potential(potential, self.natural.h.shape[-1])
        natural = Gaussian.from_standard(*potential.tilted_normal(self.natural))
        info = no_iterations(len(potential.h))
        return LocalPosterior({"x": natural}, {"x": Gaussian.mean(natural)}, info)

    def local_kl(self, global_mean: Means, local: LocalPosterior) -> Array:
        return Gaussian.kl(local.natural["x"], self.natural)
