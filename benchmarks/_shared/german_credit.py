"""Logistic regression on German credit, and its posterior by inference_gym.

1000 rows, 24 standardised features and an intercept, prior N(0, 1).
"""

from pathlib import Path
import sys

from jax import Array
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

Data = tuple[Array, Array]


def read(data_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """The features as they are, and whether a credit is bad."""
    folder = data_dir / "german_credit"
    if not (folder / "german.data-numeric").is_file():
        sys.exit(
            f"There is no german.data-numeric in {folder}; give its folder's parent as --data-dir."
        )
    table = np.loadtxt(folder / "german.data-numeric")
    return table[:, :-1], table[:, -1] == 2


def load(data_dir: Path) -> tuple[Data, np.ndarray, np.ndarray]:
    """Rows and labels; mean and standard deviation of each coefficient."""
    x, bad = read(data_dir)
    x = (x - x.mean(0)) / x.std(0)
    x = np.column_stack([x, np.ones(len(x))]).astype(np.float32)
    moments = data_dir / "german_credit" / "posterior_mean_sd.csv"
    mean, sd = np.loadtxt(moments, delimiter=",").T
    return (jnp.asarray(x), jnp.asarray(bad, jnp.float32)), mean, sd


def logistic(x: Array, y: Array, batch: int | None = None, scale: float = 1.0) -> None:
    w = numpyro.sample("w", dist.Normal(0, scale).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])
