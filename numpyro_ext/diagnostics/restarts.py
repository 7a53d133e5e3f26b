"""Several runs of one fit from different starts."""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.svi import SVIRunResult
from tqdm.auto import trange

from numpyro_ext._checks import check_count
from numpyro_ext.diagnostics._fit_of import check_key
from numpyro_ext.diagnostics._workers import of_each


def restarts(
    make_svi: Callable[[], Any],
    rng_key: Any,
    num_restarts: int,
    num_steps: int,
    *args: Any,
    vectorized: bool = False,
    executor: Executor | None = None,
    **kwargs: Any,
) -> list[Any]:
    r"""Run one fit R times, each time with a new guide, key and start.

    Run r is ``make_svi().run(keys[r], num_steps, *args, **kwargs)`` with ``keys = split(rng_key,
    R)``. NumPyro's automatic guides keep the start of their first run, so one ``SVI`` that runs
    with R keys begins R times at the same point.

    The list is what :func:`to_arviz`, :func:`diagnose` and the scores of predictions take as
    ``result``, beside one ``make_svi()``: as chains, of which R-hat says whether they found the
    same optimum, or as a deep ensemble, a mixture with equal weights.

    **It fails** to find an optimum that no start leads to. It costs R times one run, compilation
    included. ``vectorized=True`` compiles once, and takes a step of all R runs together by
    :func:`jax.vmap`, with the same numbers up to rounding. With an ``executor`` each run is a task,
    with the same numbers.

    :param make_svi: a function of no argument that makes an ``SVI`` (or an engine with ``run``)
        with a **new** guide.
    :param rng_key: a key, new-style or legacy.
    :param int num_restarts: the number R of runs.
    :param int num_steps: steps of each run.
    :param args: the arguments of the model.
    :param bool vectorized: whether all runs take their steps together (of an ``SVI`` only).
    :param executor: any ``concurrent.futures.Executor`` that can send ``make_svi`` to its workers:
        of processes, a function with a name in a module; of ``dask.distributed``, any.
    :param kwargs: its keyword arguments, and options of ``run``, such as ``progress_bar``.
    :return: a list of R results of ``run``.

    **References**

    1. *Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles*,
       B. Lakshminarayanan, A. Pritzel, C. Blundell (NIPS 2017).

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
    keys = random.split(check_key(rng_key), num_restarts)
    fits = [make_svi() for _ in keys]
    _check_new_guides(fits)
    if vectorized and executor is not None:
        raise ValueError("vectorized=True takes all steps in this process; leave out the executor.")
    if vectorized:
        return _run_together(fits, keys, num_steps, args, kwargs)
    if executor is not None:
        kept = make_svi, num_steps, args, {"progress_bar": False} | kwargs
        return list(of_each(executor, _run, kept, [(key,) for key in keys]))
    return [svi.run(key, num_steps, *args, **kwargs) for svi, key in zip(fits, keys, strict=True)]


def _run(make_svi: Callable[[], Any], num_steps: int, args: tuple, kwargs: Any, key: Any) -> Any:
    return make_svi().run(key, num_steps, *args, **kwargs)


def _check_new_guides(fits: list[Any]) -> None:
    seen: list[Any] = []
    for svi in fits:
        guide: Any = svi.guide
        while not isinstance(guide, AutoGuide) and hasattr(guide, "fn"):  # of a handler
            guide = guide.fn
        if isinstance(guide, AutoGuide) and any(guide is other for other in seen):
            raise ValueError(
                f"make_svi returned the same {type(guide).__name__} twice, which keeps the start of"
                " its first run; make the guide inside make_svi."
            )
        seen.append(guide)


def _run_together(
    fits: list[Any], keys: Any, num_steps: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[SVIRunResult]:
    """The steps of all runs under one ``vmap``, by the update of the first."""
    kwargs = dict(kwargs)
    bar = kwargs.pop("progress_bar", True)
    update = fits[0].stable_update if kwargs.pop("stable_update", False) else fits[0].update
    states = [svi.init(key, *args, **kwargs) for svi, key in zip(fits, keys, strict=True)]
    _check_one_program(fits, states[-1], args, kwargs)

    @jax.jit
    def take(states: Any) -> tuple[Any, Any]:
        step = jax.vmap(lambda state: update(state, *args, **kwargs))
        return jax.lax.scan(lambda states, _: step(states), states, length=piece)

    together: Any = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    # A bar moves twenty times. The pieces are of one length, so that one program is compiled.
    piece = next(k for k in range(max(num_steps // 20, 1), 0, -1) if num_steps % k == 0)
    losses = []
    with trange(num_steps, disable=not bar) as steps:
        for _ in range(num_steps // piece):
            together, loss = take(together)
            losses.append(jax.device_get(loss))
            steps.update(piece)
            steps.set_postfix_str(f"avg. loss of the best run: {loss.mean(0).min():.4f}")
    each = jnp.concatenate(losses).T
    ends = [jax.tree.map(lambda leaf, r=r: leaf[r], together) for r in range(len(fits))]
    return [
        SVIRunResult(svi.get_params(end), end, loss)
        for svi, end, loss in zip(fits, ends, each, strict=True)
    ]


def _check_one_program(fits: list[Any], state: Any, args: Any, kwargs: Any) -> None:
    """A guide that keeps its start outside of its parameters is another program in each run."""
    own, first = (svi.evaluate(state, *args, **kwargs) for svi in (fits[-1], fits[0]))
    if not jnp.allclose(own, first, rtol=1e-3, equal_nan=True):
        raise ValueError(
            f"the {type(fits[0].guide).__name__} keeps its start outside of its parameters (two"
            f" losses at one place are {own:.6g} and {first:.6g}); leave out vectorized=True."
        )
