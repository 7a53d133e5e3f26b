"""Bounds of minibatches as sharp as of all rows: a control variate for global latents."""

from typing import Any

from jax import Array, random

from numpyro_ext._model.expansion import TaylorExpansion
from numpyro_ext._model.taylor import TaylorProxy
from numpyro_ext._typing import Model


def taylor_proxy(
    model: Model,
    *args: Any,
    center: Any = None,
    degree: int = 2,
    rng_key: Array | None = None,
    **kwargs: Any,
) -> TaylorProxy:
    r"""A control variate with which bounds on minibatches are as sharp as on all rows.

    .. math::
        \hat\ell_B(t) = L + G^\top v + \tfrac12 v^\top H v + \frac NM \sum_{n \in B} \Big[
        \ell_n(t) - \ell_n(c) - g_n^\top v - \tfrac12 v^\top H_n v \Big], \qquad v = t - c,

    where :math:`\ell_n` is the log likelihood of a row in nats, t the unconstrained latent sites,
    and :math:`g_n` and :math:`H_n` the gradient and the Hessian of a row at the center c. Their
    sums L, G and H over all N rows are computed once. Give the result as ``proxy=`` to
    :class:`VRELBO` and other objectives where all rows share the latent sites.

    At every t, the mean of the estimate over minibatches is the log likelihood of all rows. Its
    noise is of third order in the distance from the center (a plain minibatch has noise of first
    order), and zero for a likelihood that is normal in t. Degree 1 leaves out the Hessians; its
    noise is of second order.

    In a loss of order other than 1 the noise that is left would count as mass. Each log weight
    therefore loses :math:`\tfrac12 a (1 - 1/K)` times the variance of the noise, estimated from the
    residuals of the minibatch, where a is the power of the weights (:math:`1 - \alpha`, at most 2).
    The cost of a step does not depend on N.

    **Of which data.** Each run evaluates all rows at the center once, and other data are an error.
    A step that is compiled on arguments of its own, as by ``jax.jit(svi.update)``, compares its
    minibatch, and its loss is NaN if that differs.

    **When it fails.** Far from the center the noise is as of a plain minibatch or worse. An
    ``InferenceWarning`` says so if its standard deviation exceeds 0.5 nats where the normal
    approximation at the center has its mass. Then make it with ``center=(guide, params)``, the mean
    of a guide. A posterior with several separated modes has no center.

    The latent sites must lie outside the plate that takes the minibatch, and the model must have no
    ``numpyro.param``. ``proxy.center`` holds the constrained values of c, which
    :class:`numpyro_ext.mcmc.ControlVariate` and ``numpyro.infer.init_to_value`` take.

    :param model: Python callable with NumPyro primitives, in which one plate takes a minibatch.
    :param args: arguments of the model, as of ``svi.run``, and ``kwargs`` too.
    :param center: None for the mode, searched from one point, by 2,000 minibatches and at most 300
        gradients of all rows; or the result of ``find_modes``, for the heaviest one; or a dict of
        constrained values of all latent sites; or a pair ``(guide, params)`` for the mean of a
        guide.
    :param int degree: 2, or 1 for the expansion without Hessians. Above 512
        dimensions it is 1, except for a hierarchy of which each row sees one effect of each factor.
    :param jax.random.key rng_key: the key of the search, ``jax.random.key(0)`` if None.
    :return: the proxy, a pytree that pickles.

    **References:** *Speeding up MCMC by efficient data subsampling*, Quiroz et al., Journal of the
    American Statistical Association 2019 (the expansion, for MCMC); *Renyi divergence variational
    inference*, Li and Turner, NIPS 2016 (the energy approximation on minibatches)

    >>> from numpyro_ext.objectives import VRELBO, taylor_proxy
    >>> def model(x, batch=None):
    ...     mean = numpyro.sample("mean", dist.Normal(0., 10.))
    ...     with numpyro.plate("rows", len(x), subsample_size=batch) as idx:
    ...         numpyro.sample("x", dist.Normal(mean, 1.), obs=x[idx])
    >>> def guide(x, batch=None):
    ...     numpyro.sample("mean", dist.Normal(3., 0.03))
    >>> x = 3 + jnp.sin(jnp.arange(1000.))
    >>> proxy = taylor_proxy(model, x, batch=50)
    >>> proxy
    TaylorProxy(degree=2, 1000 rows of 'rows', 1 dimensions)
    >>> all_rows = lambda key: VRELBO(0.5).loss(key, {}, model, guide, x)
    >>> fifty = lambda key: VRELBO(0.5, proxy=proxy).loss(key, {}, model, guide, x, batch=50)
    >>> error = jax.jit(lambda key: abs(all_rows(key) - fifty(key)))(jax.random.key(0))
    >>> bool(error < 0.01)  # of 1,200 nats
    True
    """
    if degree not in (1, 2):
        raise ValueError(f"degree is {degree!r}; it must be 1 or 2.")
    rows = TaylorExpansion(model, args, kwargs, degree=degree)
    return rows.proxy(random.key(0) if rng_key is None else rng_key, center)
