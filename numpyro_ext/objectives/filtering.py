"""The bound of a particle filter, for models of sequences (Maddison, Naesseth, Le et al., 2017)."""

from typing import Any, NamedTuple, cast

import jax
from jax import Array, lax, random
from jax.lax import stop_gradient
import jax.numpy as jnp
from numpyro.handlers import replay, seed, substitute
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._checks import check_choice
from numpyro_ext._model.density import log_density, scaled
from numpyro_ext._model.handlers import drawn_once, valid_plates
from numpyro_ext._model.read import Site, latent_sites, layers, sample_sites
from numpyro_ext._model.units import drawn_sites
from numpyro_ext._numpyro import mask_of, without_rsample_stop_gradient
from numpyro_ext._typing import Sites, Trace
from numpyro_ext.objectives.base import Draws, MapT, Objective, State
from numpyro_ext.objectives.power_mean import power_mean, surrogate, weighted_surrogate
from numpyro_ext.objectives.time_steps import Scan, check_pieces, refuse_no_steps, until_scan


class FilteringELBO(Objective):
    r"""Log of the evidence that a particle filter estimates, with the guide as its proposal.

    Model and guide each have one ``numpyro.contrib.control_flow.scan`` over the same T time steps,
    with bodies that draw the same latent sites. The K particles take a time step of both together:
    :math:`x_t^k \sim q(x_t \mid x_{t-1}^k)`, with the weight

    .. math::
        w_t^k = w_{t-1}^k\, \frac{p(x_t^k \mid x_{t-1}^k)\, p(y_t \mid x_t^k)}
        {q(x_t^k \mid x_{t-1}^k)}, \qquad
        \hat L_K = \sum_{t \in R} \log \frac1K \sum_k w_t^k ,

    in nats, where R are the time steps at which the effective sample size :math:`(\sum_k w)^2 /
    \sum_k w^2` is below ``ess_threshold`` times K, and T. After each, K ancestors are drawn
    independently with probabilities proportional to the weights, and all weights are 1. The loss is
    :math:`-\hat L_K`. What x carries from step to step is the carry of ``scan``, so a step may
    depend on the whole past.

    **Bias.** :math:`E\, e^{\hat L_K} = p(y)` at every K, so the mean of :math:`\hat L_K` is a lower
    bound of the evidence. K = 1 is the ELBO, and ``ess_threshold=0`` is :class:`IWELBO`. To keep
    the gap, K has to grow in proportion to T, where :class:`IWELBO` needs exponentially many
    particles. The gap need not vanish where the guide is the exact posterior, :math:`q(x_t \mid
    x_{t-1}, y_{t:T})`: the weights of a time step do not know the data to come.

    **Latent sites before the loop.** A site from which only the initial carry is computed, the
    state at time 0, is drawn by each particle. All others, which the body reads, are parameters of
    the sequence: they are drawn once, for all K particles.

    **Gradients.**

    * ``"pathwise"``: the derivative of the formula at the ancestors drawn. It is **biased**,
      because it leaves out how the probabilities of the ancestors change, and has much less noise.
    * ``"score"``: unbiased. The term :math:`\sum_t \sum_k \nabla \log \bar w_t^{a_k}\,(\hat L -
      \hat L_{1:t})` is added, less the same difference of a second filter, independent of the
      first. Its noise grows with T: for 100 time steps of a volatility it found worse parameters
      than ``"pathwise"``, for 400 none (``benchmarks/objectives``). A step takes twice as long.

    **When it fails.** A plate of many sequences inside the body shares its K weights, so that K
    has to grow with their number. There are no minibatches, and no discrete sites.

    :param int num_particles: number of particles K.
    :param float ess_threshold: between 0 and 1; by default 0.5, and with ``gradient="score"`` 1, so
        that the particles are resampled whenever their weights differ.
    :param str gradient: ``"pathwise"`` or ``"score"``.

    **References:** *Filtering variational objectives*, Maddison et al., NIPS 2017;
    *Variational sequential Monte Carlo*, Naesseth et al., AISTATS 2018;
    *Auto-encoding sequential Monte Carlo*, Le et al., ICLR 2018

    >>> from numpyro.contrib.control_flow import scan
    >>> def model(y):
    ...     def step(x, y):
    ...         x = numpyro.sample("x", dist.Normal(0.9 * x, 0.5))
    ...         return x, numpyro.sample("y", dist.Normal(x, 0.4), obs=y)
    ...     scan(step, 0.0, y)
    >>> def guide(y):
    ...     def step(x, y):
    ...         x = numpyro.sample("x", dist.Normal(0.9 * x + gain * (y - 0.9 * x), 0.4))
    ...         return x, None
    ...     gain = numpyro.param("gain", 0.0)
    ...     scan(step, 0.0, y)
    >>> y = jnp.array([0.5, 1.2, 0.3, -0.4])
    >>> svi = SVI(model, guide, optax.adam(0.02), FilteringELBO(16))  # was: Trace_ELBO(16)
    >>> params = svi.run(jax.random.key(0), 300, y, progress_bar=False).params
    >>> loss = FilteringELBO(2000).loss(jax.random.key(1), params, model, guide, y)
    >>> bool(abs(loss - 4.28) < 0.1)  # -log p(y)
    True
    """

    without_log_q = "a distribution with a log density that can be evaluated"

    def __init__(
        self,
        num_particles: int = 10,
        *,
        ess_threshold: float | None = None,
        gradient: str = "pathwise",
        vectorize_particles: bool | MapT = True,
    ) -> None:
        check_choice("gradient", gradient, ("pathwise", "score"))
        if ess_threshold is None:
            ess_threshold = 1.0 if gradient == "score" else 0.5
        if not 0 <= ess_threshold <= 1:
            raise ValueError(
                f"ess_threshold is {ess_threshold}; it must be a share of the particles, between 0"
                " (IWELBO) and 1."
            )
        if gradient == "score" and 0 < ess_threshold < 1:
            raise ValueError(
                f"gradient='score' with ess_threshold={ess_threshold} would leave out the jump of"
                " the bound where the particles begin to be resampled; use ess_threshold=1."
            )
        self.ess_threshold, self.gradient = float(ess_threshold), gradient
        super().__init__(num_particles, vectorize_particles=vectorize_particles)

    def loss_with_mutable_state(self, *args: Any, **kwargs: Any) -> Any:
        with refuse_no_steps():
            return super().loss_with_mutable_state(*args, **kwargs)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        shared = shared_sites(draws)
        key, other = random.split(draws.extra_key)
        run = _filter(draws, shared, draws.keys, key, self.ess_threshold)
        bound = run.bound
        if self.gradient == "score" and self.ess_threshold > 0 and self.num_particles > 1:
            keys = random.split(other, self.num_particles + 1)
            second = _filter(draws, shared, keys[1:], keys[0], self.ess_threshold)
            ahead = [stop_gradient(r.bound - r.until) for r in (run, second)]
            reward = jnp.nan_to_num(ahead[0] - ahead[1], posinf=0.0, neginf=0.0)
            weights = run.excess * reward[:, None]
            scores = weighted_surrogate(jnp.zeros_like(reward), weights.T, run.log_weights.T)
            bound = bound + jnp.sum(scores)
        return -bound, run.state


class _Run(NamedTuple):
    """A run of the filter: ``bound``, ``()``; and of each time step, the bound ``until`` it,
    ``(T,)``, the ``log_weights`` ``(T, K)`` before resampling, and the ``excess`` ``(T, K)`` of
    descendants over their expected number."""

    bound: Array
    until: Array
    log_weights: Array
    excess: Array
    state: State


def _filter(
    draws: Draws, shared: frozenset[str], keys: Array, rng_key: Array, threshold: float
) -> _Run:
    K = len(keys)
    sites, guide = _guide(draws, keys[0], {})
    values = {name: site["value"] for name, site in drawn_sites(sites).items()}
    _, model = _model(draws, keys[0], sites)

    def begin(key: Array) -> tuple[Array, Any, Any, State]:
        guide_trace, q = _guide(draws, key, {name: values[name] for name in shared})
        model_trace, p = _model(draws, key, guide_trace)
        both = [*guide_trace.items(), *model_trace.items()]
        state = {name: site["value"] for name, site in both if site["type"] == "mutable"}
        log_weight = log_density(model_trace) - _log_q(draws, guide_trace)
        return log_weight, (q.carry, p.carry), (q.rng_key, p.rng_key), state

    def move(carry: Any, keys: Any, xs: Any) -> tuple[Array, Any, Any]:
        pairs = [random.split(key) for key in keys]
        log_weight, carry, _ = _step(draws, (guide, model), carry, xs, [pair[1] for pair in pairs])
        return log_weight, carry, tuple(pair[0] for pair in pairs)

    def step(before: Any, inputs: Any) -> tuple[Any, Any]:
        bound, lw, carry, keys = before
        xs, key = inputs
        more, carry, keys = draws.map(lambda c, k: move(c, k, xs), carry, keys)
        lw = lw + more
        value, weights = surrogate(lw, 1.0), power_mean(lw, 1.0)[1]
        resampled = jnp.sum(weights**2) * threshold * K > 1
        ancestors = random.choice(key, K, (K,), p=weights)  # random.categorical takes K^2
        excess = jnp.zeros(K).at[ancestors].add(1.0) - K * weights
        ancestors = jnp.where(resampled, ancestors, jnp.arange(K))
        carry = jax.tree.map(lambda x: x[ancestors], carry)
        end = bound + jnp.where(resampled, value, 0.0), jnp.where(resampled, 0.0, lw), carry, keys
        return end, (bound + value, lw, jnp.where(resampled, excess, 0.0))

    lw, carry, rng_keys, state = draws.map(begin, keys)
    inputs = (guide.xs, model.xs), random.split(rng_key, guide.length)
    start = jnp.zeros_like(lw[0]), lw, carry, rng_keys
    end, of_steps = lax.scan(step, start, inputs, reverse=guide.reverse)
    bound, lw, _, _ = end
    until, log_weights, excess = of_steps
    return _Run(bound + surrogate(lw, 1.0), until, log_weights, excess, state)


def _guide(draws: Draws, key: Array, values: Sites) -> tuple[Trace, Scan]:
    """The guide up to its loop, with these values of its sites."""
    guide = seed(draws.guide, random.split(key)[1])
    guide = substitute(guide, data={**draws.params, **values})
    with valid_plates(), drawn_once(), without_rsample_stop_gradient():
        return _with_scan("guide", *until_scan(guide, draws.args, draws.kwargs))


def _model(draws: Draws, key: Array, guide_trace: Trace) -> tuple[Trace, Scan]:
    program, trace = draws.program(key, draws.params), cast(Any, guide_trace)
    with valid_plates():
        return _with_scan("model", *until_scan(replay(program.model, trace), *program.arguments))


def _with_scan(name: str, sites: Trace, scan: Scan | None) -> tuple[Trace, Scan]:
    if scan is None:
        raise ValueError(
            f"FilteringELBO: the {name} has no numpyro.contrib.control_flow.scan over time; write"
            " its time steps as the body of one, or use IWELBO."
        )
    return sites, scan


def _step(
    draws: Draws, scans: tuple[Scan, Scan], carry: Any, xs: Any, keys: Any
) -> tuple[Array, Any, tuple[Trace, Trace]]:
    """One time step of guide and model: its log weight, the carries and the traces."""
    guide, model = scans
    with valid_plates(), drawn_once(), without_rsample_stop_gradient():
        q, guide_trace = guide.step(carry[0], xs[0], keys[0])
    with valid_plates():
        p, model_trace = model.step(carry[1], xs[1], keys[1], guide_trace)
    log_weight = log_density(model_trace) - _log_q(draws, guide_trace)
    return log_weight, (q, p), (guide_trace, model_trace)


def _log_q(draws: Draws, trace: Trace) -> Array:
    sites = sample_sites(trace)
    return sum((jnp.sum(scaled(site, draws.log_q(site))) for site in sites), jnp.zeros(()))


def shared_sites(draws: Draws) -> frozenset[str]:
    """The sites before the loop that all particles share; an error unless the programs fit.

    Shared is what a step depends on other than by its carry, and what the guide draws them from.
    """
    if draws.layout.subsampled:
        plate, size, batch = draws.layout.subsampled[0]
        raise ValueError(
            f"the plate '{plate}' takes a minibatch of {batch} of {size} rows, and FilteringELBO"
            " has one weight for all rows; drop subsample_size, or use VRELBO(1.)."
        )
    key = draws.keys[0]

    def drawn() -> Sites:
        sites = drawn_sites(_guide(draws, key, {})[0])
        return {name: site["value"] for name, site in sites.items()}

    def look(**values: Array) -> tuple[Any, dict[str, Any]]:
        before, guide = _guide(draws, key, values)
        model_before, model = _model(draws, key, before)
        if (guide.length, guide.reverse) != (model.length, model.reverse):
            raise ValueError(
                f"the scan of the guide has {guide.length} time steps (reverse={guide.reverse}) and"
                f" the model's {model.length} (reverse={model.reverse}); give both the same."
            )
        nothing = jax.tree.map(jnp.zeros_like, (guide.carry, model.carry))
        first = jax.tree.map(lambda x: jnp.asarray(x)[0], (guide.xs, model.xs))
        log_weight, carry, steps = _step(draws, (guide, model), nothing, first, (key, key))
        for site in latent_sites(steps[1]):
            if site["name"] not in steps[0]:
                raise ValueError(
                    f"the latent site '{site['name']}' is in the scan of the model and not in the"
                    " guide's; draw it in the body of the guide's scan."
                )
            if _is_masked(site) and not _is_masked(steps[0][site["name"]]):
                raise ValueError(
                    f"the latent site '{site['name']}' is masked in the scan of the model and not"
                    " in the guide's; give both the mask, or mask the observed sites alone."
                )
        whole = draws.guide_trace(key), draws.model_trace(key, draws.guide_trace(key))
        check_pieces("FilteringELBO", guide, before, steps[0], whole[0])
        check_pieces("FilteringELBO", model, model_before, steps[1], whole[1])
        values = {name: site["value"] for name, site in drawn_sites(steps[0]).items()}
        of_step = log_weight, carry, values
        parents = {n: jax.tree.leaves(site["fn"]) for n, site in drawn_sites(before).items()}
        return of_step, {
            n: [x for x in xs if isinstance(x, jax.Array)] for n, xs in parents.items()
        }

    shapes = jax.eval_shape(drawn)
    of_step, parents = eval_provenance(look, **shapes)
    origins = jax.tree.leaves(of_step, is_leaf=lambda x: isinstance(x, frozenset))
    shared: set[str] = set().union(*origins)
    while True:
        more = set().union(*(x for name in shared for x in parents[name])) - shared
        if not more:
            return frozenset(shared)
        shared |= more


def _is_masked(site: Site) -> bool:
    """Whether there is a mask, which may be one number for each time step."""
    return any(isinstance(mask_of(layer), jax.Array) for layer in layers(site["fn"]))
