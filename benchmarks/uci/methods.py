"""The methods of the tables, each as a user writes it on `bayesian_mlp`.

A method takes a key, the training rows, the inputs to predict, the number of epochs, and that of
classes, None for a number. All but PBP and the rows with fixed numbers in their name learn the
precision of the noise, with the prior Gamma(1, 0.1) (Gamma(6, 6), the default of the model, keeps
the standard deviation of the noise of 277 rows above a fifth of that of y, and on yacht it is a
twentieth), and have the prior N(0, 1) of weights. They start at `init_to_fan_in()`, draw a
minibatch for each step (32 rows, 128 of sets of more than 5,000), and have a rate that falls along
a cosine; that of Adam begins at 0.02, so that its mean is the 0.01 of the protocol. A fit by `SVI`
is one compiled function of the key and of the arrays, so the splits of a set, whose shapes are the
same, share its program.
"""

from collections.abc import Callable
from functools import partial
from math import exp
from typing import Any, NamedTuple

from flax import nnx
import jax
from jax import Array, random
import jax.numpy as jnp
import numpyro
from numpyro.contrib.module import random_nnx_module
import numpyro.distributions as dist
from numpyro.handlers import block
from numpyro.infer import MCMC, SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
import optax

from numpyro_ext.ep import PBP
from numpyro_ext.guides import AutoDropout, AutoLaplaceGGN, init_to_fan_in
from numpyro_ext.mcmc import SGHMC, CyclicalSchedule
from numpyro_ext.objectives import (
    VRELBO,
    BBAlphaELBO,
    CurvatureELBO,
    KLWeightedELBO,
    count_steps,
    minibatch_kl_weights,
)
from numpyro_ext.optim import ivon, vadam, von
from numpyro_ext.particles import SVGD, AutoParticles, RegularizedSVGD
from numpyro_ext.targets import bayesian_mlp, scale_mixture

HIDDEN, DRAWS, NETWORKS, KEPT = 50, 100, 5, 33
START = init_to_fan_in()


Method = Callable[[Array, Array, Array, Array, int, int | None], dist.Distribution]
"""It returns the prediction of each test row under T draws of the network, ``(T, n)``.

A closed form is one draw, whose joint density is not known.
"""


class Budget(NamedTuple):
    """Rows, rows of a minibatch and steps of a fit."""

    rows: int
    batch: int
    steps: int


def budget(X: Array, epochs: int) -> Budget:
    batch = 128 if len(X) > 4500 else min(32, len(X))
    return Budget(len(X), batch, max(1, epochs * (len(X) // batch)))


def network(
    classes: int | None = None,
    log_noise: float | None = None,
    log_prior: float = 0.0,
    prior: Any = None,
) -> Callable[..., None]:
    """The model; with the logarithms of the precisions of noise and weights, or a learnt noise."""
    prior = prior or dist.Normal(0.0, exp(-log_prior / 2))
    model = partial(bayesian_mlp, hidden=(HIDDEN,), weight_prior=prior)
    if classes is not None:
        return partial(model, num_classes=classes)
    noise = dist.Gamma(1.0, 0.1) if log_noise is None else exp(log_noise)
    return partial(model, noise_prior=noise)


class Net(nnx.Module):
    """The same hidden layer in Flax, with or without a layer norm, and one or more outputs."""

    def __init__(self, inputs: int, outputs: int, norm: bool) -> None:
        rngs = nnx.Rngs(0)
        self.hidden, self.out = (
            nnx.Linear(*shape, rngs=rngs) for shape in ((inputs, HIDDEN), (HIDDEN, outputs))
        )
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs) if norm else None

    def __call__(self, x: Array) -> Array:
        h = self.hidden(x)
        return self.out(nnx.relu(self.norm(h) if self.norm else h))


def layer_norm(classes: int | None = None) -> Callable[..., None]:
    """A layer norm before the rectifiers; the noise, or the classes, as in :func:`network`."""

    def model(X: Array, y: Array | None = None, subsample_size: int | None = None) -> None:
        net = random_nnx_module("net", Net(X.shape[1], classes or 1, True), dist.Normal())
        scale = None if classes else numpyro.sample("noise_precision", dist.Gamma(1.0, 0.1)) ** -0.5
        with numpyro.plate("data", len(X), subsample_size=subsample_size):
            f = net(numpyro.subsample(X, event_dim=1))
            f = f if classes else f[..., 0]
            if y is None:
                numpyro.deterministic("f", f)
            target = None if y is None else numpyro.subsample(y, event_dim=0)
            law = dist.Categorical(logits=f) if scale is None else dist.Normal(f, scale)
            numpyro.sample("y", law, obs=target)

    return model


def two_heads(classes: int | None = None) -> Callable[..., None]:
    """The mean of a row, and the logarithm of its noise; of numbers alone."""

    def model(X: Array, y: Array | None = None, subsample_size: int | None = None) -> None:
        net = random_nnx_module("net", Net(X.shape[1], 2, False), dist.Normal())
        with numpyro.plate("data", len(X), subsample_size=subsample_size):
            f = net(numpyro.subsample(X, event_dim=1))
            mean, scale = f[..., 0], jnp.exp(f[..., 1])
            if y is None:
                numpyro.deterministic("f", mean)
                numpyro.deterministic("noise", scale)
            target = None if y is None else numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(mean, scale), obs=target)

    return model


def of_draws(model: Callable[..., None], draws: dict[str, Array], X: Array) -> dist.Distribution:
    predicted = Predictive(model, draws, return_sites=["f", "noise"])(random.key(0), X)
    f = predicted["f"]
    if f.ndim == 3:
        return dist.Categorical(logits=f)
    if "noise" in predicted:
        return dist.Normal(f, predicted["noise"])
    if "noise_precision" in draws:
        precision = draws["noise_precision"]
    else:
        precision = jnp.full(len(f), model.keywords["noise_prior"])  # type: ignore[attr-defined]
    return dist.Normal(f, precision[:, None] ** -0.5)


class Recipe(NamedTuple):
    """An ``SVI``: guide, optimiser for a budget, and loss, which may be a function of it."""

    guide: Callable[[Callable[..., None]], Any]
    optim: Callable[[Budget], Any]
    loss: Any
    networks: int = 1
    model: Callable[..., Any] = network


@partial(jax.jit, static_argnums=(0, 5, 6))
def by_svi(
    recipe: Recipe,
    rng_key: Array,
    X: Array,
    y: Array,
    X_test: Array,
    epochs: int,
    classes: int | None,
) -> dist.Distribution:
    size, model = budget(X, epochs), recipe.model(classes)

    def one(rng_key: Array) -> dict[str, Array]:
        guide = recipe.guide(model)
        weighted = recipe.loss is by_minibatch
        loss = by_minibatch(size) if weighted else recipe.loss
        counted = count_steps(guide) if weighted else guide
        svi = SVI(model, counted, recipe.optim(size), loss)
        fit_key, draw_key = random.split(rng_key)
        data = {"subsample_size": size.batch, "progress_bar": False}
        params = svi.run(fit_key, size.steps, X, y, **data).params
        if isinstance(guide, AutoParticles):
            return guide.particles(params)
        shape = (DRAWS // recipe.networks,)
        draws: dict[str, Array] = guide.sample_posterior(draw_key, params, sample_shape=shape)
        return draws

    draws = jax.vmap(one)(random.split(rng_key, recipe.networks))
    draws = {name: x.reshape(-1, *x.shape[2:]) for name, x in draws.items()}
    return of_draws(model, draws, X_test)


def by_laplace(
    structure: str,
    rng_key: Array,
    X: Array,
    y: Array,
    X_test: Array,
    epochs: int,
    classes: int | None,
) -> dist.Distribution:
    """The curvature is taken outside of the compiled training: the guide wants data with values."""
    model = network(classes)
    guide = AutoLaplaceGGN(model, structure=structure, init_loc_fn=START)
    SVI(model, guide, optax.adam(0.01), Trace_ELBO()).init(rng_key, X, y)
    params = mode(rng_key, X, y, epochs, classes)
    if classes is None:
        f = guide.linearised_predictive(params, X_test)
        noise = 1 / guide.median(params)["noise_precision"]
        return dist.Normal(f.mean[None], jnp.sqrt(f.variance + noise)[None])
    drawn, (params,) = guide.as_normal([params])  # of which predictive_scores takes draws too

    def logits(key: Array) -> Array:
        return drawn.linearised_site(key, params, "y", (X_test,), {})["fn"].logits

    return dist.Categorical(logits=jax.vmap(logits)(random.split(rng_key, DRAWS)))


@partial(jax.jit, static_argnums=(3, 4))
def mode(rng_key: Array, X: Array, y: Array, epochs: int, classes: int | None) -> dict[str, Array]:
    size, model = budget(X, epochs), network(classes)
    svi = SVI(model, AutoLaplaceGGN(model, init_loc_fn=START), adam(size), Trace_ELBO())
    data = {"subsample_size": size.batch, "progress_bar": False}
    params: dict[str, Array] = svi.run(rng_key, size.steps, X, y, **data).params
    return params


def by_sghmc(
    cyclical: bool,
    rng_key: Array,
    X: Array,
    y: Array,
    X_test: Array,
    epochs: int,
    classes: int | None,
) -> dist.Distribution:
    """Half of the steps are warmup; of the cyclical one a fifth, which is the first of five cycles.

    The peak of a cycle is a length in the standardised space of the weights: 0.3 posterior standard
    deviations of a weight that the rows determine as they do a mean.
    """
    size, model = budget(X, epochs), network(classes)
    if cyclical:
        inner = max(1, size.steps // (5 * KEPT))  # transitions of a draw
        schedule = CyclicalSchedule(0.3 / size.rows**0.5, KEPT * inner)
        kernel = SGHMC(model, schedule, friction=10.0, steps_per_sample=inner, init_strategy=START)
        mcmc = MCMC(kernel, num_warmup=KEPT, num_samples=4 * KEPT, progress_bar=False)
        mcmc.run(rng_key, X, y, subsample_size=size.batch)
        kept = mcmc.get_extra_fields()["sampling"]
    else:
        half = max(1, size.steps // 2)
        kernel = SGHMC(model, init_strategy=START)
        mcmc = MCMC(kernel, num_warmup=half, num_samples=half, progress_bar=False)
        mcmc.run(rng_key, X, y, subsample_size=size.batch)
        kept = slice(None, None, max(1, half // DRAWS))
    draws = {name: x[kept] for name, x in mcmc.get_samples().items()}
    return of_draws(model, draws, X_test)


def by_pbp(
    method: str,
    rng_key: Array,
    X: Array,
    y: Array,
    X_test: Array,
    epochs: int,
    classes: int | None,
) -> dist.Distribution:
    engine = PBP([X.shape[1], HIDDEN, 1], method=method)
    params = engine.run(rng_key, epochs, X, y, progress_bar=False).params
    mean, variance = engine.predict(params, X_test)
    return dist.Normal(mean[None], jnp.sqrt(variance)[None])


def ridge(
    rng_key: Array, X: Array, y: Array, X_test: Array, epochs: int, classes: int | None
) -> dist.Distribution:
    """A linear regression with weights N(0, 1), whose noise is the residual of training."""
    A, A_test = (jnp.pad(x, ((0, 0), (0, 1)), constant_values=1.0) for x in (X, X_test))
    w = jnp.linalg.solve(A.T @ A + jnp.eye(A.shape[1]), A.T @ y)
    mean = (A_test @ w)[None]
    return dist.Normal(mean, jnp.sqrt(jnp.mean((y - A @ w) ** 2)))


def adam(size: Budget) -> Any:
    return optax.adam(optax.cosine_decay_schedule(0.02, size.steps))


def constant(size: Budget) -> Any:
    return optax.adam(0.01, b1=0.9, b2=0.99)


def natural(size: Budget) -> Any:
    rate = optax.cosine_decay_schedule(0.1, size.steps)
    return ivon(rate, other=adam(size))


def newton(size: Budget) -> Any:
    return von(optax.cosine_decay_schedule(0.05, size.steps), other=adam(size))


def perturbed(size: Budget, log_prior: float = 0.0, constant: bool = False) -> Any:
    """By one draw; or with a constant rate and the mean of the squares of draws, as the public code
    of Cinelli (2019) does.
    """
    rate = 0.01 if constant else optax.cosine_decay_schedule(0.02, size.steps)
    prior = exp(log_prior)
    squares = "scale" if constant else "loc"
    return vadam(rate, num_data=size.rows, prior_precision=prior, squares=squares, other=adam(size))


def mean_field(model: Callable[..., None], scale: float = 0.02) -> Any:
    return AutoNormal(model, init_loc_fn=START, init_scale=scale)


def of_weights(model: Callable[..., None]) -> Any:
    """A normal of the weights, as wide as their prior at first, and a point for the noise."""
    guide = AutoGuideList(model)
    guide.append(mean_field(block(model, hide=["noise_precision"]), 1.0))
    guide.append(AutoDelta(block(model, expose=["noise_precision"]), init_loc_fn=START))
    return guide


def by_minibatch(size: Budget) -> KLWeightedELBO:
    """The prior counts in the first minibatches of an epoch, the rows in the last ones."""
    number = size.rows // size.batch
    weights = number * minibatch_kl_weights(number)
    return KLWeightedELBO(lambda i: weights[i % number], Trace_ELBO(20))


POINT = partial(AutoDelta, init_loc_fn=START)
DROPOUT = partial(AutoDropout, keep_prob=0.98, init_loc_fn=START)
PARTICLES = partial(AutoParticles, num_particles=20, init_loc_fn=START)
TWENTY = Trace_ELBO(20)
SQUARES = CurvatureELBO("squared_gradient", 10)


def vadam_at(log_noise: float, log_prior: float) -> Recipe:
    guide = partial(mean_field, scale=exp(-log_prior / 2))
    optim = partial(perturbed, log_prior=log_prior, constant=True)
    model = partial(network, log_noise=log_noise, log_prior=log_prior)
    return Recipe(guide, optim, SQUARES, model=model)


def backprop_at(log_noise: float, prior: Any = None, loss: Any = TWENTY) -> Recipe:
    """Weights N(0, 1) or another prior, a start at the precision 10, and the rate of Vadam."""
    model = partial(network, log_noise=log_noise, prior=prior)
    return Recipe(partial(mean_field, scale=10**-0.5), constant, loss, model=model)


def of_network(name: str, model: Callable[..., Any]) -> dict[str, Recipe]:
    return {
        f"{name}, MAP": Recipe(POINT, adam, Trace_ELBO(), model=model),
        f"{name}, ensemble of five MAP": Recipe(POINT, adam, Trace_ELBO(), NETWORKS, model),
        f"{name}, mean field, Adam": Recipe(mean_field, adam, Trace_ELBO(4), model=model),
        f"{name}, mean field, ivon": Recipe(mean_field, natural, Trace_ELBO(4), model=model),
    }


RECIPES = {
    "MAP": Recipe(POINT, adam, Trace_ELBO()),
    "ensemble of five MAP": Recipe(POINT, adam, Trace_ELBO(), NETWORKS),
    "mean field, Adam": Recipe(mean_field, adam, Trace_ELBO(4)),
    "mean field, ivon": Recipe(mean_field, natural, Trace_ELBO(4)),
    "ensemble of five ivon": Recipe(mean_field, natural, Trace_ELBO(4), NETWORKS),
    **of_network("two heads", two_heads),
    **of_network("layer norm", layer_norm),
    "VRELBO(0.5)": Recipe(mean_field, adam, VRELBO(0.5, 10)),
    "BBAlphaELBO(0.5)": Recipe(mean_field, adam, BBAlphaELBO(0.5, 10)),
    "VOGN": Recipe(mean_field, newton, CurvatureELBO("empirical_fisher", 4)),
    "Vadam": Recipe(of_weights, perturbed, TraceMeanField_ELBO()),
    "dropout": Recipe(DROPOUT, adam, Trace_ELBO(10)),
    "SVGD": Recipe(PARTICLES, adam, SVGD()),
    "RegularizedSVGD": Recipe(PARTICLES, adam, RegularizedSVGD(precondition=None)),
    "Vadam at e^2, 1": vadam_at(2, 0),
    "Vadam at e^2, e^2": vadam_at(2, 2),
    "Vadam at e^5, 1": vadam_at(5, 0),
    "Vadam at e^5, e^4": vadam_at(5, 4),
    "mean field, Adam at e^2, 1": backprop_at(2),
    "mean field, Adam at e^2, mixture": backprop_at(2, scale_mixture()),
    "mean field, Adam at e^2, mixture, KL weights": backprop_at(2, scale_mixture(), by_minibatch),
}
METHODS: dict[str, Method] = {
    "ridge": ridge,
    **{name: partial(by_svi, recipe) for name, recipe in RECIPES.items()},
    "last-layer Laplace": partial(by_laplace, "last_layer"),
    "AutoLaplaceGGN, diag": partial(by_laplace, "diag"),
    "SGHMC": partial(by_sghmc, False),
    "SGHMC, cyclical": partial(by_sghmc, True),
    "PBP": partial(by_pbp, "adf"),
    "PBP, EP": partial(by_pbp, "ep"),
    "PBP, SEP": partial(by_pbp, "sep"),
}
