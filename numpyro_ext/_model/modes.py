"""The modes of a posterior, the normal approximations there, and their shares of the mass."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
import math
from typing import Any
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
from numpyro.infer.initialization import init_to_uniform

from numpyro_ext._checks import InferenceWarning, check_count
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.checks import check_rows, read_global
from numpyro_ext._model.mode_search import (
    DENSE_UP_TO,
    Mode,
    Problem,
    advice,
    mode_search,
    starts_of,
)
from numpyro_ext._model.normal_fit import factor_like, shape_measure, variational_fit
from numpyro_ext._model.operations import run_once
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import unravel
from numpyro_ext._model.start import draw_params, draw_start, prior_center, start_near_median
from numpyro_ext._model.whitening import Whitening
from numpyro_ext._typing import Model, Sites

__all__ = ["Modes", "find_modes", "modes_of", "search_modes"]

_NORMAL_MODE, _NORMAL_FIT = 0.3, 0.1
"""Departures up to which a mode, and a variational fit in its place, are taken without a warning;
a fit has come as near as a normal can, so what it leaves is of another kind."""
_FAR_AWAY = 100.0
"""The departure of a fit that has not come near the posterior: gradients ten times too large."""
_REDRAWN = 8  # starts, of up to 100 tries each
_LOST = 1e3
"""Standard deviations from a mode beyond which the start of a search was of no use: a likelihood
that is flat to the last digit there, as that of raw columns behind an exponential."""
_APART, _LEAST_SHARE = 1.5, 1e-3
_SAME_HEIGHT, _SAME_PLACE = 0.1, 0.5


@dataclass(frozen=True, eq=False, repr=False)
class Modes:
    r"""
    The distinct modes of a posterior that a search has found, and the mixture of normals there,

    .. math:: q(z) = \sum_k w_k\, N(z; c_k, A_k A_k^\top), \qquad w_k \propto e^{-U(c_k)} |A_k| .

    :func:`find_modes` makes it. It prints as a table, and pickles. The shares :math:`w_k` are those
    of Laplace's formula among the modes that were found: a mode that no search has reached is not
    counted, and where a posterior is not near normal at a mode its share is as far off as the
    formula is.

    :param tuple modes: a record of each mode, the heaviest first, with the fields ``center`` and
        ``factor`` (c and A, lower triangular or its diagonal), ``share``, ``log_evidence`` (by
        Laplace's formula), ``decrement`` (the distance of c from the mode, in posterior standard
        deviations), ``departure`` (0 for a normal posterior, and 1 where gradients around c are off
        by as much as they are large), ``variational`` (True if it is the normal of greatest ELBO
        instead), and ``copy_of`` (the place of a heavier mode of which it is an image by a
        permutation or by changes of sign of coordinates, or None).
    :param tuple shapes: ``(site, unconstrained shape)`` of each latent site, in the flat order.
    :param int row_gradients: gradients of single rows that all searches spent.
    :param tuple problems: sentences on what did not hold; each has a ``kind``, which is ``"no
        mode"``, ``"far from normal"``, ``"several modes"`` or ``"density jumps"``.

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro_ext.optim import find_modes
        >>> def model():
        ...     numpyro.sample("z", dist.Normal(300.0, 20.0))
        >>> modes = find_modes(model)
        >>> print(f"{modes.heaviest.center[0]:.0f} {modes.heaviest.factor[0, 0]:.0f}")
        300 20
        >>> modes.sample(jax.random.key(0), (5,)).shape
        (5, 1)
    """

    modes: tuple[Mode, ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    row_gradients: int = 0
    problems: tuple[Problem, ...] = ()

    def __post_init__(self) -> None:
        modes = self.modes
        if not (isinstance(modes, tuple) and modes and all(isinstance(x, Mode) for x in modes)):
            raise TypeError(
                "modes must be a tuple of at least one record of a mode; take the result of"
                " find_modes(model, *args)."
            )
        n = sum(math.prod(shape) for _, shape in self.shapes)
        if any(jnp.shape(mode.center) != (n,) for mode in modes):
            given = [jnp.shape(mode.center) for mode in modes]
            raise ValueError(
                f"the centers have the shapes {given}; by the shapes of the sites each must be"
                f" ({n},)."
            )
        shares = np.array([mode.share for mode in modes])
        if not (np.all(shares > 0) and abs(shares.sum() - 1) < 1e-3):
            raise ValueError(f"the shares are {shares}; they must be positive and sum to 1.")
        if not all(np.all(np.isfinite(mode.center)) for mode in modes):
            raise ValueError("the center of a mode is not finite; check the data.")
        _ = [mode.whitening for mode in modes]  # which checks the factors

    @property
    def heaviest(self) -> Mode:
        """The mode of greatest share."""
        return self.modes[0]

    @property
    def whitening(self) -> Whitening:
        """The coordinates of the heaviest mode, for the argument ``whitening`` of a kernel."""
        return self.heaviest.whitening

    @property
    def size(self) -> int:
        """The number of coordinates, n."""
        return self.whitening.size

    @property
    def log_evidence(self) -> float:
        """The logarithm of the model's evidence, by Laplace's formula at all modes."""
        return float(np.logaddexp.reduce([mode.log_evidence for mode in self.modes]))

    def sample(self, rng_key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws of the mixture, ``(*sample_shape, n)`` unconstrained vectors in the flat order.

        :param rng_key: random number generator key.
        :param tuple sample_shape: the leading axes.
        """
        key_mode, key_xi = random.split(rng_key)
        shares = jnp.asarray([mode.share for mode in self.modes])
        return self.sample_at(
            key_xi, random.categorical(key_mode, jnp.log(shares), shape=sample_shape)
        )

    def sample_at(self, rng_key: Array, which: ArrayLike, scale: ArrayLike = 1.0) -> Array:
        """Draws of the normals at given modes.

        :param rng_key: random number generator key.
        :param which: ``(*batch,)``, the place of the mode of each draw, such as :meth:`apportion`
            gives.
        :param scale: what the standard deviations are multiplied by.
        :return: ``(*batch, n)`` unconstrained vectors in the flat order.
        """
        which = jnp.asarray(which)[..., None]
        xi = scale * random.normal(rng_key, (*which.shape[:-1], self.size))
        parts = [
            jnp.vectorize(mode.whitening.to_z, signature="(n)->(n)")(xi) for mode in self.modes
        ]
        return jnp.select([which == k for k in range(len(parts))], parts)

    def apportion(self, num: int) -> np.ndarray:
        """The place of the mode at which each of ``num`` particles or chains begins, ``(num,)``:
        each mode has its share of them, up to a rounding by the largest remainders."""
        quota = num * np.array([mode.share for mode in self.modes])
        counts = np.floor(quota).astype(int)
        # Equal remainders go to the heavier mode.
        counts[np.argsort(counts - quota, kind="stable")[: num - counts.sum()]] += 1
        return np.repeat(np.arange(len(counts)), counts)

    def num_taken(self, num: int) -> int:
        """The number of modes at which one of ``num`` begins, the heaviest ones."""
        return int(np.max(self.apportion(num))) + 1

    def unravel(self, x: Array) -> Sites:
        """Vectors ``(*batch, n)`` as unconstrained sites, such as ``init_params`` takes."""
        return unravel(x, self.shapes)

    def __repr__(self) -> str:
        shares = ", ".join(f"{mode.share:.2g}" for mode in self.modes)
        return f"Modes({self.size} coordinates, shares {shares})"

    def __str__(self) -> str:
        head = ("share", "log evidence", "decrement", "departure", "kind")
        rows: list[tuple[str, ...]] = [head]
        for mode in self.modes:
            kind = "greatest ELBO" if mode.variational else "mode"
            kind += "" if mode.copy_of is None else f", a copy of {mode.copy_of}"
            numbers = (mode.share, mode.log_evidence, mode.decrement, mode.departure)
            digits = ("{:.3f}", "{:.2f}", "{:.2g}", "{:.2g}")
            rows.append((*(d.format(x) for d, x in zip(digits, numbers, strict=True)), kind))
        lines = [
            f"{'' if k == 0 else k - 1:>3}" + "".join(f"  {cell:>12}" for cell in row)
            for k, row in enumerate(rows)
        ]
        title = f"{self.size} coordinates, {self.row_gradients:,} gradients of a row"
        return "\n".join([title, *lines, *(f"  ! {problem}" for problem in self.problems)])


def find_modes(
    model: Model,
    *args: Any,
    rng_key: Array | None = None,
    starts: int = 4,
    init_params: Sites | None = None,
    **kwargs: Any,
) -> Modes:
    """
    The modes of a model's posterior, each with the normal approximation there.

    Adam on minibatches and damped Newton steps on all rows find a mode; the inverse curvature there
    is the covariance, dense up to 512 latent dimensions and diagonal above. Each search takes 2,000
    minibatches and at most 300 gradients of all rows. Ends of searches are one mode if they lie
    within 1.5 standard deviations of each other, and modes with less than a thousandth of the mass
    are left out. Where there is no mode, as in a centred hierarchy, or where gradients around it
    are far from those of a normal posterior, the normal of greatest ELBO takes its place. An
    :class:`InferenceWarning` says what did not hold, as ``modes.problems`` does. With funsor
    installed discrete latent sites of few values are summed out.

    **When it fails.** Searches begin within 2 of 0 in unconstrained space, in pairs of opposite
    points. They find the modes into which these points fall, which need not be all.

    The programs are compiled once for all data of the same shapes.

    :param model: Python callable containing NumPyro primitives.
    :param args: arguments of the model.
    :param rng_key: random number generator key of the search.
    :param int starts: the number of searches.
    :param dict init_params: unconstrained values of all latent sites, where one search begins
        instead.
    :param kwargs: keyword arguments of the model.
    :return: :class:`Modes`.

    .. doctest::

        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro_ext.optim import find_modes
        >>> def model(x):
        ...     z = numpyro.sample("z", dist.Normal(300.0, 20.0))
        ...     numpyro.sample("x", dist.Normal(z, 5.0), obs=x)
        >>> modes = find_modes(model, 310.0)
        >>> print(f"{modes.heaviest.center[0]:.1f} {modes.heaviest.factor[0, 0]:.2f}")
        309.4 4.85
        >>> print(f"{modes.log_evidence:.2f}")  # of N(310; 300, 20^2 + 5^2)
        -4.06
    """
    modes = modes_of(model, args, kwargs, rng_key, check_count("starts", starts), init_params)
    if modes.problems:
        warnings.warn(InferenceWarning(" ".join(modes.problems)), stacklevel=2)
    return modes


def modes_of(
    model: Model,
    args: tuple,
    kwargs: dict[str, Any],
    rng_key: Array | None = None,
    starts: int = 4,
    init_params: Sites | None = None,
) -> Modes:
    """:func:`find_modes` without its warning."""
    if is_traced((args, kwargs)):
        raise ValueError(
            "an argument of the model is traced (jax.jit, jax.vmap), while modes are found from"
            " numbers; call find_modes outside, and use its result inside."
        )
    rng_key = random.key(0) if rng_key is None else rng_key
    because = "the modes are those of all latent sites together"
    info = read_global(model, args, kwargs, because=because, sums=True)
    if info.size == 0:
        raise ValueError("the latent sites of the model have no free coordinate, so no modes.")
    check_rows(model, args, kwargs, init_to_uniform)
    params = draw_params(rng_key, model, info, args, kwargs)
    potential = Potential(model, info, params, args, kwargs).traced_once()
    if init_params is not None:
        init_params = info.check_unconstrained("init_params", init_params)
    return search_modes(rng_key, model, potential, init_params, starts=starts)


def search_modes(
    rng_key: Array,
    model: Model,
    potential: Potential,
    start: Sites | None,
    init_strategy: Callable[..., Any] = init_to_uniform,
    key_again: Array | None = None,
    starts: int = 4,
) -> Modes:
    """The modes of a posterior, as :func:`find_modes` says.

    :param start: unconstrained sites where one search begins.
    :param key_again: key of other starts, some nearer to the prior's median, of which the one of
        lowest potential is taken where the search from the first one has led nowhere.
    """
    info = potential.info
    key_start, key_mode, key_svi, key_shape = run_once(_split_in_four, rng_key)
    search_from = mode_search(key_mode, potential)
    with_shape = shape_measure(key_shape, potential, factor_like(info))
    # Of many dimensions a posterior is seldom near normal at its mode.
    vary = variational_fit(key_svi, potential) if info.size > DENSE_UP_TO else None
    given = start is not None
    energy: Any = 0.0
    if start is None:
        start, energy, _ = draw_start(
            key_start, model, info, *potential.arguments, init_strategy=init_strategy
        )

    def search(start: Sites) -> tuple[Mode, Iterator[Mode]]:
        ends = search_from(starts_of(key_start, info.ravel(start), starts))
        return next(ends), ends

    mode = Mode(info.ravel(start), jnp.ones(info.size), np.nan)
    others: Iterator[Mode] = iter(())
    in_vain = 0
    if np.isfinite(energy):
        mode, others = search(start)
    if not (given or mode.decrement <= _LOST):
        in_vain, again = mode.row_gradients, key_start if key_again is None else key_again
        start, energy, grad = start_near_median(again, model, potential)
        drawn, energies, _ = draw_start(
            random.split(again, _REDRAWN),
            model,
            info,
            *potential.arguments,
            init_strategy=init_strategy,
            validate_grad=True,
        )
        best = int(np.argmin(np.nan_to_num(energies, nan=np.inf)))
        if np.isfinite(energies[best]) and not energy <= energies[best]:
            start = {name: x[best] for name, x in drawn.items()}
        else:
            potential.check_start(start, potential.first_rows(), energy, grad)
        mode, others = search(start)
    ends = [mode, *others] if mode.at_mode and not given else [mode]
    found, x = [mode], info.ravel(start)
    spent = in_vain + sum(end.row_gradients for end in ends)
    if mode.at_mode:
        found = [with_shape(one) for one in _merge_ends(ends)]
        mode = found[0]
    if len(found) > 1:
        x = mode.center  # from elsewhere a fit might end in another mode
    problems = _several_problem(found, len(ends))
    if not mode.at_mode or mode.departure > _NORMAL_MODE:
        if not np.isfinite(mode.decrement):
            # The search leaves out minibatches whose gradient is not finite; all rows are in here.
            rows = {n: jnp.arange(N) for n, (N, _) in potential.plates.items()}
            potential.check_start(start, rows, *jax.jit(potential.full_value_and_grad)(start))
        vary = vary or variational_fit(key_svi, potential)
        fit = with_shape(vary(x))
        spent += fit.row_gradients
        if fit.departure > _FAR_AWAY and not given:  # from where the prior is, in its units
            again = with_shape(vary(*prior_center(key_start, model, potential)))
            spent += again.row_gradients
            fit = min(fit, again, key=lambda fit: fit.departure)
        mass = {"share": mode.share, "log_evidence": mode.log_evidence}
        fit = replace(fit, **mass, problems=(*mode.problems, *fit.problems))
        if mode.at_mode and mode.departure <= fit.departure:
            fit = replace(mode, problems=fit.problems)
        problems += _distance_problem(mode, fit, advice(info))
        found[0] = fit
    problems = (*(problem for one in found for problem in one.problems), *problems)
    return Modes(tuple(found), info.shapes, spent, tuple(dict.fromkeys(problems)))


def _split_in_four(rng_key: Array) -> tuple[Array, ...]:
    return tuple(random.split(rng_key, 4))


def _merge_ends(ends: list[Mode]) -> list[Mode]:
    """The modes among the ends of searches, with their shares, the heaviest first."""
    known = [end for end in ends if end.at_mode and np.isfinite(end.log_evidence)]
    kept: list[Mode] = []
    for mode in sorted(known, key=lambda mode: -mode.log_evidence):
        # A diagonal knows no direction in which a posterior of many dimensions is long.
        least = _APART if mode.factor.ndim == 2 else 3 + math.sqrt(len(mode.center))
        if all(_distance(mode, other) > least for other in kept):
            kept.append(mode)
    if not kept:
        return ends[:1]
    shares = np.exp([mode.log_evidence - kept[0].log_evidence for mode in kept])
    kept = kept[: int(np.sum(shares >= _LEAST_SHARE * shares.sum()))]
    shares = shares[: len(kept)] / shares[: len(kept)].sum()
    found: list[Mode] = []
    for mode, share in zip(kept, shares, strict=True):
        same = (k for k, other in enumerate(found) if _is_copy(mode, other))
        found.append(replace(mode, share=float(share), copy_of=next(same, None)))
    return found


def _distance(one: Mode, other: Mode) -> float:
    return max(one.distance(other.center), other.distance(one.center))


def _is_copy(mode: Mode, other: Mode) -> bool:
    """True if the two are as high, and their coordinates the same but for signs and places."""

    def places(mode: Mode) -> tuple[np.ndarray, np.ndarray]:
        center = np.asarray(mode.center, np.float64)
        order = np.argsort(abs(center))
        return abs(center)[order], mode.sds[order]

    (x, sd), (y, _) = places(mode), places(other)
    near = np.all(abs(x - y) < _SAME_PLACE * sd)
    return bool(near and abs(mode.log_evidence - other.log_evidence) < _SAME_HEIGHT)


def _several_problem(found: list[Mode], num: int) -> tuple[Problem, ...]:
    best, *others = found
    apart = max((best.distance(other.center) for other in others), default=0.0)
    if apart <= 3 + math.sqrt(len(best.center)):
        return ()
    shares = ", ".join(f"{mode.share:.2g}" for mode in found)
    copies = "check that the modes are copies of each other"
    if all(mode.copy_of is not None for mode in others):
        copies = "let it be, if the modes are copies of each other, as it seems"
    sentence = (
        f"searches from {num} points ended at different modes, {apart:.2g} standard deviations"
        f" apart, with {shares} of the mass, and what starts at one of them may not leave it; take"
        " particles or at least four chains that start together (chain_method='vectorized'), which"
        f" begin at all of them with these shares, use AutoMixtureNormal, or {copies}."
    )
    return (Problem(sentence, "several modes"),)


def _distance_problem(mode: Mode, fit: Mode, advice: str) -> tuple[Problem, ...]:
    """What is said where a search has not ended at a mode that is near normal."""
    if not mode.at_mode:
        what = "the search for a mode ended where the gradient of all rows is not finite"
        if mode.num_negative:
            what = (
                "the curvature is not that of a mode where the search ended (negative directions:"
                f" {mode.num_negative})"
            )
        elif np.isfinite(mode.decrement):
            what = f"the search for a mode ended {mode.decrement:.2g} standard deviations from one"
        sentence = (
            f"{what}{mode.budget}, so center and scales come from a variational fit instead;"
            f" {advice}, or give init_params near the mode."
        )
        return (Problem(sentence, "no mode"),)
    if fit.departure > _NORMAL_FIT:
        error = f"relative error {fit.departure**0.5:.2g}"
        if not np.isfinite(fit.departure):
            error = "at half of the points they are not finite"
        sentence = (
            f"gradients around the center are far from those of a normal posterior ({error}), so"
            " the scales found do not hold in all of it. A flow, which bends, may be right; for a"
            f" kernel, a proxy or a normal guide {advice}, or use NUTS."
        )
        return (Problem(sentence, "far from normal"),)
    return ()
