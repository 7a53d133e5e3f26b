"""A minibatch as the arguments of the model, in a plate of N rows that nothing follows."""

from functools import partial
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import scale, substitute
from numpyro.infer import MCMC, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import optax
import pytest

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.minibatch import draw_indices
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import read_model
from numpyro_ext.data import Batches
from numpyro_ext.guides import AutoRealNVPNormal
from numpyro_ext.mcmc import SGHMC, SGLD, SGNHT, SVRG, ControlVariate, MinibatchGradient
from numpyro_ext.objectives import VRELBO, BBAlphaELBO, taylor_proxy
from numpyro_ext.optim import find_modes

N, B, D = 20_000, 250, 3
W = np.array([1.0, -0.5, 0.2])
rng = np.random.default_rng(0)
X = rng.normal(size=(N, D)) * [1.0, 0.1, 5.0]
Y = X @ W + rng.normal(size=N)
BATCH = X[:B], Y[:B]
ROWS = jnp.arange(100, 100 + B)


def weights():
    return numpyro.sample("w", dist.Normal(0, 10).expand([D]).to_event(1))


def given(x, y):
    w = weights()
    with numpyro.plate("rows", N, subsample_size=len(x)):
        numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def given_scaled(x, y):
    w = weights()
    with numpyro.plate("rows", len(x)), scale(scale=N / B):
        numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def by_index(x, y, batch=B):
    w = weights()
    with numpyro.plate("rows", N, subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1.0), obs=y[i])


def by_subsample(x, y):
    w = weights()
    with numpyro.plate("rows", N, subsample_size=B):
        mean = numpyro.subsample(x, event_dim=1) @ w
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=numpyro.subsample(y, event_dim=0))


def by_factor(x, y):
    w = weights()
    with numpyro.plate("rows", N, subsample_size=B) as i:
        numpyro.factor("y", -((x[i] @ w - y[i]) ** 2) / 2)


def outside(x, y):
    w = weights()
    with numpyro.plate("rows", N, subsample_size=B) as i:
        numpyro.sample("ones", dist.Normal(0.0, 1.0), obs=jnp.ones(B))
    numpyro.factor("y", -N / B * jnp.sum((x[i] @ w - y[i]) ** 2) / 2)


def of_stream(batches):
    w = weights()
    with numpyro.plate("rows", N, subsample_size=B) as i:
        x, y = batches[i]
        numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def given_to(x, y):
    """The model of batches on rows that an index chooses."""
    with numpyro.plate("rows", N, subsample_size=B) as i:
        pass
    given(x[i], y[i])


def given_two(x, y):
    """A plate inside, and rows as one event."""
    w = weights()
    with numpyro.plate("rows", N, subsample_size=len(x), dim=-2), numpyro.plate("twice", 2):
        numpyro.sample("y", dist.Normal((x @ w)[:, None], 1.0), obs=y[:, None] + jnp.zeros(2))


def two_by_index(x, y):
    w = weights()
    with numpyro.plate("rows", N, subsample_size=B, dim=-2) as i, numpyro.plate("twice", 2):
        numpyro.sample("y", dist.Normal((x[i] @ w)[:, None], 1.0), obs=y[i, None] + jnp.zeros(2))


def local(x, y):
    with numpyro.plate("rows", N, subsample_size=len(x)):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def close(a, b, rtol=1e-4):
    rtol = 1e-9 if rtol == 1e-4 and jax.config.jax_enable_x64 else rtol
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=rtol), a, b)


def potential_of(model, *args):
    return Potential(model, read_model(model, args), {}, args, {})


def test_a_plate_that_nothing_follows_has_the_rows_that_are_given():
    assert read_model(given, BATCH).given == read_model(given_two, BATCH).given == {"rows": (N, B)}
    assert read_model(given, BATCH).plates == {}
    for model in (by_index, by_subsample, by_factor, outside, given_to):
        info = read_model(model, (X, Y))
        assert info.given == {} and info.plates == {"rows": (N, B)}
    assert read_model(local, BATCH).given == {}  # each row has a latent site of its own
    assert read_model(given, (X, Y)).given == read_model(given, (X, Y)).plates == {}


@pytest.mark.x64
@pytest.mark.parametrize("pair", [(given, by_index), (given_two, two_by_index)])
def test_the_potential_is_that_of_the_same_rows_by_index(pair):
    z = {"w": jnp.array([0.3, -1.0, 0.1])}
    here = potential_of(pair[0], X[ROWS], Y[ROWS])
    there = potential_of(pair[1], jnp.asarray(X), jnp.asarray(Y))
    close(here.value_and_grad(z, {}), there.value_and_grad(z, {"rows": ROWS}))
    close(here.full_value_and_grad(z), there.value_and_grad(z, {"rows": ROWS}))


FLOW = partial(AutoRealNVPNormal, init_from=None)


@pytest.mark.x64
@pytest.mark.parametrize(
    ("guide", "loss"),
    [
        (AutoNormal, Trace_ELBO(4)),
        (AutoNormal, VRELBO(0.0, 4)),
        (AutoNormal, BBAlphaELBO(0.5, 4)),
        pytest.param(FLOW, VRELBO(1.0, 4), marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:VRELBO takes the noise")
def test_loss_and_gradient_are_those_of_the_same_rows_by_index(loss, guide):
    chosen = substitute(by_index, data={"rows": ROWS})
    results = []
    for model, args in ((given, (X[ROWS], Y[ROWS])), (chosen, (jnp.asarray(X), jnp.asarray(Y)))):
        svi = SVI(model, guide(model), optax.sgd(1.0), loss)
        params = svi.get_params(svi.init(random.key(0), *args))

        def value(params, args=args, model=model, guide=svi.guide):
            return loss.loss(random.key(1), params, model, guide, *args)

        results.append(jax.jit(jax.value_and_grad(value))(params))
    close(*results)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [SGLD, SGHMC, SGNHT])
def test_a_chain_is_that_of_the_same_rows_by_index(kernel):
    """With the settings that were found on one batch, and the batches that the other chain draws;
    in a loop that is compiled once."""
    found = kernel(given)
    state = found.init(random.key(0), 0, None, BATCH)
    assert not found.settings.problems and not found.settings.control_variate
    other, args = kernel(by_index, **found.settings.arguments), (jnp.asarray(X), jnp.asarray(Y))
    first = {"init_params": state.z, "model_args": args}
    other_state = other.init(random.key(0), 0, **first)
    state = found.init(random.key(0), 0, state.z, BATCH)

    @jax.jit
    def both(state, other_state):
        key_index = random.split(other_state.rng_key, 3)[1]
        rows = draw_indices(key_index, {}, {"rows": (N, B)})[0]["rows"]
        state = found.sample(state, (args[0][rows], args[1][rows]))
        return state, other.sample(other_state, args)

    for _ in range(5):
        state, other_state = both(state, other_state)
        close(state.z, other_state.z, rtol=1e-3)
        close(state.potential_energy, other_state.potential_energy)


@pytest.mark.slow
def test_settings_of_one_batch_are_those_of_the_plain_gradient_of_all_rows():
    """A loop has no rows beside its batch for a correction; its step is no shorter for that."""
    on_batch, on_rows = SGHMC(given), SGHMC(by_index, gradient=MinibatchGradient())
    on_batch.init(random.key(0), 0, None, BATCH)
    on_rows.init(random.key(0), 0, None, (jnp.asarray(X), jnp.asarray(Y)))
    loop, run = on_batch.settings, on_rows.settings
    assert 0.5 < loop.noise / run.noise < 2 and 0.5 < loop.gradients / run.gradients < 2


@pytest.mark.slow
def test_no_batch_is_traced_anew():
    traces = []

    def model(x, y):
        traces.append(len(x))
        given(x, y)

    kernel = SGLD(model, 1e-4)
    state = kernel.init(random.key(0), 0, None, BATCH)
    sample = jax.jit(kernel.sample)
    svi = SVI(model, AutoNormal(model), optax.adam(0.01), VRELBO(1.0, 2))
    fit = svi.init(random.key(0), *BATCH)
    update = jax.jit(svi.update)
    for k in range(3):
        batch = X[k * B : (k + 1) * B], Y[k * B : (k + 1) * B]
        state, (fit, _) = sample(state, batch), update(fit, *batch)
        if k == 0:
            traces.clear()
    assert traces == []


@pytest.mark.slow
def test_the_modes_are_those_of_the_rows_scaled_to_all():
    modes, scaled = find_modes(given, *BATCH), find_modes(given_scaled, *BATCH).heaviest
    assert not modes.problems
    close(modes.heaviest.center, scaled.center)
    close(modes.heaviest.factor, scaled.factor)
    # In the units of the posterior of all rows.
    close(modes.heaviest.sds, find_modes(given, X, Y).heaviest.sds, rtol=0.5)


@pytest.mark.slow
def test_a_batch_of_few_rows_is_no_start():
    few = X[:20], Y[:20]
    sentence = "a minibatch of 20 rows, fewer than 10 for each of 3 latent numbers"
    with pytest.warns(InferenceWarning, match=sentence):
        modes = find_modes(given, *few)
    assert [problem.kind for problem in modes.problems] == ["few rows"]
    with pytest.warns(
        InferenceWarning, match=f"the guide begins at the mode of few rows: .*{sentence}"
    ):
        SVI(given, AutoRealNVPNormal(given), optax.adam(0.01), VRELBO()).init(random.key(0), *few)


def test_noise_is_seen_within_a_batch():
    """The variance over resampled rows is N^2 / B times that over the rows of a batch."""
    potential, z = potential_of(given, *BATCH), {"w": jnp.zeros(D)}

    def gradient(key):
        return potential.resampled(key).value_and_grad(z, {})[1]["w"]

    draws = jax.jit(jax.vmap(gradient))(random.split(random.key(0), 4000))
    rows = -Y[:B, None] * X[:B]
    close(draws.mean(0), N * rows.mean(0), rtol=0.1)
    np.testing.assert_allclose(draws.var(0), N**2 / B * rows.var(0), rtol=0.15)


@pytest.mark.slow
def test_what_reads_all_rows_is_refused():
    batches = Batches(list(zip(np.split(X, N // B), np.split(Y, N // B), strict=True)))

    for model, args, what in (
        (given, BATCH, f"the arguments of the model are {B} of the {N} rows of the plate 'rows'"),
        (of_stream, (batches,), "a Batches gives them as its loader does"),
    ):
        for gradient in (ControlVariate({"w": W}), SVRG(10)):
            kernel = SGHMC(model, 1e-3, gradient=gradient)
            name = type(gradient).__name__
            with pytest.raises(ValueError, match=f"{name} reads all rows, .*{what}.*HostArray"):
                kernel.init(random.key(0), 0, None, args)
        with pytest.raises(ValueError, match=f"a proxy reads all rows, .*{what}.*HostArray"):
            taylor_proxy(model, *args)
        modes = find_modes(model, *args)  # of the first batch
        close(modes.heaviest.center, find_modes(given, *BATCH).heaviest.center, rtol=1e-3)
    with pytest.raises(ValueError, match="local to the subsampled plate"):
        SGHMC(local, 1e-3).init(random.key(0), 0, None, BATCH)


def states_of(kernel, state, key, num):
    """Draws of a chain, or of several, each on batches of its own that are drawn."""

    def sample(state, rows):
        return kernel.sample(state, (jnp.asarray(X)[rows], jnp.asarray(Y)[rows]))

    def draw(state, key):
        rows = random.randint(key, (*state.i.shape, B), 0, N)
        state = jax.vmap(sample)(state, rows) if state.i.shape else sample(state, rows)
        return state, state

    return jax.jit(lambda s, keys: jax.lax.scan(draw, s, keys))(state, random.split(key, num))


@pytest.mark.slow
def test_a_loop_goes_on_where_it_was_killed():
    kernel = SGHMC(given)
    state = kernel.init(random.key(0), 10, None, BATCH)
    state, _ = states_of(kernel, state, random.key(1), 15)
    saved = pickle.dumps((state, kernel.settings.arguments))
    _, expected = states_of(kernel, state, random.key(2), 15)
    state, arguments = pickle.loads(saved)
    again = SGHMC(given, **arguments)
    again.init(random.key(3), 10, None, BATCH)  # reads the model
    _, states = states_of(again, state, random.key(2), 15)
    np.testing.assert_array_equal(states.z["w"], expected.z["w"])


@pytest.mark.slow
def test_a_run_goes_on_after_a_loader_has_failed():
    is_down = False

    def loader():
        for k in range(N // B):
            if is_down:
                raise OSError("no such shard")
            yield X[k * B : (k + 1) * B], Y[k * B : (k + 1) * B]

    batches, start = Batches(loader, N), {"w": jnp.asarray(W)}
    mcmc = MCMC(SGLD(of_stream, 1e-9), num_warmup=0, num_samples=5, progress_bar=False)
    mcmc.run(random.key(0), batches, init_params=start)
    state = mcmc.post_warmup_state = jax.block_until_ready(mcmc.last_state)
    is_down = True

    def go_on():
        mcmc.run(random.key(1), batches)
        jax.block_until_ready(mcmc.get_samples())

    with pytest.raises(Exception, match=r"batch \d+ of the loader loader .* no such shard"):
        go_on()
    is_down = False
    mcmc.post_warmup_state = state
    go_on()
    assert mcmc.last_state.i == 10  # the steps are too short to leave the state that was kept
    np.testing.assert_allclose(mcmc.get_samples()["w"], jnp.tile(state.z["w"], (5, 1)), atol=1e-3)


@pytest.mark.slow
def test_a_run_goes_on_with_the_next_batch():
    mcmc = MCMC(SGHMC(given), num_warmup=5, num_samples=5, progress_bar=False, jit_model_args=True)
    mcmc.run(random.key(0), *BATCH)
    settings = mcmc.sampler.settings
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(random.key(1), X[B : 2 * B], Y[B : 2 * B])
    assert mcmc.sampler.settings is settings and "no plate subsamples" not in str(settings)


def posterior():
    """Mean and covariance of the regression on all rows."""
    precision = X.T @ X + np.eye(D) / 100
    return np.linalg.solve(precision, X.T @ Y), np.linalg.inv(precision)


def check_law(draws, within=0.2, width=0.15):
    mean, covariance = posterior()
    sds, draws = np.sqrt(np.diag(covariance)), np.asarray(draws, float)  # a long sum in float32
    assert np.all(abs(draws.mean(0) - mean) < within * sds)
    assert np.all(abs(draws.std(0) / sds - 1) < width)


@pytest.mark.slow
def test_a_flow_on_the_batches_of_a_loader_is_right():
    """Each batch of a loader is an argument of ``svi.update``; no warning is said."""
    guide = AutoRealNVPNormal(given)
    rate = optax.cosine_decay_schedule(0.005, 16000)
    svi = SVI(given, guide, optax.adam(rate), VRELBO(1.0, 4))
    state, update = svi.init(random.key(0), *BATCH), jax.jit(svi.update)
    order = np.random.default_rng(1)
    for _ in range(16000 * B // N):
        for rows in np.split(order.permutation(N), N // B):
            state, _ = update(state, X[rows], Y[rows])
    check_law(guide.sample_latent(random.key(1), svi.get_params(state), 10_000))


@pytest.mark.slow
def test_chains_on_batches_are_right():
    """Eight chains from the mode of one batch, which is nine standard deviations away. A chain that
    shared its batches with the others would share their noise. The error of a mean is 0.07 sds."""
    kernel = SGHMC(given)
    state = kernel.init(random.split(random.key(0), 8), 3000, None, BATCH)
    state, _ = states_of(kernel, state, random.key(1), 10_000)
    _, states = states_of(kernel, state, random.key(2), 60_000)
    check_law(states.z["w"].reshape(-1, D))
