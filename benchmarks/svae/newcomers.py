"""Structured guides as a newcomer meets them, nothing tuned, compared with NUTS.

Six models of NumPyro's examples whose local variables are conjugate to the global ones; the prior
of location and covariance is the conjugate one. Each runs as `SVI(model, SVAEGuide(prior,
recognition_network(d), rule), optim, SVAEELBO(implicit))` for 5,000 steps on all rows, with natural
steps of 0.1 and Adam at 1e-3 for all. `exact` has the likelihood of x itself as its potential where
that is normal, in place of a network. The truth is NUTS: 4 chains of 1,000 + 2,000 draws of the
global variables, kept under `out/`, with the local ones drawn given them where they have a closed
form; `R-hat` is the largest of the compared numbers. Components and states are put in the order of
their locations, in each draw. `worst mean` is the largest distance of the means in standard
deviations of NUTS; `globals` and `x` are the mean, and [least, largest], of the standard deviation
of 4,000 draws over that of NUTS; `P(z)` is the largest error of a probability of a component or a
state. `right` is whether every mean is within 0.2 and every ratio within 20 % of 1. `k-hat` is that
of `diagnose`; `says` is what it finds wrong or could not judge, `judged by` has the quantities with
a verdict about the draws, and a `false alarm` is a right row that it finds wrong. `seconds` are
those of everything, compilation included. Rows are kept under `--out` too, so that a table which
was stopped goes on; without the folder `rows` there they are run again.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
import sys
import time
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import split_gelman_rubin
import numpyro.distributions as dist
from numpyro.infer import SVI, init_to_median
import optax
from sklearn.datasets import load_iris

from numpyro_ext.diagnostics import Diagnosis, diagnose
from numpyro_ext.expfam import MNIW, NIW, Dirichlet, GaussianChain, MarkovChain
from numpyro_ext.optim import natural_gradient
from numpyro_ext.svae import (
    GMMEP,
    HMMEP,
    LDS,
    SVAEELBO,
    GaussianPotential,
    GMMMeanField,
    HMMMeanField,
    SVAEGuide,
    recognition_network,
)

sys.path.append(str(Path(__file__).parents[1]))
from _shared.numpyro_examples import HITS, TIMES, eight_schools
from _shared.nuts import Samples, nuts
from _shared.verdicts import HEADS as VERDICT_HEADS
from _shared.verdicts import Line, Verdict, counted, elbo, errors, kept, moments, shown

STEPS, DRAWS, CHAINS = 5000, 4000, 4
HEADS = (
    *("model", "rule", "potential", "implicit", "R-hat", "ELBO", "k-hat", "worst mean"),
    *("globals", "x", "P(z)", *VERDICT_HEADS, "seconds"),
)


class Problem(NamedTuple):
    """A model for the guide, and the same one for NUTS."""

    model: Callable[..., None]
    truth: Callable[..., None]
    """The model with its local variables summed out, or with x as a deterministic site."""
    locals_given: Callable[[Array, dict[str, Array], Array], dict[str, Array]] | None
    """``(key, globals, y)`` to a draw of the local variables that are summed out."""
    prior: dict[str, Any]
    rules: tuple[Any, ...]
    y: Array
    dim: int = 1
    exact: Callable[[Array], Array] | None = None
    """The precision of y given x, where that is normal about x: the exact potential."""


def normals(standard: dict[str, Any], Sigma: str = "Sigma", mu: str = "mu") -> tuple[Array, Array]:
    """Means and covariances of the components, from NIW."""
    S = numpyro.sample(
        Sigma, dist.InverseWishart(standard["df"], scale_matrix=standard["scale_matrix"])
    )
    m = standard["loc"]
    return numpyro.sample(mu, dist.MultivariateNormal(m, S / standard["kappa"][..., None, None])), S


def components(standard: dict[str, Any]) -> tuple[Array, Array]:
    with numpyro.plate("components", len(standard["loc"])):
        return normals(standard)


def mixture(
    standard: dict[str, Any], y: Array, likelihood: Callable[..., Any], noise: Callable[..., Any]
) -> Problem:
    """x_n of a component; the data given x have this likelihood, normal if there is a noise."""
    K, d = standard["loc"].shape
    rules = (GMMEP(), GMMMeanField()) if K > 1 else (GMMEP(),)
    prior = {
        "pi": Dirichlet.from_standard(jnp.ones(K)),
        "components": NIW.from_standard(**standard),
    }

    def model(y: Array) -> None:
        pi = numpyro.sample("pi", dist.Dirichlet(jnp.ones(K)))
        mu, Sigma = components(standard)
        with numpyro.plate("data", len(y)):
            z = numpyro.sample("z", dist.Categorical(pi))
            x = numpyro.sample("x", dist.MultivariateNormal(mu[z], Sigma[z]))
            likelihood(x, y)

    def conditional(theta: dict[str, Array], y: Array) -> tuple[Array, Any, Array]:
        """Log weights of the components, and x given y in each."""
        R = noise(y)[:, None]
        mu, Sigma = theta["mu"], theta["Sigma"]
        total = Sigma + R
        at = y[:, None, :d]
        weight = jnp.log(theta["pi"]) + dist.MultivariateNormal(mu, total).log_prob(at)
        gain = jnp.swapaxes(jnp.linalg.solve(total, Sigma), -1, -2)
        loc = mu + jnp.einsum("nkij,nkj->nki", gain, at - mu)
        cov = Sigma - gain @ Sigma
        return weight, loc, (cov + jnp.swapaxes(cov, -1, -2)) / 2

    def summed_out(y: Array) -> None:
        pi = numpyro.sample("pi", dist.Dirichlet(jnp.ones(K))) if K > 1 else jnp.ones(1)
        mu, Sigma = components(standard)
        weight, _, _ = conditional({"pi": pi, "mu": mu, "Sigma": Sigma}, y)
        numpyro.factor("y", jax.nn.logsumexp(weight, -1).sum())

    def locals_given(key: Array, theta: dict[str, Array], y: Array) -> dict[str, Array]:
        key_z, key_x = random.split(key)
        weight, loc, cov = conditional({"pi": jnp.ones(1), **theta}, y)
        z = random.categorical(key_z, weight)
        rows = jnp.arange(len(z))
        x = dist.MultivariateNormal(loc[rows, z], cov[rows, z]).sample(key_x)
        return {"x": x, "z": z}

    return Problem(model, summed_out, locals_given, prior, rules, y, d)


def schools() -> Problem:
    """The README's eight schools."""
    sigma, effects = eight_schools(centred=True).data
    standard = {
        "loc": jnp.zeros((1, 1)),
        "kappa": jnp.full(1, 0.5),
        "df": jnp.full(1, 4.0),
        "scale_matrix": jnp.full((1, 1, 1), 50.0),
    }

    def likelihood(x: Array, y: Array) -> None:
        numpyro.sample("y", dist.Normal(x[:, 0], y[:, 1]), obs=y[:, 0])

    y = jnp.column_stack([effects, sigma])
    found = mixture(standard, y, likelihood, lambda y: y[:, 1, None, None] ** 2)
    return found._replace(exact=lambda y: y[:, 1:] ** -2)


def iris() -> Problem:
    """Length and width of petals, in centimetres, measured to 0.1: three components."""
    data, _ = load_iris(return_X_y=True)
    standard = {
        "loc": jnp.tile(jnp.array([3.5, 1.2]), (3, 1)),
        "kappa": jnp.full(3, 0.1),
        "df": jnp.full(3, 6.0),
        "scale_matrix": jnp.tile(0.5 * jnp.eye(2), (3, 1, 1)),
    }

    def likelihood(x: Array, y: Array) -> None:
        numpyro.sample("y", dist.Normal(x, 0.1).to_event(1), obs=y)

    def noise(y: Array) -> Array:
        return jnp.broadcast_to(0.01 * jnp.eye(2), (len(y), 2, 2))

    found = mixture(standard, jnp.asarray(data[:, 2:], jnp.float32), likelihood, noise)
    return found._replace(exact=lambda y: jnp.full(y.shape, 100.0))


def baseball() -> Problem:
    """`examples/baseball.py`, partially pooled with logits."""
    standard = {
        "loc": jnp.full((1, 1), -1.0),
        "kappa": jnp.full(1, 0.5),
        "df": jnp.full(1, 4.0),
        "scale_matrix": jnp.full((1, 1, 1), 0.2),
    }

    def likelihood(x: Array, y: Array) -> None:
        numpyro.sample("y", dist.Binomial(TIMES, logits=x[:, 0]), obs=y[:, 0])

    def truth(y: Array) -> None:
        mu, Sigma = components(standard)
        with numpyro.plate("data", len(y)):
            base = numpyro.sample("base", dist.Normal(0, 1).expand([1]).to_event(1))
            x = numpyro.deterministic("x", mu[0] + jnp.sqrt(Sigma[0, 0]) * base)
            likelihood(x, y)

    y = jnp.asarray(HITS, jnp.float32)[:, None]
    found = mixture(standard, y, likelihood, lambda y: y)
    return found._replace(truth=truth, locals_given=None)


def chain(y: Array, weight: float, Q: float) -> tuple[Problem, Callable[..., Any]]:
    """x is an autoregression; its likelihood is to be filled in."""
    initial = {
        "loc": jnp.zeros(1),
        "kappa": jnp.array(1.0),
        "df": jnp.array(10.0),
        "scale_matrix": jnp.full((1, 1), 8.0),
    }
    steps = {
        "weight": jnp.full((1, 1), weight),
        "precision": jnp.eye(1),
        "df": jnp.array(6.0),
        "scale_matrix": jnp.full((1, 1), 4 * Q),
    }

    def theta() -> tuple[Array, ...]:
        mu_1, Sigma_1 = normals(initial, "Sigma_1", "mu_1")
        Q = numpyro.sample(
            "Q", dist.InverseWishart(steps["df"], scale_matrix=steps["scale_matrix"])
        )
        A = numpyro.sample(
            "A", dist.MatrixNormal(steps["weight"], jnp.linalg.cholesky(Q), jnp.eye(1))
        )
        return mu_1, Sigma_1, A, Q

    prior = {"initial": NIW.from_standard(**initial), "dynamics": MNIW.from_standard(**steps)}
    nothing: Any = None
    return Problem(nothing, nothing, None, prior, (LDS(),), y), theta


def level() -> Problem:
    """A level that moves, seen through noise of a known size; simulated."""
    T, noise = 200, 1.0
    rng = np.random.default_rng(0)
    x = [0.5]
    for step in 0.4 * rng.standard_normal(T - 1):
        x.append(0.95 * x[-1] + step)
    y = jnp.asarray(np.array(x) + noise * rng.standard_normal(T), jnp.float32)[None, :, None]
    problem, theta = chain(y, 1.0, 0.2)

    def model(y: Array) -> None:
        mu_1, Sigma_1, A, Q = theta()
        with numpyro.plate("data", len(y)):
            natural = GaussianChain.from_standard(mu_1, Sigma_1, A, Q, T)
            x = numpyro.sample("x", GaussianChain.to_distribution(natural))
            numpyro.sample("y", dist.Normal(x, noise).to_event(2), obs=y)

    def filtered(theta: tuple[Array, ...], y: Array) -> tuple[Array, Array, Array]:
        """Mean and variance of each step given the data up to it, and the log evidence."""
        m, C, A, Q = (x.reshape(()) for x in theta)

        def step(state: tuple[Array, Array], y: Array) -> tuple[Any, Any]:
            m, P = state
            log_p = dist.Normal(m, jnp.sqrt(P + noise**2)).log_prob(y)
            gain = P / (P + noise**2)
            m, P = m + gain * (y - m), (1 - gain) * P
            return (A * m, A**2 * P + Q), (m, P, log_p)

        mean, variance, log_p = jax.lax.scan(step, (m, C), y[0, :, 0])[1]
        return mean, variance, jnp.sum(log_p)

    def truth(y: Array) -> None:
        numpyro.factor("y", filtered(theta(), y)[2])

    def locals_given(key: Array, theta: dict[str, Array], y: Array) -> dict[str, Array]:
        values = tuple(theta[name] for name in ("mu_1", "Sigma_1", "A", "Q"))
        mean, variance, _ = filtered(values, y)
        A, Q = (theta[name].reshape(()) for name in ("A", "Q"))

        def step(later: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
            m, P, eps, last = inputs
            gain = jnp.where(last, 0.0, A * P / (A**2 * P + Q))
            x = m + gain * (later - A * m) + jnp.sqrt((1 - gain * A) * P) * eps
            return x, x

        inputs = mean, variance, random.normal(key, (T,)), jnp.arange(T) == T - 1
        x = jax.lax.scan(step, jnp.zeros(()), inputs, reverse=True)[1]
        return {"x": x[None, :, None]}

    problem = problem._replace(model=model, truth=truth, locals_given=locals_given)
    return problem._replace(exact=lambda y: jnp.full(y.shape, noise**-2))


def volatility() -> Problem:
    """`examples/stochastic_volatility.py` with an autoregression, on 200 simulated returns."""
    T = 200
    rng = np.random.default_rng(1)
    x = [0.0]
    for step in 0.3 * rng.standard_normal(T - 1):
        x.append(0.95 * x[-1] + step)
    returns = np.exp(np.array(x) / 2) * rng.standard_normal(T)
    problem, theta = chain(jnp.asarray(returns, jnp.float32)[None, :, None], 0.9, 0.1)

    def likelihood(x: Array, y: Array) -> None:
        # Where a trajectory of NUTS starts, an explosive x would have no scale.
        numpyro.sample("y", dist.Normal(0, jnp.exp(jnp.clip(x, -40, 40) / 2)).to_event(2), obs=y)

    def model(y: Array) -> None:
        mu_1, Sigma_1, A, Q = theta()
        with numpyro.plate("data", len(y)):
            natural = GaussianChain.from_standard(mu_1, Sigma_1, A, Q, T)
            likelihood(numpyro.sample("x", GaussianChain.to_distribution(natural)), y)

    def truth(y: Array) -> None:
        mu_1, Sigma_1, A, Q = theta()
        eps = numpyro.sample("eps", dist.Normal(0, 1).expand([T]).to_event(1))
        first = mu_1[0] + jnp.sqrt(Sigma_1[0, 0]) * eps[0]

        def step(x: Array, e: Array) -> tuple[Array, Array]:
            x = A[0, 0] * x + jnp.sqrt(Q[0, 0]) * e
            return x, x

        rest = jax.lax.scan(step, first, eps[1:])[1]
        x = numpyro.deterministic("x", jnp.append(first, rest)[None, :, None])
        with numpyro.plate("data", len(y)):
            likelihood(x, y)

    return problem._replace(model=model, truth=truth)


def hidden_markov() -> Problem:
    """A hidden Markov model of three states, 200 simulated steps, seen through known noise."""
    T, K, noise = 200, 3, 0.3
    rng = np.random.default_rng(2)
    move = np.array([[0.9, 0.08, 0.02], [0.1, 0.85, 0.05], [0.05, 0.15, 0.8]])
    z = [0]
    for _ in range(T - 1):
        z.append(rng.choice(K, p=move[z[-1]]))
    loc, scale = np.array([-2.0, 0.0, 2.5])[z], np.array([0.6, 0.5, 0.9])[z]
    y = loc + scale * rng.standard_normal(T) + noise * rng.standard_normal(T)
    standard = {
        "loc": jnp.zeros((K, 1)),
        "kappa": jnp.full(K, 0.1),
        "df": jnp.full(K, 4.0),
        "scale_matrix": jnp.ones((K, 1, 1)),
    }
    prior = {
        "initial": Dirichlet.from_standard(jnp.ones(K)),
        "transition": Dirichlet.from_standard(jnp.ones((K, K))),
        "emission": NIW.from_standard(**standard),
    }

    def theta() -> tuple[Array, ...]:
        pi = numpyro.sample("pi", dist.Dirichlet(jnp.ones(K)))
        with numpyro.plate("states", K):
            P = numpyro.sample("P", dist.Dirichlet(jnp.ones(K)))
        return pi, P, *components(standard)

    def model(y: Array) -> None:
        pi, P, mu, Sigma = theta()
        with numpyro.plate("data", len(y)):
            states = MarkovChain.to_distribution(MarkovChain.from_standard(pi, P, T))
            z = numpyro.sample("z", states)
            x = numpyro.sample("x", dist.MultivariateNormal(mu[z], Sigma[z]).to_event(1))
            numpyro.sample("y", dist.Normal(x, noise).to_event(2), obs=y)

    def posterior(pi: Array, P: Array, mu: Array, Sigma: Array, y: Array) -> Any:
        states = MarkovChain.from_standard(pi, P, T)
        seen = dist.Normal(mu[:, 0], jnp.sqrt(Sigma[:, 0, 0] + noise**2)).log_prob(y[0])
        return states._replace(unary=states.unary + seen)

    def truth(y: Array) -> None:
        numpyro.factor("y", MarkovChain.log_partition(posterior(*theta(), y)))

    def locals_given(key: Array, theta: dict[str, Array], y: Array) -> dict[str, Array]:
        key_z, key_x = random.split(key)
        values = [theta[name] for name in ("pi", "P", "mu", "Sigma")]
        z = MarkovChain.sample(key_z, posterior(*values, y))
        mu, var = theta["mu"][z], theta["Sigma"][z][..., 0]
        gain = var / (var + noise**2)
        sd = jnp.sqrt(gain * noise**2)
        x = mu + gain * (y[0] - mu) + sd * random.normal(key_x, mu.shape)
        return {"x": x[None], "z": z[None]}

    data = jnp.asarray(y, jnp.float32)[None, :, None]
    found = Problem(model, truth, locals_given, prior, (HMMEP(), HMMMeanField()), data)
    return found._replace(exact=lambda y: jnp.full(y.shape, noise**-2))


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "eight schools": schools,
    "baseball": baseball,
    "level": level,
    "volatility": volatility,
    "iris": iris,
    "hidden Markov": hidden_markov,
}


def compared(draws: dict[str, Any]) -> Samples:
    """What is compared: components in the order of their means, scales in place of variances."""
    draws = {name: np.asarray(x) for name, x in draws.items()}
    if "mu" in draws and draws["mu"].shape[1] > 1:
        order = np.argsort(draws["mu"][..., 0], 1)
        rows = np.arange(len(order))[:, None]
        for name in {"mu", "Sigma", "pi", "P"} & set(draws):
            draws[name] = draws[name][rows, order]
        if "P" in draws:
            draws["P"] = np.take_along_axis(draws["P"], order[:, None], 2)
        place = np.argsort(order, 1)
        z = draws["z"].reshape(len(order), -1)
        # Indicators, whose means are probabilities.
        draws["z"] = np.eye(order.shape[1])[place[rows, z]]
    else:
        draws = {name: x for name, x in draws.items() if name not in ("z", "pi")}
    for name in {"Sigma", "Q"} & set(draws):
        draws[name] = np.sqrt(np.diagonal(draws[name], axis1=-2, axis2=-1))
    kept = ("mu", "Sigma", "pi", "P", "A", "Q", "mu_1", "x", "z")
    return {name: draws[name] for name in kept if name in draws}


def truth_of(folder: Path, name: str, problem: Problem) -> tuple[Samples, float]:
    """Draws of what is compared, and the largest R-hat among them."""
    draws: dict[str, Any] = dict(
        nuts(folder, name, problem.truth, (problem.y,), init_strategy=init_to_median)
    )
    if problem.locals_given is not None:
        keys = random.split(random.key(3), len(next(iter(draws.values()))))
        one = jax.jit(jax.vmap(problem.locals_given, (0, 0, None)))
        draws |= jax.device_get(one(keys, draws, problem.y))
    found = compared(draws)
    r_hat = [
        np.nanmax(split_gelman_rubin(x.reshape(CHAINS, -1, *x.shape[1:])))
        for name, x in found.items()
        if name != "z"
    ]
    return found, float(max(r_hat))


def known(problem: Problem) -> Any:
    """In place of a network, the likelihood of x itself."""

    def apply(params: Any, y: Array) -> GaussianPotential:
        assert problem.exact is not None
        precision = problem.exact(y)
        return GaussianPotential.from_diagonal(y[..., : problem.dim] * precision, precision)

    return lambda rng_key, shape: (shape, {}), apply


def fit(
    problem: Problem, rule: Any, potential: str, implicit: str, steps: int
) -> tuple[Samples, Diagnosis]:
    network = known(problem) if potential == "exact" else recognition_network(problem.dim)
    guide = SVAEGuide(problem.prior, network, rule)
    guide.check(problem.model, random.key(0), problem.y)
    optim = optax.multi_transform(
        {"natural": natural_gradient(0.1, guide.domain), "network": optax.adam(1e-3)},
        guide.param_labels,
    )
    svi = SVI(problem.model, guide, optim, SVAEELBO(implicit))
    result = svi.run(random.key(1), steps, problem.y, progress_bar=False)
    sample = jax.jit(
        lambda key, params: guide.sample_posterior(key, params, problem.y, sample_shape=(DRAWS,))
    )
    draws = jax.device_get(sample(random.key(2), result.params))
    return compared(draws), diagnose(svi, result=result, model_args=(problem.y,))


def ways(problem: Problem) -> list[tuple[str, str]]:
    """Potential and ``implicit`` of each row."""
    found = [("network", "full"), ("network", "explicit_only")]
    return found if problem.exact is None else [*found, ("exact", "explicit_only")]


def line(
    label: list[str], truth: Samples, r_hat: float, run: Callable[[], Any], verbose: bool
) -> tuple[str, Verdict]:
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples, found = run()
    seconds = time.perf_counter() - began
    if verbose:
        print(found)
    known = {site: values for site, values in moments(truth).items() if site != "z"}
    error = errors(samples, known)
    of_globals = errors(samples, {site: values for site, values in known.items() if site != "x"})
    probs = "-"
    if "z" in truth:
        probs = f"{np.abs(samples['z'].mean(0) - truth['z'].mean(0)).max():.2f}"
    verdict = Verdict(error.right(), found)
    cells: list[Any] = [
        *label,
        f"{r_hat:.3f}",
        elbo(found),
        shown(found, "k-hat"),
        f"{error.mean:.2f}",
        of_globals.spread,
        errors(samples, {"x": known["x"]}).spread,
        probs,
        *verdict.cells,
        f"{seconds:.1f}",
    ]
    return f"| {' | '.join(cells)} |", verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--problem", nargs="*", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--only", nargs="*", default=[""], help="parts of rules, default all")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=Path("out/svae"))
    parser.add_argument("--verbose", action="store_true", help="the whole table of `diagnose`")
    args = parser.parse_args()
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
    lines: list[Line] = []
    for name in args.problem:
        problem = PROBLEMS[name]()
        truth, r_hat = truth_of(args.out, name, problem)
        for rule in problem.rules:
            label = type(rule).__name__
            if any(part in label for part in args.only):
                for potential, implicit in ways(problem):
                    run = partial(fit, problem, rule, potential, implicit, args.steps)
                    cells = [name, f"`{label}`", potential, implicit]
                    make = partial(line, cells, truth, r_hat, run, args.verbose)
                    lines.append(kept(args.out, " ".join([*cells, str(args.steps)]), make))
    print(counted(lines))


if __name__ == "__main__":
    main()
