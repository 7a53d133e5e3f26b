"""
The order of Rényi's bound, seen
================================

``VRELBO(alpha)`` maximises a bound whose order alpha says what a guide does that cannot be right.
Three pictures of it, each with a closed form beside what the package computes (Li, 2018, chapters 2
and 4; Li and Turner, 2016).

**Width.** A normal of two numbers with a correlation of 0.9, and the best guide without one. From
alpha = inf down to -inf the guide widens: above 0 it fits inside the posterior (at order 1, VI, it
has the sd of one number given the other), at 0 it has the right sd of each number, and below it
covers the whole. But the exact bound has a maximum there for orders above 0 alone: at 0 it is the
evidence whatever the guide, and below 0 an upper bound, which that guide minimises. What is trained
is the bound of K particles, whose maximum there depends on K.

**Noise.** A linear regression whose noise is learnt with the guide. The bound of each order lies
below the evidence, the further the less noise there is, so its maximum is at too large a noise. The
slope of the bound where the evidence has its maximum is 0 for order 0 alone, and grows with alpha.

**Particles.** Fifty pairs with a correlation of 0.69, the guide of order 1, and the mean of the
bound of K particles. For infinitely many an order below 0 is an upper bound, and infinite from
-0.44 on; the bound of K particles is far below it, and here below the evidence even with 500. So
the order -inf (VR-max), by theory no lower bound at all, is the tightest lower one of those that a
computer can afford.

The exit code is 1 if the sd of a guide of an order above 0, or a noise that was learnt, is more
than 3 % from its closed form.
::

    python examples/order_of_renyis_bound.py --out out/order_of_renyis_bound.png

.. image:: /recorded/order_of_renyis_bound.png
   :alt: Guides of five orders around one posterior; bounds over the noise; bounds of K particles.

.. literalinclude:: /recorded/order_of_renyis_bound.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/order_of_renyis_bound.png"

import argparse
from pathlib import Path
import sys

from jax import random
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
import optax
from scipy.optimize import minimize_scalar
from scipy.stats import multivariate_normal

from numpyro_ext.diagnostics import evidence_bounds
from numpyro_ext.objectives import VRELBO, log_weights

ORDERS = (-np.inf, -1.0, 0.0, 0.5, 1.0, 2.0, np.inf)
LEARNT = (0.0, 0.5, 1.0, 2.0, np.inf)
SAMPLED = (1.0, 0.5, 0.0, -1.0, -5.0, -50.0, -500.0)
PARTICLES = (1, 5, 50, 500)
STEEP = np.linalg.inv([[1.0, 0.9], [0.9, 1.0]])
PAIR, PAIRS = np.array([[2.0, 1.2], [1.2, 1.5]]), 50
INPUTS = [[1, 0.8], [0.5, 0.9], [1.2, 1], [-0.8, -0.6], [0.7, 1.1], [-1, -1.1]]
INPUTS, OUTPUTS = np.array(INPUTS), np.array([1.6, -0.3, 0.9, 0.2, 2.0, -1.4])


def r2_of(precision):
    """Squared partial correlation, all that a bound of two numbers depends on."""
    return precision[0, 1] ** 2 / (precision[0, 0] * precision[1, 1])


def rho_of(alpha, r2):
    """Precisions of the best guide over the diagonal of the posterior's precision matrix."""
    if np.isinf(alpha):
        return 1 + np.sign(alpha) * r2**0.5
    if alpha == 0:
        return 1 - r2
    return (2 * alpha - 1 + np.sqrt(1 - 4 * alpha * (1 - alpha) * r2)) / (2 * alpha)


def gap(alpha, rho, r2):
    """Log evidence minus the exact bound, in nats; -inf where an upper bound is infinite."""
    if alpha == 1:
        return 1 / rho - 1 + np.log(rho) - np.log(1 - r2) / 2
    inside = (alpha * rho + 1 - alpha) ** 2 - (1 - alpha) ** 2 * r2
    if inside <= 0:
        return -np.inf
    return (2 * alpha * np.log(rho) + (1 - alpha) * np.log(1 - r2) - np.log(inside)) / (
        2 * (alpha - 1)
    )


def fit(model, alpha, num_particles, steps):
    """What was learnt by a guide without correlations."""
    adam = optax.adam(optax.cosine_decay_schedule(0.05, steps))
    # Near its optimum the gradient of a low order is mostly noise, but for "dreg".
    gradient = "standard" if np.isinf(alpha) else "dreg"
    svi = SVI(model, AutoNormal(model), adam, VRELBO(alpha, num_particles, gradient=gradient))
    return svi.run(random.key(0), steps, progress_bar=False).params


def steep():
    numpyro.sample("z", dist.MultivariateNormal(jnp.zeros(2), precision_matrix=jnp.array(STEEP)))


def widths(steps):
    """Standard deviation of the guide over the posterior's, by the formula and by fits."""
    print("Width: sd of the guide over the posterior's")
    print(f"{'alpha':>8}{'formula':>10}{'K = 10':>10}{'K = 1000':>10}")
    r2, close = r2_of(STEEP), True
    for alpha in ORDERS:
        exact = np.sqrt((1 - r2) / rho_of(alpha, r2))
        found = [fit(steep, alpha, K, steps)["z_auto_scale"].mean() for K in (10, 1000)]
        close &= alpha <= 0 or abs(found[-1] / exact - 1) < 0.03
        print(f"{alpha:8g}{exact:10.3f}{found[0]:10.3f}{found[1]:10.3f}", flush=True)
    return close


def regression():
    noise = numpyro.param("noise", 1.0, constraint=dist.constraints.positive)
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(jnp.array(INPUTS) @ w, noise).to_event(1), obs=OUTPUTS)


def regression_bound(alpha, noise):
    """The exact bound with the best guide."""
    r2 = r2_of(np.eye(2) + INPUTS.T @ INPUTS / noise**2)
    covariance = noise**2 * np.eye(len(OUTPUTS)) + INPUTS @ INPUTS.T
    # For an infinite order, the limit of a large one.
    alpha = min(alpha, 1e6)
    return multivariate_normal(cov=covariance).logpdf(OUTPUTS) - gap(alpha, rho_of(alpha, r2), r2)


def learnt_noise(steps):
    """Where each bound has its maximum over the noise, by the formula and by a fit."""
    print("\nNoise: where the bound has its maximum, and its slope where the evidence has its own")
    print(f"{'alpha':>8}{'formula':>10}{'VRELBO':>10}{'slope':>10}")
    tops, close, h = {}, True, 1e-4
    for alpha in LEARNT:
        top = minimize_scalar(lambda s, a=alpha: -regression_bound(a, s), bounds=(0.3, 3)).x
        tops[alpha] = top
        best = tops[0.0]
        up, down = (regression_bound(alpha, best + e) for e in (h, -h))
        found = fit(regression, alpha, 200, steps)["noise"]
        close &= abs(found / top - 1) < 0.03
        print(f"{alpha:8g}{top:10.3f}{found:10.3f}{(up - down) / (2 * h):10.3f}", flush=True)
    return tops, close


def pairs():
    one = dist.MultivariateNormal(jnp.zeros(2), precision_matrix=jnp.array(PAIR))
    numpyro.sample("z", one.expand([PAIRS]).to_event(1))


def guide_of_pairs():
    numpyro.sample("z", dist.Normal(0.0, jnp.diag(PAIR) ** -0.5).expand([PAIRS, 2]).to_event(2))


def particles(repeats):
    """The exact bound minus the evidence, 0, and the mean of that of K particles."""
    print(f"\nParticles: the bound of {PAIRS} pairs less the evidence, in nats")
    print(f"{'alpha':>8}" + "".join(f"{alpha:>10g}" for alpha in SAMPLED))
    exact = [-PAIRS * gap(alpha, 1.0, r2_of(PAIR)) for alpha in SAMPLED]
    print(f"{'exact':>8}" + "".join(f"{x:10.2f}" for x in exact))
    means = {}
    for K in PARTICLES:
        options = {"num_samples": K * repeats, "batch_size": 1000}
        lw = np.array(log_weights(random.key(1), {}, pairs, guide_of_pairs, **options))
        lw = lw.reshape(K, repeats)
        # A bound of one particle is its log weight, whatever the order. Columns are independent
        # units here, whose bounds are summed; ten groups of them give the error.
        groups = [
            np.full(len(SAMPLED), part.mean())
            if K == 1
            else evidence_bounds(part, alphas=SAMPLED).values / part.shape[1]
            for part in np.split(lw, 10, axis=1)
        ]
        means[K] = np.mean(groups, 0)
        error = np.std(groups, axis=0, ddof=1).max() / 10**0.5
        print(f"{f'K = {K}':>8}" + "".join(f"{x:10.2f}" for x in means[K]) + f"   +- {error:.2f}")
    return exact, means


def draw(out, tops, exact, means):
    fig, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    angle = np.linspace(0, 2 * np.pi, 200)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, 5))
    axes[0].fill(*(2 * np.linalg.cholesky(np.linalg.inv(STEEP)) @ circle), color="0.85")
    for alpha, colour in zip((-np.inf, 0.0, 0.5, 1.0, np.inf), colours, strict=True):
        sd = (rho_of(alpha, r2_of(STEEP)) * STEEP[0, 0]) ** -0.5
        axes[0].plot(*(2 * sd * circle), color=colour, label=f"alpha = {alpha:g}")
    axes[0].set(title="Two sd of the posterior and of the guides", aspect="equal")
    axes[0].set_xlim(-3, 6.5)

    noise = np.linspace(0.6, 1.4, 200)
    for alpha, colour in zip(LEARNT, colours, strict=True):
        curve = [regression_bound(alpha, s) for s in noise]
        label = "log evidence (alpha = 0)" if alpha == 0 else f"alpha = {alpha:g}"
        axes[1].plot(noise, curve, color=colour, label=label)
        axes[1].plot(tops[alpha], regression_bound(alpha, tops[alpha]), "o", color=colour)
    axes[1].set(title="Bounds over a noise that is learnt", xlabel="noise", ylabel="nats")

    order = range(len(SAMPLED))
    axes[2].axhline(0, color="0.6", lw=1)
    axes[2].plot(order, exact, "k--", label="exact")
    for (K, values), colour in zip(means.items(), colours, strict=False):
        axes[2].plot(order, values, "o-", color=colour, label=f"K = {K}")
    axes[2].set_xticks(order, [f"{alpha:g}" for alpha in SAMPLED])
    title = f"K particles, {PAIRS} pairs: bound less evidence"
    axes[2].set(title=title, xlabel="alpha", ylabel="nats")
    for ax, where in zip(axes, ("center right", "lower center", "center right"), strict=True):
        ax.legend(frameon=False, fontsize=8, loc=where)
    out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=120)


def main(out, steps, repeats):
    widths_close = widths(steps)
    tops, noise_close = learnt_noise(steps)
    draw(out, tops, *particles(repeats))
    return 0 if widths_close and noise_close else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--out", type=Path, default=Path("out/order_of_renyis_bound.png"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=1000, help="of each K particles")
    args = parser.parse_args()
    sys.exit(main(args.out, args.steps, args.repeats))
