"""Chains and fits over several devices, in a process of their own; ``test_devices.py`` starts it
and reads what it saves.
"""

import sys

import jax
from jax import random
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import MCMC, SVI
import optax
import pytest

from numpyro_ext.data import HostArray
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import VRELBO
from tests.mcmc.models import linear, linear_data


def chain_keys(num_chains=2):
    # The same in every process, also where the keys of the suite are shifted.
    return random.split(random.wrap_key_data(np.zeros(2, np.uint32)), num_chains)


def draws(keys, data, sharding=None):
    kernel = SGHMC(linear, 0.01, friction=5.0, sharding=sharding, steps_per_sample=2)
    options = {"num_chains": len(keys), "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=2, num_samples=10, jit_model_args=True, **options)
    mcmc.run(keys, *data)
    return {site: np.asarray(x) for site, x in mcmc.get_samples(group_by_chain=True).items()}


def guide(x, y):
    loc = numpyro.param("loc", jnp.zeros(2))
    scale = numpyro.param("scale", 0.3, constraint=constraints.positive)
    numpyro.sample("w", dist.Normal(loc, scale).to_event(1))
    numpyro.sample("sigma", dist.LogNormal(numpyro.param("m", 0.0), scale))


def fit(data):
    """Ten steps of an objective, which are functions of data that another process may hold."""
    svi = SVI(linear, guide, optax.adam(0.05), VRELBO(1.0, 3))
    state = jax.jit(svi.init)(chain_keys()[0], *data)
    step, losses = jax.jit(svi.update), []
    for _ in range(10):
        state, loss = step(state, *data)
        losses.append(np.asarray(loss))
    params = {name: np.asarray(x) for name, x in svi.get_params(state).items()}
    return {"losses": np.stack(losses), **params}


def along(axis, **axes):
    """The sharding of a first axis over ``axis`` of the mesh with these axes."""
    types = (AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)
    return NamedSharding(mesh, PartitionSpec(axis))


def spread(sharding):
    """The data, of which each process holds the rows of its own devices."""

    def place(x):
        return jax.make_array_from_callback(x.shape, sharding, lambda rows: x[rows])

    return tuple(place(np.asarray(x)) for x in linear_data())


def one_of_two(address, rank):
    jax.distributed.initialize(address, 2, int(rank))
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 2, 1)
    sharding = along("data", data=2)
    data = spread(sharding)
    assert data[0].addressable_shards[0].data.shape[0] == data[0].shape[0] // 2
    with pytest.raises(ValueError, match="array of several processes, on which settings cannot"):
        SGHMC(linear, sharding=sharding).init(chain_keys(), 2, None, data)
    arrays = draws(chain_keys(), data, sharding)
    # Parts of unequal size: 15 and 25 rows.
    mine = slice(0, 15) if int(rank) == 0 else slice(15, None)
    data = tuple(HostArray(np.asarray(x)[mine], sharding=sharding) for x in linear_data())
    assert len(data[0]) == 40
    rows = draws(chain_keys(), data, sharding)
    return {"arrays": arrays, "rows on the host": rows, "fit": fit(data)}


def of_eight(devices):
    """Rows on the host that eight devices read, one eighth each."""
    sharding = along("data", data=8)
    assert jax.device_count() == int(devices) == 8
    data = tuple(HostArray(np.asarray(x), sharding=sharding) for x in linear_data())
    return {"rows on the host": draws(chain_keys(), data, sharding), "fit": fit(data)}


if __name__ == "__main__":
    path, *process = sys.argv[1:]
    runs = one_of_two(*process) if len(process) == 2 else of_eight(*process)
    found = {f"{name}/{site}": x for name, sites in runs.items() for site, x in sites.items()}
    np.savez(path, **found)
