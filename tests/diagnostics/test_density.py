"""What the densities of a guide's sites add up to is decided by what it declares and draws."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import block
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoDAIS,
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoNormal,
    AutoSemiDAIS,
)
import pytest

from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext.diagnostics import diagnose, pareto_khat
from numpyro_ext.diagnostics._fit_of import fit_of
from numpyro_ext.guides import AutoAuxiliary, AutoHVI, AutoSemiImplicit


def model():
    numpyro.sample("b", dist.Normal())
    numpyro.sample("a", dist.HalfNormal())


def zero_sum():
    numpyro.sample("z", dist.ZeroSumNormal(1.0, event_shape=(4,)))


def only_local(batch=2):
    with numpyro.plate("N", 3, subsample_size=batch):
        numpyro.sample("z", dist.Normal())


def look(model, guide):
    svi = SVI(model, guide, numpyro.optim.Adam(0.1), Trace_ELBO())
    sites = numpyro.handlers.trace(numpyro.handlers.seed(guide, 0)).get_trace()
    params = {n: x["value"] for n, x in sites.items() if x["type"] == "param"}
    return fit_of(svi, params, ()).proto


def noise(shape=()):
    return numpyro.sample("e", dist.Normal().expand(shape), infer={"is_auxiliary": True})


def drawn():
    numpyro.sample("b", dist.Normal())
    numpyro.sample("a", dist.HalfNormal())


def mixture():
    drawn()
    noise()


def by_hand(declared=True):
    """What AutoContinuous does, with the site 'a' first."""

    def guide():
        e, infer = noise((2,)), {"states_jacobian": declared}
        numpyro.sample("a", dist.Delta(jnp.exp(e[0]), log_density=-e[0]), infer=infer)
        numpyro.sample("b", dist.Delta(e[1] + 0.3), infer=infer)

    return guide


def of_one_coordinate():
    e = noise()
    numpyro.sample("b", dist.Delta(e), infer={"states_jacobian": True})
    numpyro.sample("a", dist.Delta(jnp.exp(e), log_density=-e), infer={"states_jacobian": True})


def points():
    numpyro.sample("b", dist.Delta(0.3), infer={"states_jacobian": True})
    numpyro.sample("a", dist.HalfNormal())


def implicit():
    numpyro.sample("b", Implicit(noise()))
    numpyro.sample("a", dist.HalfNormal())


def of_a_category():
    """The density of both, of the draws and of the category."""
    k = numpyro.sample("k", dist.Bernoulli(0.5), infer={"is_auxiliary": True})
    numpyro.sample("b", dist.Delta(noise() + k), infer={"states_jacobian": True})
    numpyro.sample("a", dist.HalfNormal())


def with_a_factor():
    """An extended space: the factor is the density of the way back."""
    e, infer = noise((3,)), {"states_jacobian": True}
    numpyro.sample("b", dist.Delta(e[0] + e[1] ** 3), infer=infer)
    numpyro.sample("a", dist.Delta(jnp.exp(e[2]), log_density=-e[2]), infer=infer)
    numpyro.factor("back", -dist.Normal().log_prob(e[1]))


@pytest.mark.parametrize(
    ("guide", "expected"),
    [
        (drawn, "exact"),
        (by_hand(), "exact"),
        (mixture, "bound"),
        (with_a_factor, "bound"),
        (of_a_category, "bound"),
        (by_hand(declared=False), "none"),
        (of_one_coordinate, "none"),
        (points, "none"),
        (implicit, "none"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_guide_by_hand(guide, expected):
    assert look(model, guide).density == expected


def test_a_delta_of_which_nobody_says_that_it_states_its_jacobian_is_asked_for_that():
    guide = by_hand(declared=False)
    assert look(model, guide).undeclared == ["a", "b"]
    svi = SVI(model, guide, numpyro.optim.Adam(0.1), Trace_ELBO())
    with pytest.raises(IntractableDensityError, match=r"of the Delta 'a' is minus .* by infer="):
        pareto_khat(svi, {}, model_args=())
    lines = diagnose(svi, {}, model_args=(), num_samples=30, num_moves=0).rows
    assert any("states_jacobian" in row.verdict for row in lines if row.quantity == "k-hat")


def part(guide, hide):
    return guide(block(model, hide=[hide]), prefix=guide.__name__)


def in_parts(second):
    guide = AutoGuideList(model)
    guide.append(part(AutoDiagonalNormal, "a"))
    guide.append(part(second, "b"))
    return guide


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "guide", "expected"),
    [
        (model, AutoNormal(model), "exact"),
        (model, AutoDiagonalNormal(model), "exact"),
        (zero_sum, AutoDiagonalNormal(zero_sum), "exact"),
        (model, in_parts(AutoNormal), "exact"),
        (model, in_parts(AutoDelta), "none"),
        (model, AutoDelta(model), "none"),
        (model, AutoDAIS(model, K=1), "bound"),
        (model, AutoAuxiliary(model, hidden_dims=(2,), init_from=None), "bound"),
        pytest.param(
            model,
            AutoHVI(model, hidden_dims=(2,), init_from=None),
            "bound",
            marks=pytest.mark.nightly,
        ),
        (model, AutoSemiImplicit(model, hidden_dims=(2,), init_from=None), "none"),
        pytest.param(
            only_local,
            AutoSemiDAIS(only_local, only_local, K=1),
            "bound",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_an_automatic_guide(model, guide, expected):
    found = look(model, guide)
    assert found.density == expected
    if model is only_local:  # AutoSemiDAIS fixes the size of its minibatch, but is given all rows
        assert found.trace["z"]["value"].shape == (3,)
