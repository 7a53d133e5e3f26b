"""Directions and probabilities as points of a sphere."""

from typing import Any

from jax import Array
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer.reparam import Reparam

from numpyro_ext._model.read import elementwise
from numpyro_ext._model.spheres import OnSphere, RootsOfDirichlet
from numpyro_ext._numpyro import unwrap_distribution, wrap_distribution


class SphereReparam(Reparam):
    r"""A latent site on a sphere, or of Dirichlet probabilities, as a point x of a sphere in
    :math:`R^d`, on which :class:`GeodesicSGHMC` and :class:`GeodesicSGNHT` move.

    NumPyro has no map from unconstrained space to the sphere. Here it is :math:`u = x / |x|`, with
    the density

    .. math:: p(x) = p(u)\, |S^{d-1}|\, N(x; 0, I_d),

    which has the integral and the law of p(u), so that the site is right under every kernel,
    guide and loss. The geodesic kernels keep :math:`|x| = 1`.

    - A site with the support ``constraints.sphere`` keeps its name: a ``ProjectedNormal``, or
      ``dist.ImproperUniform(dist.constraints.sphere, (), (d,))``, uniform in any dimension. A von
      Mises-Fisher prior is ``numpyro.factor("prior", k * u @ m)`` beside that. Densities are per
      area.
    - A ``Dirichlet`` site p has the latent site ``<name>_sphere``, s, and is the deterministic
      :math:`p_k = s_k^2`. With :math:`s_k` of either sign there is no boundary: what would be
      reflected goes on to the mirror image. The density is
      :math:`\propto \prod_k |s_k|^{2\alpha_k - 1}`, smooth at :math:`\alpha_k = 1/2`; else its
      gradient has a pole at 0. Chains at mirror images agree about p; for s,
      :func:`~numpyro_ext.diagnostics.diagnose` takes R-hat of the absolute value.

    **References:**

    1. *Geodesic Monte Carlo on embedded manifolds*, Simon Byrne, Mark Girolami (Scandinavian
       Journal of Statistics 2013)
    2. *Stochastic gradient geodesic MCMC methods*, Chang Liu, Jun Zhu, Yang Song (NIPS 2016)

    >>> from numpyro.handlers import reparam
    >>> from numpyro_ext.mcmc import GeodesicSGHMC, SphereReparam
    >>> def model():
    ...     numpyro.sample("p", dist.Dirichlet(jnp.array([2.0, 3.0, 5.0])))
    >>> model = reparam(model, config={"p": SphereReparam()})
    >>> mcmc = MCMC(GeodesicSGHMC(model, 0.2), num_warmup=100, num_samples=4000, progress_bar=False)
    >>> mcmc.run(random.key(0))
    >>> bool(jnp.abs(mcmc.get_samples()["p"].mean(0) - jnp.array([0.2, 0.3, 0.5])).max() < 0.03)
    True
    """

    def __call__(self, name: str, fn: Any, obs: Array | None) -> tuple[Any, Array | None]:
        base, expand_shape, event_dim = unwrap_distribution(fn)
        is_dirichlet = isinstance(base, dist.Dirichlet)
        on_sphere = isinstance(elementwise(fn.support), type(constraints.sphere))
        if obs is not None or not (is_dirichlet or on_sphere):
            what = f"a {type(base).__name__}" if obs is None else "observed"
            raise ValueError(
                f"site '{name}' is {what}; SphereReparam is for latent sites whose support is"
                " constraints.sphere, and for latent Dirichlet sites."
            )
        around: Any = RootsOfDirichlet if is_dirichlet else OnSphere
        wrapped = wrap_distribution(around(base), expand_shape, event_dim)
        if not is_dirichlet:
            return wrapped, None
        s = jnp.asarray(numpyro.sample(f"{name}_sphere", wrapped))
        return None, s**2
