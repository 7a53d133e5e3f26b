"""HMC with a surrogate score: Strathmann et al. (2015), Li & Turner (2018)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import check_count
from numpyro_ext._model.mode_search import Mode
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.whitening import Whitening
from numpyro_ext._typing import Sites
from numpyro_ext.mcmc.base import Chain, ModelKernel, Unchanged, state_class
from numpyro_ext.mcmc.geometry import VectorFn, check_shape, values_at
from numpyro_ext.mcmc.settings import Settings

_PILOT = 64


KernelHMCState = state_class(
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
        "settings": "``kernel.settings``, None where the step size was given.",
    },
)


@dataclass(kw_only=True, eq=False, repr=False)
class KernelHMC(ModelKernel):
    r"""Hamiltonian Monte Carlo whose trajectories follow a surrogate score f instead of
    :math:`-\nabla U`.

    .. math::
        r \sim N(0, I), \quad \text{leapfrog: } r \leftarrow r + \tfrac{\epsilon}{2} f(z), \;
        z \leftarrow z + \epsilon r, \; r \leftarrow r + \tfrac{\epsilon}{2} f(z),
        \quad L \text{ times}, \\
        \text{accept } (z^*, r^*) \text{ with probability }
        \min\bigl(1, \exp(U(z) + \tfrac12 |r|^2 - U(z^*) - \tfrac12 |r^*|^2)\bigr)

    on the flat, unconstrained z: the latent sites in the order in which the model samples them. No
    gradient of the model is taken, and U once per transition, so the model may be costly, or have
    no gradient. Any *fixed* f makes the map reversible and volume-preserving, a gradient or not, so
    the chain is exact; only its speed depends on f. With f = 0 it is a random walk with normal
    steps of length :math:`\epsilon L`; where f is wrong, proposals are rejected. Estimates of f
    from samples decay away from them: a chain in the tails falls back to the random walk.

    A proposal with a potential that is not finite is rejected; a score that is not finite at the
    draw marks it ``diverging``. All data are used: no subsampled plates. There is no adaptation of
    the step size (aim at an ``accept_prob`` of 0.6 to 0.9), and f is not refitted.

    :param step_size: positive float or schedule :math:`\epsilon`, of the order of a posterior
        standard deviation; None has it found in whitened coordinates, as that of the largest
        expected squared jump.
    :param score: f, a callable from the flat z to ``(n,)``, or an estimator with the method
        ``fit((k, n) samples)``, such as ``numpyro_ext.scores.SteinScore()``, which returns a
        callable from ``(k, n)`` points to ``(k, n)`` scores. It is fitted once, when the chain
        starts.
    :param dict training_samples: constrained draws of all latent sites, leading axis first, to fit
        an estimator, such as ``mcmc.get_samples()``; values of deterministic sites are left out.
    :param int num_leapfrog: L.
    :param whitening: the coordinates in which the kernel moves, a :class:`Whitening`.
    :param int steps_per_sample: transitions per draw, all in one dispatch.

    **References:**

    1. *Gradient-free Hamiltonian Monte Carlo with Efficient Kernel Exponential Families*, Heiko
       Strathmann, Dino Sejdinovic, Samuel Livingstone, Zoltan Szabo, Arthur Gretton (NeurIPS 2015),
       algorithm 1
    2. *Gradient Estimators for Implicit Models*, Yingzhen Li, Richard E. Turner (ICLR 2018),
       section 5

    .. doctest::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from jax import random
        >>> from numpyro.infer import MCMC
        >>> from numpyro_ext.mcmc import KernelHMC
        >>> def model():
        ...     numpyro.sample("z", dist.StudentT(5.0, 1.0, 2.0))
        >>> kernel = KernelHMC(model, 1.0, score=lambda z: -(z - 1) / 4, num_leapfrog=3)
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=2000, progress_bar=False)
        >>> mcmc.run(random.key(0), extra_fields=("accept_prob",))
        >>> abs(mcmc.get_samples()["z"].mean() - 1) < 0.3
        Array(True, dtype=bool)
        >>> mcmc.get_extra_fields()["accept_prob"].mean() > 0.9
        Array(True, dtype=bool)
    """

    state_class = KernelHMCState

    score: Any
    training_samples: Sites | None = None
    num_leapfrog: int = 10
    temperature = 1.0  # there is none, and no gradient of the model is taken
    gradient = None

    def __post_init__(self) -> None:
        super().__post_init__()
        score, training_samples = self.score, self.training_samples
        fits = hasattr(score, "fit")
        if isinstance(score, type) or not (fits or callable(score)):
            raise TypeError(
                f"score is {score!r}; it must be a callable of the flat z, or an object with the"
                " method fit, such as SteinScore()."
            )
        if fits and training_samples is None:
            raise ValueError(
                f"score is {score!r}, which is fitted to samples, but training_samples is None;"
                " give a dict of draws of all latent sites."
            )
        if not fits and training_samples is not None:
            raise ValueError(
                f"training_samples is given, but score is {score!r}, which has no method fit; leave"
                " it out."
            )
        self.num_leapfrog = check_count("num_leapfrog", self.num_leapfrog)
        self.fitted: VectorFn | None = None

    def choose(self, noise: np.ndarray, normal: Mode, potential: Potential) -> Settings:
        """The step of the largest expected squared jump, from draws of the normal approximation."""
        map_ = normal.whitening
        f = self._fit_score(potential, map_)
        n, dtype = normal.whitening.size, normal.center.dtype
        keys = random.split(random.key(1), 2)
        z, r = (random.normal(key, (_PILOT, n), dtype) for key in keys)

        def jump(eps: Array) -> Array:
            def one(z: Array, r: Array) -> Array:
                z_new, r_new = self.trajectory(f, z, r, eps)
                energies = [
                    potential(self.info.unravel(map_.to_z(x)), {}) + jnp.vdot(v, v) / 2
                    for x, v in ((z, r), (z_new, r_new))
                ]
                accept = jnp.exp(jnp.minimum(energies[0] - energies[1], 0))
                return jnp.nan_to_num(accept * jnp.sum((z_new - z) ** 2), posinf=0.0)

            return jnp.mean(jax.vmap(one)(z, r))

        # A trajectory of half a period would only mirror a Gaussian; a quarter forgets it.
        longest = min(np.pi / 2 / self.num_leapfrog, 1.5)
        steps = longest * jnp.geomspace(0.02, 1.0, 30, dtype=dtype)
        jumps = np.asarray(jax.jit(partial(lax.map, jump))(steps), float)
        best = int(np.argmax(jumps))
        correlation = 1 - min(jumps[best] / (2 * n), 1.0)
        transitions = (1 + correlation) / max(1 - correlation, 1e-6)
        return Settings(float(steps[best]), transitions=transitions)

    def setup(self, potential: Potential) -> None:
        for name in potential.plates:
            raise ValueError(
                f"plate '{name}' has a subsample_size, but KernelHMC accepts with the potential of"
                " all data; drop subsample_size, or use SGHMC."
            )
        super().setup(potential)
        self.fitted = self._fit_score(potential, self.coordinates)

    def _fit_score(self, potential: Potential, map_: Whitening | Unchanged) -> VectorFn:
        """f in these coordinates."""
        if self.training_samples is None:
            score = self.score
            return lambda xi: map_.pull(jnp.asarray(score(map_.to_z(xi)), xi.dtype))
        samples = {name: jnp.asarray(x) for name, x in self.training_samples.items()}
        lengths = {x.shape[:1] for x in samples.values()}
        if len(lengths) > 1 or () in lengths:
            shapes = {name: x.shape for name, x in samples.items()}
            raise ValueError(
                f"training_samples has the shapes {shapes}; the leading axis, of draws, must be the"
                " same."
            )
        chains = next(iter(lengths), ())
        samples = self.info.check_constrained("training_samples", samples, chains)

        @jax.jit
        @jax.vmap
        def flatten(draw: Sites) -> Array:
            z = potential.unconstrain("one draw of training_samples", draw)
            return map_.to_xi(self.info.ravel(z))

        predict = self.score.fit(flatten(samples))
        return lambda xi: jnp.asarray(predict(xi[None])[0], xi.dtype)

    def chain(self, potential: Potential) -> "HMCChain":
        return HMCChain(self, potential, self.coordinates)

    def check_state(self, states: Any, grads: Sites | None) -> None:
        assert self.fitted is not None
        if not np.all(np.isfinite(values_at(self.fitted, jax.vmap(self.flatten)(states.z)))):
            raise ValueError(
                "the score is not finite at the initial point; check the samples that it was fitted"
                " to, or give init_params."
            )

    def trajectory(self, f: VectorFn, z: Array, r: Array, eps: Array) -> tuple[Array, Array]:
        def leapfrog(_: Any, at: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            z, r, g = at
            r = r + eps / 2 * g
            z = z + eps * r
            g = f(z)
            return z, r + eps / 2 * g, g

        z, r, _ = lax.fori_loop(0, self.num_leapfrog, leapfrog, (z, r, f(z)))
        return z, r

    def refresh(self, state: Any, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        chain = self.chain(self.potential(model_args, model_kwargs))
        return chain.resume(state, jnp.ones((), bool))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"fitted": None}


class HMCChain(Chain):
    """The chain of :class:`KernelHMC`, whose proposals are accepted or not."""

    def start(
        self, rng_key: Array, key_plates: Array, key_start: Array, z: Sites
    ) -> tuple[Any, dict[str, Array], Sites | None]:
        i, flat = jnp.zeros((), int), self.kernel.flatten(z)
        check_shape("score", self.kernel.fitted, flat, (1,))
        state = KernelHMCState(
            i=i,
            z=z,
            potential_energy=self.potential(z, {}).astype(flat.dtype),
            step_size=self.kernel.step_size_at(i, flat.dtype),
            diverging=jnp.zeros((), bool),
            accept_prob=jnp.zeros((), flat.dtype),
            num_accepted=jnp.zeros((), int),
            settings=self.kernel.settings,
            resumed=jnp.zeros((), bool),
            rng_key=rng_key,
        )
        return state, {}, None

    def transition(self, state: Any) -> Any:
        z, dtype = state.z, state.z.dtype
        rng_key, _, key_step = random.split(state.rng_key, 3)
        key_momentum, key_accept = random.split(key_step)
        eps = self.kernel.step_size_at(state.i, dtype)
        r = random.normal(key_momentum, z.shape, dtype)
        f = self.kernel.fitted
        z_new, r_new = self.kernel.trajectory(f, z, r, eps)
        U, U_new = (
            state.potential_energy,
            self.potential(self.kernel.unflatten(z_new), {}).astype(dtype),
        )
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

    def resume(self, state: Any, resumed: Array) -> Any:
        old = state.potential_energy
        U = lax.cond(resumed, lambda: self.potential(state.z, {}).astype(old.dtype), lambda: old)
        return state._replace(potential_energy=U)
