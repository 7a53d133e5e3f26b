"""The posteriors of the table of guides, and what is known of each."""

from collections.abc import Callable
from pathlib import Path
import sys
from typing import Any, NamedTuple

from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import Predictive

from numpyro_ext.targets import banana

sys.path.append(str(Path(__file__).parents[1]))
from _shared import german_credit, numpyro_examples
from _shared.nuts import Samples, nuts


class Target(NamedTuple):
    """A model of ``data`` and what is known of its posterior."""

    model: Callable[..., None]
    data: tuple[Any, ...] = ()
    log_evidence: float | None = None
    sds: dict[str, Any] | None = None
    """Standard deviations of some sites, which are real; None: draws tell those of all sites."""
    is_prior: bool = False
    """Whether the model has no data, so that its draws are exact ones."""
    moments: dict[str, Callable[[Samples], float]] = {}  # noqa: RUF012  # never written to
    """Further numbers of the draws, by name."""


def exact_draws(name: str, target: Target, folder: Path) -> Samples:
    """Draws of the prior where it is the target, and of NUTS otherwise."""
    if target.is_prior:
        draws = Predictive(target.model, num_samples=8000)(random.key(0))
        return {site: np.asarray(x) for site, x in draws.items()}
    return nuts(folder, name, target.model, target.data)


def funnel() -> None:
    """Neal's funnel in ten dimensions."""
    v = numpyro.sample("v", dist.Normal(0.0, 3.0))
    numpyro.sample("x", dist.Normal(0.0, jnp.exp(v / 2)).expand([9]).to_event(1))


def two_moons() -> None:
    """A ring of radius 2 with a gap above and one below."""
    z: Any = numpyro.sample("z", dist.ImproperUniform(constraints.real_vector, (), (2,)))
    ring = -0.5 * ((jnp.linalg.norm(z) - 2) / 0.4) ** 2
    sides = jnp.logaddexp(-0.5 * ((z[0] - 2) / 0.6) ** 2, -0.5 * ((z[0] + 2) / 0.6) ** 2)
    numpyro.factor("moons", ring + sides)


def correlated() -> None:
    cov = jnp.array([[1.0, 0.95], [0.95, 1.0]])
    numpyro.sample("z", dist.MultivariateNormal(jnp.zeros(2), cov))


def horseshoe(x: Array, y: Array) -> None:
    """The model of `examples/horseshoe_regression.py`: 2 d + 2 latent numbers for d columns."""
    d = x.shape[1]
    lambdas = numpyro.sample("lambdas", dist.HalfCauchy(jnp.ones(d)))
    tau = numpyro.sample("tau", dist.HalfCauchy(jnp.ones(1)))
    unscaled = numpyro.sample("unscaled_betas", dist.Normal(0.0, jnp.ones(d)))
    precision = numpyro.sample("prec_obs", dist.Gamma(3.0, 1.0))
    mean = x @ (tau * lambdas * unscaled)
    numpyro.sample("Y", dist.Normal(mean, precision**-0.5), obs=y)


def sparse_regression() -> Target:
    """100 rows and 20 columns of which 3 count, as in that example but with noise of sd 1."""
    rng = np.random.RandomState(0)
    x = rng.randn(100, 20)
    y = x[:, :3] @ np.array([2.0, -1.0, 0.5])
    y = y - y.mean() + rng.randn(100)
    return Target(horseshoe, (jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)))


def schools() -> Target:
    model, data, *_ = numpyro_examples.eight_schools(centred=False)
    return Target(model, data)


def german(data_dir: Path) -> Target:
    data, _, sd = german_credit.load(data_dir)
    return Target(german_credit.logistic, data, -529.17, {"w": sd})


def make(name: str, data_dir: Path) -> Target:
    return german(data_dir) if name == "German credit" else TARGETS[name]()


def share_right(draws: Samples) -> float:
    return float(np.mean(draws["z"][:, 0] > 0))


MOONS = {
    "E abs(z1) / exact": lambda draws: float(np.abs(draws["z"][:, 0]).mean() / 1.7653059),
    "share of the right moon": share_right,
}
TARGETS: dict[str, Callable[[], Target]] = {
    "banana": lambda: Target(banana, (), 0.0, {"z1": 1.0, "x2": 19.0**0.5}, True),
    "funnel": lambda: Target(funnel, (), 0.0, {"v": 3.0}, True),
    "two moons": lambda: Target(
        two_moons, (), 1.8775016261, {"z": np.sqrt([3.3035016, 1.3952778])}, moments=MOONS
    ),
    "eight schools": schools,
    "horseshoe": sparse_regression,
    "correlated": lambda: Target(
        correlated,
        (),
        0.0,
        {"z": np.ones(2)},
        True,
        {"correlation": lambda draws: float(np.corrcoef(draws["z"].T)[0, 1])},
    ),
}
NAMES = ("banana", "funnel", "two moons", "eight schools", "horseshoe", "German credit")
SHOOT_OUT = ("banana", "funnel", "two moons", "correlated")
