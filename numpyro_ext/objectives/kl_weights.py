"""Weights of the KL term of each minibatch in an epoch (Blundell et al. 2015, Section 3.4)."""

from jax import Array
import jax.numpy as jnp

from numpyro_ext._checks import check_choice, check_count


def minibatch_kl_weights(num_batches: int, scheme: str = "geometric") -> Array:
    r"""Weights :math:`\pi_i` of the KL term in the B minibatches of an epoch, summing to 1.

    The epoch's losses :math:`\pi_i \mathrm{KL}[q \| p_0] - \log p(\mathrm{batch}_i | \theta)` sum
    to minus the evidence lower bound of all data, whatever the weights. With

    .. math::
        \pi_i = \frac{2^{B-i}}{2^B - 1}, \qquad i = 1, \ldots, B,

    (``"geometric"``) the prior dominates in the first minibatches and the data in the last ones;
    ``"uniform"`` is :math:`1/B`. The loss of a single minibatch is not unbiased; only the sum over
    the epoch is, so go through the minibatches in order.

    In NumPyro the loss is scaled by N/M = B, so put the global latents of the model *and* the guide
    under ``handlers.scale(scale=B * pi[i])``, with ``i`` an argument of both:

    .. code-block:: python

        def model(i, x):
            with handlers.scale(scale=B * pi[i]):
                w = numpyro.sample("w", dist.Normal(0., 1.))
            with numpyro.plate("data", N, subsample_size=M):
                numpyro.sample("x", dist.Normal(w, 1.), obs=x)

    :param int num_batches: number of minibatches B in an epoch.
    :param str scheme: ``"geometric"`` or ``"uniform"``.
    :return: weights of shape ``(num_batches,)``.

    **Reference:** *Weight uncertainty in neural networks*, Charles Blundell, Julien Cornebise,
    Koray Kavukcuoglu, Daan Wierstra, ICML 2015, Section 3.4 (eqs. 8 and 9).

    .. doctest::

        >>> from numpyro_ext.objectives import minibatch_kl_weights
        >>> print((7 * minibatch_kl_weights(3)).round(4))
        [4. 2. 1.]
    """
    num_batches = check_count("num_batches", num_batches)
    check_choice("scheme", scheme, ("geometric", "uniform"))
    if scheme == "uniform":
        return jnp.full(num_batches, 1 / num_batches)
    i = jnp.arange(1, num_batches + 1)
    # The quotient of the paper with 2^-B taken out, which overflows for no B.
    return jnp.exp2(-i.astype(jnp.result_type(float))) / -jnp.expm1(-num_batches * jnp.log(2.0))
