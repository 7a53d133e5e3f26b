"""A second look at a fit shows what has changed since the first."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import pytest

from numpyro_ext.diagnostics import diagnose, evidence_bounds, to_arviz

PARAMS = {"z_auto_loc": jnp.array(0.375), "z_auto_scale": jnp.array(0.5)}
X = jnp.array([0.5, -1.0, 2.0])
OUTSIDE = X


def conjugate(x):
    z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("N", len(x)):
        numpyro.sample("x", dist.Normal(z), obs=jnp.asarray(x))


def argument():
    x = np.array(X)
    return conjugate, (x,), lambda: x.__iadd__(0.3)


def global_variable():
    return lambda: conjugate(OUTSIDE), (), lambda: globals().update(OUTSIDE=X + 0.3)


def svi_of(model):
    return SVI(model, AutoNormal(model), numpyro.optim.Adam(0.1), Trace_ELBO())


def looks(svi, args):
    """The log evidence, as each function has it from the same draws."""
    given = {"result": PARAMS, "model_args": args, "num_samples": 40}
    log_w = diagnose(svi, num_moves=0, **given).plot_data.weights.log_w
    weights = to_arviz(svi, **given).sample_stats.log_weight.to_numpy()
    return [
        float(np.logaddexp.reduce(weights, axis=1)[0] - np.log(40)),
        evidence_bounds(svi, **given).log_evidence,
        float(np.logaddexp.reduce(log_w) - np.log(40)),
    ]


@pytest.fixture(autouse=True)
def the_same_global_variable(monkeypatch):
    monkeypatch.setitem(globals(), "OUTSIDE", X)


@pytest.mark.slow
@pytest.mark.parametrize("case", [argument, global_variable], ids=lambda case: case.__name__)
def test_a_model_that_has_changed_is_seen(case):
    model, args, change = case()
    svi = svi_of(model)
    # The guide is exact for X.
    np.testing.assert_allclose(looks(svi, args), -5.79371, atol=1e-4)
    change()
    given = {"result": PARAMS, "model_args": (X + 0.3,), "num_samples": 40}
    expected = evidence_bounds(svi_of(conjugate), **given).log_evidence
    assert abs(expected + 5.79371) > 0.01
    np.testing.assert_allclose(looks(svi, args), expected, rtol=1e-5)
