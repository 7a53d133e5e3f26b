"""What a newcomer calls: a table, or one sentence that says what to call instead."""

import functools

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import pytest

from numpyro_ext.diagnostics import (
    diagnose,
    to_arviz,
)
from numpyro_ext.diagnostics.comparison import SD
from numpyro_ext.guides import Implicit

N = 100
DESIGN = np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)
Y = DESIGN @ np.array([1.0, -2.0], np.float32) + np.sin(np.arange(N), dtype=np.float32)


def regression(x, y=None, batch=None):
    b = numpyro.sample("b", dist.Normal().expand([2]).to_event(1))
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        rows = slice(None) if batch is None else i
        numpyro.sample("y", dist.Normal(x[rows] @ b), obs=None if y is None else y[rows])


SVI_OF = SVI(regression, AutoNormal(regression), numpyro.optim.Adam(0.05), Trace_ELBO())


@functools.cache
def fitted():
    return SVI_OF.run(random.key(0), 300, jnp.asarray(DESIGN), jnp.asarray(Y), progress_bar=False)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda r: diagnose(r), TypeError, "must be an SVI or an engine with result="),
        (lambda r: diagnose(SVI_OF), ValueError, "does not keep its parameters: pass result="),
        (
            lambda r: diagnose(MCMC(NUTS(regression), num_warmup=1, num_samples=1)),
            ValueError,
            "run",
        ),
        (lambda r: diagnose({"b": np.zeros((9, 2))}), TypeError, "kernel_stein_discrepancy"),
        (lambda r: diagnose(SVI_OF, r), TypeError, r"missing a required argument: 'x'; pass the"),
        (lambda r: diagnose(SVI_OF, r, model_args=DESIGN), TypeError, r"pass model_args=\(x,\)"),
        (lambda r: diagnose(SVI_OF, r, model_args=(DESIGN,)), ValueError, "'y' .*if it is data"),
    ],
)
def test_one_sentence_says_what_to_call(call, error, words):
    with pytest.raises(error, match=words):
        call(fitted())


def nothing(*args):
    pass


def svi_of(model, guide=nothing):
    return SVI(model, guide, numpyro.optim.Adam(0.05), Trace_ELBO())


def of(params, **options):
    return to_arviz(SVI_OF, params, model_args=(DESIGN, Y), **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: of([p, {**p, "b_auto_loc": jnp.zeros(3)}]), "restart 1 has parameters of other"),
        (
            lambda p: of([p, {**p, "b_auto_loc": jnp.full(2, jnp.nan)}]),
            "of restart 1 is not finite",
        ),
        (lambda p: of({"auto_loc": jnp.zeros(2)}), r"no parameter 'b_auto_loc' of the guide"),
        (lambda p: of(p, num_samples=10**7), r"4\.0 GB; pass log_likelihood=False, or fewer draws"),
        (
            lambda p: to_arviz(svi_of(regression), {}, model_args=(DESIGN, Y)),
            "does not draw latent",
        ),
        (lambda p: to_arviz(svi_of(nothing), {}), "no latent sample site"),
    ],
)
def test_what_would_be_wrong_in_silence_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(fitted().params)


def test_data_that_hold_nan_are_named():
    y = Y.copy()
    y[3] = np.nan
    with pytest.raises(ValueError, match="'y' have 1 NaN among 100 numbers"):
        diagnose(SVI_OF, fitted(), model_args=(DESIGN, y))


def implicit(x, y=None, batch=None):
    w = numpyro.param("w", jnp.zeros(2))
    L = numpyro.param("L", jnp.eye(2))
    e = numpyro.sample("e", dist.Normal().expand([2]).to_event(1), infer={"is_auxiliary": True})
    numpyro.sample("b", Implicit(w + L @ e, event_dim=1))


@pytest.mark.nightly
def test_draws_of_an_implicit_guide_are_judged_by_their_gradients():
    precision = np.eye(2) + DESIGN.T @ DESIGN
    mean, L = np.linalg.solve(precision, DESIGN.T @ Y), np.linalg.cholesky(np.linalg.inv(precision))
    svi = SVI(regression, implicit, numpyro.optim.Adam(0.1), Trace_ELBO())
    for factor, ok in ((1.0, True), (0.5, False)):
        params = {"w": jnp.asarray(mean), "L": jnp.asarray(factor * L, jnp.float32)}
        found = diagnose(svi, params, model_args=(DESIGN, Y))
        row = next(row for row in found.rows if row.quantity == SD)
        # An sd of 1,000 draws has a relative error of 2 %; the worst of two is shown.
        assert row.value == pytest.approx(factor, rel=0.08)
        assert (row.ok, found.ok) == (ok, ok), found
