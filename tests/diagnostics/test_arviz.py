"""``to_arviz``: reference values, and what the stock converters cannot do."""

import warnings

import arviz as az
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import HMC, MCMC, SVI, Trace_ELBO
from numpyro.infer import log_likelihood as numpyro_log_likelihood
from numpyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.util import potential_energy, unconstrain_fn
import pytest

from numpyro_ext.diagnostics import InferenceWarning, to_arviz
from numpyro_ext.diagnostics.arviz import _warn_of_lost_draws
from numpyro_ext.mcmc import SGLD

X = jnp.array([0.5, -1.0, 2.0])
EXACT = {"z_auto_loc": jnp.array(0.375), "z_auto_scale": jnp.array(0.5)}
LOG_EVIDENCE = -5.793712780173964


def conjugate(x, batch=None):
    z = numpyro.sample("z", dist.Normal())
    numpyro.deterministic("double", 2 * z)
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        numpyro.sample("x", dist.Normal(z), obs=x[i])


def constrained(x, batch=None):
    """Positive, simplex and real sites with different scales."""
    scale = numpyro.sample("scale", dist.LogNormal(0.5, 0.3))
    base = dist.Normal(jnp.array([0.5, -0.3]), jnp.array([1.0, 2.0])).to_event(1)
    simplex = dist.transforms.StickBreakingTransform()
    p = numpyro.sample("p", dist.TransformedDistribution(base, simplex))
    loc = numpyro.sample("loc", dist.Normal(1.0, 2.0))
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        numpyro.sample("x", dist.Normal(loc + p[0], scale), obs=x[i])


def positive(x):
    scale = numpyro.sample("scale", dist.LogNormal(0.5, 0.3))
    numpyro.deterministic("variance", scale**2)
    with numpyro.plate("N", len(x)):
        numpyro.sample("x", dist.Normal(0.3, scale), obs=x)


class Given:
    """A guide with fixed draws, for what does not depend on where draws come from."""

    def __init__(self, **draws):
        self.draws = draws

    def particles(self, params):
        return self.draws


# The same guide twice, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:only 1 of [25] restarts")


def given(model, *args, draws, **kwargs):
    svi = svi_of(model, Given(**draws))
    return to_arviz(svi, result={}, model_args=args, **kwargs)


def svi_of(model, guide, **static):
    return SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO(), **static)


def start(svi, *args, **kwargs):
    """Parameters without any fitting: converters do not care."""
    return svi.get_params(svi.init(random.key(0), *args, **kwargs))


def exact_tree(batch=None, num_samples=400, **kwargs):
    svi = svi_of(conjugate, AutoNormal(conjugate))
    kwargs = {"result": EXACT, **kwargs}
    return to_arviz(svi, model_args=(X, batch), num_samples=num_samples, **kwargs)


@pytest.fixture(scope="module")
def exact():
    return exact_tree(1, 800, result=[EXACT, EXACT], posterior_predictive=True)


@pytest.mark.slow
@pytest.mark.x64
def test_exact_guide_has_constant_weight_on_each_restart(exact, tol):
    stats = exact.sample_stats
    assert stats.log_weight.shape == (2, 800)
    np.testing.assert_allclose(stats.log_weight, LOG_EVIDENCE, atol=tol(1e-5, 1e-12))
    z = exact.posterior.z.to_numpy()
    log_q = dist.Normal(0.375, 0.5).log_prob(z)
    np.testing.assert_allclose(stats.log_q, log_q, rtol=tol(1e-4, 1e-12), atol=tol(1e-5, 1e-12))
    log_p = dist.Normal().log_prob(z) + dist.Normal(z[..., None]).log_prob(X).sum(-1)
    np.testing.assert_allclose(stats.lp, log_p, rtol=tol(1e-5, 1e-12))


def test_log_likelihood_has_no_plate_scale_and_no_handler_scale():
    scaled = numpyro.handlers.scale(conjugate, 7.0)
    svi = svi_of(scaled, AutoNormal(scaled))
    dt = to_arviz(svi, result=EXACT, model_args=(X, 1), num_samples=20)
    z = dt.posterior.z.to_numpy()[..., None]
    np.testing.assert_allclose(dt.log_likelihood.x, dist.Normal(z).log_prob(X), rtol=1e-5)


# Three data, of which one is far out: over keys a tenth of the shapes is above arviz's limit.
far_out = pytest.mark.filterwarnings("ignore:Estimated shape parameter")


@far_out
def test_loo_of_a_variational_fit(exact):
    corrected = az.loo_approximate_posterior(
        exact, log_p=exact.sample_stats.lp, log_q=exact.sample_stats.log_q
    )
    # The guide is exact, so that there is nothing to correct.
    assert corrected.elpd == pytest.approx(az.loo(exact).elpd, abs=0.05)
    # Leave-one-out predictive of datum n: N(sum of the others / 3, 1 + 1/3).
    others = (1.5 - np.array(X)) / 3
    elpd = dist.Normal(others, np.sqrt(4 / 3)).log_prob(X).sum()
    # Over 60 keys the mean is .02 above it and the standard deviation .056.
    assert corrected.elpd == pytest.approx(float(elpd), abs=0.02 + 4 * 0.056)


def test_custom_guide_keeps_only_sites_of_the_model_and_its_deterministic_sites():
    def guide(x, batch=None):
        noise = numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
        numpyro.deterministic("of_guide", noise)
        numpyro.sample("z", dist.Normal(numpyro.param("loc", 0.4) + 0.1 * noise, 0.3))

    svi = svi_of(conjugate, guide)
    dt = to_arviz(svi, result=start(svi, X), model_args=(X, 1), num_samples=30)
    assert set(dt.posterior.data_vars) == {"z", "double"}
    np.testing.assert_allclose(dt.posterior.double, 2 * dt.posterior.z)
    assert dt.attrs["guide"] == "guide"
    assert dt.attrs["density"] == "bound"


def test_deterministic_sites_belong_to_the_arguments_of_the_call():
    def regression(x, y):
        w = numpyro.sample("w", dist.Normal())
        with numpyro.plate("N", len(x)):
            mean = numpyro.deterministic("mean", w * x)
            numpyro.sample("y", dist.Normal(mean), obs=y)

    svi = svi_of(regression, AutoDiagonalNormal(regression))
    params = start(svi, X, X)  # the guide remembers these arguments
    new = jnp.arange(5.0)
    dt = to_arviz(svi, result=params, model_args=(new, new), num_samples=10)
    expected = dt.posterior.w.to_numpy()[..., None] * new
    np.testing.assert_allclose(dt.posterior["mean"], expected, rtol=1e-6)


@pytest.mark.slow
def test_lp_is_minus_numpyros_potential(tol):
    draws = {
        "scale": jnp.array([0.7, 3.0]),
        "p": jnp.array([[0.2, 0.5, 0.3], [0.01, 0.19, 0.8]]),
        "loc": jnp.array([-1.0, 2.0]),
    }
    dt = given(constrained, X, 2, draws=draws)

    @jax.jit
    @jax.vmap
    def expected(values):
        z = unconstrain_fn(numpyro.handlers.seed(constrained, 0), (X,), {}, values)
        return -potential_energy(constrained, (X,), {}, z)

    np.testing.assert_allclose(dt.sample_stats.lp[0], expected(draws), rtol=tol(1e-5, 1e-12))


def test_log_q_is_in_unconstrained_space(tol):
    svi = svi_of(positive, AutoMultivariateNormal(positive))
    params = {"auto_loc": jnp.array([0.2]), "auto_scale_tril": jnp.array([[0.3]])}
    dt = to_arviz(svi, result=params, model_args=(X,), num_samples=8)
    expected = dist.Normal(0.2, 0.3).log_prob(np.log(dt.posterior.scale.to_numpy()))
    tolerance = {"rtol": tol(1e-4, 1e-10), "atol": tol(1e-4, 1e-10)}
    stats = dt.sample_stats
    np.testing.assert_allclose(stats.log_q, expected, **tolerance)
    np.testing.assert_allclose(stats.log_weight, stats.lp - stats.log_q, **tolerance)


def test_laplace_draws_its_normal_and_not_its_point_mass():
    svi = svi_of(conjugate, AutoLaplaceApproximation(conjugate))
    start(svi, X)
    params = {"auto_loc": jnp.array([0.375])}
    dt = to_arviz(svi, result=params, model_args=(X,), num_samples=2000)
    assert float(dt.posterior.z.std()) == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(4000))
    np.testing.assert_allclose(dt.sample_stats.log_weight, LOG_EVIDENCE, atol=1e-5)
    assert dt.attrs["density"] == "exact"


def run_mcmc(
    kernel,
    *args,
    num_samples=20,
    num_chains=1,
    chain_method="vectorized",
    extra_fields=(),
    **kwargs,
):
    mcmc = MCMC(
        kernel,
        num_warmup=20,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method=chain_method,
        progress_bar=False,
        **kwargs,
    )
    mcmc.run(random.key(0), *args, extra_fields=extra_fields)
    return mcmc


@pytest.mark.slow
def test_mcmc_with_thinning_chains_and_statistics():
    fields = (
        "potential_energy",
        "num_steps",
        "accept_prob",
        "adapt_state.step_size",
        "adapt_state.inverse_mass_matrix",
    )
    mcmc = run_mcmc(
        HMC(positive, num_steps=3, trajectory_length=None),
        X,
        num_samples=20,
        num_chains=2,
        thinning=4,
        extra_fields=fields,
    )
    dt = to_arviz(mcmc)
    assert dt.posterior.sizes["chain"] == 2
    assert dt.posterior.sizes["draw"] == 5
    assert np.array_equal(dt.posterior.draw, range(5))
    for name, value in mcmc.get_samples(group_by_chain=True).items():
        assert np.array_equal(dt.posterior[name], value), name
    stock = az.from_numpyro(mcmc).sample_stats
    assert set(stock.data_vars) == set(dt.sample_stats.data_vars)
    for name, value in stock.data_vars.items():
        assert np.array_equal(dt.sample_stats[name], value), name
    expected = numpyro_log_likelihood(
        positive, mcmc.get_samples(group_by_chain=True), X, batch_ndims=2
    )["x"]
    np.testing.assert_allclose(dt.log_likelihood.x, expected, rtol=1e-5)
    assert dt.attrs["kernel"] == "HMC"
    assert dt.attrs["inference_method"] == "mcmc"
    by_guide = given(positive, X, draws=mcmc.get_samples())
    np.testing.assert_allclose(by_guide.sample_stats.lp[0], np.ravel(dt.sample_stats.lp), rtol=1e-4)


def test_a_kernel_of_minibatches_has_the_likelihood_of_all_rows():
    mcmc = run_mcmc(SGLD(conjugate, 1e-3), X, 1)
    dt = to_arviz(mcmc)
    assert dt.attrs["inference_method"] == "sgmcmc"
    assert "lp_minibatch" in dt.sample_stats and "lp" not in dt.sample_stats
    assert dt.log_likelihood.x.shape == (1, 20, 3)
    np.testing.assert_allclose(dt.posterior.double, 2 * dt.posterior.z, rtol=1e-6)


def test_a_site_with_the_name_of_a_dimension_is_refused():
    def model():
        numpyro.sample("draw", dist.Normal())

    with pytest.raises(ValueError, match="a site 'draw', which is the name of a dimension"):
        given(model, draws={"draw": jnp.ones(5)})


def with_factors(x):
    z = numpyro.sample("z", dist.Normal())
    numpyro.factor("prior", -jnp.sum(z**2))
    numpyro.factor("rows", dist.Normal(z).log_prob(x))


def only_a_number(x):
    numpyro.factor("all", dist.Normal(numpyro.sample("z", dist.Normal())).log_prob(x).sum())


@pytest.mark.parametrize(("model", "name"), [(with_factors, "prior"), (only_a_number, "all")])
def test_a_likelihood_without_observed_rows_is_named_before_loo_misses_it(model, name):
    """A number beside observed rows is left out without a word: see the factor 'penalty' below."""
    draws = {"z": jnp.linspace(0.1, 1.0, 5)}
    with pytest.warns(InferenceWarning, match=f"the factor '{name}' .* LOO with it, leave it out"):
        given(model, X, draws=draws)
    given(model, X, draws=draws, log_likelihood=False)


def test_dims_and_coordinates():
    def model(y):
        with numpyro.plate("outer", 2, dim=-3), numpyro.plate("inner", 4, dim=-1):
            w = numpyro.sample("w", dist.Normal().expand([5]).to_event(1))
            numpyro.deterministic("sum", w.sum(-1))
        v = numpyro.sample(
            "v", dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3)), infer={"event_dims": ["axis"]}
        )
        numpyro.deterministic("square", v**2)
        with numpyro.plate("N", 6):
            numpyro.sample("y", dist.Normal(v.sum()).expand([6, 3]).to_event(1), obs=y)

    y = jnp.zeros((6, 3))
    draws = {"w": jnp.ones((4, 2, 1, 4, 5)), "v": jnp.ones((4, 3))}
    dt = given(model, y, draws=draws)
    w = dt.posterior.w
    assert w.shape == (1, 4, 2, 1, 4, 5)
    assert (w.dims[2], w.dims[4]) == ("outer", "inner")
    assert dt.posterior.v.dims == ("chain", "draw", "axis")
    assert dt.posterior.square.dims == ("chain", "draw", "square_dim_0")
    assert dt.log_likelihood.y.dims == ("chain", "draw", "N")
    assert dt.observed_data.y.dims == ("N", "y_dim_1")
    assert np.array_equal(dt.posterior.chain, [0])
    assert np.array_equal(dt.observed_data.N, range(6))
    named = given(
        model,
        y,
        draws=draws,
        coords={"axis": ["x", "y", "z"], "N": list("abcdef")},
        dims={"y": ["N", "axis"]},
    )
    assert list(named.posterior["axis"].to_numpy()) == ["x", "y", "z"]
    assert named.observed_data.y.dims == ("N", "axis")
    assert named.log_likelihood.y.sel(N="c").shape == (1, 4)
    assert named.posterior.w.dims == w.dims


def test_observed_sites_of_other_shapes():
    def model(x):
        z = numpyro.sample("z", dist.Normal())
        numpyro.sample("no_plate", dist.Normal(z), obs=x)
        with numpyro.plate("N", 4):
            numpyro.sample("zeros", dist.Normal(z), obs=0.0)
        numpyro.sample("event", dist.Normal(z).expand([3]).to_event(1), obs=x)
        numpyro.factor("penalty", -100.0 * z**2)

    dt = given(model, X, draws={"z": jnp.linspace(0.1, 1.0, 5)})
    assert dt.log_likelihood.no_plate.shape == (1, 5, 3)
    assert dt.log_likelihood.zeros.dims == ("chain", "draw", "N")
    assert np.array_equal(dt.observed_data.zeros, np.zeros(4))
    assert dt.log_likelihood.event.shape == (1, 5)
    assert "penalty" not in dt.log_likelihood
    assert "penalty" not in dt.observed_data
    z = dt.posterior.z
    total = dt.log_likelihood.no_plate.sum("no_plate_dim_0") + dt.log_likelihood.zeros.sum("N")
    total = (
        total + dt.log_likelihood.event - 100 * z**2 + np.asarray(dist.Normal().log_prob(z.data))
    )
    np.testing.assert_allclose(dt.sample_stats.lp, total, rtol=1e-4)


def test_labels_under_a_name_of_the_tree_are_kept_where_rows_are_masked():
    def model(y):
        z = numpyro.sample("z", dist.Normal())
        with numpyro.plate("net/n", 3):
            numpyro.sample("y", dist.Normal(z).mask(jnp.arange(3) != 1), obs=y)

    draws = {"z": jnp.arange(4.0)}
    for name in ("net/n", "net:n"):
        dt = given(model, jnp.zeros(3), draws=draws, coords={name: list("abc")})
        assert dt.log_likelihood["net:n"].values.tolist() == ["a", "c"]


def masked_rows(x, seen, table):
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    with numpyro.plate("N", len(x)):
        numpyro.sample("x", dist.Normal(z, 1.0).mask(seen), obs=x)
    with numpyro.plate("column", 3, dim=-1), numpyro.plate("row", 4, dim=-2):
        numpyro.sample("table", dist.Normal(z, 1.0).mask(table > 0), obs=table)


def test_rows_that_a_mask_leaves_out_are_not_in_the_log_likelihood():
    """A row that is 0 in all draws stops ArviZ's LOO."""
    x, seen = jnp.arange(6.0) / 3, jnp.arange(6) != 2
    table = jnp.sin(jnp.arange(12.0)).reshape(4, 3)
    svi = svi_of(masked_rows, AutoNormal(masked_rows))
    dt = to_arviz(
        svi,
        {"z_auto_loc": jnp.array(0.4), "z_auto_scale": jnp.array(0.3)},
        model_args=(x, seen, table),
        num_samples=200,
        coords={"N": list("abcdef")},
    )
    log_lik = dt.log_likelihood
    assert log_lik.x.dims == ("chain", "draw", "N")
    assert log_lik.N.values.tolist() == list("abdef")
    assert dt.observed_data.N.values.tolist() == list("abcdef")
    z = dt.posterior.z.to_numpy()[..., None]
    np.testing.assert_allclose(log_lik.x, dist.Normal(z).log_prob(x[seen]), rtol=1e-5)
    places = log_lik.table_entry.values
    np.testing.assert_array_equal(places, np.flatnonzero(table > 0))
    expected = dist.Normal(z).log_prob(table.ravel()[places])
    np.testing.assert_allclose(log_lik.table, expected, rtol=1e-5)
    assert az.loo(dt, var_name="x").n_data_points == 5


def test_sites_of_one_plate_may_mask_different_rows():
    """As the exact and the censored times of survival."""
    seen = jnp.array([True, False, True, True])

    def model(y):
        z = numpyro.sample("z", dist.Normal())
        with numpyro.plate("N", 4):
            numpyro.sample("exact", dist.Normal(z).mask(seen), obs=y)
            numpyro.sample("censored", dist.Normal(z, 2.0).mask(~seen), obs=y)

    draws = {"z": jnp.arange(4.0)}
    log_lik = given(model, jnp.arange(4.0), draws=draws).log_likelihood
    assert log_lik.exact_entry.values.tolist() == [0, 2, 3]
    assert log_lik.censored_entry.values.tolist() == [1]
    expected = dist.Normal(draws["z"][:, None], 2.0).log_prob(1.0)
    np.testing.assert_allclose(log_lik.censored[0], expected, rtol=1e-5)


def test_draws_without_a_density_are_counted():
    """One of two draws of the second chain, in one of three rows."""
    log_lik = np.zeros((2, 2, 3))
    _warn_of_lost_draws([np.zeros((2, 2)), log_lik])
    log_lik[1, 0, 2] = -np.inf
    with pytest.warns(InferenceWarning, match=r"1 of 4 draws \(chains \[1\]\) have no density"):
        _warn_of_lost_draws([np.zeros((2, 2)), log_lik])


def with_a_row_that_nothing_changes(x):
    """The first row does not depend on the latent site."""
    z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("N", len(x)) as i:
        numpyro.sample("x", dist.Normal(jnp.where(i == 0, 1.0, z), 1.0), obs=x)


def test_loo_of_a_row_with_one_value_is_that_value():
    svi = svi_of(with_a_row_that_nothing_changes, AutoNormal(with_a_row_that_nothing_changes))
    tree = to_arviz(svi, EXACT, model_args=(X,), num_samples=500)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the two other rows
        loo = az.loo(tree, pointwise=True)
    assert float(loo.elpd_i[0]) == pytest.approx(-0.125 - np.log(2 * np.pi) / 2, abs=1e-6)
    assert float(loo.pareto_k[0]) < 0.5
