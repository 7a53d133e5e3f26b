"""`AutoStructuredNormal`: its density, a funnel that it holds, its start above 512 numbers."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext._model.arrow import Arrow
from numpyro_ext._model.modes import Mode, Modes
from numpyro_ext.guides import AutoStructuredNormal
from numpyro_ext.objectives import VRELBO
from numpyro_ext.saving import load, save
from tests._model.test_arrow import arrow
from tests._model.test_structured_fit import data, model, normal_given
from tests.guides.moved import moved


def pairs():
    """A global after its effects, pairs of effects, and a positive scale."""
    with numpyro.plate("patients", 3):
        numpyro.sample("own", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 4):
        numpyro.sample("u", dist.Normal(0.0, s))
    numpyro.sample("mean", dist.Normal(1.0, 2.0))


def test_density_is_that_of_the_map():
    """log q(f(e)) + log |f'(e)| = log N(e), with the Jacobian of automatic differentiation."""
    guide = AutoStructuredNormal(pairs, init_from=None)
    params = moved(SVI(pairs, guide, optax.adam(1e-2), Trace_ELBO()), 0.3)
    e = random.normal(random.key(0), (guide.latent_dim,))

    @jax.jit
    def both(params, e):
        f = guide.get_transform(params)
        x = f(e)
        return f.log_abs_det_jacobian(e, x), jax.jacfwd(f)(e), f.inv(x)

    log_det, slopes, back = both(params, e)
    assert log_det == pytest.approx(np.linalg.slogdet(np.asarray(slopes, float))[1], abs=1e-4)
    np.testing.assert_allclose(back, e, atol=1e-4)
    assert list(guide.prepared.globals) == [6, 11]


@pytest.mark.slow
def test_a_funnel_is_in_the_family():
    """u_j ~ N(0, e^g) for six j and no data: the log evidence is 0, and the greatest ELBO of a
    normal, -6.5 s^2 + log s + 1/2 at s^2 = 1 / 13, is -1.28. Trained so far the loss is 0.27."""

    def funnel():
        g = numpyro.sample("g", dist.Normal(0.0, 1.0))
        with numpyro.plate("groups", 6):
            numpyro.sample("u", dist.Normal(2.0, jnp.exp(g)))

    guide = AutoStructuredNormal(funnel, init_scale=0.5)
    rate = optax.exponential_decay(3e-2, 1500, 0.01)
    svi = SVI(funnel, guide, optax.adam(rate), Trace_ELBO(num_particles=16))
    result = svi.run(random.key(0), 1500, progress_bar=False)
    assert float(result.losses[-100:].mean()) < 0.7
    np.testing.assert_allclose(result.params["auto_log_slope"], 1, atol=0.1)


@pytest.mark.slow
def test_begins_at_the_posterior_of_many_groups():
    """541 crossed numbers of a linear model: draws before any step; 4,000 know an sd to 1.1 %."""
    guide = AutoStructuredNormal(model)
    svi = SVI(model, guide, optax.adam(1e-3), Trace_ELBO())
    state = svi.init(random.key(0), **data(), scales=(0.8, 0.3))
    assert isinstance(guide.start_modes.heaviest.factor, Arrow)
    params = svi.get_params(state)
    draws = guide.sample_latent(random.key(1), params, 4000)
    center, covariance, evidence = normal_given(0.8, 0.3)
    sds = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose((draws.mean(0) - center) / sds, 0, atol=5 / 4000**0.5)
    np.testing.assert_allclose(draws.std(0) / sds, 1, atol=5 / 8000**0.5)
    loss = svi.evaluate(state, **data(), scales=(0.8, 0.3))
    assert float(loss) == pytest.approx(-evidence, abs=0.1)  # at each draw, of the posterior itself
    # The map is among the parameters: another guide of the same model draws the same.
    other = AutoStructuredNormal(model, init_from=guide.start_modes)
    SVI(model, other, optax.adam(1e-3), Trace_ELBO()).init(
        random.key(5), **data(), scales=(0.8, 0.3)
    )
    np.testing.assert_array_equal(other.sample_latent(random.key(1), params, 4000), draws)


def nine(y):
    z = numpyro.sample("z", dist.Normal(0, 1).expand([9]).to_event(1))
    numpyro.sample("y", dist.Normal(z, 1).to_event(1), obs=y)


def svi_of_nine(loss, at=0.0) -> SVI:
    """A start with a factor of three numbers and three pairs."""
    mode = Mode(at + jnp.arange(9.0), arrow()[0])
    guide = AutoStructuredNormal(nine, init_from=Modes((mode,), (("z", (9,)),)))
    return SVI(nine, guide, optax.adam(1e-2), loss)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [Trace_ELBO(num_particles=3), VRELBO(0.5)], ids=["ELBO", "Renyi"])
def test_an_optimiser_has_no_part_of_the_fixed_map(loss, tmp_path):
    """It has the location, factor and skew of nine globals, twice as many moments, and two counts;
    parameters have the map nevertheless, and take it along: to another guide, through a file, and
    out of a state that is older than another start of the same ``SVI``."""
    svi, y = svi_of_nine(loss), jnp.ones(9)
    result = svi.run(random.key(0), 2, y, progress_bar=False)
    sizes = [x.size for x in jax.tree.leaves(result.state.optim_state)]
    assert sum(sizes) == 3 * (9 + 45 + 9) + 2
    np.testing.assert_array_equal(result.params["auto_root_slope"], arrow()[0].slope)
    draws = svi.guide.sample_latent(random.key(1), result.params, 5)
    traced = jax.jit(lambda params: svi.guide.sample_latent(random.key(1), params, 5))
    np.testing.assert_allclose(traced(result.params), draws, rtol=1e-4, atol=1e-4)

    other = svi_of_nine(loss, at=100.0)
    other.init(random.key(0), y)
    np.testing.assert_array_equal(other.guide.sample_latent(random.key(1), result.params, 5), draws)
    save(tmp_path / "fit.npz", svi, result)
    other = svi_of_nine(loss, at=100.0)
    loaded = load(tmp_path / "fit.npz", other, y)
    np.testing.assert_array_equal(other.guide.sample_latent(random.key(1), loaded.params, 5), draws)
    update = jax.jit(svi.update)
    after, same = update(result.state, y), other.update(loaded.state, y)
    assert float(after[1]) == pytest.approx(float(same[1]), rel=1e-4)

    moved = {**result.params, "auto_center": result.params["auto_center"] + 50}
    second = svi.init(random.key(0), y, init_params=moved)
    assert float(update(second, y)[1]) > float(after[1]) + 1000
    np.testing.assert_array_equal(svi.get_params(after[0])["auto_center"], jnp.arange(9.0))
