"""A program that was compiled for a model knows what the model reads from outside."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext._model.same import fingerprint
from numpyro_ext.ep import EP

Y = np.array([1.0, 2.0, 1.5], np.float32)  # of float64, JAX itself keeps what it has converted


class Held:
    """A model of data and of a scale that are no arguments."""

    def __init__(self, y, scale):
        self.y, self.scale = y, scale

    def __call__(self):
        theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        with numpyro.plate("rows", len(self.y)) as idx:
            numpyro.sample("y", dist.Normal(theta, self.scale), obs=jnp.asarray(self.y)[idx])


def fit(ep, *args):
    params = ep.run(random.key(0), 20, *args, progress_bar=False).params
    return params["auto_loc"][0], params["auto_scale_tril"][0, 0]


def exact(y, scale):
    precision = 0.01 + len(y) / scale**2
    return np.sum(y) / scale**2 / precision, precision**-0.5


def close(computed, expected):
    np.testing.assert_allclose(computed, expected, rtol=1e-4)


@pytest.mark.slow
def test_a_model_reads_from_outside_what_is_there_at_the_call():
    """Other data, in the same array and in another, another scale, another number of rows; of a
    new engine and of the same one. A state that it made before is refused."""
    model = Held(Y.copy(), 1.0)
    ep = EP(model, schedule="parallel")
    close(fit(ep), exact(Y, 1.0))
    state = ep.init(random.key(0))
    model.y += 5
    close(fit(EP(model, schedule="parallel")), exact(Y + 5, 1.0))
    model.y = model.y + 5
    with pytest.raises(ValueError, match="what it reads from outside, differ from init"):
        ep.update(state)
    model.scale = 2.0
    close(fit(ep), exact(Y + 10, 2.0))
    model.y = np.arange(5, dtype=np.float32)
    close(fit(ep), exact(np.arange(5, dtype=np.float32), 2.0))


@pytest.mark.slow
def test_an_update_traces_the_model_again_only_where_what_it_names_has_changed(monkeypatch):
    """A function among the arguments counts too, with what it names."""
    traced, noise, shift = [], [1.0], [0.0]

    def model(y, moved):
        theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        with numpyro.plate("rows", len(y)) as idx:
            numpyro.sample("y", dist.Normal(moved(theta), noise[0]), obs=jnp.asarray(y)[idx])

    def moved(theta):
        return theta + shift[0]

    def counted(*args):
        traced.append(args)
        return fingerprint(*args)

    monkeypatch.setattr("numpyro_ext.ep.reading.fingerprint", counted)
    ep = EP(model, schedule="parallel")
    state, _ = ep.update(ep.init(random.key(0), Y, moved), Y, moved)
    ep.update(state, Y.copy(), moved)
    assert len(traced) == 1
    for read in noise, shift:
        before, read[0] = read[0], 2.0
        with pytest.raises(ValueError, match="what it reads from outside, differ from init"):
            ep.update(state, Y, moved)
        read[0] = before


def test_a_traced_value_from_outside_is_refused():
    ep = EP(Held(Y, 1.0), schedule="parallel")
    state = ep.init(random.key(0))

    def evidence(scale):
        ep.model.scale = scale
        return ep.log_evidence(state)

    with pytest.raises(ValueError, match="pass it as an argument of the model"):
        jax.grad(evidence)(2.0)


@pytest.mark.slow
def test_a_model_calls_the_function_of_the_host_that_is_there_at_the_call():
    """Rows that are read on the host, by a function that each trace makes anew."""
    held = [Y]

    def model():
        theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        rows = held[0]
        with numpyro.plate("rows", 3) as idx:
            like = jax.ShapeDtypeStruct(idx.shape, np.float32)
            y = jax.pure_callback(lambda i: rows[i], like, idx, vmap_method="expand_dims")
            numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    ep = EP(model, schedule="parallel")
    close(fit(ep), exact(Y, 1.0))
    state = ep.init(random.key(0))
    ep.update(state)
    held[0] = Y + 5
    with pytest.raises(ValueError, match="what it reads from outside, differ from init"):
        ep.update(state)
    for engine in (ep, EP(model, schedule="parallel")):
        close(fit(engine), exact(Y + 5, 1.0))
