"""HMC with a surrogate score: Strathmann et al. (2015), Li & Turner (2018)."""

from dataclasses import dataclass, field
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_ext._checks import check_count
from numpyro_ext._model.potential import Potential
from numpyro_ext._typing import Kwargs, Sites
from numpyro_ext.mcmc.base import Chain, ModelKernel, Schedule, documented_tuple
from numpyro_ext.mcmc.geometry import VectorFn, check_values

KernelHMCState = documented_tuple(
    "KernelHMCState",
    __name__,
    {
        "i": "number of transitions made, from 0; it is not reset after warmup.",
        "z": "dict of the latent sites in unconstrained space.",
        "potential_energy": "U at ``z``.",
        "step_size": "step size of the last transition.",
        "diverging": "True if the score was not finite where a transition of the last draw began.",
        "accept_prob": "acceptance probability of the last proposal.",
        "num_accepted": "proposals accepted so far, warmup included.",
        "rng_key": "random number generator key of the next transition.",
    },
)


@dataclass(kw_only=True, eq=False, repr=False)
class KernelHMC(ModelKernel):
    r"""Hamiltonian Monte Carlo along a surrogate score f instead of :math:`-\nabla U`.

    .. math::
        r \sim N(0, I), \quad \text{leapfrog: } r \leftarrow r + \tfrac{\epsilon}{2} f(z), \;
        z \leftarrow z + \epsilon r, \; r \leftarrow r + \tfrac{\epsilon}{2} f(z),
        \quad L \text{ times}, \\
        \text{accept } (z^*, r^*) \text{ with probability }
        \min\bigl(1, \exp(U(z) + \tfrac12 |r|^2 - U(z^*) - \tfrac12 |r^*|^2)\bigr)

    on the flat, unconstrained z: the latent sites in the order in which the model samples them. No
    gradient of the model is taken, and U once per transition, so the model may be costly, or have
    no gradient. Any *fixed* f makes the map reversible and volume-preserving, so the chain is
    exact; only its speed depends on f. With f = 0 it is a random walk.

    A proposal with a potential that is not finite is rejected; a score that is not finite at the
    draw marks it ``diverging``. All data are used: no subsampled plates. Aim at an ``accept_prob``
    of 0.6 to 0.9.

    :param step_size: positive float or schedule :math:`\epsilon`, of the order of a posterior
        standard deviation; it is not found from the model.
    :param score: f, a callable from the flat z to ``(n,)``, or an estimator with the method
        ``fit((k, n) samples)``, such as ``numpyro_ext.scores.SteinScore()``, which returns a
        callable from ``(k, n)`` points to ``(k, n)`` scores.
    :param dict training_samples: constrained draws of all latent sites to fit an estimator, such as
        ``mcmc.get_samples()``; values of deterministic sites are left out.
    :param int num_leapfrog: L.

    **References:**

    1. *Gradient-free Hamiltonian Monte Carlo with Efficient Kernel Exponential Families*, Heiko
       Strathmann, Dino Sejdinovic, Samuel Livingstone, Zoltan Szabo, Arthur Gretton (NeurIPS 2015),
       algorithm 1
    2. *Gradient Estimators for Implicit Models*, Yingzhen Li, Richard E. Turner (ICLR 2018),
       section 5

    >>> def model():
    ...     numpyro.sample("z", dist.StudentT(5.0, 1.0, 2.0))
    >>> kernel = KernelHMC(model, 1.0, score=lambda z: -(z - 1) / 4, num_leapfrog=3)
    >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=2000, progress_bar=False)
    >>> mcmc.run(random.key(0))
    >>> abs(mcmc.get_samples()["z"].mean() - 1) < 0.3
    Array(True, dtype=bool)
    """

    state_class = KernelHMCState
    takes_gradients = False

    step_size: float | Schedule = field(kw_only=False)  # pyright: ignore
    score: Any
    training_samples: Sites | None = None
    num_leapfrog: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if hasattr(self.score, "fit") != (self.training_samples is not None):
            samples = "None" if self.training_samples is None else "given"
            raise ValueError(
                f"training_samples is {samples}, but score is {self.score!r}; a dict of draws"
                " belongs to a score with the method fit, and to no other."
            )
        self.num_leapfrog = check_count("num_leapfrog", self.num_leapfrog)
        self.fitted: VectorFn | None = None

    def setup(self, potential: Potential) -> None:
        for name in potential.plates:
            raise ValueError(
                f"plate '{name}' has a subsample_size, but KernelHMC takes all data; drop"
                " subsample_size, or use SGHMC."
            )
        super().setup(potential)
        self.fitted = self._fit_score(potential)
        if self.training_samples is None:
            center = jnp.zeros(self.info.size)
            check_values("score", self.score, self.coordinates.to_z(center), (1,))

    def _fit_score(self, potential: Potential) -> VectorFn:
        """f in the coordinates of the kernel."""
        coordinates = self.coordinates
        if self.training_samples is None:
            score = self.score
            return lambda xi: coordinates.pull(jnp.asarray(score(coordinates.to_z(xi)), xi.dtype))
        samples = {name: jnp.asarray(x) for name, x in self.training_samples.items()}
        num_draws = next((x.shape[:1] for x in samples.values()), ())
        samples = self.info.check_constrained("training_samples", samples, num_draws)

        @jax.jit
        @jax.vmap
        def flatten(draw: Sites) -> Array:
            z = potential.unconstrain("one draw of training_samples", draw)
            return coordinates.to_xi(self.info.ravel(z))

        predict = self.score.fit(flatten(samples))
        return lambda xi: jnp.asarray(predict(xi[None])[0], xi.dtype)

    def chain(self, potential: Potential) -> "HMCChain":
        return HMCChain(self, potential, self.coordinates)

    @property
    def keeps_sums(self) -> bool:
        return True

    def trajectory(self, f: VectorFn, z: Array, r: Array, eps: Array) -> tuple[Array, Array]:
        def leapfrog(_: Any, point: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            z, r, g = point
            r = r + eps / 2 * g
            z = z + eps * r
            g = f(z)
            return z, r + eps / 2 * g, g

        z, r, _ = lax.fori_loop(0, self.num_leapfrog, leapfrog, (z, r, f(z)))
        return z, r

    def refresh(self, state: Any, model_args: tuple, model_kwargs: Kwargs | None) -> Any:
        U = self.potential(model_args, model_kwargs)(state.z, {})
        return state._replace(potential_energy=U.astype(state.potential_energy.dtype))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"fitted": None}


class HMCChain(Chain):
    """The chain of :class:`KernelHMC`, in which proposals are accepted or not."""

    def start(
        self, rng_key: Array, key_plates: Array, key_start: Array, z: Sites
    ) -> tuple[Any, dict[str, Array], Sites | None]:
        i, flat = jnp.zeros((), int), self.kernel.flatten(z)
        state = KernelHMCState(
            i=i,
            z=z,
            potential_energy=self.potential(z, {}).astype(flat.dtype),
            step_size=self.kernel.step_size_at(i, flat.dtype),
            diverging=jnp.zeros((), bool),
            accept_prob=jnp.zeros((), flat.dtype),
            num_accepted=jnp.zeros((), int),
            rng_key=rng_key,
        )
        return state, {}, None

    def transition(self, state: Any, batch: Any = None) -> Any:
        z, dtype = state.z, state.z.dtype
        rng_key, _, key_step = random.split(state.rng_key, 3)
        key_momentum, key_accept = random.split(key_step)
        eps = self.kernel.step_size_at(state.i, dtype)
        r = random.normal(key_momentum, z.shape, dtype)
        f = self.kernel.fitted
        z_new, r_new = self.kernel.trajectory(f, z, r, eps)
        U = state.potential_energy
        U_new = self.potential(self.kernel.unflatten(z_new), {}).astype(dtype)
        # The difference of squares as a product keeps the digits of a small difference.
        log_ratio = U - U_new + jnp.vdot(r - r_new, r + r_new) / 2
        finite = jnp.isfinite(U_new) & jnp.all(jnp.isfinite(z_new)) & jnp.isfinite(log_ratio)
        accept_prob = jnp.where(finite, jnp.exp(jnp.minimum(log_ratio, 0)), 0)
        accept = random.uniform(key_accept, (), dtype) < accept_prob
        return state._replace(
            i=state.i + 1,
            z=jnp.where(accept, z_new, z),
            potential_energy=jnp.where(accept, U_new, U),
            step_size=eps,
            diverging=state.diverging | ~jnp.all(jnp.isfinite(f(z))),
            accept_prob=accept_prob,
            num_accepted=state.num_accepted + accept,
            rng_key=rng_key,
        )
