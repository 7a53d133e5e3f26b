"""Workers of Dask, in processes of their own, hold parts of the data and run fits."""

from functools import partial
import os
from pathlib import Path
import signal

from distributed import Client, LocalCluster
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
import optax
import pytest

from numpyro_ext.diagnostics import restarts, simulation_based_calibration
from numpyro_ext.ep import DistributedEP
from tests.ep.models import LOGISTIC, logistic

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client():
    ports = {"dashboard_address": None, "worker_dashboard_address": None}
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "host": "127.0.0.1"}
    with LocalCluster(**options, **ports) as cluster, Client(cluster) as client:
        yield client


def opened(path):
    """The rows of a file, beside which is written who has opened it."""
    with path.with_suffix(".opened").open("a") as log:
        print(os.getpid(), file=log)
    with np.load(path) as rows:
        return rows["x"], rows["y"]


@pytest.mark.filterwarnings("ignore:EP has not converged")
def test_workers_alone_open_the_files_and_one_may_die(client, tmp_path):
    x, y = (np.asarray(a)[:6] for a in LOGISTIC)
    paths = [tmp_path / f"{j}.npz" for j in range(2)]
    for j, path in enumerate(paths):
        np.savez(path, x=x[3 * j : 3 * j + 3], y=y[3 * j : 3 * j + 3])
    alone = DistributedEP(logistic, np.arange(6) // 3)
    expected = alone.run(random.key(0), 3, jnp.asarray(x), jnp.asarray(y), progress_bar=False)
    after, _ = alone.update(expected.state, jnp.asarray(x), jnp.asarray(y))
    workers = client.run(os.getpid)
    each = [
        client.get_executor(pure=False, workers=[address], allow_other_workers=True)
        for address in workers
    ]
    ep = DistributedEP(logistic, [partial(opened, path) for path in paths], executor=each)
    result = ep.run(random.key(0), 3, progress_bar=False)
    pids = [Path(path.with_suffix(".opened")).read_text().split() for path in paths]
    assert pids == [[str(pid)] for pid in workers.values()]
    np.testing.assert_allclose(result.params["auto_loc"], expected.params["auto_loc"], rtol=1e-4)
    os.kill(workers[list(workers)[1]], signal.SIGKILL)  # its part moves to another process
    state, _ = ep.update(result.state)
    np.testing.assert_allclose(state.total.shift, after.total.shift, rtol=1e-4)
    again = paths[1].with_suffix(".opened").read_text().split()
    assert len(again) == 2 and str(os.getpid()) not in again


def test_fits_are_tasks_with_the_same_numbers(client):
    """Of functions without a name, which Dask sends by value."""

    def model(x):
        z = numpyro.sample("z", dist.Normal())
        with numpyro.plate("N", len(x)):
            numpyro.sample("x", dist.Normal(z), obs=x)

    def make_svi():
        return SVI(model, AutoDelta(model), optax.sgd(0.1), Trace_ELBO())

    def exact(rng_key, model, args, kwargs):
        x = args[0]["x"]
        mean, sd = x.sum() / (1 + len(x)), (1 + len(x)) ** -0.5
        return {"z": mean + sd * random.normal(rng_key, (10,))}

    x, pool = np.array([0.5, -1.0, 2.0], np.float32), client.get_executor(pure=False)
    arguments = make_svi, random.key(0), 2, 1, x
    fits, expected = (
        restarts(*arguments, progress_bar=False, executor=executor) for executor in (pool, None)
    )
    for fit, here in zip(fits, expected, strict=True):
        np.testing.assert_array_equal(fit.params["z_auto_loc"], here.params["z_auto_loc"])
        assert random.key_data(fit.state.rng_key).tolist() == (
            random.key_data(here.state.rng_key).tolist()
        )
    sizes = {"num_simulations": 20, "num_samples": 10}
    there, here = (
        simulation_based_calibration(
            random.key(0), model, exact, x, executor=executor, **sizes
        ).ranks["z"]
        for executor in (pool, None)
    )
    np.testing.assert_array_equal(there, here)
