"""The sentence for each common mistake in a program or its data."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import init_to_uniform
import pytest

from numpyro_ext._model.checks import (
    check_observed,
    check_rows,
    check_supports,
    valid_data,
)
from numpyro_ext._model.implicit import Implicit
from numpyro_ext._model.read import shape_trace

Y = jnp.arange(10.0)


def trace(fn, *args):
    return shape_trace(handlers.seed(fn, random.key(0)), args)


def one_site(fn):
    return trace(lambda: numpyro.sample("z", fn))


def normal(*shape):
    return dist.Normal(np.zeros(shape), 1.0).to_event(len(shape))


def on(support, base):
    return dist.TransformedDistribution(base, dist.biject_to(support))


POSITIVE = dist.HalfNormal(1.0)
# One program in place of many, while tests are collected.
SHARE, CHOLESKY = jax.jit(lambda: (dist.Dirichlet(np.ones(3)), dist.LKJCholesky(3)))()
DENSE = dist.MultivariateNormal(np.zeros(3), scale_tril=np.eye(3))
ORDERED = dist.TransformedDistribution(normal(3), dist.transforms.OrderedTransform())


@pytest.mark.parametrize(
    ("model", "guide", "word"),
    [
        (POSITIVE, normal(), "Positive"),
        (dist.Beta(1.0, 1.0), normal(), "UnitInterval"),
        (POSITIVE.expand([3]).to_event(1), normal(3), "Positive"),
        (POSITIVE.expand([3]).to_event(1), DENSE, ""),
        (SHARE, normal(3), "Simplex"),
        (CHOLESKY, normal(3, 3), "CorrCholesky"),
        (ORDERED, normal(3), "OrderedVector"),
    ],
)
def test_real_numbers_for_a_constrained_site_are_refused(model, guide, word):
    with pytest.raises(ValueError, match=f"site 'z' has the support {word}.*from .*AutoNormal"):
        check_supports(one_site(model), one_site(guide))


@pytest.mark.parametrize(
    ("model", "guide"),
    [
        (POSITIVE, dist.LogNormal(0.0, 1.0)),
        (POSITIVE, on(constraints.positive, normal())),
        (POSITIVE, dist.Delta(1.0)),
        (POSITIVE, dist.Delta(jnp.ones(3), event_dim=1)),
        (POSITIVE, Implicit(jnp.array(1.0))),
        (SHARE, on(constraints.simplex, normal(2))),
        (CHOLESKY, on(constraints.corr_cholesky, normal(3))),
        (normal(3), DENSE),
        (dist.HalfNormal(1.0).mask(False), normal()),
        (dist.ZeroSumNormal(1.0, (3,)), normal(3)),
    ],
)
def test_other_pairs_of_supports_pass(model, guide):
    check_supports(one_site(model), one_site(guide))


def model(y, size=10, batch=None, *, scan=None):
    with numpyro.plate("n", size, subsample_size=batch):
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            (Y, 8),
            r"'y' have shape \(10,\).* shape \(8,\) in the plate 'n' of 8 rows; give the plate",
        ),
        ((Y, 10, 4), r"\(4,\) in the plate 'n' of 4 of 10 rows; .*data\[idx\]"),
        ((Y[:, None],), r"shape \(10, 1\), .*shape \(10,\), .*drop the axis of length 1"),
    ],
)
def test_data_that_do_not_fit_their_plate_are_named(args, words):
    with pytest.raises(ValueError, match=words):
        check_observed(trace(model, *args))
    with pytest.raises(ValueError, match=words):
        trace(valid_data(model), *args)


def test_data_that_do_not_fit_their_distribution_are_named():
    fn = dist.Normal(jnp.zeros(8), 1.0)
    with pytest.raises(ValueError, match=r"'y' have shape \(10,\).*\(8,\); give both the same"):
        check_observed(trace(lambda: numpyro.sample("y", fn, obs=Y)))


def fitting():
    numpyro.sample("scalar", normal(), obs=1.5)
    numpyro.sample("no plate", normal(), obs=Y)
    numpyro.sample("event", normal(10).expand([3]), obs=Y)
    with numpyro.plate("n", 10, subsample_size=4) as idx:
        numpyro.sample("batch", normal(), obs=Y[idx])
        numpyro.sample("one for all", normal(), obs=1.5)
        numpyro.sample("vector", normal(3), obs=jnp.ones((4, 3)))
        numpyro.factor("factor", jnp.zeros(4))
    with numpyro.plate("a", 3, dim=-2), numpyro.plate("b", 10, dim=-1):
        numpyro.sample("column", normal(), obs=jnp.ones((3, 1)))
        numpyro.sample("full", normal(), obs=jnp.ones((3, 10)))
    with numpyro.plate("c", 10):
        numpyro.sample("more", normal(), obs=jnp.ones((3, 10)))
        numpyro.sample("class", dist.Categorical(jnp.ones(3) / 3), obs=jnp.zeros(10, int))


def test_data_that_fit_pass():
    check_observed(trace(fitting))
    trace(valid_data(fitting))


ROWS, COLUMN = jnp.ones(80), jnp.ones((80, 1))


@pytest.mark.parametrize("plate", [True, False])
@pytest.mark.parametrize(
    ("x", "y", "fits"),
    [
        (ROWS, ROWS, True),
        (ROWS, 1.0, True),
        (1.0, ROWS, True),
        (COLUMN, ROWS, False),
        (ROWS, COLUMN, False),
        (COLUMN, COLUMN, None),
    ],
)
def test_a_column_is_no_vector(plate, x, y, fits):
    """Eighty rows have a density of eighty numbers, and not of 80 x 80."""

    def line(x, y):
        fn = dist.Normal(0.5 * x)
        if not plate:
            return numpyro.sample("y", fn, obs=y)
        with numpyro.plate("rows", 80):
            return numpyro.sample("y", fn, obs=y)

    # Without a plate two columns belong together.
    if fits or (fits is None and not plate):
        site = handlers.trace(handlers.seed(line, 0)).get_trace(x, y)["y"]
        check_observed({"y": site})
        assert np.size(site["fn"].log_prob(site["value"])) == 80
    else:
        for read in (
            lambda: check_observed(trace(line, x, y)),
            lambda: trace(valid_data(line), x, y),
        ):
            with pytest.raises(
                ValueError, match=r"count 80 times, .*of shape \(80, 1\), as by jnp.sq"
            ):
                read()


class Missing(dist.Normal):
    """A distribution of a user that knows what to do with NaN."""


def test_missing_data_are_named_unless_the_model_may_take_care_of_them():
    missing = Y.at[jnp.array([2, 5])].set(jnp.nan)

    def no_mask(y):
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    for data in (missing, np.asarray(missing)):
        with pytest.raises(
            ValueError, match=r"observed site 'y' have 2 NaN among 10 numbers.*mask"
        ):
            check_observed(trace(no_mask, data))

    def own(y):
        numpyro.sample("y", Missing(0.0, 1.0), obs=y)

    check_observed(trace(own, missing))
    check_observed(trace(handlers.mask(no_mask, mask=~jnp.isnan(missing)), missing))
    # Under jit the data are traced, and nothing is looked at.
    jax.eval_shape(lambda y: check_observed(trace(no_mask, y)), missing)


def rate(fn, y, batch=None, seen=None):
    r = numpyro.sample("r", dist.Gamma(2.0, 2.0))
    with numpyro.plate("n", len(y), subsample_size=batch) as idx:
        of_rows = fn(r) if seen is None else fn(r).mask(seen[idx])
        numpyro.sample("y", of_rows, obs=y[idx])


def check(fn, y, seen=None):
    check_rows(rate, (fn, jnp.asarray(y), 2, seen), {}, init_to_uniform)


COUNTS = {
    "poisson": dist.Poisson,
    "negative binomial": lambda r: dist.NegativeBinomial2(r, 2.0),
    "binomial": lambda r: dist.Binomial(4, logits=r),
    "bernoulli": lambda r: dist.Bernoulli(logits=r),
    "categorical": lambda r: dist.Categorical(logits=jnp.stack([r, 0 * r])),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_that_has_no_density_is_named_also_outside_of_the_minibatch(name):
    y = [0, 1, 1, 0, 0, 1]
    check(COUNTS[name], y)
    with pytest.raises(ValueError, match=r"site 'y' has no density at 1 of its 6 values.* as -1,"):
        check(COUNTS[name], [*y[:5], -1])
    if name in ("binomial", "bernoulli", "categorical"):
        with pytest.raises(ValueError, match="such as 5, which is outside of its support"):
            check(COUNTS[name], [*y[:5], 5])


@pytest.mark.parametrize(
    ("fn", "bad"),
    [
        (dist.Exponential, -1.0),
        (lambda r: dist.Beta(1.5 + r, 1.0), 1.5),
        (lambda r: dist.Uniform(0.0, 1.0 + 0 * r), 1.5),
        (lambda r: dist.Pareto(0.1, r), 0.05),
        (lambda r: dist.Exponential(jnp.stack([r, r])).to_event(1), -1.0),
    ],
)
def test_a_number_that_has_no_density_is_named(fn, bad):
    y = jnp.full((4, *fn(jnp.array(1.0)).event_shape), 0.4)
    check(fn, y)
    with pytest.raises(ValueError, match=f"has no density at 1 of its {y.size} values.* as {bad}"):
        check(fn, y.at[3 if y.ndim == 1 else (3, 1)].set(bad))


@pytest.mark.parametrize(
    ("fn", "y", "seen"),
    [
        (dist.Poisson, [1.0, 2.5, 3.0], None),
        (dist.Exponential, [0.0, 1.0, 2.0], None),
        (lambda r: dist.Bernoulli(logits=r), [0.2, 0.9, 1.0], None),
        (lambda r: dist.Uniform(0.0, r), [0.1, 0.5, 9.0], None),
        (lambda r: dist.VonMises(0.0, r), [0.1, 6.0, -5.0], None),
        (dist.Poisson, [1, -1, 3], jnp.array([True, False, True])),
        (lambda r: dist.Dirichlet(jnp.ones(2) + r), [[0.3, 0.7], [0.5, 0.5001]], None),
        (lambda r: dist.Normal(r, 1.0), [-1.0, 0.0, 1.0], None),
    ],
    ids=["halves", "zeros", "soft labels", "latent bound", "angles", "mask", "rounding", "real"],
)
def test_numbers_that_have_a_density_all_the_same_pass(fn, y, seen):
    check(fn, y, seen)


def test_data_that_are_traced_are_not_looked_at():
    def of(y):
        check_rows(rate, (dist.Poisson, y, 2), {}, init_to_uniform)
        held = lambda: rate(dist.Poisson, y)  # noqa: E731
        check_rows(held, (), {}, init_to_uniform)
        return y

    jax.jit(of)(jnp.array([1, -1]))
    held = lambda: rate(dist.Poisson, jnp.array([1, -1]))  # noqa: E731
    with pytest.raises(ValueError, match="no density at 1 of its 2 values"):
        check_rows(held, (), {}, init_to_uniform)
