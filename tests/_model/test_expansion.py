"""The models and centers of which there is no expansion, and the sentences that say so."""

from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.objectives import taylor_proxy

COUNTS = jnp.array([2.0, 0.0, 7.0, 1.0, 1.0, 4.0])


def with_rows(build):
    """A model whose rows are what ``build(i)`` says."""

    def model(batch=2):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", 6, subsample_size=batch) as i:
            build(w, i)

    return model


def plain_row(w, i):
    numpyro.sample("y", dist.Normal(w, 1.0), obs=COUNTS[i])


def local_site(w, i):
    z = numpyro.sample("z", dist.Normal(w, 1.0))
    numpyro.sample("y", dist.Normal(z, 1.0), obs=COUNTS[i])


def model_param(w, i):
    numpyro.sample("y", dist.Normal(w * numpyro.param("b", 1.0), 1.0), obs=COUNTS[i])


def two_plates(w, i):
    with numpyro.plate("columns", 4, subsample_size=2, dim=-2) as j:
        numpyro.sample("y", dist.Normal(w, 1.0), obs=jnp.zeros((4, 99))[j[:, None], i])


def noisy_row(w, i):
    noise = random.normal(numpyro.prng_key(), ())
    numpyro.sample("y", dist.Normal(w + noise, 1.0), obs=COUNTS[i])


def discrete_site(w, i):
    numpyro.sample("k", dist.Bernoulli(0.3))
    plain_row(w, i)


def no_data(w, i):
    numpyro.deterministic("y", w + COUNTS[i])


@pytest.mark.parametrize(
    ("row", "batch", "sentence"),
    [
        (plain_row, None, r"minibatch on these arguments are \[\]"),
        (local_site, 2, r"latent site 'z' lies in the plate 'rows'.*NestedVRELBO or BBAlphaELBO"),
        (model_param, 2, r"param or mutable site 'b'.*a prior \(numpyro.sample\)"),
        (two_plates, 2, r"minibatch on these arguments are \['columns', 'rows'\]"),
        (noisy_row, 2, r"numpyro.prng_key outside its sample sites.*leave it out"),
        (discrete_site, 2, r"latent site 'k' is discrete.*sum it out"),
        (no_data, 2, r"no observed site lies in the plate 'rows'"),
    ],
)
def test_models_without_a_proxy_are_refused(row, batch, sentence):
    with pytest.raises(ValueError, match=sentence):
        taylor_proxy(with_rows(row), batch, center={"w": 0.0})


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"center": {"w": jnp.nan}}, ValueError, "not finite at the center"),
        ({"center": {"v": 1.0}}, ValueError, r"center has \['v'\].*\['w'\]"),
        ({"center": 3.0}, ValueError, r"center has float; it must be a dict with the sites"),
        ({"degree": 3}, ValueError, "degree is 3; it must be 1 or 2"),
    ],
)
def test_bad_arguments_are_refused(options, error, sentence):
    with pytest.raises(error, match=sentence):
        taylor_proxy(with_rows(plain_row), 2, **options)


def test_many_dimensions_take_degree_1():
    def model(batch=2):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([513]).to_event(1))
        with numpyro.plate("rows", 6, subsample_size=batch) as i:
            numpyro.sample("y", dist.Normal(w.mean(), 1.0), obs=COUNTS[i])

    proxy = taylor_proxy(model, center={"w": jnp.zeros(513)})
    assert proxy.hessian is None
