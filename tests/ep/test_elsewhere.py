"""Parts that workers hold: the answer of one process, and what becomes of parts that fail."""

from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
import multiprocessing
from multiprocessing import get_context

from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.ep import (
    DAEP,
    DSEP,
    DistributedEP,
    ImportanceSampling,
    StochasticDistributedEP,
)
from tests.ep.models import LOGISTIC, Y_SCALE, logistic, unknown_scale

STEPS = 6
DATA = tuple(np.asarray(x)[:6] for x in LOGISTIC)
half_normal = partial(unknown_scale, half_normal=True)


def part_of(data, number):
    """Three rows of the data, which the process that calls it reads."""
    return tuple(x[3 * number : 3 * number + 3] for x in data)


def parts_of(data):
    return [partial(part_of, data, number) for number in range(-(-len(data[0]) // 3))]


def labels_of(data):
    return np.arange(len(data[0])) // 3


def close(a, b):
    for name, value in a.items():
        np.testing.assert_allclose(b[name], value, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:EP has not converged", "ignore:the result of 6 steps is noisy")
@pytest.mark.parametrize(
    ("engine", "model", "data", "options"),
    [
        pytest.param(  # with random keys
            *(DistributedEP, logistic, DATA, {"projection": ImportanceSampling(256)}),
            marks=pytest.mark.nightly,
        ),
        (DistributedEP, half_normal, (Y_SCALE,), {}),  # with factors of the prior
        pytest.param(
            *(DistributedEP, logistic, DATA, {"family": "diagonal", "damping": 0.5}),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *(StochasticDistributedEP, logistic, DATA, {"family": "diagonal"}),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *(StochasticDistributedEP, logistic, DATA, {"schedule": "serial", "step": 0.1}),
            marks=pytest.mark.nightly,
        ),
        pytest.param(DAEP, logistic, DATA, {"mean": "moments"}, marks=pytest.mark.nightly),
        (DSEP, half_normal, (Y_SCALE,), {}),  # with random rows
    ],
)
def test_workers_give_the_answer_of_one_process(engine, model, data, options):
    """Up to the order of sums, which float32 rounds."""
    data = tuple(map(np.asarray, data))
    alone = engine(model, labels_of(data), **options)
    expected = alone.run(random.key(0), STEPS, *map(jnp.asarray, data), progress_bar=False)
    with ThreadPoolExecutor(2) as pool:
        ep = engine(model, parts_of(data), executor=pool, **options)
        result = ep.run(random.key(0), STEPS, progress_bar=False)
        if engine is DistributedEP:
            again = ep.run(random.key(0), 2, init_state=result.state, progress_bar=False)
            evidence = ep.log_evidence(result.state)
            np.testing.assert_allclose(evidence, -again.losses[0], rtol=1e-5)
    close(expected.params, result.params)
    np.testing.assert_allclose(result.losses, expected.losses, rtol=1e-3, atol=1e-3)
    before, now = expected.state.report, result.state.report
    assert (before.visited, before.num_skipped) == (now.visited, now.num_skipped)
    draws = ep.guide.sample_posterior(random.key(1), result.params, sample_shape=(4,))
    assert all(np.isfinite(x).all() for x in draws.values())


class Fails:
    """A part that fails from its second step on."""

    def __init__(self, failing):
        self.failing = failing

    def submit(self, task, run, number, *rest):
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(task, run, number, *rest)
            future.exception()
        fails = number == 1 and rest[-1] is False and self.failing[0] > 0
        self.failing[0] += number == 1 and rest[-1] is False
        if fails:
            with ThreadPoolExecutor(1) as pool:
                future = pool.submit(open, "/nowhere")
                future.exception()
        return future


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:EP has not converged")
def test_a_part_that_fails_ends_the_run_or_keeps_its_site():
    ep = DistributedEP(logistic, parts_of(DATA), executor=Fails([0]))
    with pytest.raises(RuntimeError, match="part 1 failed: FileNotFoundError"):
        ep.run(random.key(0), 3, progress_bar=False)
    ep = DistributedEP(logistic, parts_of(DATA), executor=Fails([0]), lost="keep")
    one = DistributedEP(logistic, parts_of(DATA), executor=Fails([-9]))
    with pytest.warns(InferenceWarning, match=r"the parts \[1\] failed"):
        result = ep.run(random.key(0), 3, progress_bar=False)
    first = one.run(random.key(0), 1, progress_bar=False)
    for kept, before in zip(result.state.sites[0], first.state.sites[0], strict=True):
        np.testing.assert_allclose(kept[1], before[1], rtol=1e-5)
    assert int(result.state.report.skipped) == 1 and bool(jnp.isfinite(result.losses).all())


@pytest.mark.nightly
def test_a_part_that_shares_a_site_is_lost_or_late():
    """Its rows count as skipped, and the fixed point is that of a run that waits."""
    ep = StochasticDistributedEP(logistic, parts_of(DATA), executor=Fails([0]), lost="keep")
    with pytest.warns(InferenceWarning, match=r"the parts \[1\] failed"):
        result = ep.run(random.key(0), 3, progress_bar=False)
    report = result.state.report
    assert (int(report.skipped), int(report.num_skipped), int(report.visited)) == (1, 2, 2)
    with ThreadPoolExecutor(2) as pool:
        fits = [
            DAEP(logistic, parts_of(DATA), executor=pool, tol=1e-4, **options).run(
                random.key(0), 600, progress_bar=False
            )
            for options in ({}, {"patience": 1e-4, "step": 0.5})
        ]
    assert all(fit.state.report.converged for fit in fits)
    expected, late = (fit.params["auto_loc"] for fit in fits)
    np.testing.assert_allclose(late, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.nightly
def test_a_late_part_changes_its_site_when_it_answers():
    """The fixed point of a run without patience is that of one that waits."""
    with ThreadPoolExecutor(2) as pool:
        waits = DistributedEP(logistic, parts_of(DATA), executor=pool, tol=1e-4)
        expected = waits.run(random.key(0), 100, progress_bar=False)
        hurries = DistributedEP(
            logistic, parts_of(DATA), executor=pool, patience=1e-4, damping=0.5, tol=1e-4
        )
        result = hurries.run(random.key(0), 600, progress_bar=False)
    assert result.state.report.converged
    np.testing.assert_allclose(
        result.params["auto_loc"], expected.params["auto_loc"], rtol=1e-2, atol=1e-2
    )


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:EP has not converged")
def test_processes_that_hold_their_parts():
    alone = DistributedEP(logistic, labels_of(DATA))
    expected = alone.run(random.key(0), STEPS, *map(jnp.asarray, DATA), progress_bar=False)
    pools = [ProcessPoolExecutor(1, get_context("spawn")) for _ in range(2)]
    try:
        ep = DistributedEP(logistic, parts_of(DATA), executor=pools, lost="keep")
        result = ep.run(random.key(0), STEPS, progress_bar=False)
        for process in multiprocessing.active_children()[-1:]:  # that of the second part
            process.kill()
        state, _ = ep.update(result.state)
        with pytest.warns(InferenceWarning, match="the parts .* failed"):
            ep.warn(result.state, state, 1)
    finally:
        for pool in pools:
            pool.shutdown()
    close(expected.params, result.params)
    assert int(state.report.skipped) == 1 and bool(jnp.isfinite(state.total.shift).all())


def test_wrong_calls():
    with ThreadPoolExecutor(1) as pool:
        for options, error, words in (
            ({"schedule": "serial"}, ValueError, "with an executor all parts"),
            ({"partition": 3}, TypeError, "must be a list with a function for each part"),
            ({"patience": 0.0}, ValueError, "patience is 0.0"),
            ({"lost": "forget"}, ValueError, "lost is 'forget'"),
        ):
            with pytest.raises(error, match=words):
                DistributedEP(**{"model": logistic, "partition": [], "executor": pool} | options)
        with pytest.raises(ValueError, match=r"patience is 1.0; parts that are visited one after"):
            DSEP(logistic, parts_of(DATA), executor=pool, patience=1.0)
        ep = DSEP(logistic, parts_of(DATA), executor=pool)
        with pytest.raises(TypeError, match="with an executor leave them out"):
            ep.update(None, indices=[0, 1])
        with pytest.raises(TypeError, match="the workers have the rows"):
            ep.run(random.key(0), 3, *LOGISTIC)
