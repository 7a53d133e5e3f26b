"""A second look at the same fit compiles nothing, and never shows what has changed since."""

import gc
import itertools
import weakref

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import optax
import pytest

from numpyro_ext.diagnostics import (
    diagnose,
    evidence_bounds,
    kernel_stein_discrepancy,
    pareto_khat,
    to_arviz,
)
from numpyro_ext.diagnostics._memo import _MEMOS, SIZE, memo_of
from numpyro_ext.mcmc import SGLD
from numpyro_ext.particles import SVGD, AutoParticles, ParVI

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


COMPILED = []


def count_compilations(event, duration, **kwargs):
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(count_compilations)


def mcmc_of(kernel, *args, num_chains):
    mcmc = MCMC(
        kernel,
        num_warmup=5,
        num_samples=20,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *args)
    return mcmc


def particles_of_a_fit():
    svi = SVI(counted, AutoParticles(counted, 12), optax.adam(0.1), SVGD())
    params = svi.get_params(svi.init(random.key(0), OUTSIDE))
    return svi, {"result": params, "model_args": (OUTSIDE,)}


FITS = {
    "guide": lambda: (svi_of(counted), {"result": PARAMS, "model_args": (OUTSIDE, 2)}),
    "particles": particles_of_a_fit,
    "SGLD": lambda: (mcmc_of(SGLD(counted, 0.01), OUTSIDE, 2, num_chains=2), {}),
    "ParVI": lambda: (mcmc_of(ParVI(counted), OUTSIDE, num_chains=12), {}),
}


@pytest.mark.parametrize("name", FITS)
@pytest.mark.filterwarnings("ignore::numpyro_ext.diagnostics.InferenceWarning")
def test_a_second_look_compiles_nothing(name):
    fit, given = FITS[name]()
    looks = [to_arviz, diagnose, *([pareto_khat, evidence_bounds] if name == "guide" else [])]
    # evidence_bounds has a default number of draws of its own.
    given |= {"num_samples": 50}
    for look in looks:
        look(fit, **given)
    before = len(COMPILED)
    assert before
    for look in looks:
        look(fit, **given)
    assert len(COMPILED) == before


def test_a_second_stein_discrepancy_of_a_model_compiles_nothing():
    draws = {"z": np.linspace(-1.0, 1.0, 20)}
    first = float(kernel_stein_discrepancy(draws, model=counted, model_args=(OUTSIDE,)))
    before = len(COMPILED)
    other = {"z": 0.5 + draws["z"]}
    assert float(kernel_stein_discrepancy(other, model=counted, model_args=(OUTSIDE,))) != first
    assert len(COMPILED) == before
