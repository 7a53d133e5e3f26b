"""NumPy data in models that index them by the rows of a plate."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Trace_ELBO
import pandas as pd
import pytest

from numpyro_ext._model.arguments import indexed
from numpyro_ext.ep import EP
from numpyro_ext.guides import AutoLaplaceGGN
from numpyro_ext.mcmc import SGLD
from numpyro_ext.objectives import VRELBO, taylor_proxy

Y = np.random.default_rng(0).normal(2.0, 1.0, 60).astype(np.float32)
GROUP = np.arange(60) % 3


def groups(data, batch=None):
    """Reads a number of its data, and takes rows of them."""
    number = int(data["group"].max()) + 1
    loc = numpyro.sample("loc", dist.Normal(0.0, 5.0).expand([number]).to_event(1))
    with numpyro.plate("rows", len(data["y"]), subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(loc[data["group"][i]], 1.0), obs=data["y"][i])


NUMPY = {"y": Y, "group": GROUP}
EXACT = np.array([Y[GROUP == k].sum() / (20 + 1 / 25) for k in range(3)])


def test_what_was_computed_of_an_array_takes_traced_indices_too():
    x = indexed({"b": np.arange(12.0).reshape(6, 2), "a": [np.arange(6), "word"]})
    assert list(x) == ["b", "a"] and x["a"][1] == "word"
    found = jax.jit(lambda i: (x["b"][i, 0], (x["b"].T - 1)[:, i], x["a"][0][2:][i]))(jnp.array(1))
    for one, expected in zip(found, (2.0, [1.0, 2.0], 3), strict=True):
        np.testing.assert_array_equal(one, expected)


FRAME = pd.DataFrame({"group": GROUP, "y": Y}).sample(frac=1.0, random_state=1)


def by_columns(frame, batch=None):
    """Reads columns by their names, rows by their place, and a mean by column."""
    group, size = frame["group"], int(frame.group.max()) + 1
    offset = frame[["y"]].mean() - frame.y.mean()  # 0, for a frame has a mean for each column
    loc = numpyro.sample("loc", dist.Normal(0.0, 5.0).expand([size]).to_event(1))
    with numpyro.plate("rows", len(frame), subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(loc[group[i]] + offset[0], 1.0), obs=frame.y[i])


@pytest.mark.slow
def test_a_frame_is_read_by_name_and_by_position():
    """Its rows are in another order than the labels of its index."""
    found = EP(by_columns, schedule="parallel").run(random.key(0), 20, FRAME, progress_bar=False)
    np.testing.assert_allclose(found.params["auto_loc"], EXACT, rtol=1e-3)
    arrays = {name: FRAME[name].to_numpy() for name in FRAME}
    by_frame, by_arrays = (
        taylor_proxy(*both, batch=10) for both in ((by_columns, FRAME), (groups, arrays))
    )
    np.testing.assert_allclose(by_frame.center["loc"], by_arrays.center["loc"], rtol=1e-5)
    np.testing.assert_allclose(by_frame.rows, by_arrays.rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("model", "data"), [(groups, NUMPY), (by_columns, FRAME)])
def test_a_kernel_takes_numpy_data_and_a_frame(model, data):
    mcmc = MCMC(SGLD(model, 1e-4), num_warmup=0, num_samples=2, progress_bar=False)
    mcmc.run(random.key(0), data, batch=10, init_params={"loc": jnp.asarray(EXACT)})
    np.testing.assert_allclose(mcmc.get_samples()["loc"][-1], EXACT, atol=0.3)


@pytest.mark.parametrize("loss", [Trace_ELBO(), VRELBO(1.0)])
def test_a_guide_says_where_the_loss_hands_on_a_frame_with_which_the_model_does_not_run(loss):
    def model(x):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([1]).to_event(1))
        numpyro.sample("y", dist.Normal(x[["group"]] @ w, 1.0).to_event(1), obs=x["y"])

    svi = SVI(model, AutoLaplaceGGN(model), numpyro.optim.Adam(0.01), loss)
    if isinstance(loss, VRELBO):
        assert np.isfinite(svi.run(random.key(0), 1, FRAME, progress_bar=False).losses).all()
    else:
        with pytest.raises(TypeError, match=r"does not run on the DataFrame .*; pass arrays"):
            svi.run(random.key(0), 1, FRAME, progress_bar=False)
