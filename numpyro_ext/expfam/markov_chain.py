"""Chains of discrete states: forward-backward in log space (Rabiner, 1989)."""

from typing import Annotated, Any, NamedTuple

from jax import Array, lax, nn, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from numpyro_ext._checks import check_count
from numpyro_ext._typing import Float, Shape
from numpyro_ext.expfam.chain import ChainFamily
from numpyro_ext.expfam.leaves import canonical


class MarkovChainNatural(NamedTuple):
    """Natural parameters of :class:`MarkovChain`: log weights of the states of each step, and of a
    state at t (rows) and one at t + 1 (columns)."""

    unary: Annotated[Array, "T K"]
    pair: Annotated[Array, "T-1 K K"]


class MarkovChainMean(NamedTuple):
    """Mean parameters of :class:`MarkovChain`: probabilities of states, and of the states at t
    (rows) and t + 1 (columns)."""

    probs: Annotated[Array, "T K"]
    pair_probs: Annotated[Array, "T-1 K K"]


class MarkovChainStandard(NamedTuple):
    """A Markov chain with the same transition at all steps."""

    initial_probs: Annotated[Array, "K"]
    transition_probs: Annotated[Array, "K K"]


class MarkovChain(ChainFamily[MarkovChainNatural, MarkovChainMean, MarkovChainStandard]):
    r"""Sequences :math:`z_1, \dots, z_T` of states in 0, ..., K - 1 with weights of neighbours.

    .. math::
        p(z) \propto \exp\Big\{ \sum_t unary_t[z_t] + \sum_t pair_t[z_t, z_{t+1}] \Big\}.

    Log weights of observations are added to ``unary``; nothing needs to be normalised, and the
    representation is overcomplete. A is the logarithm of a product of K x K matrices, computed
    forwards, and forwards and backwards for the marginals, always in log space, in
    :math:`O(T K^2)`.

    **When it fails.** A transition of probability exactly 0 has no finite natural parameter and is
    refused; give it a small probability.

    References: Rabiner, *A tutorial on hidden Markov models and selected applications in speech
    recognition* (Proceedings of the IEEE, 1989), section III.

    >>> from numpyro_ext.expfam import MarkovChain
    >>> prior = MarkovChain.from_standard(
    ...     initial_probs=jnp.array([0.6, 0.4]),
    ...     transition_probs=jnp.array([[0.9, 0.1], [0.2, 0.8]]), num_steps=3)
    >>> seen = jnp.log(jnp.array([[0.5, 0.1], [0.4, 0.3], [0.2, 0.7]]))
    >>> posterior = prior._replace(unary=prior.unary + seen)
    >>> print([f"{p:.3f}" for p in MarkovChain.mean(posterior).probs[:, 0].tolist()])
    ['0.832', '0.714', '0.533']
    """

    domain = "positive initial_probs, and positive transition_probs whose rows sum to 1"
    discrete = True

    @classmethod
    def from_standard(
        cls, initial_probs: Any, transition_probs: Any, num_steps: int
    ) -> MarkovChainNatural:
        """The logarithms of the probabilities of a chain of ``num_steps`` steps, which is T."""
        T = check_count("num_steps", num_steps)
        p, P = canonical(MarkovChainStandard(initial_probs, transition_probs))
        first = jnp.log(p)[..., None, :]
        unary = jnp.concatenate([first, jnp.zeros((*p.shape[:-1], T - 1, p.shape[-1]))], axis=-2)
        pair = jnp.repeat(jnp.log(P)[..., None, :, :], T - 1, axis=-3)
        rows = jnp.concatenate([p[..., None, :], P], axis=-2)
        normalised = jnp.all(jnp.abs(jnp.sum(rows, axis=-1) - 1) < 1e-4, axis=-1)
        positive = jnp.all(rows > 0, axis=(-1, -2))
        return cls._constructed(MarkovChainNatural(unary, pair), normalised & positive)

    @classmethod
    def statistics(cls, value: Any, num_categories: int | None = None) -> MarkovChainMean:
        """Unit vectors of the states ``(*batch, T)``, which are below ``num_categories``, and unit
        matrices of neighbours."""
        states = nn.one_hot(jnp.asarray(value), check_count("num_categories", num_categories))
        return MarkovChainMean(states, states[..., :-1, :, None] * states[..., 1:, None, :])

    @classmethod
    def log_base_measure(cls, value: Any) -> Float[Array, "*batch"]:
        return jnp.zeros(jnp.shape(value)[:-1])

    @classmethod
    def log_prob(cls, natural: MarkovChainNatural, value: Any) -> Float[Array, "*batch"]:
        n = _without_constants(cls._checked(MarkovChainNatural, natural))
        t = cls.statistics(value, n.unary.shape[-1])
        return cls.inner(n, t) - cls.log_partition(n)

    @classmethod
    def entropy(cls, natural: MarkovChainNatural) -> Float[Array, "*batch"]:
        return super().entropy(_without_constants(cls._checked(MarkovChainNatural, natural)))

    @classmethod
    def _log_partition(cls, natural: MarkovChainNatural) -> Array:
        return _forward(natural)[1]

    @classmethod
    def _mean(cls, natural: MarkovChainNatural) -> MarkovChainMean:
        forward, _ = _forward(natural)
        unary, pair = _time_first(natural)
        # What is to come, as a log weight of the state at t: the chain in reverse.
        turned = MarkovChainNatural(
            jnp.flip(natural.unary, -2), jnp.swapaxes(jnp.flip(natural.pair, -3), -1, -2)
        )
        backward = jnp.flip(_forward(turned)[0], 0)
        both = forward[:-1, ..., :, None] + pair + backward[1:, ..., None, :]
        return MarkovChainMean(
            jnp.moveaxis(nn.softmax(forward + backward - unary), 0, -2),
            jnp.moveaxis(nn.softmax(both, axis=(-1, -2)), 0, -3),
        )

    @classmethod
    def _natural(cls, mean: MarkovChainMean) -> MarkovChainNatural:
        probs, pair_probs = mean
        later = jnp.zeros_like(probs[..., 1:, :])
        unary = jnp.concatenate([jnp.log(probs[..., :1, :]), later], axis=-2)
        return MarkovChainNatural(unary, jnp.log(pair_probs) - jnp.log(probs[..., :-1, :, None]))

    @classmethod
    def _sample(cls, rng_key: Array, natural: MarkovChainNatural, sample_shape: Shape) -> Array:
        forward, _ = _forward(natural)
        pair = _time_first(natural)[1]
        shape = (forward.shape[0], *sample_shape, *forward.shape[1:])
        within = (slice(None), *[None] * len(sample_shape))
        # State t for each state of t + 1, from the same noise: only one of them is taken.
        score = forward[within] + random.gumbel(rng_key, shape, forward.dtype)
        last = jnp.broadcast_to(jnp.argmax(score[-1:], axis=-1, keepdims=True), (1, *shape[1:]))
        before = jnp.argmax(score[:-1, ..., :, None] + pair[within], axis=-2)
        maps = jnp.concatenate([before, last])

        def step(later: Array, earlier: Array) -> tuple[Array, Array]:
            state = jnp.take_along_axis(earlier, later, axis=-1)
            return state, state

        drawn = lax.scan(step, maps[-1], maps, reverse=True)[1]
        return jnp.moveaxis(drawn[..., 0], 0, -1)


def _without_constants(natural: MarkovChainNatural) -> MarkovChainNatural:
    """The same distribution with the largest log weights at 0, for the digits of float32."""
    unary, pair = natural
    return MarkovChainNatural(
        unary - jnp.max(unary, axis=-1, keepdims=True),
        pair - jnp.max(pair, axis=(-1, -2), keepdims=True),
    )


def _time_first(natural: MarkovChainNatural) -> tuple[Array, Array]:
    return jnp.moveaxis(natural.unary, -2, 0), jnp.moveaxis(natural.pair, -3, 0)


def _forward(natural: MarkovChainNatural) -> tuple[Array, Array]:
    """``(T, *batch, K)`` log weights of z_t with all states before it summed out, and A."""
    # Normalised at each step, or float32 would lose the weights beside a large A.
    unary, pair = _time_first(natural)

    def step(last: Array, inputs: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        unary_t, pair_t = inputs
        new, scale = normalised(unary_t + logsumexp(last[..., :, None] + pair_t, axis=-2))
        return new, (new, scale)

    def normalised(weights: Array) -> tuple[Array, Array]:
        scale = logsumexp(weights, axis=-1)
        return weights - scale[..., None], scale

    start, scale = normalised(unary[0])
    rest, scales = lax.scan(step, start, (unary[1:], pair))[1]
    return jnp.concatenate([start[None], rest]), scale + jnp.sum(scales, axis=0)
