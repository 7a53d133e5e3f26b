"""A weight of the KL term: annealed, tempered, or by minibatch (Blundell et al., 2015)."""

from typing import Any

from jax import Array
import jax.numpy as jnp
from numpyro.handlers import block
from numpyro.infer import ELBO, Trace_ELBO, TraceMeanField_ELBO
from numpyro.primitives import Messenger

from numpyro_ext._checks import check_count, check_nonnegative, summary
from numpyro_ext._typing import Model, Params
from numpyro_ext.objectives.base import STEP, Order, counts_steps, order_of_step


class _scaled(Messenger):
    """``numpyro.handlers.scale``, which may be 0 and may leave out the observed sites."""

    def __init__(self, fn: Model, weight: Any, *, observed: bool) -> None:
        super().__init__(fn)
        self.weight, self.observed = weight, observed

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and (self.observed or not msg["is_observed"]):
            msg["scale"] = self.weight if msg["scale"] is None else msg["scale"] * self.weight


class KLWeightedELBO(ELBO):
    r"""The evidence lower bound with a weight of its KL term.

    .. math::
        \mathcal{L}_\beta = E_{q(z)}[\log p(x \mid z)] - \beta\, \mathrm{KL}[q(z) \,\|\, p(z)],
        \qquad \beta \ge 0,

    in nats; the loss is its negative. A schedule that rises from 0 to 1 is KL annealing. A constant
    below 1 is the tempered, or cold, posterior: the optimum over all q is proportional to
    :math:`p(z)\, p(x \mid z)^{1 / \beta}`. For an auto-encoder it is the objective of the beta-VAE.

    The prior is every site of the model that is not observed, the likelihood every observed site
    and ``numpyro.factor``. Sites in a minibatch are scaled by N/M as before.

    **Biased**: with a weight other than 1 the optimum is not the posterior of the model; below 1
    the draws are too narrow, above 1 too wide. The value is a bound on the evidence from a weight
    of 1 on.

    **One weight for each minibatch.** With ``pi = J * minibatch_kl_weights(J)`` and J minibatches
    in order, ``KLWeightedELBO(lambda i: pi[i % J])`` has the weights of an epoch.

    :param weight: a number of at least 0, or a schedule ``step -> weight`` with
        :func:`count_steps` around the guide.
    :param base: a ``Trace_ELBO`` (default) or ``TraceMeanField_ELBO``, which has the KL term in
        closed form where NumPyro knows it.

    **References:** *Weight uncertainty in neural networks*, Blundell et al., ICML 2015, eq. 8;
    *Generating sentences from a continuous space*, Bowman et al., CoNLL 2016, Section 3.1
    (annealing); *How good is the Bayes posterior in deep neural networks really?*, Wenzel et al.,
    ICML 2020, equation 1 (the cold posterior, with the prior tempered too)

    >>> from numpyro_ext.objectives import count_steps
    >>> guide = AutoNormal(normal_mean)
    >>> loss = KLWeightedELBO(lambda i: jnp.minimum(i / 500, 1.0))
    >>> svi = SVI(normal_mean, count_steps(guide), optax.adam(0.01), loss)
    >>> params = svi.run(jax.random.key(0), 2000, jnp.array([2.]), progress_bar=False).params
    >>> bool(abs(guide.median(params)["z"] - 1.0) < 0.3)  # the posterior is N(1, 0.5)
    True
    """

    linear = True
    per_datum = False

    def __init__(self, weight: Order = 1.0, base: ELBO | None = None) -> None:
        base = Trace_ELBO() if base is None else base
        if not isinstance(base, Trace_ELBO | TraceMeanField_ELBO):
            raise TypeError(
                f"base is {base!r}; it must be a Trace_ELBO() or TraceMeanField_ELBO(), because"
                " other losses have no KL term of their own."
            )
        if not callable(weight):
            check_nonnegative("weight", weight)
        self.weight, self.base = weight, base
        super().__init__(base.num_particles, base.vectorize_particles)

    def __repr__(self) -> str:
        return summary(self)

    def loss_with_mutable_state(
        self,
        rng_key: Array,
        param_map: Params,
        model: Model,
        guide: Model,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The loss, and the mutable state, in which the number of the step is one larger."""
        counted = counts_steps(guide)
        first: Any = {"step": jnp.zeros((), jnp.int32)}
        step: Any = param_map.get(STEP, first)["step"] if counted else None
        weight = self.weight
        if callable(weight):
            weight = order_of_step(weight, step, "weight")
        # Hidden, because Trace_ELBO drops the mutable state of several particles.
        uncounted = block(guide, hide=[STEP]) if counted else guide
        result = self.base.loss_with_mutable_state(
            rng_key,
            param_map,
            _scaled(model, weight, observed=False),
            _scaled(uncounted, weight, observed=True),
            *args,
            **kwargs,
        )
        if not counted:
            return result
        state = {**(result["mutable_state"] or {}), STEP: {"step": step + 1}}
        return {"loss": result["loss"], "mutable_state": state}


def minibatch_kl_weights(num_batches: int) -> Array:
    r"""Weights :math:`\pi_i` of the KL term in the B minibatches of an epoch, summing to 1.

    The losses of an epoch, :math:`\pi_i \mathrm{KL}[q \| p_0] - \log p(\mathrm{batch}_i | \theta)`,
    sum to minus the evidence lower bound of all data, whatever the weights. With

    .. math::
        \pi_i = \frac{2^{B-i}}{2^B - 1}, \qquad i = 1, \ldots, B,

    the prior dominates in the first minibatches and the data in the last ones. Only the sum over
    the epoch is unbiased, so go through the minibatches in order.

    :param int num_batches: number of minibatches B in an epoch.
    :return: weights of shape ``(num_batches,)``.

    **Reference:** *Weight uncertainty in neural networks*, Blundell et al., ICML 2015, Section 3.4
    (eqs. 8 and 9).

    >>> print((7 * minibatch_kl_weights(3)).round(4))
    [4. 2. 1.]
    """
    num_batches = check_count("num_batches", num_batches)
    i = jnp.arange(1, num_batches + 1)
    # The quotient of the paper with 2^-B taken out, which overflows for no B.
    return jnp.exp2(-i.astype(jnp.result_type(float))) / -jnp.expm1(-num_batches * jnp.log(2.0))
