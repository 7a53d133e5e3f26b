"""
Conjugate models by coordinate ascent, beside their exact answers
=================================================================

A mixture of normals with conjugate priors (a Dirichlet of the weights, a normal-inverse-Wishart of
each component) has closed updates: the responsibilities of the rows, given the components, and the
natural parameters of the components, prior plus expected statistics of the rows. Both are one line
with ``numpyro_ext.expfam``, where a posterior is a sum of natural parameters. Without a network
such a model needs no ``SVI``; with one, ``SVAEELBO`` has the same updates inside.

**The mean and precision of a normal**, from twelve rows: the posterior is a normal-gamma, in closed
form; coordinate ascent takes a normal of the mean times a gamma of the precision.

**A rate of counts above a background**: the counts that are seen are the sum of both, and the
counts of a second measurement are background alone, and both rates have gamma priors. Given how
many of the counts are background each rate has a gamma posterior, so that the exact answer is a
finite sum; coordinate ascent takes a gamma of each rate and a binomial of the split.

**Twelve rows**, two components: there are 4,096 assignments, so that the evidence and the
probability that two rows share a component are exact sums. The table says what mean field loses.

**20,000 rows**, five components: coordinate ascent reads all rows for a step; natural gradients on
200 rows (Hoffman et al., 2013), by ``natural_gradient``, whose step of size 1 is coordinate ascent
itself, are ahead of it after as many readings. Either may end at another local optimum.

The exit code is 1 if a bound is above its exact evidence, if the mixture's falls at any step
of coordinate ascent, or if natural gradients are not ahead of it after five readings.
::

    python examples/conjugate_ascent.py --out out/conjugate_ascent.png

.. image:: /recorded/conjugate_ascent.png
   :alt: Left: mean field is sure whether two rows are together where the exact answer is
         not. Right: natural gradients are ahead of coordinate ascent after as many
         readings of the data.

.. literalinclude:: /recorded/conjugate_ascent.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/conjugate_ascent.png"

import argparse
from pathlib import Path
import sys

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.special import gammaln, logsumexp
import matplotlib.pyplot as plt
import numpy as np

from numpyro_ext.expfam import (
    NIW,
    Dirichlet,
    DirichletNatural,
    Gamma,
    GammaNatural,
    Gaussian,
    GaussianNatural,
    NIWNatural,
    Poisson,
    PoissonNatural,
    multiply,
)
from numpyro_ext.optim import natural_gradient

D = 2


def prior_of(num):
    """Natural parameters of the weights, and of ``num`` components."""
    one = NIW.from_standard(loc=jnp.zeros(D), kappa=0.1, df=4.0, scale_matrix=jnp.eye(D))
    components = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), one)
    return Dirichlet.from_standard(jnp.ones(num)), components


def statistics(r, x):
    """Those of rows with the responsibilities ``(rows, components)``, to be added to a prior."""
    count = r.sum(0)
    squares = jnp.einsum("nk,ni,nj->kij", r, x, x)
    return DirichletNatural(count), NIWNatural(squares, r.T @ x, count, count)


def responsibilities(q, x):
    """Of each row, and the log of their normalisers, whose sum is a part of the bound."""
    t = NIW.mean(q[1])
    log_lik = (
        jnp.einsum("kij,ni,nj->nk", t.neg_half_precision, x, x)
        + x @ t.precision_loc.T
        + t.neg_half_quad
        + t.half_logdet
        - D / 2 * np.log(2 * np.pi)
    )
    log_r = log_lik + Dirichlet.mean(q[0]).log_prob
    total = logsumexp(log_r, axis=1)
    return jnp.exp(log_r - total[:, None]), total


def updated(prior, q, x, scale=1.0):
    """Prior times the expected statistics of these rows, each counted ``scale`` times."""
    r, _ = responsibilities(q, x)
    added = jax.tree.map(lambda leaf: scale * leaf, statistics(r, x))
    return tuple(multiply(*pair) for pair in zip(prior, added, strict=True))


def bound(prior, q, x):
    """The evidence lower bound at the best responsibilities, in nats."""
    kl = Dirichlet.kl(q[0], prior[0]) + NIW.kl(q[1], prior[1]).sum()
    return responsibilities(q, x)[1].sum() - kl


def start(rng_key, prior, x):
    """Components around rows drawn at random."""
    centers = x[random.choice(rng_key, len(x), (len(prior[0].a),), replace=False)]
    r = jax.nn.softmax(-jnp.sum((x[:, None] - centers) ** 2, -1))
    return tuple(multiply(*pair) for pair in zip(prior, statistics(r, x), strict=True))


def exact(prior, x):
    """Log evidence, and the probability that two rows share a component, over all assignments."""
    rows, num = len(x), len(prior[0].a)
    codes = np.stack(np.unravel_index(np.arange(num**rows), (num,) * rows), -1)

    @jax.jit
    def log_joint(z):
        added = statistics(jax.nn.one_hot(z, num), x)
        weights, components = (multiply(*pair) for pair in zip(prior, added, strict=True))
        gained = Dirichlet.log_partition(weights) - Dirichlet.log_partition(prior[0])
        gained += jnp.sum(NIW.log_partition(components) - NIW.log_partition(prior[1]))
        return gained - rows * D / 2 * np.log(2 * np.pi)

    log_p = jax.lax.map(log_joint, jnp.asarray(codes), batch_size=512)
    share = np.exp(np.asarray(log_p - logsumexp(log_p), np.float64))
    same = codes[:, :, None] == codes[:, None, :]
    return float(logsumexp(log_p)), np.einsum("s,sij->ij", share, same)


def mixture(rng_key, rows, spread):
    key_z, key_x = random.split(rng_key)
    angle = 2 * np.pi * jnp.arange(5) / 5
    centers = spread * jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)
    z = random.categorical(key_z, jnp.log(jnp.array([0.3, 0.25, 0.2, 0.15, 0.1])), shape=(rows,))
    return centers[z] + random.normal(key_x, (rows, D)) * jnp.array([1.0, 0.6])


def ascend(prior, q, x, steps):
    """Coordinate ascent: the bound before each step, and the last q."""
    step = jax.jit(lambda q, x: (updated(prior, q, x), bound(prior, q, x)))
    bounds = []
    for _ in range(steps):
        q, value = step(q, x)
        bounds.append(float(value))
    return np.array(bounds), q


def normal_of_mean_and_precision(y, sweeps=30):
    """mu | tau ~ N(0, 1 / (kappa tau)), tau ~ Gamma: moments and evidence, exact and factorised.

    Every factor of the model is a product of natural parameters of one variable and statistics of
    the other, so that an update is the sum of what the factors say about it.
    """
    n, kappa, prior = len(y), 0.1, Gamma.from_standard(2.0, 2.0)
    half_log_2pi = 0.5 * np.log(2 * np.pi)
    center = jnp.sum(y) / (kappa + n)
    spread = jnp.sum(y**2) - (kappa + n) * center**2
    exact = multiply(prior, GammaNatural(n / 2, spread / 2))
    evidence = Gamma.log_partition(exact) - Gamma.log_partition(prior)
    evidence += 0.5 * np.log(kappa / (kappa + n)) - n * half_log_2pi
    sd = jnp.sqrt(exact.b / (exact.a - 1) / (kappa + n))  # of a t distribution

    def squares(mean):
        """E of kappa mu^2 + sum (y - mu)^2, under the mean parameters of q(mu)."""
        return (kappa + n) * mean.xx[0, 0] - 2 * jnp.sum(y) * mean.x[0] + jnp.sum(y**2)

    tau = prior
    for _ in range(sweeps):
        precision = -Gamma.mean(tau).neg_value
        W = -(kappa + n) * precision * jnp.eye(1) / 2
        mu = GaussianNatural(precision * jnp.sum(y)[None], W)
        mean = Gaussian.mean(mu)
        tau = multiply(prior, GammaNatural((n + 1) / 2, squares(mean) / 2))
    log_tau, neg_tau = Gamma.mean(tau)
    bound = (n + 1) * (log_tau / 2 - half_log_2pi) + 0.5 * np.log(kappa)
    bound += neg_tau * squares(mean) / 2 + Gaussian.entropy(mu) - Gamma.kl(tau, prior)
    found = mean.x[0], jnp.sqrt(mean.xx[0, 0] - mean.x[0] ** 2), -neg_tau, tau.a**0.5 / tau.b, bound
    return (center, sd, exact.a / exact.b, exact.a**0.5 / exact.b, evidence), found


def counts_above_a_background(seen, background, times, sweeps=200):
    """Rates with the priors Gamma(1, 0.1): seen ~ Poisson(times[0] (signal + noise)) and
    background ~ Poisson(times[1] noise). Moments and evidence, exact and factorised."""
    prior, (t, s) = Gamma.from_standard(1.0, 0.1), times

    def posteriors(of_signal):
        """Given how many of the counts that are seen are of the signal; or their expectation."""
        rest = GammaNatural(seen - of_signal + background, t + s)
        return multiply(prior, GammaNatural(of_signal, t)), multiply(prior, rest)

    # What the densities of the counts have beside the rates: times and factorials.
    of_times = seen * jnp.log(t) + background * jnp.log(s) - gammaln(background + 1.0)
    split = jnp.arange(seen + 1.0)
    both = posteriors(split)
    log_p = sum(Gamma.log_partition(q) - Gamma.log_partition(prior) for q in both)
    for count in (split, seen - split):
        log_p += Poisson.log_base_measure(count)
    evidence = logsumexp(log_p) + of_times
    share = jnp.exp(log_p - logsumexp(log_p))
    first = [share @ (q.a / q.b) for q in both]
    second = [share @ (q.a * (q.a + 1) / q.b**2) for q in both]
    exact = [x for m, m2 in zip(first, second, strict=True) for x in (m, jnp.sqrt(m2 - m**2))]

    of_signal = seen / 2
    for _ in range(sweeps):
        both = posteriors(of_signal)
        logs = jnp.stack([Gamma.mean(q).log_value for q in both])
        of_signal = seen * jax.nn.softmax(logs)[0]
    # The split is summed in closed form: a Poisson density of the counts at the sum of two rates.
    total = PoissonNatural(logsumexp(logs))
    bound = Poisson.inner(total, Poisson.statistics(seen)) + Poisson.log_base_measure(seen)
    bound += background * logs[1] + of_times
    bound += t * Gamma.mean(both[0]).neg_value + (t + s) * Gamma.mean(both[1]).neg_value
    bound -= sum(Gamma.kl(q, prior) for q in both)
    found = [x for q in both for x in (q.a / q.b, q.a**0.5 / q.b)]
    return (*exact, evidence), (*found, bound)


def compare(title, names, exact, found):
    print(f"{title:<38}{'exact':>9}{'factorised':>12}")
    for name, a, b in zip(names, exact, found, strict=True):
        print(f"  {name:<36}{float(a):9.3f}{float(b):12.3f}")
    print()
    return bool(found[-1] < exact[-1])


def main(out, rows, seed):
    keys = random.split(random.key(seed), 8)
    y = 1.0 + 2.0 * random.normal(keys[6], (12,))
    names = ["mean of mu", "sd of mu", "mean of tau", "sd of tau", "log evidence, bound"]
    below = compare("normal, 12 rows", names, *normal_of_mean_and_precision(y))
    names = ["mean of the signal", "sd", "mean of the background", "sd", "log evidence, bound"]
    answers = counts_above_a_background(18, 30, (1.0, 3.0))
    below &= compare("18 counts, 30 in three times as long", names, *answers)
    prior = prior_of(2)
    x = jnp.concatenate([mixture(keys[0], 6, 0.0), mixture(keys[1], 6, 0.0) + 2.5])
    evidence, together = exact(prior, x)
    runs = [ascend(prior, start(key, prior, x), x, 60) for key in random.split(keys[2], 10)]
    never_falls = all(np.all(np.diff(bounds) > -1e-3) for bounds, _ in runs)
    bounds, q = max(runs, key=lambda run: run[0][-1])
    r = np.asarray(responsibilities(q, x)[0])
    guess = r @ r.T
    np.fill_diagonal(guess, 1.0)
    off = ~np.eye(len(x), dtype=bool)
    print("12 rows, all assignments summed")
    print(f"  log evidence                     {evidence:9.3f}")
    print(f"  bound, best of 10 starts         {bounds[-1]:9.3f}")
    print(f"  the same, both labellings        {bounds[-1] + np.log(2):9.3f}")
    print(f"  two rows together, mean |error|  {np.abs(guess - together)[off].mean():9.3f}")
    sure = np.minimum(together, 1 - together)[off].mean()
    print(f"  doubt about a pair: exact {sure:.3f},", end=" ")
    print(f"mean field {np.minimum(guess, 1 - guess)[off].mean():.3f}")

    prior, x = prior_of(5), mixture(keys[3], rows, 4.0)
    q0 = start(keys[4], prior, x[:200])
    steps, batch = 25, 200
    whole, q_whole = ascend(prior, q0, x, steps)
    optim = natural_gradient(lambda i: (i + 1.0) ** -0.7)

    @jax.jit
    def step(q, state, rng_key):
        some = x[random.randint(rng_key, (batch,), 0, rows)]
        target = updated(prior, q, some, rows / batch)
        gradient = jax.tree.map(jnp.subtract, q, target)
        moves, state = optim.update(gradient, state, q)
        return jax.tree.map(jnp.add, q, moves), state

    q, state, read, reached = q0, optim.init(q0), [], []
    value = jax.jit(lambda q: bound(prior, q, x))
    num = max(1, 5 * rows // batch)
    for i, key in enumerate(random.split(keys[5], num)):
        if i % max(1, num // 50) == 0:
            read.append(i * batch / rows)
            reached.append(float(value(q)) / rows)
        q, state = step(q, state, key)
    read.append(num * batch / rows)
    reached.append(float(value(q)) / rows)
    best = float(value(q_whole)) / rows
    print(f"\n{rows:,} rows, five components; nats a row")
    print(f"  coordinate ascent after {steps} readings      {best:9.4f}")
    print(f"  natural gradients after {read[-1]:.0f} readings       {reached[-1]:9.4f}")
    early = int(np.argmin(np.abs(np.array(read) - 1)))
    print(f"  after one reading: {reached[early]:.4f}, coordinate ascent {whole[1] / rows:.4f}")

    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(together[off], guess[off], ".", ms=8, alpha=0.4)
    left.plot([0, 1], [0, 1], color="0.7", lw=1, zorder=0)
    left.set(xlabel="exact", ylabel="mean field", title="Probability that two rows are together")
    gap = max(best, reached[-1]) + 1e-5
    right.plot(np.arange(steps), gap - whole / rows, "o-", ms=3, label="coordinate ascent")
    right.plot(read, gap - np.array(reached), label=f"natural gradients, {batch} rows a step")
    right.set(yscale="log", xlabel="readings of all rows", ylabel="nats a row below the best bound")
    right.set_title(f"{rows:,} rows")
    right.legend(frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=120)
    good = below and never_falls and bounds[-1] < evidence and reached[-1] > whole[5] / rows
    return 0 if good else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--out", type=Path, default=Path("out/conjugate_ascent.png"))
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    sys.exit(main(args.out, args.rows, args.seed))
