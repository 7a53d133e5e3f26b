"""Stochastic gradients along great circles: Liu, Zhu & Song (2016)."""

from collections.abc import Callable
from dataclasses import dataclass
import math
from typing import Any

from jax import Array, random
import jax.numpy as jnp

from numpyro_ext._checks import check_positive, if_given
from numpyro_ext._model.spheres import has_poles, is_sphere, normalised
from numpyro_ext.mcmc.base import GradFn, SGMCMCKernel, Transition, kernel_state

_OWN = {
    "r": "momentum, ``(n,)`` in the flat order, at right angles to the points of spheres.",
    "kinetic_temperature": "``|r|^2`` over its degrees of freedom, d - 1 of each sphere.",
}
GeodesicSGHMCState = kernel_state("GeodesicSGHMCState", __name__, **_OWN)
GeodesicSGNHTState = kernel_state(
    "GeodesicSGNHTState", __name__, **_OWN, thermostat="friction xi that was found, ``()``."
)


@dataclass(kw_only=True, eq=False, repr=False)
class GeodesicKernel(SGMCMCKernel):
    """Base of the kernels that move sites of :class:`SphereReparam` along great circles, and all
    other coordinates along lines."""

    momentum = "r"
    finds_whitening = False

    friction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("friction", self.friction)
        if self.whitening is not None:
            raise ValueError(
                f"whitening is given, but {type(self).__name__} moves on spheres, which have no"
                " other coordinates; leave it out."
            )

    @property
    def _spheres(self) -> list[tuple[slice, tuple[int, ...]]]:
        info = self.info
        latents = info.latents.items()
        on_sphere = [(name, latent) for name, latent in latents if is_sphere(latent.support)]
        return [(info.slices[name], latent.unconstrained.shape) for name, latent in on_sphere]

    def _on_spheres(self, of_points: Callable[..., Array], out: Array, *xs: Array) -> Array:
        """``out`` with ``of_points`` of each array ``(*batch, d)`` of points of a sphere."""
        for where, shape in self._spheres:
            new = of_points(*(x[where].reshape(shape) for x in xs))
            out = out.at[where].set(jnp.ravel(new))
        return out

    def on_manifold(self, z: Array) -> Array:
        """The points, of length 1."""
        return self._on_spheres(normalised, z, z)

    def tangent(self, z: Array, v: Array) -> Array:
        """The part of ``v`` at right angles to the points."""

        def of_points(x: Array, v: Array) -> Array:
            return v - jnp.sum(x * v, -1, keepdims=True) * x

        return self._on_spheres(of_points, v, z, v)

    def slope(self, z: Array, grad: Array, eps: Array) -> Array:
        """The gradient along spheres. Of probabilities it has poles, where a step would have no
        bounded mean square: their kicks are at most one thermal unit."""
        for name, latent in self.info.latents.items():
            if has_poles(latent.support):
                where = self.info.slices[name]
                grad = grad.at[where].set(jnp.clip(grad[where], -1 / eps, 1 / eps))
        return self.tangent(z, grad)

    def flow(self, z: Array, r: Array, t: Array) -> tuple[Array, Array]:
        """The geodesic from z with velocity r for a time t, and the velocity at its end."""

        def moved(x: Array, v: Array) -> Array:
            speed = jnp.linalg.norm(v, axis=-1, keepdims=True)
            return x * jnp.cos(speed * t) + v * t * jnp.sinc(speed * t / jnp.pi)

        def turned(x: Array, v: Array) -> Array:
            speed = jnp.linalg.norm(v, axis=-1, keepdims=True)
            return v * jnp.cos(speed * t) - x * speed * jnp.sin(speed * t)

        new = self.on_manifold(self._on_spheres(moved, z + t * r, z, r))
        return new, self.tangent(new, self._on_spheres(turned, r, z, r))

    @property
    def freedom(self) -> int:
        """The number of degrees of freedom."""
        return self.info.size - sum(math.prod(shape[:-1]) for _, shape in self._spheres)

    def temperature_of(self, r: Array) -> Array:
        """The mean square of a momentum along a degree of freedom."""
        return jnp.sum(r**2) / self.freedom

    def draw_momentum(self, rng_key: Array, z: Array, T: Array) -> Array:
        return self.tangent(self.on_manifold(z), super().draw_momentum(rng_key, z, T))


@dataclass(kw_only=True, eq=False, repr=False)
class GeodesicSGHMC(GeodesicKernel):
    r"""SGHMC on spheres, SGGMC: momentum in the tangent space, motion along great circles.

    A site of :class:`SphereReparam`, a direction or the roots of probabilities, is a point z of the
    unit sphere in :math:`R^d`, with a density per area, and r a tangent vector there. With
    :math:`P = I - z z^\top`, :math:`c = e^{-C \epsilon}` and :math:`\Phi_t` the great circle

    .. math::
        \Phi_t(z, r) = \big( z \cos|r|t + \tfrac{r}{|r|} \sin|r|t, \;
            r \cos|r|t - z |r| \sin|r|t \big),

    one step of size :math:`\epsilon` is

    .. math::
        (z_m, r_a) &= \Phi_{\epsilon/2}(z, r), \qquad k = -\tfrac{\epsilon}{2} P g(z_m), \\
        r_b &= c\, (r_a + k) + \sqrt{T (1 - c^2)}\, P \zeta + k, \qquad
        (z', r') = \Phi_{\epsilon/2}(z_m, r_b) ,

    each part of which is exact. All other sites move along lines, as of :class:`SGHMC`, with the
    same step, and without spheres this is :class:`SGHMC`. There is no chart and so no pole, no cut
    and no boundary.

    *What it is biased by.* With full gradients the error is of order :math:`\epsilon^2`. Gradient
    noise of variance :math:`s^2` heats the chain as of :class:`SGHMC`, by about :math:`\epsilon s^2
    / (2C)`, which ``kinetic_temperature`` shows. The gradient has a pole where the root of a
    probability is 0, so kicks of such roots, :math:`\epsilon |g|`, are at most 1. At the pole that
    is an error of order :math:`\epsilon^{2\alpha}`, and kicks that no step resolves heat the chain:
    if a prior has :math:`\alpha` near 1 take a step of 0.03 and a friction of 3, and if it is far
    below 1 :class:`SGRLD` with :class:`GammaSimplexReparam`. Away from it the tails of a normal
    posterior with the standard deviation s become exponential beyond :math:`s^2 / \epsilon`, so
    that the variance is 8 % too large at :math:`\epsilon = s / 2`, 0.4 % at :math:`s / 3`, and more
    where minibatches make the gradient noisy. The kernel has no law by which a step could be found:
    take about a tenth to a half of the narrowest posterior standard deviation, in radians on
    spheres, and at most a third for probabilities.

    :param step_size: positive float or schedule, in units of time.
    :param float friction: the rate C.

    **References:**

    1. *Stochastic gradient geodesic MCMC methods*, Chang Liu, Jun Zhu, Yang Song (NIPS 2016)
    2. *Geodesic Monte Carlo on embedded manifolds*, Simon Byrne, Mark Girolami (Scandinavian
       Journal of Statistics 2013)

    >>> from numpyro.handlers import reparam
    >>> from numpyro_ext.mcmc import GeodesicSGHMC, SphereReparam
    >>> def model(total):  # the sum of directions, each von Mises-Fisher
    ...     u = numpyro.sample("u", dist.ImproperUniform(dist.constraints.sphere, (), (3,)))
    ...     numpyro.factor("likelihood", u @ total)
    >>> kernel = GeodesicSGHMC(reparam(model, config={"u": SphereReparam()}), 0.2)
    >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=4000, progress_bar=False)
    >>> mcmc.run(random.key(0), jnp.array([6.0, 0.0, 8.0]))
    >>> # The mean is the direction (.6, 0, .8) times coth 10 - 1/10 = .9.
    >>> bool(jnp.abs(mcmc.get_samples()["u"].mean(0) - jnp.array([0.54, 0, 0.72])).max() < 0.03)
    True
    """

    state_class = GeodesicSGHMCState

    def step(
        self, rng_key: Array, state: Any, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> Transition:
        z = self.on_manifold(z)
        c = jnp.exp(-jnp.asarray(self.friction, z.dtype) * eps)
        z, r = self.flow(z, self.tangent(z, state.r), eps / 2)
        estimate = grad_fn(z)
        noise = self.tangent(z, random.normal(rng_key, z.shape, z.dtype))
        k = -eps / 2 * self.slope(z, estimate.grad, eps)
        r = c * (r + k) + jnp.sqrt(T * (1 - c**2)) * noise + k
        z, r = self.flow(z, r, eps / 2)
        return Transition(z, estimate, {"r": r, "kinetic_temperature": self.temperature_of(r)})


@dataclass(kw_only=True, eq=False, repr=False)
class GeodesicSGNHT(GeodesicKernel):
    r"""SGNHT on spheres, gSGNHT: a friction that adapts until the temperature is right.

    As :class:`GeodesicSGHMC`, with the thermostat of :class:`SGNHT` in place of a fixed friction.
    With f degrees of freedom, d - 1 of each point of a sphere in :math:`R^d` and 1 of each other
    coordinate, and :math:`c = e^{-\xi\epsilon}`,

    .. math::
        (z_m, r_a) &= \Phi_{\epsilon/2}(z, r), \qquad
        r_b = c\, r_a + \tfrac{1 + c}{2} P \big(-\epsilon g(z_m) + \sqrt{2 C T \epsilon}\,
            \zeta\big), \\
        (z', r') &= \Phi_{\epsilon/2}(z_m, r_b), \qquad
        \xi' = \xi + \epsilon \tfrac{f}{\mu} \big(\tfrac1f |r'|^2 - T\big) .

    Gradient noise of unknown variance :math:`s^2` is taken up by :math:`\xi \approx C + \epsilon
    s^2 / (2T)`; noise that is unequal between sites, or varies along the chain, is not.

    :param step_size: as of :class:`GeodesicSGHMC`.
    :param float friction: C, of the noise that is injected, and the first :math:`\xi`.
    :param float thermal_mass: :math:`\mu`, in units of squared time; by default f, but at least 10.

    **Reference:** *Stochastic gradient geodesic MCMC methods*, Chang Liu, Jun Zhu, Yang Song (NIPS
    2016)

    >>> from numpyro_ext.mcmc import GeodesicSGNHT
    >>> GeodesicSGNHT(normal_mean, 0.02)
    GeodesicSGNHT(model=normal_mean, step_size=0.02)
    """

    state_class = GeodesicSGNHTState

    thermal_mass: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if_given(check_positive, "thermal_mass", self.thermal_mass)

    def init_state(self, rng_key: Array, z: Array) -> dict[str, Array]:
        xi = jnp.asarray(self.friction, z.dtype)
        return super().init_state(rng_key, z) | {"thermostat": xi}

    def step(
        self, rng_key: Array, state: Any, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> Transition:
        z = self.on_manifold(z)
        C, xi = jnp.asarray(self.friction, z.dtype), state.thermostat
        c = jnp.exp(-xi * eps)
        z, r = self.flow(z, self.tangent(z, state.r), eps / 2)
        estimate = grad_fn(z)
        noise = self.tangent(z, random.normal(rng_key, z.shape, z.dtype))
        kick = jnp.sqrt(2 * C * T * eps) * noise - eps * self.slope(z, estimate.grad, eps)
        r = c * r + (1 + c) / 2 * kick
        z, r = self.flow(z, r, eps / 2)
        f, K = self.freedom, self.temperature_of(r)
        mass = max(f, 10) if self.thermal_mass is None else self.thermal_mass
        xi = xi + eps * f / mass * (K - T)
        return Transition(z, estimate, {"r": r, "kinetic_temperature": K, "thermostat": xi})
