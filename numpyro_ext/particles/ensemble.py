"""Particle inference as a kernel for ``MCMC``: the chains are the particles."""

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
from jax import Array, lax, random
from jax.core import Tracer
import jax.numpy as jnp
from jax.sharding import NamedSharding
from numpyro.handlers import substitute
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key
import optax

from numpyro_ext._checks import check_count
from numpyro_ext._model.circles import circles_of, with_circles
from numpyro_ext._model.mode_search import place_cuts, recut_sites
from numpyro_ext._model.modes import SEARCH, InitFrom
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import SiteTable, check_site_table
from numpyro_ext._model.start import draw_params, draw_start
from numpyro_ext._typing import Kwargs, Model, Params, Sites
from numpyro_ext.particles._start import (
    BeginsAtModes,
    check_data,
    check_distinct,
    draw_at_modes,
    warn_of_few_particles,
)
from numpyro_ext.particles.base import ParticleField, find_lost, read_for_particles, report_lost
from numpyro_ext.particles.blob import Blob
from numpyro_ext.particles.dynamics import PSGHMC
from numpyro_ext.particles.langevin import EnsembleLangevin
from numpyro_ext.particles.regularized_svgd import RegularizedSVGD
from numpyro_ext.particles.step import ParticleStepState, particle_step, start_sds

ParVIState = namedtuple(
    "ParVIState", "i z modes optim_state potential_energy z_grad bandwidth diverging rng_key"
)
"""
A :func:`~collections.namedtuple` with these entries, m being the number of particles:

 - **i** - number of steps so far, warmup included.
 - **z** - the particles: unconstrained values of the latent sites, with a leading axis of length m.
 - **modes** - ``(m, K)``, 1 for the one of K modes at which each particle began, or None.
 - **optim_state** - state of the optimiser.
 - **potential_energy** - ``(m,)`` potential energies at ``z``, on the minibatch of the last step.
 - **z_grad** - ``(m, d)`` gradients of the log density there, in the order in which the model
   samples its sites.
 - **bandwidth** - ``(m,)``, the bandwidth of the last step for each particle, in units of the
   particles' spread if the field is preconditioned; NaN for a kernel without one.
 - **diverging** - ``(m,)``, true for a particle at which the log density or its gradient is not
   finite, or that the last step left in place because something was not.
 - **rng_key** - random number generator seed of the next steps.
"""


_FOUND_IN_RUNS = ("params", "start_modes", "num_steps", "sites", "circles", "_key_params")
"""The attributes of a kernel that its runs have set."""


class ParVI(BeginsAtModes, MCMCKernel):
    r"""Particles as an ensemble kernel: the chains are the particles, which move together.

    By default m particles :math:`x \in R^{m \times d}` (unconstrained, Jacobian included, in the
    order in which the model samples its sites) make the steps of :class:`EnsembleLangevin`, and are
    draws of the posterior. With a field they are moved along it,

    .. math::
        x \leftarrow x + \text{optimiser}\left( V(x, \gamma_i \nabla \log p(x) / T) \right),

    with the temperature T and the annealing :math:`\gamma` of the field. A plate with
    ``subsample_size`` gives one minibatch per step, the same for all particles. The particles begin
    at the modes of the posterior, as in :class:`AutoParticles`.

    It runs under ``MCMC(..., chain_method="vectorized", num_chains=m)``. Take some hundred
    particles, ``steps_per_sample=10``, ``num_warmup=100`` and ``num_samples=50`` to start with:
    ``get_samples()`` are the particles at 50 times. Along a field the warmup steps are ordinary
    steps, so put all of them into ``num_warmup`` (500 to start with) and take ``num_samples=1``: at
    the default step the particles are at rest after the warmup. :func:`print_particles` prints a
    summary.

    **Bias.** As for the dynamics or the field. Draws by :class:`EnsembleLangevin` have an R-hat and
    an effective sample size, which mean nothing along a field, where a chain is the path of an
    optimisation. ``diagnose`` judges both. ``diverging`` shows particles that are lost, as in
    :class:`ParticleField`, and all of them after a step that is not finite itself.

    :param model: a NumPyro model with continuous latents. For a potential energy write one that
        samples from ``dist.ImproperUniform`` and adds ``numpyro.factor("U", -potential_fn(z))``.
    :param field: a field such as ``RegularizedSVGD()``, which an optax transformation has by
        default; ``Blob()`` with a :class:`PSGHMC`, and none with an :class:`EnsembleLangevin`.
    :param optim: an :class:`EnsembleLangevin`, the default without a field; a :class:`PSGHMC`; or
        an optax transformation, of parameters of shape ``(m, d)``, by default
        :func:`particle_step` over all warmup steps. Momenta are kept in ``optim_state``. Only
        functions such as ``functools.partial(optax.adam, 0.1)`` can be pickled.
    :param init_from: as for :class:`AutoParticles`. There is no search where ``init_strategy`` is
        given.
    :param init_strategy: one of NumPyro's strategies for another start, used with a key for each
        particle.
    :param int steps_per_sample: steps in one iteration of ``MCMC``.
    :param sharding: a ``NamedSharding`` of one axis, such as ``NamedSharding(mesh,
        PartitionSpec("particles"))``, over the devices of which the particles and their gradients
        are spread; m must be a multiple of their number.

    >>> def model():
    ...     numpyro.sample("w", dist.Normal(3.0, 2.0))
    >>> kernel = ParVI(model, RegularizedSVGD(), init_from=None)
    >>> mcmc = MCMC(kernel, num_warmup=300, num_samples=1, num_chains=100,
    ...             chain_method="vectorized", progress_bar=False)
    >>> mcmc.run(jax.random.key(0))
    >>> w = mcmc.get_samples()["w"]
    >>> bool(abs(w.mean() - 3.0) < 0.1), bool(abs(w.std() - 2.0) < 0.1)
    (True, True)
    """

    start_argument = "init_strategy"

    def __init__(
        self,
        model: Model,
        field: ParticleField | None = None,
        optim: optax.GradientTransformation
        | Callable[[], optax.GradientTransformation]
        | PSGHMC
        | EnsembleLangevin
        | None = None,
        *,
        init_from: InitFrom = SEARCH,
        init_strategy: Callable[..., Any] | None = None,
        steps_per_sample: int = 1,
        sharding: NamedSharding | None = None,
    ) -> None:
        if field is None and optim is None:
            optim = EnsembleLangevin()
        if isinstance(optim, EnsembleLangevin):
            field = optim.check_field(field)
        elif field is None:
            field = Blob() if isinstance(optim, PSGHMC) else RegularizedSVGD()
        if isinstance(optim, PSGHMC):
            optim.check_field(field)
        self.model = model
        self.field = field
        self.optim = optim
        self.choose_start(init_from, own=init_strategy is not None)
        self.init_strategy = init_strategy or init_to_uniform
        self.steps_per_sample = check_count("steps_per_sample", steps_per_sample)
        self.sharding = sharding
        self.params: Params = {}
        self._key_params: Array | None = None
        self.num_steps = 0
        self.circles: Array | None = None
        self.sites: SiteTable = []

    @property
    def draws_independently(self) -> bool:
        """True if the particles are draws that are independent but for what preconditions them."""
        return isinstance(self.optim, EnsembleLangevin)

    @property
    def inference_method(self) -> str:
        return "ensemble" if self.draws_independently else "particles"

    @property
    def method(self) -> str:
        """The name of what moves the particles."""
        moving = self.optim if self.draws_independently else self.field
        return type(moving).__name__

    @property
    def sample_field(self) -> str:
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        return ("z", "diverging")

    @property
    def is_ensemble_kernel(self) -> bool:
        return True

    def get_diagnostics_str(self, state: ParVIState) -> str:
        # Shapes only: a number from the state would wait for the device at every update of the bar.
        return f"{self.method}, {state.diverging.size} particles"

    def postprocess_fn(
        self, model_args: tuple[Any, ...], model_kwargs: Kwargs | None
    ) -> Callable[..., Any]:
        return self._potential(model_args, model_kwargs or {}).postprocess()

    def saved(self) -> dict[str, Any]:
        """What the kernel has found in its runs, for :func:`numpyro_ext.saving.save`."""
        return {name: vars(self)[name] for name in _FOUND_IN_RUNS}

    def restore(self, saved: dict[str, Any], args: tuple, kwargs: Kwargs) -> None:
        """Take what :meth:`saved` gave, of another kernel that was made alike."""
        vars(self).update({name: saved[name] for name in _FOUND_IN_RUNS})
        self.sites = self._potential(args, kwargs).info.site_table
        check_site_table(saved["sites"], self.sites)

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Any = None,
        model_args: tuple[Any, ...] = (),
        model_kwargs: Kwargs | None = None,
    ) -> ParVIState:
        if is_prng_key(rng_key) or rng_key.shape[0] < 2:
            raise ValueError(
                "the particles of ParVI are chains that move together; use"
                ' MCMC(..., chain_method="vectorized", num_chains=m) with m >= 2.'
            )
        if self.optim is None and num_warmup == 0:
            raise ValueError(
                "num_warmup is 0, but the default step has the length of the warmup; put the steps"
                " into num_warmup and take num_samples=1, or give optim."
            )
        self.num_steps = num_warmup * self.steps_per_sample
        num_particles, args, kwargs = rng_key.shape[0], model_args, model_kwargs or {}
        rng_key, key_init, key_optim, key_minibatch = random.split(rng_key[0], 4)
        z, modes = self._start(key_init, num_particles, init_params, args, kwargs)
        z, potential = self._spread(z), self._by_proxy(args, kwargs)
        x = jax.vmap(potential.info.ravel)(z)
        check_distinct(x, "use init_strategy=init_to_uniform, or init_params that differ.")
        if not self.draws_independently:
            warn_of_few_particles(*x.shape)
        energy, grad, idx = jax.jit(partial(_evaluate, potential))(key_minibatch, x)
        rows = {name: jnp.tile(i, (num_particles, 1)) for name, i in idx.items()}
        check = partial(potential.check_start, give="init_from=find_modes(model, *args)")
        check(z, rows, energy, jax.vmap(potential.info.unravel)(grad))
        return ParVIState(
            i=jnp.zeros((), int),
            z=z,
            modes=modes,
            optim_state=self._init_optim(key_optim, x, modes),
            potential_energy=energy,
            z_grad=-grad,
            bandwidth=jnp.tile(self.field.bandwidth(x, modes), num_particles),
            diverging=jnp.zeros(num_particles, bool),
            rng_key=rng_key,
        )

    def sample(
        self, state: ParVIState, model_args: tuple[Any, ...], model_kwargs: Kwargs | None
    ) -> ParVIState:
        potential = self._by_proxy(model_args, model_kwargs or {})
        return lax.fori_loop(
            0, self.steps_per_sample, lambda _, state: self._moved(state, potential), state
        )

    def _moved(self, state: ParVIState, potential: Potential) -> ParVIState:
        rng_key, key_minibatch = random.split(state.rng_key)
        x = jax.vmap(potential.info.ravel)(state.z)
        lost, seen = find_lost(state.potential_energy, state.z_grad)
        new_x, optim_state, bandwidth = self._advance(x, state, lost, seen)
        fine = jnp.all(jnp.isfinite(new_x))
        old, new = (x, state.optim_state, state.bandwidth[0]), (new_x, optim_state, bandwidth)
        x, optim_state, bandwidth = jax.tree.map(partial(jnp.where, fine), new, old)
        x = self._spread(x)
        energy, grad, _ = _evaluate(potential, key_minibatch, x)
        now_lost = report_lost(find_lost(energy, grad)[0])
        return state._replace(
            i=state.i + 1,
            z=jax.vmap(potential.info.unravel)(x),
            optim_state=optim_state,
            potential_energy=energy,
            z_grad=-grad,
            bandwidth=jnp.broadcast_to(bandwidth, energy.shape),
            diverging=lost | now_lost | ~fine,
            rng_key=rng_key,
        )

    def _spread(self, z: Any) -> Any:
        if self.sharding is None:
            return z
        return jax.tree.map(lambda leaf: lax.with_sharding_constraint(leaf, self.sharding), z)

    def _init_optim(self, rng_key: Array, x: Array, groups: Array | None) -> Any:
        if isinstance(self.optim, PSGHMC):
            return self.optim.init(rng_key, x)
        if isinstance(self.optim, EnsembleLangevin):
            modes = None if groups is None else self.start_modes
            return self.optim.init(rng_key, x, modes, groups)
        state: Any = self._transformation().init(x)
        if groups is not None and isinstance(state, ParticleStepState):
            return state._replace(start_sds=start_sds(x))
        return state

    def _advance(
        self, x: Array, state: ParVIState, lost: Array, seen: Array
    ) -> tuple[Array, Any, Array]:
        """Particles, state of the optimiser and bandwidth after one step, finite or not."""
        modes = None if state.modes is None else state.modes[seen]
        seen_x, g = x[seen], self.field.tempered(state.z_grad[seen], state.i)
        stays = lost[:, None]
        if isinstance(self.optim, PSGHMC):
            r = state.optim_state
            new_x, new_r = self.optim.step(seen_x, r[seen], g, self.field)
            return jnp.where(stays, x, new_x), jnp.where(stays, r, new_r), state.bandwidth[0]
        if isinstance(self.optim, EnsembleLangevin):
            progress = jnp.where(state.i < self.num_steps, state.i / max(self.num_steps, 1), 1.0)
            old = state.optim_state
            new_x, new = self.optim.step(seen_x, old, g, progress, modes)
            new = new._replace(momenta=jnp.where(stays, old.momenta, new.momenta))
            return jnp.where(stays, x, new_x), new, state.bandwidth[0]
        v, bandwidth = self.field.velocity_and_bandwidth(
            seen_x, g, bandwidth=state.bandwidth[0], groups=modes
        )
        v = jnp.where(stays, 0, v)
        updates, optim_state = self._transformation().update(-v, state.optim_state, seen_x)
        # An optimiser may clip what is not finite.
        new_x = jnp.where(jnp.all(jnp.isfinite(v)), seen_x + cast(Array, updates), jnp.nan)
        return jnp.where(stays, x, new_x), optim_state, bandwidth

    def _start(
        self, rng_key: Array, num_particles: int, init_params: Any, args: tuple, kwargs: dict
    ) -> tuple[Sites, Array | None]:
        info = read_for_particles(self.model, args, kwargs)
        self.sites = info.site_table
        how: dict[str, Any] = {"init_strategy": self.init_strategy}
        keys = random.split(rng_key, num_particles)
        key = keys[0] if init_params is None else rng_key
        if not isinstance(key, Tracer):
            # What is compiled for one run serves the next, and holds its parameters.
            key = self._key_params = key if self._key_params is None else self._key_params
        self.params = draw_params(key, self.model, info, args, kwargs, **how)
        modes, self.circles = None, None
        model, potential = substitute(self.model, data=self.params), self._potential(args, kwargs)
        if init_params is None:
            modes = self.find_modes(model, potential)
        else:
            check_data(model, potential)
        if modes is not None:
            self.circles = modes.circles
            potential = self._potential(args, kwargs)
            # Draws need no more particles at a mode than a covariance does.
            least = {"least": 0} if self.draws_independently else {}
            x, groups = draw_at_modes(rng_key, modes, num_particles, potential, **least)
            return jax.vmap(info.unravel)(x), groups
        cut_at_pi, info = info, place_cuts(self.model, info, self.params, args, kwargs)
        self.circles = circles_of(info)
        if init_params is not None:
            z = info.check_unconstrained("init_params", init_params, (num_particles,))
            return recut_sites(z, cut_at_pi, info), None
        z, *_ = draw_start(keys, self.model, info, args, kwargs, **how, validate_grad=True)
        return z, None

    def _potential(self, args: tuple, kwargs: Kwargs) -> Potential:
        info = read_for_particles(substitute(self.model, data=self.params), args, kwargs)
        info = with_circles(info, self.circles)
        return Potential(self.model, info, self.params, args, kwargs)

    def _by_proxy(self, args: tuple, kwargs: Kwargs) -> Potential:
        return self.field.with_proxy(self._potential(args, kwargs), self.model, args, kwargs)

    def _transformation(self) -> optax.GradientTransformation:
        if self.optim is None:
            return particle_step(max(self.num_steps, 1))
        return cast(Any, self.optim() if callable(self.optim) else self.optim)


def _evaluate(
    potential: Potential, rng_key: Array, x: Array
) -> tuple[Array, Array, dict[str, Array]]:
    """Potentials ``(m,)`` and gradients ``(m, d)`` of all particles on one minibatch, its rows."""
    idx = potential.draw_rows(rng_key)
    potential = potential.with_rows(idx)
    return *jax.vmap(lambda x: potential.value_and_grad_flat(x, idx))(x), idx
