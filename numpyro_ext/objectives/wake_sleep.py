"""Wake-sleep (Hinton et al., 1995) and reweighted wake-sleep (Bornschein and Bengio, 2015)."""

from copy import copy
import inspect

from jax import Array, random
from jax.lax import stop_gradient
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Unit
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._checks import check_choice, check_several
from numpyro_ext._model.arguments import without_handlers
from numpyro_ext._model.operations import is_part_of
from numpyro_ext._model.read import base_distribution, frames, latent_sites
from numpyro_ext._model.units import drawn_sites
from numpyro_ext._typing import Sites, Trace
from numpyro_ext.objectives.base import (
    Arguments,
    Draws,
    MapT,
    Objective,
    Particle,
    State,
    refuse_hidden_gradient,
)
from numpyro_ext.objectives.power_mean import power_mean, weighted_surrogate


class ReweightedWakeSleep(Objective):
    r"""The importance-weighted bound for the model; for the guide, the forward divergence
    :math:`KL(p(z | x) \| q)`.

    No gradient goes through a draw, so that guide sites may be **discrete**, and no score is
    multiplied by a log weight. With K draws :math:`z_k \sim q` and normalised weights :math:`\hat
    w_k \propto p(x, z_k) / q(z_k)` the gradients are the ones of

    .. math::
        \text{model:}\quad & \sum_k \hat w_k \log p(x, z_k) \\
        \text{guide, wake:}\quad & \sum_k \hat w_k \log q(z_k | x) \\
        \text{guide, sleep:}\quad & \frac1K \sum_k \log q(\tilde z_k | \tilde x_k), \qquad
        (\tilde z_k, \tilde x_k) \sim p(z, x),

    with the weights and draws fixed. The loss has the value of :class:`IWELBO`, :math:`-\log
    \frac1K \sum_k p(x, z_k) / q(z_k)` in nats, whatever the guide follows. If plates enclose every
    site of model and guide, each of their elements has its own weights.

    **Sleep.** A dream is a draw of latents and data from the model. The guide is called with the
    dreamed data in place of the argument that has the name of the observed site, so write
    ``numpyro.sample("x", ..., obs=x)`` for the argument ``x``. A plate may take its rows. Each
    latent site of the model has to be one of the guide, which has to read the dreamed data.

    **Biased.** The model and the wake update by O(1/K), towards the guide. The sleep update is
    unbiased for the mean divergence over data *of the model*, which are far from the given ones
    until the model is good. The two losses differ, so the value need not fall. A minibatch of data
    that share latent sites has the noise of :class:`VRELBO` of order 0, and is an error with sleep.

    :param int num_particles: number of particles K; at least 2 unless ``guide_update="sleep"``.
    :param str guide_update: ``"wake"``, ``"sleep"``, or ``"both"`` for the mean of the two.

    **Reference:** *Reweighted wake-sleep*, Bornschein and Bengio, ICLR 2015 (its wake and sleep
    updates of q; with sleep and K = 1 it is :class:`WakeSleep`).

    >>> def model(x):
    ...     z = numpyro.sample("z", dist.Bernoulli(0.5))
    ...     numpyro.sample("x", dist.Normal(z, 1.), obs=x)
    >>> def guide(x):
    ...     slope, bias = numpyro.param("slope", 0.), numpyro.param("bias", 0.)
    ...     numpyro.sample("z", dist.Bernoulli(logits=slope * x + bias))
    >>> optim = optax.adam(optax.linear_schedule(0.05, 0., 1000))
    >>> svi = SVI(model, guide, optim, ReweightedWakeSleep(50, guide_update="sleep"))
    >>> params = svi.run(jax.random.key(0), 1000, 1.5, progress_bar=False).params
    >>> print(f"{params['slope']:.0f} x {params['bias']:+.1f}")  # exact: x - 1/2
    1 x -0.5
    """

    can_infer_discrete = True
    takes_powers = True
    without_log_q = "VIMCO"

    def __init__(
        self,
        num_particles: int = 10,
        *,
        guide_update: str = "wake",
        vectorize_particles: bool | MapT = True,
    ) -> None:
        check_choice("guide_update", guide_update, ("wake", "sleep", "both"))
        if guide_update != "sleep":
            why = 'the weight of one is 1 whatever it is worth; guide_update="sleep" takes it'
            check_several(num_particles, why)
        self.guide_update = guide_update
        super().__init__(num_particles, vectorize_particles=vectorize_particles)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        wake = {"wake": 1.0, "sleep": 0.0, "both": 0.5}[self.guide_update]
        return _estimate(draws, 1.0, wake)


class WakeSleep(Objective):
    r"""The ELBO for the model, and dreams of the model for the guide.

    .. math::
        \text{model:}\quad & \frac1K \sum_k \log p(x, z_k), \qquad z_k \sim q(z | x) \\
        \text{guide:}\quad & \frac1K \sum_k \log q(\tilde z_k | \tilde x_k), \qquad
        (\tilde z_k, \tilde x_k) \sim p(z, x),

    with the draws fixed. The loss has the value of minus the ELBO in nats, but its gradient in the
    parameters of the guide is of sleep alone, as in :class:`ReweightedWakeSleep`, which has the
    tighter bound for the model. It has no weights that could degenerate.

    **Biased.** The model by the gap of the ELBO, which the guide does not minimise; so a fit may
    end worse than it was. The guide learns from data of the model alone.

    :param int num_particles: number of particles K, and of dreams.

    **Reference:** *The "wake-sleep" algorithm for unsupervised neural networks*, Hinton et al.,
    Science 1995.

    >>> def model(x):
    ...     loc = numpyro.param("loc", 0.)
    ...     z = numpyro.sample("z", dist.Normal(loc, 1.))
    ...     numpyro.sample("x", dist.Normal(z, 1.), obs=x)
    >>> def guide(x):
    ...     slope, bias = numpyro.param("slope", 0.), numpyro.param("bias", 0.)
    ...     numpyro.sample("z", dist.Normal(slope * x + bias, 0.5 ** 0.5))
    >>> svi = SVI(model, guide, optax.adam(optax.linear_schedule(0.05, 0., 1000)), WakeSleep(50))
    >>> params = svi.run(jax.random.key(0), 1000, 1.6, progress_bar=False).params
    >>> # Of the greatest evidence is loc = x, and the posterior N(x / 2 + loc / 2, 1 / 2).
    >>> print({name: round(float(params[name]), 1) for name in ("loc", "slope", "bias")})
    {'loc': 1.6, 'slope': 0.5, 'bias': 0.8}
    """

    can_infer_discrete = True
    linear = True
    without_log_q = "VIMCO"

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        return _estimate(draws, 0.0, 0.0)


def _estimate(draws: Draws, power: float, wake: float) -> tuple[Array, State]:
    """The loss of weights :math:`w^{power}`; ``wake`` is the share of the wake update."""
    drawn = draws.layout.drawn_global + draws.layout.drawn_local

    def densities(key: Array) -> tuple[Array, Array, State]:
        values = stop_gradient(draws.values(key))
        refuse_hidden_gradient(draws, key, drawn_sites(draws.guide_trace(key, values=values)))
        lw = draws.particle(key, guide_params=draws.stopped, values=values).log_weight
        particle = draws.particle(key, values=values)
        return lw, particle.log_q_of(drawn), particle.state

    lw, log_q, state = draws.map(densities, draws.keys)
    value, weights = power_mean(lw, power)
    bound = weighted_surrogate(value, weights, lw)
    zero = jnp.zeros_like(value)
    if wake:
        bound += weighted_surrogate(zero, wake * weights, log_q)
    if wake < 1:
        dreams = Dreams(draws)
        log_q = draws.map(dreams.log_q, random.split(draws.extra_key, len(draws.keys)))
        mean = jnp.full_like(log_q, (1 - wake) / len(log_q))
        bound += weighted_surrogate(zero, mean, log_q)
    return -draws.total(bound), state


class Dreams:
    """Draws of latents and data from the model, and the guide's density of these latents."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self._drawn = draws.layout.drawn_global + draws.layout.drawn_local
        trace = draws.dream(draws.keys[0])
        names = [name for name, site in trace.items() if "obs" in site.get("infer", {})]
        self._check_sites(trace, names)
        guide = without_handlers(draws.guide)
        self._bound = inspect.signature(guide).bind(*draws.args, **draws.kwargs)
        self._given: Sites = {name: self._argument(name) for name in names}
        if not eval_provenance(lambda **data: self._log_q(trace, data), **self._given):
            raise self._error(
                f"the guide does not depend on the data of {names}, and would learn the prior"
            )

    def log_q(self, rng_key: Array) -> Array:
        """``(*units)``, of one dream."""
        trace = self.draws.dream(rng_key)
        dreamed = {}
        for name, whole in self._given.items():
            value = trace[name]["value"]
            is_whole = jnp.shape(value) == whole.shape  # or the rows of a minibatch
            dreamed[name] = value if is_whole else whole.at[_rows(trace, name)].set(value)
        return self._log_q(trace, dreamed)

    def _log_q(self, trace: Trace, data: Sites) -> Array:
        draws, key = self.draws, self.draws.keys[0]
        latents = {name: trace[name]["value"] for name in self._drawn}
        guide_trace = draws.guide_trace(key, None, latents, self._with(data))
        return Particle(draws, key, draws.params, guide_trace).log_q_of(self._drawn)

    def _with(self, data: Sites) -> Arguments:
        """The arguments with these in place of their namesakes."""
        bound = copy(self._bound)
        bound.arguments = {**bound.arguments, **data}
        return bound.args, bound.kwargs

    def _error(self, why: str) -> ValueError:
        name = type(self.draws.objective).__name__
        return ValueError(
            f'{name}: {why}; use ReweightedWakeSleep(guide_update="wake"), which has no dreams.'
        )

    def _check_sites(self, trace: Trace, observed: list[str]) -> None:
        layout = self.draws.layout
        for plate, *_ in layout.subsampled:
            if plate not in layout.plates:
                raise self._error(f"the subsampled plate '{plate}' does not enclose every site")
        latents = sorted({site["name"] for site in latent_sites(trace)} - {*observed})
        if latents != sorted(self._drawn):
            raise self._error(
                f"the guide draws {sorted(self._drawn)} and the model {latents}, so that it has no"
                " density of what the model dreams"
            )
        for name in observed:
            if isinstance(base_distribution(trace[name]["fn"]), Unit):
                raise self._error(f"draws of the model do not follow the factor '{name}'")

    def _argument(self, name: str) -> Array:
        """The argument of the guide that dreamed data of this site replace."""
        value = self._bound.arguments.get(name)
        if not isinstance(value, np.ndarray | Array | float | int):
            raise self._error(
                f"the guide needs an array argument '{name}' for the dreamed data of that site, and"
                f" it has {list(self._bound.arguments)}"
            )

        def observed(x: Array) -> Array:
            return self.draws.dream(self.draws.keys[0], self._with({name: x}))[name]["infer"]["obs"]

        if not is_part_of(observed, jnp.asarray(value)):
            raise self._error(f"the data of site '{name}' are computed from the argument '{name}'")
        return jnp.asarray(value)


def _rows(trace: Trace, name: str) -> tuple[Array, ...]:
    """The indices of the numbers of a site in its data of all rows."""
    site = trace[name]
    axes = [jnp.arange(size) for size in jnp.shape(site["value"])]
    for plate, dim in frames(site).items():
        if plate in trace:
            axes[dim - site["fn"].event_dim] = trace[plate]["value"]
    return jnp.ix_(*axes)
