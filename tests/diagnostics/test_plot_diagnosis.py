"""The picture of a diagnosis shows what was compared, and a panel without data is left out."""

import pickle

from jax import random
import jax.numpy as jnp
from matplotlib import pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import pytest

from numpyro_ext._model.labels import Labels
from numpyro_ext.diagnostics import Diagnosis, diagnose, plot_diagnosis
from numpyro_ext.diagnostics._moves import Moved
from numpyro_ext.diagnostics.checks.chains import Agreement
from numpyro_ext.diagnostics.checks.moves import compare_moved
from numpyro_ext.diagnostics.checks.weights import WeightSummary
from numpyro_ext.diagnostics.comparison import MEAN, SD
from numpyro_ext.diagnostics.plots import DiagnosisPlotData, _worst_numbers
from numpyro_ext.diagnostics.psis import pareto_khat
from numpyro_ext.diagnostics.table import Row

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.multivariate_normal([0, 0], [[1, 0.95], [0.95, 1]], 200))
Y = X @ jnp.array([1.0, -1.0]) + jnp.asarray(RNG.normal(size=200))


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def group(ratio, shift, names, combined=(), **more):
    ratio, shift = np.array(ratio), np.array(shift)
    error = np.full(len(ratio), 0.01)
    moved = Moved((shift, 2 * error, ratio, error), error, np.array(0.7), **more)
    return compare_moved(moved, names.__getitem__, "run longer", combined)


def rows(**ok):
    names = {"shift": MEAN, "sd": SD}
    return tuple(Row(names[k], 1.0, 0.1, "0.2", x, "so.") for k, x in ok.items())


def parts(**given):
    empty = {"moved": None, "draws": {}, "weights": None, "losses": [], "chains": None}
    empty["labels"] = Labels({}, {})
    return DiagnosisPlotData(**empty | given)


def dots(ax):
    """``(place, value, error)`` of every line, from the top."""
    found = []
    for bar in ax.containers:
        line, _, (bars,) = bar.lines
        half = [np.ptp(x[:, 0]) / 2 for x in bars.get_segments()]
        found += zip(line.get_ydata(), line.get_xdata(), half, strict=True)
    return np.array(sorted(found, reverse=True))


def test_the_numbers_that_move_most_are_shown_with_the_worst_at_the_top():
    ratio, shift = [0.99, 0.5, 1.05, np.nan], [0.02, 0.1, -0.7, np.nan]
    draws, after = RNG.normal(size=(50, 4)), RNG.normal(size=(8, 4, 4))
    moved, of = _worst_numbers([group(ratio, shift, "abcd", numbers=(draws, after))])
    found = Diagnosis("title", rows(shift=False, sd=True), parts(moved=moved, draws=of))
    axes = plot_diagnosis(found)
    # log .5 / log .85 = 4.3, .7 / .2 = 3.5 and .1; what does not vary is left out.
    assert list(axes) == ["means", "sds", "b", "c", "a"]
    labels = [text.get_text() for text in axes["means"].get_yticklabels()]
    assert labels == ["b", "c", "a"]
    np.testing.assert_allclose(
        dots(axes["means"])[:, 1:], [[0.1, 0.04], [-0.7, 0.04], [0.02, 0.04]]
    )
    np.testing.assert_allclose(dots(axes["sds"])[:, 1:], [[0.5, 0.02], [1.05, 0.02], [0.99, 0.02]])
    assert axes["means"].title.get_color() == "C3" != axes["sds"].title.get_color()
    one, other = of["b"]
    np.testing.assert_array_equal(one, draws[:, 1])
    np.testing.assert_array_equal(other, after[..., 1].ravel())


def test_weights_and_their_tail_losses_and_chains():
    log_w = RNG.standard_t(4, 500)
    tail = WeightSummary(None, log_w, pareto_khat(log_w))
    losses = [100.0 - np.minimum(np.arange(500), 90), np.full(500, 9.0)]
    x = np.random.default_rng(1).normal(size=(2, 2, 9))
    chains = Agreement(dict(zip("ab", x, strict=True)))
    chains.rhat, chains.ess = np.array([1.0, 1.3]), np.array([900.0, 12.0])
    k_hat = Row("k-hat", 0.7, 0.1, "0.63", None, "so.")
    found = Diagnosis("x", (k_hat,), parts(weights=tail, losses=losses, chains=chains))
    axes = plot_diagnosis(found)
    assert list(axes) == ["weights", "losses", "chains"]
    raw, fitted = axes["weights"].get_lines()
    w = np.sort(np.exp(log_w))[::-1]
    np.testing.assert_allclose(raw.get_ydata(), (w / w.mean())[:100])
    smoothed = np.sort(np.exp(tail.tail.log_weights))[::-1]
    smoothed *= w[-1] / smoothed[-1]  # below the tail they are the weights
    np.testing.assert_allclose(fitted.get_ydata(), (smoothed / w.mean())[:100])
    np.testing.assert_allclose(fitted.get_ydata()[-1], raw.get_ydata()[-1])
    assert axes["weights"].get_title() == "k-hat\n0.7 +- 0.1 (limit 0.63)"
    first = axes["losses"].get_lines()[0].get_ydata()
    np.testing.assert_array_equal(first, losses[0] - 10)
    assert axes["losses"].get_ylim()[1] < 60
    np.testing.assert_array_equal(axes["chains"].get_lines()[0].get_ydata(), [1.0, 1.3])
    assert [text.get_text() for text in axes["chains"].texts] == ["b"]


def test_a_linear_combination_is_one_of_the_numbers_and_has_no_shift():
    combined = np.array([[np.nan] * 2, [np.nan] * 2, [0.4, 1.2], [0.01] * 2])
    names = ["a", "b", "both", "all"]
    moved, _ = _worst_numbers([group([0.8, 0.9], [0.1, 0.0], names, [combined])])
    assert [moved.name(k) for k in range(4)] == ["both", "a", "all", "b"]
    assert np.isnan(moved.values[0, 0])
    axes = plot_diagnosis(Diagnosis("title", rows(sd=False), parts(moved=moved)))
    np.testing.assert_allclose(dots(axes["sds"])[:, 1], [0.4, 0.8, 1.2, 0.9])


def test_numbers_are_called_by_the_coordinates_of_their_plates():
    names = ["w[1, 1]", "tau", "v[1] (at tau = 3)"]
    moved, _ = _worst_numbers([group([0.5, 0.7, 0.8], [0.0, 0.0, 0.0], names)])
    dims = {"w": ["day", "place"], "tau": [], "v": ["other"]}
    labels = Labels(dims, {"w": (2, 3), "tau": (), "v": (2,)})
    found = Diagnosis("title", rows(shift=True), parts(moved=moved, labels=labels))
    axes = plot_diagnosis(found, coords={"place": ["Leeds", "Bath", "Hull"]})
    labels = [text.get_text() for text in axes["means"].get_yticklabels()]
    assert labels == ["w[1, Bath]", "tau", "v[1] (at tau = 3)"]
    for coords in ({"place": ["Leeds"]}, {"town": ["Leeds"]}):
        with pytest.raises(ValueError, match=r"1 labels for '.*', but the dimensions of the sites"):
            plot_diagnosis(found, coords=coords)


def model(x, y, batch=None):
    w = numpyro.sample("w", dist.Normal(0, 10).expand([2]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1.0), obs=y[i])


def by_svi(guide, optim, loss, steps):
    svi = SVI(model, guide, optim, loss)
    return diagnose(svi, svi.run(random.key(0), steps, X, Y, progress_bar=False), model_args=(X, Y))


def by_mcmc(kernel, **batch):
    mcmc = MCMC(kernel, num_warmup=100, num_samples=500, progress_bar=False)
    mcmc.run(random.key(0), X, Y, **batch)
    return diagnose(mcmc)


MOVED = ["means", "sds"]
OF_W = ["w[0]", "w[1]"]
FITS = {
    "guide": (
        lambda: by_svi(AutoNormal(model), numpyro.optim.Adam(0.02), Trace_ELBO(), 1500),
        [*MOVED, "weights", "losses"],
    ),
    "NUTS": (lambda: by_mcmc(NUTS(model)), ["chains"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FITS)
def test_every_kind_of_fit_has_its_panels(name):
    make, panels = FITS[name]
    found = make()
    copy = pickle.loads(pickle.dumps(found))
    assert str(copy) == str(found)
    axes = plot_diagnosis(copy)
    wanted = [*panels, *(sorted(OF_W) if "means" in panels else [])]
    assert sorted(axes) == sorted(wanted)
