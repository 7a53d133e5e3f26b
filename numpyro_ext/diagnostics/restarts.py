"""Several runs of one fit from different starts."""

from collections.abc import Callable
from typing import Any

from jax import random
from numpyro.infer.autoguide import AutoGuide

from numpyro_ext._checks import check_count
from numpyro_ext._typing import Engine
from numpyro_ext.diagnostics._fit import check_key

__all__ = ["restarts"]


def restarts(
    make_svi: Callable[[], Any],
    rng_key: Any,
    num_restarts: int,
    num_steps: int,
    *args: Any,
    **kwargs: Any,
) -> list[Any]:
    r"""Run one fit R times from starts of their own, each with its own guide and key.

    Run r is ``make_svi().run(keys[r], num_steps, *args, **kwargs)`` with ``keys = split(rng_key,
    R)``. NumPyro's automatic guides keep the start that they found in their first run, so one
    ``SVI`` that runs with R keys begins R times at the same point, and an :class:`AutoDelta
    <numpyro.infer.autoguide.AutoDelta>` ends R times at the same numbers.

    The list is what :func:`to_arviz`, :func:`diagnose` and :func:`held_out_log_likelihood` take as
    ``result``, beside one ``make_svi()``. For the first two the restarts are chains, whose R-hat
    says whether they found the same optimum; the draws of all of them together are a mixture with
    equal weights. For the last they are a deep ensemble.

    **It fails** to find an optimum that no start leads to: runs that agree do not show that there
    is no other. It costs R times one run, compilation included.

    :param make_svi: a function of no argument that makes an ``SVI`` (or an engine with ``run``)
        with a **new** guide.
    :param rng_key: a key, new-style or legacy.
    :param int num_restarts: the number R of runs.
    :param int num_steps: steps of each run.
    :param args: the arguments of the model.
    :param kwargs: its keyword arguments, and those of ``run``, such as ``progress_bar``.
    :return: a list of R results of ``run``.

    **References**

    1. *Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles*,
       B. Lakshminarayanan, A. Pritzel, C. Blundell (NIPS 2017).

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> from numpyro.infer.autoguide import AutoDelta
        >>> from numpyro_ext.diagnostics import restarts
        >>> def model(x):  # only the size of z is known
        ...     z = numpyro.sample("z", dist.Normal(0, 2))
        ...     numpyro.sample("x", dist.Normal(z**2, 0.1), obs=x)
        >>> def make_svi():
        ...     return SVI(model, AutoDelta(model), optax.adam(0.05), Trace_ELBO())
        >>> fits = restarts(make_svi, jax.random.key(0), 6, 300, 4.0, progress_bar=False)
        >>> sorted({f"{fit.params['z_auto_loc']:.1f}" for fit in fits})
        ['-2.0', '2.0']
    """
    num_restarts = check_count("num_restarts", num_restarts)
    num_steps = check_count("num_steps", num_steps)
    results: list[Any] = []
    seen: list[Any] = []
    for key in random.split(check_key(rng_key), num_restarts):
        svi = make_svi()
        if not isinstance(svi, Engine):
            raise TypeError(f"make_svi returned a {type(svi).__name__}; it must return an SVI.")
        guide: Any = svi.guide
        while not isinstance(guide, AutoGuide) and hasattr(guide, "fn"):  # of a handler
            guide = guide.fn
        if isinstance(guide, AutoGuide) and any(guide is one for one in seen):
            raise ValueError(
                f"make_svi returned the same {type(guide).__name__} twice, which keeps the start of"
                " its first run; make the guide inside make_svi."
            )
        seen.append(guide)
        results.append(svi.run(key, num_steps, *args, **kwargs))
    return results
