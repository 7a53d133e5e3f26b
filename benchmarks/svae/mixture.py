"""Mixtures of normals as recognition potentials, beside single normals, with EP between them.

- `rows` and `series`: x is seen as |x| with noise of 0.2, so that a row alone leaves its sign open.
  Two components stand at -2 and 2, with standard deviations of 0.7. In `rows` (`GMMEP`) they have
  shares of 0.3 and 0.7, and nothing else tells the sign. In `series` (`HMMEP`) they are states of
  which one stays with probability 0.95 at each of 20 steps, and one step in six shows x itself: the
  neighbours tell the sign, of which a network that sees one step knows nothing. Parameters are
  known (a prior of 10,000 data), so that the exact posterior of each row is a sum over states of
  integrals on a grid.

Networks are trained on 1,000 rows by `SVAEELBO`, or on rows that are simulated anew at each step,
with their x and z, by the mean of log q(z) + log q(x), which is the other Kullback-Leibler
divergence: 1,000 steps of Adam, 5e-3 and falling along a cosine, on batches of 50 rows or 5
series. `exact, C = 2` is the likelihood of x itself, which apart from the noise at zero is a
mixture of two normals, as its potential; `flat` is a potential that says nothing.

`below` is the log likelihood, which is exact, less the ELBO, both per row; `mean` is the root mean
square error of the posterior mean of a row whose sign is not shown, in standard deviations of its
exact posterior, `sd` the mean ratio of standard deviations, `side` and `P(z)` the mean absolute
error of the probabilities that x > 0 and of a state. `right` is the share of states that are found.
Each number is the mean of the seeds, which have data of their own, and its standard error. The
lines below a row of the first table are q of a row with |x| = 2, of each seed.

    python benchmarks/svae/mixture.py
    python benchmarks/svae/mixture.py --only series
"""

import argparse
from collections.abc import Callable
from functools import partial
import time
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
from run import plate_of
from scipy.special import logsumexp
from scipy.stats import norm

from numpyro_ext.expfam import NIW, Dirichlet, MarkovChain
from numpyro_ext.optim import natural_gradient
from numpyro_ext.svae import (
    GMMEP,
    HMMEP,
    SVAEELBO,
    GaussianPotential,
    MixturePotential,
    SVAEGuide,
    recognition_network,
)

LOC, SD, NOISE, STAY, SHOWN, T = np.array([-2.0, 2.0]), 0.7, 0.2, 0.95, 1 / 6, 20
SHARES = {"rows": np.array([0.3, 0.7]), "series": np.array([0.5, 0.5])}
TRANSITION = np.array([[STAY, 1 - STAY], [1 - STAY, STAY]])
ROWS, KNOWN = 1000, 1e4
Network = tuple[Callable[..., Any], Callable[..., Any]]


def simulated(rng_key: Array, series: bool, rows: int) -> tuple[Array, Array, Array]:
    """``(N, 2)`` or ``(N, T, 2)``, of a value and whether it is x; the states, and x."""
    length = T if series else 1
    keys = random.split(rng_key, 5)
    shares = jnp.asarray(SHARES["series" if series else "rows"])
    first = random.bernoulli(keys[0], shares[1], (rows // length, 1))
    moves = random.bernoulli(keys[1], 1 - STAY, (rows // length, length - 1))
    z = jnp.cumsum(jnp.concatenate([first, moves], 1), 1) % 2
    x = jnp.asarray(LOC)[z] + SD * random.normal(keys[2], z.shape)
    shown = random.bernoulli(keys[3], SHOWN if series else 0.0, z.shape)
    value = jnp.where(shown, x, jnp.abs(x)) + NOISE * random.normal(keys[4], z.shape)
    y = jnp.stack([value, shown], -1)
    return (y, z, x) if series else (y[:, 0], z[:, 0], x[:, 0])


def program(rule: Any, network: Network) -> tuple[Callable[..., None], SVAEGuide]:
    series = "emission" in rule.families
    shares = KNOWN * SHARES["series" if series else "rows"]
    rows = KNOWN * TRANSITION
    scale = jnp.full((2, 1, 1), KNOWN * SD**2)
    niw = {"loc": jnp.asarray(LOC[:, None]), "kappa": KNOWN, "df": KNOWN, "scale_matrix": scale}

    def model(y: Array, B: int | None = None) -> None:
        pi = numpyro.sample("pi", dist.Dirichlet(shares))
        with numpyro.plate("components", 2):
            P = numpyro.sample("P", dist.Dirichlet(rows)) if series else None
            Sigma = numpyro.sample("Sigma", dist.InverseWishart(KNOWN, scale_matrix=scale))
            mu = numpyro.sample("mu", dist.MultivariateNormal(niw["loc"], Sigma / KNOWN))
        with plate_of(y, B) as idx:
            if series:
                states = MarkovChain.to_distribution(MarkovChain.from_standard(pi, P, T))
            else:
                states = dist.Categorical(pi)
            z = numpyro.sample("z", states)
            normal = dist.MultivariateNormal(mu[z], Sigma[z])
            x = numpyro.sample("x", normal.to_event(1) if series else normal)
            value, shown = y[idx, ..., :1], y[idx, ..., 1:]
            seen = dist.Normal(jnp.where(shown > 0, x, jnp.abs(x)), NOISE)
            numpyro.sample("y", seen.to_event(2 if series else 1), obs=value)

    first, components = Dirichlet.from_standard(shares), NIW.from_standard(**niw)
    prior = {"pi": first, "components": components}
    if series:
        transition = Dirichlet.from_standard(rows)
        prior = {"initial": first, "transition": transition, "emission": components}
    return model, SVAEGuide(prior, network, rule, create_plates=plate_of, init_natural=prior)


def exact_potential(params: Any, y: Array) -> MixturePotential:
    """The likelihood of x, with both signs where it is not shown."""
    side = jnp.where(y[..., 1:] > 0, jnp.ones(2), jnp.array([1.0, -1.0]))
    h = (side * y[..., :1])[..., None] / NOISE**2
    W = jnp.full((*h.shape, 1), -0.5 / NOISE**2)
    return MixturePotential(jnp.zeros(h.shape[:-1]) - jnp.log(2.0), h, W)


def flat_potential(params: Any, y: Array) -> GaussianPotential:
    zeros = jnp.zeros((*y.shape[:-1], 1))
    return GaussianPotential(zeros, zeros[..., None])


def without_parameters(apply: Callable[..., Any]) -> Network:
    return (lambda rng_key, shape: (shape, {})), apply


class Exact(NamedTuple):
    """Of each row, ``(N, T)``."""

    log_lik: float
    mean: np.ndarray
    sd: np.ndarray
    side: np.ndarray
    z: np.ndarray
    """The probability of the upper state."""


def exact(y: np.ndarray, shares: np.ndarray) -> Exact:
    """Sums over states of integrals on a grid, for ``y`` of shape ``(N, T, 2)``."""
    grid = np.linspace(-6, 6, 2401)
    states = norm.pdf(grid, LOC[:, None], SD) * (grid[1] - grid[0])
    seen = np.where(y[..., 1:] > 0, grid, np.abs(grid))
    lik = norm.pdf(y[..., :1], seen, NOISE)
    Z, mean, second, side = (
        np.einsum("ntg,kg->ntk", lik, states * f) for f in (1, grid, grid**2, grid > 0)
    )
    log_Z, log_P = np.log(Z), np.log(TRANSITION)
    ahead = [log_Z[:, 0] + np.log(shares)]
    for t in range(1, y.shape[1]):
        ahead.append(log_Z[:, t] + logsumexp(ahead[-1][:, :, None] + log_P, axis=1))
    back = [np.zeros_like(log_Z[:, 0])]
    for t in range(y.shape[1] - 1, 0, -1):
        back.insert(0, logsumexp(log_P + (log_Z[:, t] + back[0])[:, None], axis=2))
    log_r = np.stack(ahead, 1) + np.stack(back, 1)
    log_lik = logsumexp(log_r, axis=2)
    r = np.exp(log_r - log_lik[..., None])
    mean, second, side = (np.sum(r * f / Z, 2) for f in (mean, second, side))
    return Exact(log_lik[:, 0].mean(), mean, np.sqrt(second - mean**2), side, r[..., 1])


def by_elbo(svi: SVI, rng_key: Array, y: Array, steps: int) -> Any:
    """Parameters of the guide."""
    batch = 5 if y.ndim == 3 else 50
    update = lambda state, _: svi.update(state, y, batch)  # noqa: E731
    state, _ = lax.scan(update, svi.init(rng_key, y, batch), length=steps)
    return svi.get_params(state)


def by_simulation(guide: SVAEGuide, rng_key: Array, params: Any, steps: int) -> Any:
    """The same, where a step sees rows that the model makes, with their x and z."""
    rule, (_, apply) = guide.local_inference, guide.recognition
    known, series = guide.global_mean(params), "emission" in rule.families
    adam, name = optax.adam(optax.cosine_decay_schedule(5e-3, steps)), "svae_recognition$params"

    def loss(phi: Any, key: Array) -> Array:
        y, z, x = simulated(key, series, 5 * T if series else 50)
        q = rule.distributions(rule.infer(known, apply(phi, y)))
        return -jnp.mean(q["z"].log_prob(z)) - jnp.mean(q["x"].log_prob(x[..., None]))

    def step(carry: Any, key: Array) -> tuple[Any, None]:
        phi, state = carry
        moves, state = adam.update(jax.grad(loss)(phi, key), state, phi)
        return (optax.apply_updates(phi, moves), state), None

    start = params[name], adam.init(params[name])
    (phi, _), _ = lax.scan(step, start, random.split(rng_key, steps))
    return {**params, name: phi}


def fitted(rule: Any, network: Network, simulate: bool, steps: int, key: Array) -> Any:
    """Data, states, the ELBO per row, mean and variance of x, and the upper state's probability;
    and the same three of a row with |x| = 2."""
    series = "emission" in rule.families
    key_data, key_run = random.split(key)
    y, z, _ = simulated(key_data, series, ROWS)
    model, guide = program(rule, network)
    adam = optax.adam(optax.cosine_decay_schedule(5e-3, max(steps, 1)))
    rates = {"natural": natural_gradient(1e-6, guide.domain), "network": adam}
    optim = optax.multi_transform(rates, guide.param_labels)
    svi = SVI(model, guide, optim, SVAEELBO("explicit_only"))
    params = by_elbo(svi, key_run, y, 0 if simulate else steps)
    if simulate:
        params = by_simulation(guide, key_run, params, steps)
    elbo = -SVAEELBO(num_particles=16).loss(key_run, params, model, guide, y) / z.size

    def moments(y: Array) -> tuple[Array, ...]:
        mean = guide.local_posterior(params, y).mean
        x = mean["x"].x[..., 0]
        return x, mean["x"].xx[..., 0, 0] - x**2, mean["z"].probs[..., 1]

    one = () if series else moments(jnp.array([[2.0, 0.0]]))
    return (y, z, elbo, *moments(y)), one


def row(label: str, rule: Any, network: Network, steps: int, keys: Array, simulate: bool) -> None:
    """Prints a line of the table."""
    began = time.perf_counter()
    run = jax.jit(jax.vmap(partial(fitted, rule, network, simulate, steps)))
    of_seeds, one = jax.device_get(run(keys))
    cells, right_of_exact = [], []
    for y, z, elbo, mean, var, upper in zip(*of_seeds, strict=True):
        series = z.ndim == 2
        table = y if series else y[:, None]
        truth = exact(table.astype(float), SHARES["series" if series else "rows"])
        hidden = table[..., 1] == 0
        mean, var, upper, z = (a.reshape(table.shape[:-1]) for a in (mean, var, upper, z))
        sd, side = np.sqrt(var), norm.cdf(mean / np.sqrt(var))
        cells.append(
            (
                truth.log_lik / table.shape[1] - elbo,
                np.sqrt(np.mean(((mean - truth.mean) / truth.sd)[hidden] ** 2)),
                np.mean((sd / truth.sd)[hidden]),
                np.abs(side - truth.side)[hidden].mean(),
                np.abs(upper - truth.z)[hidden].mean(),
                np.mean((upper > 0.5) == z),
            )
        )
        right_of_exact.append(np.mean((truth.z > 0.5) == z))
    middle, error = np.mean(cells, 0), np.std(cells, 0, ddof=1) / np.sqrt(len(cells))
    shown = [f"{m:.3f} +- {e:.3f}" for m, e in zip(middle, error, strict=True)]
    seconds = time.perf_counter() - began
    print(f"| {label} | {' | '.join(shown)} | {seconds:.0f} |", flush=True)
    if label == "flat":
        print(f"right by the exact posterior: {np.mean(right_of_exact):.3f}")
    for name, values in zip(("mean", "sd", "P(z)"), one, strict=False):
        values = np.sqrt(values) if name == "sd" else values
        print(f"    {name:5}" + " ".join(f"{value[0]:.2f}".rjust(6) for value in values))


def table(series: bool, components: list[int], steps: int, seeds: int) -> None:
    ep = HMMEP() if series else GMMEP()
    network = partial(recognition_network, 1, init_scale=1.0)
    line = partial(row, keys=random.split(random.key(3), seeds))
    print("| potential | below | mean | sd | side | P(z) | right | seconds |\n|" + "---|" * 8)
    line("exact, C = 2", ep, without_parameters(exact_potential), 0, simulate=False)
    line("flat", ep, without_parameters(flat_potential), 0, simulate=False)
    for C in components:
        for simulate in (False, True):
            how = "simulated" if simulate else "ELBO"
            made = network(num_components=C if C > 1 else None)
            line(f"network, C = {C}, {how}", ep, made, steps, simulate=simulate)
    if not series:
        truth = exact(np.array([[[2.0, 0.0]]]), SHARES["rows"])
        mean, sd, side, z = (f.item() for f in truth[1:])
        print(f"exact, |x| = 2: mean {mean:.3f}, sd {sd:.3f}, x > 0 {side:.3f}, P(z) {z:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parts = ("rows", "series")
    parser.add_argument("--only", choices=parts)
    parser.add_argument("--components", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    for part in [args.only] if args.only else parts:
        table(part == "series", args.components, args.steps, args.seeds)


if __name__ == "__main__":
    main()
