"""Eight models of angles, each of which can be turned as a whole.

A model takes ``turn``, which is added to the locations of its priors and to its data, so that its
posterior is the same but for a turn. Data and seeds were written down before anything was run, but
for `nests`, which had two measurements of concentration 2 at first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.special import i0e, i1e


class Problem(NamedTuple):
    """A model ``(turn, data)``, its data before the turn, and the sites that turn with it.

    The truth is a sum over a grid of all sites, of circles and of ``ranges``, in which a site is
    equally spaced, or its logarithm if it is positive; or it is ``exact(data)``; or NUTS, turned by
    ``away`` to where nothing is cut.
    """

    model: Callable[..., Any]
    data: np.ndarray
    angles: tuple[str, ...]
    ranges: dict[str, tuple[float, float]] | None = None
    exact: Callable[..., Any] | None = None
    away: float = 0.0


def wrapped(x: Any) -> Any:
    return jnp.remainder(x + jnp.pi, 2 * jnp.pi) - jnp.pi


def direction(turn: Any, y: Any) -> None:
    """Fifteen angles, direction and concentration unknown."""
    mu = numpyro.sample("mu", dist.VonMises(turn, 0.1))
    kappa = numpyro.sample("kappa", dist.LogNormal(0.0, 1.0))
    numpyro.sample("y", dist.VonMises(mu, kappa), obs=wrapped(y + turn))


def stations(turn: Any, y: Any) -> None:
    """Three directions in a plate and a common concentration; one of them lies half around."""
    kappa = numpyro.sample("kappa", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("station", 3):
        mu = numpyro.sample("mu", dist.VonMises(turn, 0.1))
    numpyro.sample("y", dist.VonMises(mu[:, None], kappa).to_event(2), obs=wrapped(y + turn))


def nests(turn: Any, y: Any) -> None:
    """Twelve angles with a common direction and concentration, five noisy measurements of each."""
    mu = numpyro.sample("mu", dist.VonMises(turn, 0.1))
    kappa = numpyro.sample("kappa", dist.LogNormal(0.5, 1.0))
    with numpyro.plate("nest", 12):
        angle = numpyro.sample("angle", dist.VonMises(mu, kappa))
    numpyro.sample("y", dist.VonMises(angle[:, None], 4.0).to_event(2), obs=wrapped(y + turn))


def regression(turn: Any, data: Any) -> None:
    """An angle that turns with a covariate, by the link 2 atan."""
    x, y = data
    alpha = numpyro.sample("alpha", dist.VonMises(turn, 0.1))
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0))
    kappa = numpyro.sample("kappa", dist.LogNormal(0.0, 1.0))
    mean = alpha + 2 * jnp.arctan(beta * x)
    numpyro.sample("y", dist.VonMises(mean, kappa), obs=wrapped(y + turn))


def migration(turn: Any, y: Any) -> None:
    """A mixture of two directions a right angle apart, each near the cut when it is turned by pi
    or by half of that."""
    share = numpyro.sample("share", dist.Beta(2.0, 2.0))
    first = numpyro.sample("first", dist.VonMises(turn, 1.0))
    second = numpyro.sample("second", dist.VonMises(turn + 1.6, 1.0))
    kappa = numpyro.sample("kappa", dist.LogNormal(1.0, 0.5))
    each = dist.VonMises(jnp.stack([first, second]), kappa)
    mixture = dist.Categorical(jnp.stack([share, 1 - share]))
    numpyro.sample("y", dist.MixtureSameFamily(mixture, each), obs=wrapped(y + turn))


def wind(turn: Any, y: Any) -> None:
    """Direction and speed of a wind, of which four noisy vectors are known."""
    angle = numpyro.sample("angle", dist.VonMises(turn, 0.1))
    speed = numpyro.sample("speed", dist.LogNormal(1.0, 1.0))
    mean = speed * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
    cos, sin = jnp.cos(turn), jnp.sin(turn)
    R = jnp.array([[cos, -sin], [sin, cos]])
    numpyro.sample("y", dist.Normal(mean, 3.0).to_event(1), obs=y @ R.T)


def aimless(turn: Any, y: Any) -> None:
    """Ten angles from all around, so that the concentration is near 0 and the direction nearly
    uniform."""
    mu = numpyro.sample("mu", dist.VonMises(turn, 0.01))
    kappa = numpyro.sample("kappa", dist.HalfNormal(0.5))
    numpyro.sample("y", dist.VonMises(mu, kappa), obs=wrapped(y + turn))


def torsion(turn: Any, y: Any) -> None:
    """Two angles that depend on each other, and a third one to which both are measured."""
    pair = dist.SineBivariateVonMises(
        wrapped(turn), wrapped(turn + 1.0), 2.0, 3.0, weighted_correlation=0.6
    )
    angles = numpyro.sample("angles", pair)
    zero = numpyro.sample("zero", dist.VonMises(turn, 2.0))
    mean = jnp.stack([angles[0], angles[1], zero])
    numpyro.sample("y", dist.VonMises(mean, 3.0).to_event(1), obs=wrapped(y + turn))


def _regression_data(rng: np.random.Generator) -> np.ndarray:
    x = rng.normal(size=25)
    return np.stack([x, 2 * np.arctan(0.8 * x) + rng.vonmises(0.1, 3.0, 25)])


Moments = dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Of each site the mean (of an angle E exp(i angle)), the unit of shifts, the sd."""


def of_angle(m: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m = np.atleast_1d(m)
    return m, np.sqrt(1 - abs(m) ** 2), np.sqrt(-2 * np.log(abs(m)))


def of_number(mean: Any, square: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    mean = np.atleast_1d(mean)
    sd = np.sqrt(np.atleast_1d(square) - mean**2)
    return mean, sd, sd


def nests_exactly(y: np.ndarray) -> Moments:
    """Given direction and concentration each angle is a von Mises; both are on a grid."""
    mu = np.linspace(-np.pi, np.pi, 200, endpoint=False)[:, None]
    log_kappa = np.linspace(-5.0, 7.0, 400)
    kappa = np.exp(log_kappa)
    log_p = 0.1 * np.cos(mu) - (log_kappa - 0.5) ** 2 / 2
    resultants = []
    for each in y:
        z = kappa * np.exp(1j * mu) + 4.0 * np.exp(1j * each).sum()
        resultants.append(z)
        log_p = log_p + np.log(i0e(abs(z))) + abs(z) - np.log(i0e(kappa)) - kappa
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    angles = [(p * i1e(abs(z)) / i0e(abs(z)) * z / abs(z)).sum() for z in resultants]
    return {
        "mu": of_angle((p * np.exp(1j * mu)).sum()),
        "kappa": of_number((p * kappa).sum(), (p * kappa**2).sum()),
        "angle": of_angle(np.array(angles)),
    }


def _problems() -> dict[str, Problem]:
    rng = [np.random.default_rng(k) for k in range(8)]
    stations_at = np.array([[0.2], [-0.3], [3.0]])
    nests_at = rng[2].vonmises(0.0, 2.0, (12, 1))
    either = np.where(rng[4].random(30) < 0.6, 0.0, 1.6)
    kappa = {"kappa": (1e-4, 60.0)}
    return {
        "direction": Problem(direction, rng[0].vonmises(0.0, 2.0, 15), ("mu",), kappa),
        "stations": Problem(
            stations, stations_at + rng[1].vonmises(0.0, 2.0, (3, 6)), ("mu",), away=np.pi / 2
        ),
        "nests": Problem(
            nests,
            nests_at + rng[2].vonmises(0.0, 4.0, (12, 5)),
            ("mu", "angle"),
            exact=nests_exactly,
        ),
        "regression": Problem(
            regression, _regression_data(rng[3]), ("alpha",), {"beta": (-4.0, 4.0), **kappa}
        ),
        "migration": Problem(
            migration, either + rng[4].vonmises(0.0, 4.0, 30), ("first", "second"), away=-0.8
        ),
        "wind": Problem(
            wind,
            np.array([4.0, 0.0]) + rng[5].normal(0.0, 3.0, (4, 2)),
            ("angle",),
            {"speed": (1e-3, 30.0)},
        ),
        "aimless": Problem(aimless, rng[6].uniform(-np.pi, np.pi, 10), ("mu",), kappa),
        "torsion": Problem(
            torsion, np.array([[0.3, 0.8, 0.1], [-0.2, 1.5, 0.4]]), ("angles", "zero"), {}
        ),
    }


PROBLEMS = _problems()
