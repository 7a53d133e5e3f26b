"""A second look at the same fit compiles nothing, and never shows what has changed since."""

import gc
import itertools
import weakref

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import pytest

from numpyro_ext.diagnostics import evidence_bounds, pareto_khat, to_arviz
from numpyro_ext.diagnostics._memo import _MEMOS, SIZE, memo_of

PARAMS = {"z_auto_loc": jnp.array(0.375), "z_auto_scale": jnp.array(0.5)}
OUTSIDE = jnp.array([0.5, -1.0, 2.0])
TRACES = itertools.count()


def counted(x, batch=None):
    next(TRACES)
    z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        numpyro.sample("x", dist.Normal(z), obs=jnp.asarray(x)[i])


def reads_outside():
    z = numpyro.sample("z", dist.Normal())
    numpyro.sample("x", dist.Normal(z), obs=OUTSIDE)


def svi_of(model):
    return SVI(model, AutoNormal(model), numpyro.optim.Adam(0.1), Trace_ELBO())


def log_evidence(svi, *args):
    """The guide is exact for OUTSIDE alone."""
    weights = to_arviz(svi, result=PARAMS, model_args=args, num_samples=30).sample_stats.log_weight
    return float(weights.mean())


def test_a_second_look_traces_no_model():
    svi, args = svi_of(counted), {"result": PARAMS, "model_args": (OUTSIDE, 2), "num_samples": 40}
    first = to_arviz(svi, **args), pareto_khat(svi, **args), evidence_bounds(svi, **args)
    assert next(TRACES) > 0
    before = next(TRACES)
    other = {**PARAMS, "z_auto_scale": jnp.array(0.4)}  # another fit of the same programs
    second = to_arviz(svi, **{**args, "result": other}), evidence_bounds(svi, **args)
    pareto_khat(svi, **args)
    assert next(TRACES) == before + 1
    assert np.array_equal(second[1].values, first[2].values)
    assert float(second[0].posterior.z.std()) == pytest.approx(
        0.8 * float(first[0].posterior.z.std()), rel=1e-4
    )
    to_arviz(svi, **{**args, "model_args": (OUTSIDE + 1, 2)})
    assert next(TRACES) > before + 2


def test_data_that_were_changed_in_place_or_replaced_are_seen(monkeypatch):
    svi, x = svi_of(counted), np.array(OUTSIDE)
    assert log_evidence(svi, x) == pytest.approx(-5.79371, abs=1e-4)
    x += 100.0
    assert log_evidence(svi, x) < -1000
    svi = svi_of(reads_outside)
    assert log_evidence(svi) == pytest.approx(-5.79371, abs=1e-4)
    monkeypatch.setitem(globals(), "OUTSIDE", OUTSIDE + 100.0)
    assert log_evidence(svi) < -1000


def test_nothing_outlives_its_fit():
    class Fit:
        pass

    class Data:
        pass

    fit, data = Fit(), Data()
    seen = weakref.ref(data)
    memo = memo_of(fit, (counted,), (OUTSIDE,), {}, {})
    memo["compiled"] = data
    assert memo_of(fit, (counted,), (OUTSIDE,), {}, {})["compiled"] is data
    assert memo_of(fit, (reads_outside,), (OUTSIDE,), {}, {}) == {}
    del data, memo, fit
    gc.collect()
    assert seen() is None
    fits = [Fit() for _ in range(2 * SIZE)]
    for fit in fits:
        memo_of(fit, (counted,), (), {}, {})
    assert len(_MEMOS) <= SIZE


def test_an_argument_of_an_unknown_kind_is_never_remembered():
    class Table:
        pass

    fit, table = Table(), Table()
    memo_of(fit, (counted,), (table,), {}, {})["compiled"] = 1
    assert memo_of(fit, (counted,), (table,), {}, {}) == {}
