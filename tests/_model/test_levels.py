"""A level that a factor does not have is refused by name, and so is one from the end."""

from functools import partial

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Trace_ELBO, init_to_uniform
import optax
import pytest

from numpyro_ext._model.checks import check_rows
from numpyro_ext.ep import EP
from numpyro_ext.guides import AutoRealNVPNormal
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.optim import find_modes
from numpyro_ext.particles import AutoParticles, ParVI, RegularizedSVGD, particle_step

N = 60
SHOP, WEEK = np.arange(N) % 5, np.arange(N) % 7


def model(shop, week, known=None, within=None):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("shops", 5):
        of_shop = numpyro.sample("of_shop", dist.Normal(mean, 1))
    with numpyro.plate("weeks", 7):
        of_week = numpyro.sample("of_week", dist.Normal(0, 1).expand([2]).to_event(1))
    if within is not None:
        with numpyro.plate("streets", len(within)):
            numpyro.sample("of_street", dist.Normal(of_shop[within], 1))
    with numpyro.plate("rows", N) as i:
        effect = of_shop[shop[i]] + of_week[week, 1]
        if known is not None:
            effect = jnp.where(known, effect, mean)
        numpyro.sample("y", dist.Normal(effect, 1), obs=jnp.zeros(N))


def with_levels(levels, *values):
    levels = np.array(levels)
    levels[3 : 3 + len(values)] = values
    return levels


def look(*args, **kwargs):
    check_rows(model, args, kwargs, init_to_uniform)


def test_all_levels_are_fine():
    look(SHOP, WEEK, within=np.arange(20) % 5)
    look(jnp.asarray(SHOP), jnp.asarray(WEEK))


@pytest.mark.parametrize(
    ("shop", "week", "within", "sentence"),
    [
        (
            with_levels(SHOP, 5, 9),
            WEEK,
            None,
            "2 of 60 .* number 9 of 'of_shop', .* 0 to 4",
        ),
        (SHOP, with_levels(WEEK, 7), None, "1 of 60 .* 'y' take number 7 of 'of_week', .* 0 to 6"),
        (
            with_levels(SHOP, -1),
            WEEK,
            None,
            "1 of 60 .* number -1 of 'of_shop', .* pandas",
        ),
        (with_levels(SHOP, -6), WEEK, None, "1 of 60 .* 'y' take number -6 of 'of_shop'"),
        (SHOP.astype(np.int8) + np.int8(1), WEEK, None, "12 of 60 .* number 5 of 'of_shop'"),
        (SHOP, WEEK, np.array([0, 1, 5]), "1 of 3 .* 'of_street' take number 5 of 'of_shop'"),
    ],
)
def test_a_level_beyond_is_refused_by_name(shop, week, within, sentence):
    with pytest.raises(ValueError, match=sentence):
        look(shop, week, within=within)


def test_a_density_of_effects_may_count_from_the_end():
    def ring():
        with numpyro.plate("places", 9):
            z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("step", dist.Normal(z[jnp.arange(9) - 1], 1).to_event(1))

    check_rows(ring, (), {}, init_to_uniform)


def effects(name, size):
    with numpyro.plate(f"{name}s", size):
        return numpyro.sample(name, dist.Normal(0, 1))


def rows(mean, weight=1.0):
    weights = jnp.where(np.arange(len(mean)) == 3, weight, 1.0)
    with numpyro.plate("rows", len(mean)), numpyro.handlers.scale(scale=weights):
        numpyro.sample("y", dist.Normal(mean, 1), obs=jnp.zeros(len(mean)))


MISSING = with_levels(SHOP, -1)


@pytest.mark.parametrize(
    "model",
    [
        lambda: rows(effects("season", 5)[SHOP - 1]),
        lambda: rows(effects("shop_or_rest", 6)[MISSING]),
        lambda: rows(jnp.append(effects("shop", 5), 0.0)[MISSING]),
    ],
    ids=["ring", "rest", "zero"],
)
def test_the_end_may_be_a_level_that_no_row_has_by_its_number(model):
    check_rows(model, (), {}, init_to_uniform)


def test_rows_of_weight_zero_are_left_out():
    def model(weight):
        rows(effects("shop", 5)[MISSING], weight=weight)

    check_rows(model, (0.0,), {}, init_to_uniform)
    with pytest.raises(ValueError, match=r"1 of 60 .* number -1 of 'shop'"):
        check_rows(model, (1.0,), {}, init_to_uniform)


def test_each_lookup_counts_by_itself():
    def model(beyond, week):
        shop, week = effects("shop", 5), effects("week", 7)[week]
        # A ring, and a masked level beyond.
        numpyro.sample("steps", dist.Normal(shop[jnp.arange(5) - 1], 1).to_event(1))
        rows(jnp.where(beyond < 5, shop[beyond], 0.0) + week)

    check_rows(model, (with_levels(SHOP, 5), WEEK), {}, init_to_uniform)
    with pytest.raises(ValueError, match=r"2 of 60 .* number 8 of 'week'"):
        check_rows(model, (with_levels(SHOP, 5), with_levels(WEEK, 7, 8)), {}, init_to_uniform)


INSIDE = {
    "vmap": lambda e, g: jax.vmap(lambda i: e[i])(g),
    "vmap over effects too": lambda e, g: jax.vmap(lambda e, i: e[i])(jnp.tile(e, (N, 1)), g),
    "scan": lambda e, g: lax.scan(lambda sum_of, i: (sum_of + e[i], e[i]), 0.0, g)[1],
    "map within scan": lambda e, g: lax.scan(
        lambda _, i: (None, lax.map(lambda j: e[j], i[None])[0]), None, g
    )[1],
    "cond": lambda e, g: lax.cond(jnp.max(g) > 2, lambda: e[g], lambda: jnp.zeros(N)),
    "checkpoint": lambda e, g: jax.checkpoint(lambda e: e[g])(e),
}


@pytest.mark.parametrize("lookup", INSIDE)
def test_levels_inside_of_other_programs_are_refused_too(lookup):
    def model(shop):
        rows(INSIDE[lookup](effects("shop", 5), shop))

    check_rows(model, (jnp.asarray(SHOP),), {}, init_to_uniform)
    with pytest.raises(ValueError, match=r"2 of 60 .* number 7 of 'shop'"):
        check_rows(model, (jnp.asarray(with_levels(SHOP, 7, 6)),), {}, init_to_uniform)


UNHARMED = {
    "masked": lambda e, g: lax.scan(lambda _, i: (None, jnp.where(i < 5, e[i], 0.0)), None, g)[1],
    "not chosen": lambda e, g: lax.cond(jnp.max(g) < 2, lambda: e[g], lambda: jnp.zeros(N)),
    "clipped": lambda e, g: jax.vmap(lambda i: jnp.take(e, i, mode="clip"))(g),
}


@pytest.mark.parametrize("lookup", UNHARMED)
def test_levels_inside_of_other_programs_that_move_nothing_pass(lookup):
    def model(shop):
        rows(UNHARMED[lookup](effects("shop", 5), shop))

    check_rows(model, (jnp.asarray(with_levels(SHOP, 7)),), {}, init_to_uniform)


def test_a_level_from_the_end_is_refused_where_a_loss_is_traced():
    def traced(x):
        look(MISSING, WEEK)
        return x

    with pytest.raises(ValueError, match="take number -1 of 'of_shop'"):
        jax.jit(traced)(0.0)


def test_what_is_read_keeps_its_type():
    def model():
        shop = effects("shop", 5)
        rows(jnp.where((shop > 0)[MISSING] & (MISSING >= 0), 1.0, 2.0))
        numpyro.factor("count", jnp.round(shop).astype(int)[MISSING] * (MISSING >= 0))

    check_rows(model, (), {}, init_to_uniform)


def test_levels_of_masked_rows_may_be_any():
    for shop in (with_levels(SHOP, 5), with_levels(SHOP, -1)):
        look(shop, WEEK, known=(shop >= 0) & (shop < 5))


def _svi(guide, optim, loss):
    return lambda *args: SVI(model, guide(model), optim, loss).init(random.key(0), *args)


def _parvi(init_params=None):
    num = 40
    mcmc = MCMC(
        ParVI(model), num_warmup=1, num_samples=1, num_chains=num, chain_method="vectorized"
    )
    keys = {"mean": (num,), "of_shop": (num, 5), "of_week": (num, 7, 2)}
    start = {name: random.normal(random.key(0), shape) for name, shape in keys.items()}
    return lambda *args: mcmc.run(random.key(0), *args, init_params=init_params and start)


@pytest.mark.parametrize(
    "fit",
    [
        lambda *args: find_modes(model, *args),
        lambda *args: MCMC(SGHMC(model), num_warmup=1, num_samples=1).run(random.key(0), *args),
        lambda *args: EP(model).run(random.key(0), 1, *args, progress_bar=False),
        _svi(AutoRealNVPNormal, optax.adam(0.01), Trace_ELBO()),
        _svi(AutoParticles, particle_step(10), RegularizedSVGD()),
        _svi(partial(AutoParticles, init_from=None), particle_step(10), RegularizedSVGD()),
        _parvi(),
        _parvi(init_params=True),
    ],
    ids=[
        *("find_modes", "SGHMC", "EP", "guide", "particles", "particles without a search"),
        *("ParVI", "ParVI from a start"),
    ],
)
def test_fits_refuse_it(fit):
    with pytest.raises(ValueError, match="take number 5 of 'of_shop'"):
        fit(with_levels(SHOP, 5), WEEK)
