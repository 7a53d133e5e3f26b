"""
Which alpha?
============

``BBAlphaELBO`` (and ``VRELBO``) has an order alpha: near 0 it is the ELBO, which is sure of itself,
and at 1 the guide covers what the data leave open. No theory names the best one for predictions, so
it is chosen as any other setting is: on rows that are held out for it.

An order may be a traced number, so that one compiled program trains all orders and all splits side
by side (``jax.vmap`` over alpha and the key). It may be a schedule of the step too, such as from 1
down to 0.5 over the first half of the training (``count_steps`` around the guide).

A network of 20 rectifiers with a mean-field guide on scikit-learn's diabetes data, in random splits
of 60 % to train, 20 % to choose and 20 % to test. The table has the log predictive density of a
test row and its root mean squared error in standard deviations of the target, mean and standard
error over the splits, for each order, for the order that the validation rows chose in each split,
and for the one that the test rows would have chosen, which nobody can.

The picture shows what to expect of this: splits differ far more than orders do, and 88 rows of one
split choose nearly at random. The mean over splits is what to choose by.

The exit code is 1 if an order does not predict better than the normal distribution of the target,
whose log density is -1.42, by a tenth of a nat.
::

    python examples/which_alpha.py --out out/which_alpha.png

.. image:: /recorded/which_alpha.png
   :alt: Log density of test rows against alpha: splits differ more than orders do.

.. literalinclude:: /recorded/which_alpha.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/which_alpha.png"

import argparse
from pathlib import Path
import sys

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
import optax
from sklearn.datasets import load_diabetes

from numpyro_ext.guides import init_to_fan_in
from numpyro_ext.objectives import BBAlphaELBO, count_steps

ORDERS = (0.0, 0.25, 0.5, 0.75, 1.0)
HIDDEN, DRAWS = 20, 200


def model(x, y):
    d = x.shape[1]
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([d, HIDDEN]).to_event(2))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([HIDDEN]).to_event(1))
    v = numpyro.sample("v", dist.Normal(0.0, HIDDEN**-0.5).expand([HIDDEN]).to_event(1))
    c = numpyro.sample("c", dist.Normal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("rows", len(x), subsample_size=50) as idx:
        f = jax.nn.relu(x[idx] @ w + b) @ v + c
        numpyro.sample("y", dist.Normal(f, noise), obs=y[idx])


def fit(alpha, rng_key, x, y, steps):
    """Draws of the weights. ``alpha`` is a number, traced or not, or a schedule of the step."""
    guide = AutoNormal(model, init_scale=0.05, init_loc_fn=init_to_fan_in())
    counted = count_steps(guide) if callable(alpha) else guide
    adam = optax.adam(optax.cosine_decay_schedule(0.01, steps))
    svi = SVI(model, counted, adam, BBAlphaELBO(alpha, 10))
    key_init, key_draw = random.split(rng_key)
    state = svi.init(key_init, x, y)
    state = lax.fori_loop(0, steps, lambda _, s: svi.update(s, x, y)[0], state)
    params = svi.get_params(state)
    return guide.sample_posterior(key_draw, params, sample_shape=(DRAWS,))


def scores(draws, x, y):
    """Log predictive density of a row, and root mean squared error."""
    hidden = jax.nn.relu(x @ draws["w"] + draws["b"][:, None])
    f = jnp.einsum("snh,sh->sn", hidden, draws["v"]) + draws["c"][:, None]
    log_p = dist.Normal(f, draws["noise"][:, None]).log_prob(y)
    density = jnp.mean(logsumexp(log_p, 0) - jnp.log(DRAWS))
    return jnp.stack([density, jnp.sqrt(jnp.mean((f.mean(0) - y) ** 2))])


def splits_of(num):
    """Standardised ``(splits, rows, ...)`` to train, to choose, and to test."""
    x, y = load_diabetes(return_X_y=True)
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    orders = np.stack([np.random.default_rng(k).permutation(len(x)) for k in range(num)])
    pieces = np.split(orders, [int(0.6 * len(x)), int(0.8 * len(x))], axis=1)
    return [(jnp.asarray(x[i]), jnp.asarray(y[i])) for i in pieces]


def main(out, splits, steps, seed):
    train, choose, test = splits_of(splits)
    keys = random.split(random.key(seed), splits)

    def run(alpha, rng_key, train, choose, test):
        draws = fit(alpha, rng_key, *train, steps)
        return scores(draws, *choose), scores(draws, *test)

    all_splits = jax.vmap(run, (None, 0, 0, 0, 0))
    every = jax.jit(jax.vmap(all_splits, (0, None, None, None, None)))
    chosen_on, found = jax.device_get(every(jnp.array(ORDERS), keys, train, choose, test))

    def falling(step):
        return 0.5 + 0.5 * jnp.maximum(0.0, 1 - 2 * step / steps)

    annealed = jax.jit(lambda *data: all_splits(falling, *data))(keys, train, choose, test)[1]
    best, oracle = (np.argmax(x[..., 0], 0) for x in (chosen_on, found))
    split = np.arange(splits)
    rows = {f"alpha = {alpha:g}": found[i] for i, alpha in enumerate(ORDERS)}
    rows["from 1 to 0.5"] = np.asarray(annealed)
    rows["chosen by validation"] = found[best, split]
    rows["chosen by the test rows"] = found[oracle, split]
    print(f"{'':26}{'log density':>20}{'RMSE':>20}")
    for name, values in rows.items():
        (m, r), (e, s) = values.mean(0), values.std(0) / max(1, splits - 1) ** 0.5
        print(f"{name:26}{m:11.4f} +- {e:.4f}{r:11.4f} +- {s:.4f}")
    times = {f"{alpha:g}": int((best == i).sum()) for i, alpha in enumerate(ORDERS)}
    print(f"chosen by validation, of {splits} splits: {times}")

    fig, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
    # Splits differ by more than orders do: each is shown less its own mean.
    relative = found[..., 0] - found[..., 0].mean(0)
    ax.plot(ORDERS, relative, color="0.8", lw=1)
    error = relative.std(1) / max(1, splits - 1) ** 0.5
    ax.errorbar(ORDERS, relative.mean(1), error, fmt="o-", capsize=3, label="mean and its error")
    ax.plot([], [], color="0.8", label="one split")
    ax.set(xlabel="alpha", ylabel="log density of a test row, less the split's mean (nats)")
    ax.set_title("BBAlphaELBO on the diabetes data")
    ax.legend(frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=120)
    return 0 if found[..., 0].mean(1).min() > -1.32 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--out", type=Path, default=Path("out/which_alpha.png"))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.exit(main(args.out, args.splits, args.steps, args.seed))
