"""What the densities of a guide's sites add up to is decided by its program, whatever it draws."""

from jax import random
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

from numpyro_ext._model.implicit import Implicit
from numpyro_ext.diagnostics._evaluate import prototype
from numpyro_ext.diagnostics._fit import fit_of
from numpyro_ext.guides import AutoAuxiliary, AutoHVI, AutoRealNVPNormal, AutoSemiImplicit


def model():
    numpyro.sample("b", dist.Normal())
    numpyro.sample("a", dist.HalfNormal())


def peaked():
    numpyro.sample("p", dist.Dirichlet(jnp.full(4, 0.1)))


def zero_sum():
    numpyro.sample("z", dist.ZeroSumNormal(1.0, event_shape=(4,)))


def only_local(batch=2):
    with numpyro.plate("N", 3, subsample_size=batch):
        numpyro.sample("z", dist.Normal())


def look(model, guide, key=0, **params):
    svi = SVI(model, guide, numpyro.optim.Adam(0.1), Trace_ELBO())
    sites = numpyro.handlers.trace(numpyro.handlers.seed(guide, 0)).get_trace()
    params = {n: x["value"] for n, x in sites.items() if x["type"] == "param"} | params
    return prototype(fit_of(svi, params, (), None), random.key(key))


def noise(shape=(), scale=1.0):
    return numpyro.sample("e", dist.Normal(0, scale).expand(shape), infer={"is_auxiliary": True})


def drawn():
    numpyro.sample("b", dist.Normal())
    numpyro.sample("a", dist.HalfNormal())


def mixture():
    drawn()
    noise()


def by_hand():
    """What AutoContinuous does, with the site 'a' first."""
    e = noise((2,))
    numpyro.sample("a", dist.Delta(jnp.exp(e[0]), log_density=-e[0]))
    numpyro.sample("b", dist.Delta(e[1] + 0.3))


def scaled(declared):
    def guide():
        s, e = numpyro.param("s", 1.0), noise((2,))
        numpyro.sample("b", dist.Delta(s * e[0], -jnp.log(s) if declared else 0.0))
        numpyro.sample("a", dist.Delta(jnp.exp(e[1]), log_density=-e[1]))

    return guide


def of_one_coordinate():
    e = noise()
    numpyro.sample("b", dist.Delta(e))
    numpyro.sample("a", dist.Delta(jnp.exp(e), log_density=-e))


def without_jacobian():
    e = noise((2,))
    numpyro.sample("b", dist.Delta(e[0]))
    numpyro.sample("a", dist.Delta(jnp.exp(e[1])))


def nearly_a_point():
    drawn = noise((2,), 1e-4)
    numpyro.sample("b", dist.Delta(5 * drawn[0]))
    numpyro.sample("a", dist.Delta(jnp.exp(drawn[1]), log_density=-drawn[1]))


def with_a_kink():
    """The Jacobian is 1 at half of the draws and 0 at the others."""
    e = noise((2,))
    numpyro.sample("b", dist.Delta(jnp.maximum(e[0], 0.0)))
    numpyro.sample("a", dist.Delta(jnp.exp(e[1]), log_density=-e[1]))


def implicit():
    numpyro.sample("b", Implicit(noise()))
    numpyro.sample("a", dist.HalfNormal())


def switched_off():
    keep = numpyro.sample("keep", dist.Bernoulli(0.5), infer={"is_auxiliary": True})
    numpyro.sample("b", dist.Delta(keep * numpyro.param("loc", 0.3)))
    numpyro.sample("a", dist.HalfNormal())


def with_a_factor():
    """An extended space: the factor is the density of the way back."""
    e = noise((3,))
    numpyro.sample("b", dist.Delta(e[0] + e[1] ** 3))
    numpyro.sample("a", dist.Delta(jnp.exp(e[2]), log_density=-e[2]))
    numpyro.factor("back", -dist.Normal().log_prob(e[1]))


@pytest.mark.parametrize(
    ("guide", "expected"),
    [
        (drawn, "exact"),
        (by_hand, "exact"),
        (scaled(True), "exact"),
        (mixture, "bound"),
        (with_a_factor, "bound"),
        (scaled(False), "none"),
        (of_one_coordinate, "none"),
        (without_jacobian, "none"),
        (nearly_a_point, "none"),
        (implicit, "none"),
        (switched_off, "none"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_guide_by_hand(guide, expected):
    assert look(model, guide, s=jnp.array(1.0), loc=jnp.array(0.3)).density == expected


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
        (model, AutoRealNVPNormal(model, num_flows=1, hidden_dims=(2,), init_from=None), "exact"),
        (zero_sum, AutoDiagonalNormal(zero_sum), "exact"),
        (model, in_parts(AutoNormal), "exact"),
        (model, in_parts(AutoDelta), "none"),
        (model, AutoDelta(model), "none"),
        (model, AutoDAIS(model, K=1), "bound"),
        (model, AutoAuxiliary(model, hidden_dims=(2,), init_from=None), "bound"),
        (model, AutoHVI(model, hidden_dims=(2,), init_from=None), "bound"),
        (model, AutoSemiImplicit(model, hidden_dims=(2,), init_from=None), "none"),
        (only_local, AutoSemiDAIS(only_local, only_local, K=1), "bound"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_an_automatic_guide(model, guide, expected):
    found = look(model, guide)
    assert found.density == expected
    if model is only_local:  # AutoSemiDAIS fixes the size of its minibatch, but is given all rows
        assert found.trace["z"]["value"].shape == (3,)


@pytest.mark.slow
def test_a_draw_does_not_decide():
    """Wide draws of a Dirichlet leave float32 on the way back to unconstrained space."""
    wide = AutoDiagonalNormal(peaked, init_scale=5.0)
    for key in range(4):
        assert look(peaked, wide, key).density == "exact"
        assert look(model, with_a_kink, key).density == "none"
