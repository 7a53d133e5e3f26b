"""Names of numbers: what ArviZ calls them, in each table, sentence and picture."""

import warnings

import arviz as az
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import pytest

from numpyro_ext._model.labels import Labels, coordinate_name_of, number_name
from numpyro_ext._model.read import model_info
from numpyro_ext.diagnostics import diagnose, plot_diagnosis, to_arviz
from numpyro_ext.diagnostics.full_data import shapes_of
from numpyro_ext.optim import find_centering, find_modes

COORDS = {"patient": ["P-3", "P-17"], "column": ["age", "sex", "dose"], "town": ["Leeds", "Bath"]}
DIMS = {"net/w": ["patient", "column"]}
SECOND = jnp.array([0.0, 1.0])


def model():
    """Two towns, one number of which has two modes, and a matrix in a site as of Flax."""
    with numpyro.plate("town", 2):
        numpyro.sample("b", dist.Normal(0, 1))
        modes = dist.Normal(jnp.stack([-4 * SECOND, 4 * SECOND], -1), 0.5)
        numpyro.sample("a", dist.MixtureSameFamily(dist.Categorical(probs=jnp.ones(2) / 2), modes))
    numpyro.sample("net/w", dist.Normal(0, 1).expand([2, 3]).to_event(2))
    numpyro.sample("one", dist.Normal(0, 1).expand([1]).to_event(1))
    numpyro.sample("tau", dist.Normal(0, 1))


def labels():
    return Labels.of_trace(shapes_of(model, (), {}))


@pytest.mark.slow
def test_numbers_are_called_as_by_arviz():
    mcmc = MCMC(NUTS(model), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(random.key(0))
    for coords, dims in (({}, {}), (COORDS, DIMS)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = to_arviz(mcmc, coords=coords, dims=dims)
            theirs = list(az.summary(tree, kind="stats").index)
        named = labels().named(coords, dims)
        ours = [
            named(number_name(site, shape, k))
            for site, shape in named.sizes.items()
            for k in range(int(np.prod(shape)))
        ]
        assert sorted(x.replace("/", ":") for x in ours) == sorted(theirs)


def test_a_sentence_keeps_what_is_not_a_number_of_a_site():
    named = labels().named({"net/w_dim_1": ["age", "sex", "dose"], "town": ["Leeds", "Bath"]}, None)
    assert named("a[1] and net/w[0, 2], tau") == "a[Bath] and net/w[0, dose], tau"
    assert labels().named({"x": [9, 1, 0]}, {"net/w": [None, "x"]})("net/w[1, 2]") == "net/w[1, 0]"
    # Unconstrained places, places that do not exist, and names that end in the name of a site.
    for text in ("net/w[3]", "a[2]", "beta[1]", "x.a[1]", "a[i]"):
        assert named(text) == text


@pytest.mark.parametrize(
    ("coords", "dims", "sentence"),
    [
        ({"town": ["Leeds"]}, None, "coords has 1 labels for 'town', but the dimensions"),
        ({"twon": ["Leeds", "Bath"]}, None, "coords has 2 labels for 'twon', but the dimensions"),
        (None, {"c": ["town"]}, r"dims names the site 'c'; the sites of the model are \['b', 'a'"),
        (None, {"b": ["town", "x"]}, r"dims has \['town', 'x'\] for 'b', which has the shape"),
        (None, {"b": "town"}, r"dims has 'town' for 'b', .* give a list of at most one name"),
        ({"town": "LB"}, None, "coords has no list of labels for 'town'"),
        (None, {"net/w": ["chain", "x"]}, "'chain' is the name of another axis"),
        (None, {"net/w": ["x", "x"]}, "'x' is the name of another axis; give each axis a name"),
        (None, {"b": ["x"], "one": ["x"]}, "dims gives the name 'x' to axes of 2 and of 1 numbers"),
    ],
)
def test_wrong_names_are_refused(coords, dims, sentence):
    with pytest.raises(ValueError, match=sentence):
        labels().named(coords, dims)


def effects():
    """Two towns, of which one has rows, with a narrow column of the other in a plate."""
    mean = numpyro.sample("mean", dist.Normal(0, 10))
    with numpyro.plate("town", 2):
        a = numpyro.sample("a", dist.Normal(mean, 1.0))
        numpyro.sample("y", dist.Normal(a, jnp.array([0.1, 3.0])), obs=SECOND)


@pytest.mark.slow
def test_the_table_and_the_picture_of_a_diagnosis_have_labels():
    svi = SVI(model, AutoNormal(model, init_scale=0.1), numpyro.optim.Adam(1e-3), Trace_ELBO())
    fit = svi.run(random.key(0), 20, progress_bar=False)
    with pytest.raises(ValueError, match="coords has 1 labels for 'town'"):
        diagnose(svi, fit, coords={"town": ["Leeds"]})
    plain = diagnose(svi, fit, num_samples=200)
    found = diagnose(svi, fit, num_samples=200, coords=COORDS, dims=DIMS)
    named = labels().named(COORDS, DIMS)
    assert [row.verdict for row in found.rows] == [named(row.verdict) for row in plain.rows]
    assert str(found) != str(plain)

    def marks(axes):
        return [t.get_text().replace("\n", " ") for t in axes["means"].get_yticklabels()]

    after = marks(plot_diagnosis(plain, COORDS, DIMS))
    assert after == marks(plot_diagnosis(found)) != marks(plot_diagnosis(plain))
    assert {"a[Leeds]", "net/w[P-17, dose]"} <= set(after)


def test_a_coordinate_without_a_number_of_its_own_has_no_label_of_one():
    def model():
        with numpyro.plate("town", 2):
            numpyro.sample("scale", dist.LogNormal())
            numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
        numpyro.sample("c", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("R", dist.LKJCholesky(3))

    trace = shapes_of(model, (), {})
    named = Labels.of_trace(trace).named({"town": ["Leeds", "Bath"], "p_dim_1": [*"abc"]}, None)
    info = model_info(trace)
    names = [named(coordinate_name_of(info, k)) for k in range(info.size)]
    of_p = [f"coordinate [{i}, {j}] of 'p' in unconstrained space" for i in (0, 1) for j in (0, 1)]
    of_R = [f"coordinate [{i}] of 'R' in unconstrained space" for i in range(3)]
    assert names == ["scale[Leeds]", "scale[Bath]", *of_p, "c[0]", "c[1]", *of_R]


@pytest.mark.slow
def test_modes_and_centerings_print_labels():
    with pytest.warns(UserWarning, match="different modes"):
        modes = find_modes(model, coords=COORDS, dims=DIMS)
    assert sorted(mode.place[:7] for mode in modes.modes) == ["a[Bath]", "a[Bath]"]
    assert "mode at a[Bath] = 4" in str(modes) and "mode at a[Bath] = -4" in str(modes)
    assert str(find_centering(effects, coords={"town": ["Leeds", "Bath"]})) == (
        "a[Bath]   0.10\na[Leeds]  0.99"
    )
    with pytest.raises(ValueError, match="coords has 1 labels for 'town'"):
        find_centering(effects, coords={"town": ["Leeds"]})


@pytest.mark.slow
def test_a_model_keeps_its_own_arguments_of_these_names():
    def own(dims=1):
        numpyro.sample("z", dist.Normal(jnp.arange(dims), 1.0).to_event(1))

    assert find_modes(own, dims=3).size == 3
