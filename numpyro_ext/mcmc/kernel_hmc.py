"""HMC with a surrogate score: Strathmann et al. (2015), Li & Turner (2018)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from numpyro.infer import init_to_uniform

from numpyro_ext._checks import check_count
from numpyro_ext._typing import Model, Sites
from numpyro_ext.mcmc._fields import Field, check_shape, starting_points, values_at
from numpyro_ext.mcmc._grad_fn import GradFn
from numpyro_ext.mcmc._oracle import Oracle, check_names
from numpyro_ext.mcmc.base import Schedule, SGMCMCKernel
from numpyro_ext.mcmc.minibatch import PlateState

__all__ = ["KernelHMC", "KernelHMCState"]


class KernelHMCState(NamedTuple):
    """
    State of one chain: the fields of :class:`SGLDState`, of which **potential_energy** is exact here and **grad_norm**
    is the norm of the surrogate score where the trajectory began, and

     - **accept_prob** - acceptance probability of the last proposal.
     - **num_accepted** - proposals accepted so far, warmup included.
    """

    i: Array
    z: Sites
    potential_energy: Array
    grad_norm: Array
    step_size: Array
    diverging: Array
    sampling: Array
    gradient: Any
    plates: dict[str, PlateState]
    accept_prob: Array
    num_accepted: Array
    rng_key: Array


class KernelHMC(SGMCMCKernel):
    r"""
    Hamiltonian Monte Carlo whose trajectories follow a surrogate score f instead of :math:`-\nabla U` [1].

    .. math::

        r \sim N(0, I), \quad \text{leapfrog: } r \leftarrow r + \tfrac{\epsilon}{2} f(z), \;
        z \leftarrow z + \epsilon r, \; r \leftarrow r + \tfrac{\epsilon}{2} f(z), \quad L \text{ times}, \\
        \text{accept } (z^*, r^*) \text{ with probability }
        \min\bigl(1, \exp(U(z) + \tfrac12 |r|^2 - U(z^*) - \tfrac12 |r^*|^2)\bigr)

    on the ravelled, unconstrained z (sites sorted by name). No gradient of the model is taken, and U once per
    transition, so the model may be costly, or have no gradient. Any *fixed* f makes the map reversible and
    volume-preserving, a gradient or not, so the chain is exact; only its speed depends on f. With f = 0 it is a random
    walk with normal steps of length :math:`\epsilon L`; where f is wrong, proposals are rejected. Estimates of f from
    samples decay away from them: a chain in the tails falls back to the random walk.

    A proposal with a potential that is not finite is rejected. All data are used: no subsampled plates. There is no
    adaptation of the step size (aim at an ``accept_prob`` of 0.6 to 0.9), and f is not refitted.

    :param model: Python callable containing NumPyro primitives.
    :param step_size: positive float or schedule :math:`\epsilon`, of the order of a posterior standard deviation.
    :param score: f, a callable from the ravelled z to ``(n,)``, or an estimator with the method
        ``fit((k, n) samples)``, such as ``numpyro_ext.scores.SteinScore()``, which returns a callable from ``(k, n)``
        points to ``(k, n)`` scores. It is fitted once, when the chain starts.
    :param dict training_samples: constrained draws of all latent sites, leading axis first, to fit an estimator.
    :param int num_leapfrog: L.
    :param int steps_per_sample: transitions per draw, all in one dispatch.
    :param init_strategy: a per-site initialization function.

    **References:**

    1. *Gradient-free Hamiltonian Monte Carlo with Efficient Kernel Exponential Families*, Heiko Strathmann, Dino
       Sejdinovic, Samuel Livingstone, Zoltan Szabo, Arthur Gretton (NeurIPS 2015), algorithm 1
    2. *Gradient Estimators for Implicit Models*, Yingzhen Li, Richard E. Turner (ICLR 2018), section 5

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
    takes_gradient = False
    last_step_fields = ()  # the next transition needs the potential

    def __init__(
        self,
        model: Model,
        step_size: float | Schedule,
        *,
        score: Any,
        training_samples: Sites | None = None,
        num_leapfrog: int = 10,
        steps_per_sample: int = 1,
        init_strategy: Callable[..., Any] = init_to_uniform,
    ) -> None:
        super().__init__(
            model, step_size, steps_per_sample=steps_per_sample, init_strategy=init_strategy
        )
        fits = hasattr(score, "fit")
        if isinstance(score, type) or not (fits or callable(score)):
            raise TypeError(
                f"score is {score!r}; it must be a callable of the ravelled z, or an object with the method"
                " fit, such as SteinScore()."
            )
        if fits and training_samples is None:
            raise ValueError(
                f"score is {score!r}, which is fitted to samples, but training_samples is None; give a dict"
                " of draws of all latent sites."
            )
        if not fits and training_samples is not None:
            raise ValueError(
                f"training_samples is given, but score is {score!r}, which has no method fit; leave it out."
            )
        check_count("num_leapfrog", num_leapfrog)
        self._score = score
        self._training_samples = training_samples
        self._num_leapfrog = num_leapfrog
        self._fitted: Field | None = None

    def setup(self, oracle: Oracle) -> None:
        for name in oracle.plates:
            raise ValueError(
                f"plate '{name}' has a subsample_size, but KernelHMC accepts with the potential of all data;"
                " drop subsample_size, or use SGHMC."
            )
        if self._training_samples is None:
            self._fitted = self._score
            return
        samples = {name: jnp.asarray(x) for name, x in self._training_samples.items()}
        check_names("training_samples", samples, oracle.like)
        lengths = {x.shape[:1] for x in samples.values()}
        if len(lengths) > 1 or () in lengths:
            shapes = {name: x.shape for name, x in samples.items()}
            raise ValueError(
                f"training_samples has the shapes {shapes}; the leading axis, of draws, must be the same."
            )

        def flatten(draw: Sites) -> Array:
            return ravel_pytree(oracle.unconstrain("one draw of training_samples", draw))[0]

        predict = self._score.fit(jax.vmap(flatten)(samples))
        self._fitted = lambda z: predict(z[None])[0]

    def init_state(self, rng_key: Array, z: Array) -> dict[str, Array]:
        assert self._fitted is not None
        check_shape("score", self._fitted, z, (1,))
        return {"accept_prob": jnp.zeros((), z.dtype), "num_accepted": jnp.zeros((), int)}

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Sites | None,
        model_args: tuple = (),
        model_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        state = super().init(rng_key, num_warmup, init_params, model_args, model_kwargs)
        points = starting_points(state)
        assert self._fitted is not None
        if points is not None and not np.all(np.isfinite(values_at(self._fitted, points))):
            raise ValueError(
                "the score is not finite at the initial point; check the samples that it was fitted to, or"
                " give init_params."
            )
        return state

    def step(
        self,
        rng_key: Array,
        state: KernelHMCState,
        z: Array,
        grad_fn: GradFn,
        eps: Array,
        T: Array,
    ) -> tuple[Array, dict[str, Array], Array, Array]:
        assert self._fitted is not None
        fitted = self._fitted

        def score(z: Array) -> Array:
            return jnp.asarray(fitted(z), z.dtype)

        def leapfrog(_: Any, at: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            z, r, f = at
            r = r + eps / 2 * f
            z = z + eps * r
            f = score(z)
            return z, r + eps / 2 * f, f

        key_momentum, key_accept = random.split(rng_key)
        r = random.normal(key_momentum, z.shape, z.dtype)
        f = score(z)
        z_new, r_new, _ = lax.fori_loop(0, self._num_leapfrog, leapfrog, (z, r, f))
        U, U_new = state.potential_energy, grad_fn.potential(z_new).astype(z.dtype)
        # The difference of squares as a product keeps the digits of a small difference.
        log_ratio = U - U_new + jnp.vdot(r - r_new, r + r_new) / 2
        finite = jnp.isfinite(U_new) & jnp.all(jnp.isfinite(z_new)) & jnp.isfinite(log_ratio)
        accept_prob = jnp.where(finite, jnp.exp(jnp.minimum(log_ratio, 0)), 0)
        accept = random.uniform(key_accept, (), z.dtype) < accept_prob
        z, U = jnp.where(accept, z_new, z), jnp.where(accept, U_new, U)
        fields = {"accept_prob": accept_prob, "num_accepted": state.num_accepted + accept}
        return z, fields, U, -f

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_fitted": None}
