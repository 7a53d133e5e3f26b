"""Fits with penalties of expectations are judged by what the penalties ask for: closed forms.

The posterior is N(0.5, 0.5). With 3 (m - 2)^2 the best normal has m = 0.5 - 0.5 h'(m) = 1.625, and
the variance of the posterior, with which :func:`diagnose` has to agree; nothing is trained.
"""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import potential_energy
import optax
import pytest

from numpyro_ext.diagnostics import diagnose
from numpyro_ext.diagnostics._by_penalties import by_penalties
from numpyro_ext.diagnostics._fit import fit_of
from numpyro_ext.objectives import IWELBO, VRELBO, PosteriorRegularizedELBO

LINE = "noise of the penalties in nats"
X = 1.0


def model(x):
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    numpyro.deterministic("f", 2.0 * z - 1.0)
    with numpyro.plate("rows", 1):
        numpyro.sample("x", dist.Normal(z, 1.0), obs=jnp.reshape(x, 1))


def square(mean):
    """3 (m - 2)^2 at the mean of f, 2 m - 1."""
    return 0.75 * (mean - 3.0) ** 2


def fit(loc, base=None, penalty=square):
    loss = PosteriorRegularizedELBO(base or Trace_ELBO(), {"f": penalty}, 5)
    svi = SVI(model, AutoNormal(model), optax.adam(0.1), loss)
    svi.init(random.key(0), X)
    return svi, {"z_auto_loc": jnp.asarray(loc), "z_auto_scale": jnp.asarray(0.5**0.5)}


def judged(svi, params, **options):
    return diagnose(svi, result=params, model_args=(X,), num_samples=400, **options)


@pytest.mark.nightly
@pytest.mark.parametrize(("loc", "right"), [(1.625, True), (0.5, False)])
def test_the_optimum_of_the_penalty_is_right_and_the_posterior_is_wrong(loc, right):
    """With the slope at the mean m of the guide, the best mean is 6.5 - 3 m; the error of a shift
    in 400 draws is 0.05 of their standard deviation."""
    found = judged(*fit(loc)).to_frame()
    assert found.loc[LINE, "ok"]
    assert found.loc["shift against exact moves, worst", "ok"] == right
    assert found.loc["sd against exact moves, worst", "ok"]
    shift = found.loc["shift against exact moves, worst", "value"]
    np.testing.assert_allclose(shift, abs(6.5 - 4 * loc) / 0.5**0.5, rtol=0.1, atol=0.2)
    if right:
        assert found.loc["gap of the ELBO in nats", "value"] < 0.02


@pytest.mark.x64
@pytest.mark.parametrize("base", [Trace_ELBO(), VRELBO(1.0, 3)], ids=["NumPyro", "ours"])
def test_the_model_that_is_judged_has_the_slopes_of_the_training(base):
    """U(z) + h'(E f) f(z), of each restart at its own mean; 20,000 draws know E f to 0.01."""
    svi, first = fit(1.625, base)
    _, second = fit(0.5)
    of_both, rows = by_penalties(fit_of(svi, [first, second], (X,), None), svi, None, random.key(0))
    assert [row.quantity for row in rows] == [LINE]
    for loc, params in zip((1.625, 0.5), of_both.params, strict=True):
        slope = float(params["_slope of f"])
        np.testing.assert_allclose(slope, 1.5 * (2 * loc - 1 - 3), atol=5 * 1.5 * 2**0.5 / 141)
        z = jnp.array([-0.7, 1.3])
        substituted = numpyro.handlers.substitute(of_both.model, data=params)
        found = [potential_energy(substituted, (X,), {}, {"z": one}) for one in z]
        plain = [potential_energy(model, (X,), {}, {"z": one}) for one in z]
        expected = np.array(plain) + slope * (2 * z - 1)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_without_an_optimum_that_is_known_nothing_is_tilted():
    svi, params = fit(1.625, IWELBO(4))
    assert not svi.loss.tilts
    assert LINE not in judged(svi, params, num_moves=0).to_frame().index


def test_a_proxy_cannot_stand_in_for_penalties():
    svi, params = fit(1.625)
    with pytest.raises(ValueError, match=r"no proxy stands in for the penalties"):
        judged(svi, params, proxy=object())
