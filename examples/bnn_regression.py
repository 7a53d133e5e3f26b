"""Bayesian neural networks by Renyi bounds of five orders
=======================================================

Regression as in Li and Turner (2016, section 5.1).

One hidden layer of 50 rectified units, weights N(0, 1), mean-field Gaussian posterior, learned
noise, minibatches of 32 rows (the energy approximation), K = 100 particles, 500 epochs of Adam at
1e-3. Features and targets are standardised by the training rows; the scores are in the targets' own
units. Prints mean and standard error over the splits of the negative test log-likelihood
(pointwise, 100 draws) and of the RMSE, beside the published means, and saves a picture.

    python examples/bnn_regression.py                                    # offline: scikit-learn's
    diabetes python examples/bnn_regression.py --data-dir ../shared/data --splits 2     # boston,
    concrete, yacht python examples/bnn_regression.py --data-dir ../shared/data                # all
    20 splits
"""

import argparse
from functools import partial
from pathlib import Path
import sys
import time

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
import optax
from tqdm.auto import tqdm

from numpyro_ext.objectives import VRELBO

ALPHAS = (-np.inf, 0.0, 0.5, 1.0, np.inf)
# Negative test log-likelihood and RMSE as published, in the order of ALPHAS.
PUBLISHED = {
    "boston": ((2.47, 2.84), (2.47, 2.85), (2.46, 2.85), (2.52, 2.89), (2.50, 2.86)),
    "concrete": ((3.09, 5.28), (3.08, 5.24), (3.09, 5.34), (3.11, 5.42), (3.12, 5.40)),
    "yacht": ((1.82, 1.12), (1.83, 1.24), (1.82, 1.11), (1.77, 0.81), (2.01, 0.96)),
}


def load_split(data_dir: Path | None, name: str, split: int):
    """``(x_train, y_train, x_test, y_test)`` of one 90/10 split, as stored; diabetes comes with
    scikit-learn."""
    if name == "diabetes":
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True)
        order = np.random.default_rng(split).permutation(len(y))
        test, train = np.split(order, [round(0.1 * len(y))])
    else:
        folder = data_dir / "uci" / name
        if not (folder / "data.txt").exists():
            raise SystemExit(
                f"no data at {folder}: --data-dir must hold uci/{name}/data.txt and its indices."
            )
        table = np.loadtxt(folder / "data.txt")
        x = table[:, np.loadtxt(folder / "index_features.txt").astype(int)]
        y = table[:, int(np.loadtxt(folder / "index_target.txt"))]
        train, test = (
            np.loadtxt(folder / f"index_{part}_{split}.txt").astype(int)
            for part in ("train", "test")
        )
    return x[train], y[train], x[test], y[test]


def standardise(x_train, y_train, x_test, y_test):
    """Arrays for the model, and the targets' mean and scale."""
    loc, scale = x_train.mean(0), x_train.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    y_loc, y_scale = y_train.mean(), y_train.std()
    arrays = ((x_train - loc) / scale, (y_train - y_loc) / y_scale, (x_test - loc) / scale, y_test)
    return [jnp.asarray(a, jnp.float32) for a in arrays], y_loc, y_scale


def network(x, w0, b0, w1, b1):
    return jax.nn.relu(x @ w0 + b0) @ w1 + b1


def model(x, y, *, hidden: int, batch: int):
    d = x.shape[1]
    w0 = numpyro.sample("w0", dist.Normal().expand([d, hidden]).to_event(2))
    b0 = numpyro.sample("b0", dist.Normal().expand([hidden]).to_event(1))
    w1 = numpyro.sample("w1", dist.Normal().expand([hidden]).to_event(1))
    b1 = numpyro.sample("b1", dist.Normal())
    noise = numpyro.param("noise", 0.5, constraint=constraints.positive)
    with numpyro.plate("data", x.shape[0], subsample_size=min(batch, x.shape[0])):
        x, y = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(network(x, w0, b0, w1, b1), noise), obs=y)


def small_start(hidden: int, site=None):
    """Weights that keep the inputs of units of order one, and off zero so that they differ."""
    if site is None:
        return partial(small_start, hidden)
    if site["type"] == "sample" and not site["is_observed"]:
        fan_in = hidden if site["name"] == "w1" else max(site["fn"].event_shape[:1] or (1,))
        shape = site["fn"].shape()
        return random.normal(site["kwargs"]["rng_key"], shape) / np.sqrt(fan_in)


def make_fit(alpha: float, options, num_rows: int):
    """A compiled ``(rng_key, arrays) -> (negative log-likelihood, rmse)``, both for standardised
    targets."""
    regression = partial(model, hidden=options.hidden, batch=options.batch)
    guide = AutoNormal(
        regression, init_loc_fn=partial(small_start, options.hidden), init_scale=0.01
    )
    # At an infinite order one particle has all the weight: the same gradient, without the others'
    # backward pass.
    gradient = "single" if np.isinf(alpha) else "standard"
    svi = SVI(
        regression, guide, optax.adam(1e-3), VRELBO(alpha, options.particles, gradient=gradient)
    )
    num_steps = options.epochs * -(-num_rows // options.batch)

    @jax.jit
    def train(state, x, y):
        return lax.scan(lambda s, _: svi.update(s, x, y), state, None, num_steps)

    def fit(rng_key, x_train, y_train, x_test):
        key_init, key_draw = random.split(rng_key)
        state, losses = train(svi.init(key_init, x_train, y_train), x_train, y_train)
        params = svi.get_params(state)
        draws = guide.sample_posterior(key_draw, params, sample_shape=(100,))
        f = jax.vmap(lambda w: network(x_test, w["w0"], w["b0"], w["w1"], w["b1"]))(draws)
        return f, params["noise"], losses

    return fit


def scores(f, noise, y_test, y_loc, y_scale) -> tuple[float, float]:
    """Negative pointwise log-likelihood and RMSE of 100 draws ``f``, in the targets' units."""
    f, noise = f * y_scale + y_loc, noise * y_scale
    log_lik = dist.Normal(f, noise).log_prob(y_test)
    nll = -jnp.mean(logsumexp(log_lik, axis=0) - jnp.log(f.shape[0]))
    return float(nll), float(jnp.sqrt(jnp.mean((f.mean(0) - y_test) ** 2)))


def show(value: np.ndarray) -> str:
    error = value.std(ddof=1) / np.sqrt(len(value)) if len(value) > 1 else np.nan
    return f"{value.mean():.2f} +- {error:.2f}"


def draw_picture(results: dict[str, np.ndarray], path: Path) -> None:
    fig, axes = plt.subplots(
        1, len(results), figsize=(4.2 * len(results), 3.6), squeeze=False, constrained_layout=True
    )
    positions = np.arange(len(ALPHAS))
    for ax, (name, result) in zip(axes[0], results.items(), strict=True):
        nll = result[:, :, 0]
        error = nll.std(1, ddof=1) / np.sqrt(nll.shape[1]) if nll.shape[1] > 1 else None
        ax.errorbar(positions, nll.mean(1), error, fmt="o", capsize=3, label="this run")
        if name in PUBLISHED:
            published = [row[0] for row in PUBLISHED[name]]
            ax.plot(positions, published, "_", color="black", ms=16, label="published mean")
        ax.set(title=name, xlabel="alpha", xticks=positions, xticklabels=[f"{a:g}" for a in ALPHAS])
        ax.spines[["right", "top"]].set_visible(False)
    axes[0, 0].set_ylabel("negative test log-likelihood (nats per row)")
    axes[0, 0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="holds uci/; without it: diabetes")
    parser.add_argument("--names", nargs="+", default=None)
    parser.add_argument("--splits", type=int, default=None, help="20 of the stored, 3 of diabetes")
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--particles", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=50)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("out/bnn_regression.png"))
    options = parser.parse_args()
    offline = options.data_dir is None
    names = options.names or (["diabetes"] if offline else list(PUBLISHED))
    num_splits = options.splits or (3 if offline else 20)

    results = {}
    start = time.perf_counter()
    for name in names:
        result = np.zeros((len(ALPHAS), num_splits, 2))
        splits = [standardise(*load_split(options.data_dir, name, k)) for k in range(num_splits)]
        with tqdm(total=result[..., 0].size, desc=name) as bar:
            for i, alpha in enumerate(ALPHAS):
                fit = make_fit(alpha, options, splits[0][0][0].shape[0])
                for k, ((x_train, y_train, x_test, y_test), y_loc, y_scale) in enumerate(splits):
                    f, noise, losses = fit(random.key(k), x_train, y_train, x_test)
                    if not np.isfinite(losses[-1]):
                        raise SystemExit(
                            f"{name}, split {k}, alpha {alpha:g}: the loss is not finite"
                        )
                    result[i, k] = scores(f, noise, y_test, y_loc, y_scale)
                    bar.update()
        results[name] = result

    print(
        f"\n{num_splits} splits, {options.epochs} epochs, {options.particles} particles:"
        " mean +- s.e."
    )
    print(
        f"{'data':<10}{'alpha':>6}{'neg. test LL':>18}{'published':>11}"
        f"{'RMSE':>18}{'published':>11}"
    )
    for name, result in results.items():
        for alpha, row, published in zip(
            ALPHAS, result, PUBLISHED.get(name, [("-", "-")] * 5), strict=True
        ):
            nll, rmse = show(row[:, 0]), show(row[:, 1])
            print(f"{name:<10}{alpha:>6g}{nll:>18}{published[0]:>11}{rmse:>18}{published[1]:>11}")
    draw_picture(results, options.out)
    print(f"\n{time.perf_counter() - start:.0f} s; picture: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
