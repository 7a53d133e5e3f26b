r"""The curvature of a hierarchy from the second derivatives of its terms, each of which sees few
latent numbers.

A row of a crossed model sees one effect of each factor. If the effects of a site are the *color* a,
and :math:`v_a` is 1 on them and 0 elsewhere, then :math:`\partial^2 l_n(x + s v_a + t v_b) /
\partial s \partial t` is the second derivative of the row's log likelihood in the one effect of a
and the one of b that it sees, for all rows by two forward derivatives. Which effect it is follows
from a derivative along directions with other numbers in the place of 1. So nothing need be known of
the model, and a site of which a term sees several effects, such as a path in time, is found out.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, combinations_with_replacement
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.arrow import ArrowPrecision
from numpyro_ext._model.bend import WIDEST, Bend
from numpyro_ext._model.density import row_log_prob, scaled
from numpyro_ext._model.modes import Problem
from numpyro_ext._model.operations import jit_on_data
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import sample_sites
from numpyro_ext._numpyro import site_of_log_det

_FEW = 16
"""Numbers of a site up to which each is a coordinate of the core by itself."""
_MOST_SINGLES, _MOST_CORE, _MOST_ACROSS = 512, 4096, 4e7
"""The most coordinates with a column each, coordinates of the core, and numbers between core and
leaves."""
_SAME, _MOST_BENT = 1e-3, 2.0
Frame = tuple[Any, Bend]


class Color(NamedTuple):
    """One number of each effect of a site: the places in the flat order, ``(J,)``."""

    site: str
    places: np.ndarray


def terms_of(potential: Potential, x: Array, idx: dict[str, Array], rows: bool) -> list[Array]:
    """The log densities of the observed sites, or of all others, each one vector."""
    latents = potential.info.latents
    trace = potential.trace(potential.info.unravel(x), idx)
    return [
        jnp.ravel(jnp.asarray(scaled(site, row_log_prob(site)), x.dtype))
        for site in sample_sites(trace)
        if (site["is_observed"] and site_of_log_det(site["name"], latents) == site["name"]) is rows
    ]


def _along(fn: Callable[[Array], Any], x: Array, v: Array) -> Any:
    return jax.jvp(fn, (x,), (v,))[1]


@dataclass(frozen=True)
class _Part:
    """The terms of one kind: what they are at x on rows, the pieces of rows, and the effect of each
    color that each term sees, ``(colors, terms)`` for each piece."""

    terms: Callable[[Array, dict[str, Array]], Array]
    pieces: list[tuple[float, dict[str, Array]]]
    seen: list[np.ndarray]


class RowCurvature:
    """Sums over all terms of a model, and over draws: its potential, gradient and curvature, the
    latter with the structure that the terms have. ``arrow`` is False where they have none that is
    known here."""

    def __init__(self, potential: Potential, x: np.ndarray, options: Any = None) -> None:
        self.potential, self.size = potential, potential.info.size
        self.dtype = jnp.result_type(float)
        self._options = options
        rng = np.random.default_rng(0)
        self.probes = [(x + 0.1 * rng.normal(size=self.size)).astype(self.dtype) for _ in range(2)]
        colors = [c for name in potential.info.latents for c in self._colors_of(name)]
        weights = rng.uniform(1, 2, self.size)
        read = [self._read(rows, colors, weights) for rows in (True, False)]
        several = {name for _, names in read for name in names}
        kept = [a for a, color in enumerate(colors) if color.site not in several]
        self.colors = [colors[a] for a in kept]
        self.parts = [replace(p, seen=[x[kept] for x in p.seen]) for p, _ in read if kept]
        self.arrow = bool(kept)
        if kept:
            self._lay_out()

    def _colors_of(self, name: str) -> list[Color]:
        info = self.potential.info
        shape = info.latents[name].unconstrained.shape
        places = np.arange(self.size)[info.slices[name]]
        if len(places) <= _FEW:
            return []
        event = info.latents[name].support.event_dim or len(shape) > 1
        width = shape[-1] if event and len(shape) > 1 and shape[-1] <= WIDEST else 1
        return [Color(name, x) for x in places.reshape(-1, width).T]

    def _terms(self, rows: bool) -> Callable[[Array, dict[str, Array]], Array]:
        def terms(x: Array, idx: dict[str, Array]) -> Array:
            here = self.potential.with_rows(idx) if rows else self.potential
            of_sites = terms_of(here, x, idx, rows)
            return jnp.concatenate(of_sites) if of_sites else jnp.zeros(0, x.dtype)

        return terms

    def _read(self, rows: bool, colors: list[Color], weights: np.ndarray) -> tuple[_Part, set[str]]:
        """The effects that terms see, and the sites of which a term sees several effects."""
        terms = self._terms(rows)
        pieces = list(self.potential.pieces()) if rows else [(1.0, self.potential.first_rows())]

        def probe(x: Array, idx: dict[str, Array], directions: Array) -> Array:
            return lax.map(lambda v: _along(lambda x: terms(x, idx), x, v), directions)

        run, several = jit_on_data(probe, self._options), set()
        directions = np.zeros((4 * len(colors), self.size), self.dtype)
        for a, (_, places) in enumerate(colors):
            # The number of an effect in two digits, of which float32 keeps all.
            digits = np.divmod(np.arange(len(places)), math.isqrt(len(places)) + 1)
            for v, value in zip(directions[4 * a :], (1, *digits, weights[places]), strict=False):
                v[places] = value
        seen: list[np.ndarray] = []
        for _, idx in pieces if colors else ():
            # At the larger of two derivatives, of which either may vanish by chance.
            at_probes = [np.asarray(run(x, idx, directions), float) for x in self.probes]
            if not np.all(np.isfinite(at_probes)):
                several = {name for name, _ in colors}  # which cannot be told here
            of_piece = []
            for a, (name, places) in enumerate(colors):
                first, second = (x[4 * a : 4 * a + 4] for x in at_probes)
                larger = np.abs(first[0]) >= np.abs(second[0])
                d, high, low, weighted = np.where(larger, first, second)
                safe = np.where(d != 0, d, 1)
                with np.errstate(invalid="ignore"):
                    j = np.rint(high / safe) * (math.isqrt(len(places)) + 1) + np.rint(low / safe)
                j = np.where((d != 0) & (j >= 0) & (j < len(places)), j, -1).astype(np.int32)
                off = np.abs(weighted - weights[places][j] * np.where(j < 0, 0, d))
                if np.any(off > _SAME * np.max(np.abs([d, high, low, weighted]), axis=0)):
                    several.add(name)
                of_piece.append(j)
            seen.append(np.array(of_piece))
            if len(several) == len({name for name, _ in colors}):
                break
        return _Part(terms, pieces, seen), several

    def _lay_out(self) -> None:
        """Choose the leaves: the effects of the largest site, and of sites that go with them."""
        sizes = Counter({c.site: 0 for c in self.colors})
        for color in self.colors:
            sizes[color.site] += len(color.places)
        # In a tie the site that was sampled last.
        first = max(reversed(sizes), key=lambda name: sizes[name])
        own = [a for a, color in enumerate(self.colors) if color.site == first]
        self.leaf_colors = [a for a in range(len(self.colors)) if self._same_effects(own[0], a)]
        if not set(own) <= set(self.leaf_colors):
            self.leaf_colors = own[:1]
        self.leaves = np.stack([self.colors[a].places for a in self.leaf_colors], axis=1)
        # Single numbers come first, so that the root of their covariance is their own.
        colored = np.concatenate([color.places for color in self.colors])
        self.singles = np.setdiff1d(np.arange(self.size), colored)
        self.core = np.concatenate([self.singles, np.setdiff1d(colored, self.leaves)])
        few = len(self.singles) <= _MOST_SINGLES and len(self.core) <= _MOST_CORE
        self.arrow = few and self.leaves.size * len(self.core) <= _MOST_ACROSS
        if self.arrow:
            self.programs = [self._program(part) for part in self.parts]

    def _same_effects(self, a: int, b: int) -> bool:
        """Whether the terms that see both colors see the same effect of both."""
        if len(self.colors[a].places) != len(self.colors[b].places):
            return False
        for seen in (x for part in self.parts for x in part.seen):
            both = (seen[a] >= 0) & (seen[b] >= 0)
            if np.any(seen[a][both] != seen[b][both]):
                return False
        return True

    def _has_effects(self, a: int) -> bool:
        """Whether the effects of a color are means of others, as regions of customers."""
        ((seen,), places) = self.parts[1].seen, self.colors[a].places
        return np.sum(seen[a] >= 0) > len(places)

    def problems(self) -> tuple[Problem, ...]:
        """Sentences on effects that no row sees, and on two sites of which each row sees the same
        effects."""
        first: dict[str, int] = {}
        for a, color in enumerate(self.colors):
            first.setdefault(color.site, a)
        pieces = self.parts[0].seen
        rows = {site: np.concatenate([seen[a] for seen in pieces]) for site, a in first.items()}
        # Of the terms of the prior, which are numbered too, one for each effect is its own; a model
        # without data has no rows.
        problems = [
            Problem(f"no row sees an effect of '{site}', which keeps its prior.", "no rows")
            for site, seen in rows.items()
            if len(seen) and np.all(seen < 0) and not self._has_effects(first[site])
        ]
        for (site, i), (second, j) in combinations(rows.items(), 2):
            both = (i >= 0) & (j >= 0)
            together = np.unique(i[both].astype(np.int64) * (j.max(initial=0) + 1) + j[both])
            if np.any(both) and len(together) == len(np.unique(i)) == len(np.unique(j)):
                sentence = (
                    f"'{site}' and '{second}' are effects of one factor under two names: rows with"
                    " the same effect of one have the same of the other, so that their sums alone"
                    " are known from the data; leave one out."
                )
                problems.append(Problem(sentence, "one factor twice"))
        return tuple(problems)

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of colors."""
        return list(combinations_with_replacement(range(len(self.colors)), 2))

    @cached_property
    def _directions(self) -> np.ndarray:
        colors = np.zeros((len(self.colors), self.size), self.dtype)
        for v, color in zip(colors, self.colors, strict=True):
            v[color.places] = 1
        return colors

    def _program(self, part: _Part) -> tuple[Any, Any]:
        """Compiled ``value_and_grad(points, idx, frame)``, for each of the points, and
        ``curvature``, its mean over them: the second derivative of each term in each pair of
        colors, and the columns of the Hessian at single numbers; in the coordinates of a frame, a
        :class:`Bend` and its center."""
        colors = self._directions
        singles = np.zeros((len(self.singles), self.size), self.dtype)
        singles[np.arange(len(singles)), self.singles] = 1
        first, second = (colors[list(x)] for x in zip(*self.pairs, strict=True))

        def terms(x: Array, idx: dict[str, Array], frame: Frame) -> Array:
            center, bend = frame
            return part.terms(center + bend(x - center)[0], idx)

        def total(x: Array, idx: dict[str, Array], frame: Frame) -> Array:
            return -jnp.sum(terms(x, idx, frame))

        def value_and_grad(
            points: Array, idx: dict[str, Array], frame: Frame
        ) -> tuple[Array, Array]:
            return lax.map(lambda x: jax.value_and_grad(total)(x, idx, frame), points)

        def curvature(points: Array, idx: dict[str, Array], frame: Frame) -> tuple[Array, Array]:
            def of_pair(x: Array, pair: tuple[Array, Array]) -> Array:
                def along_first(x: Array) -> Array:
                    return _along(lambda x: terms(x, idx, frame), x, pair[0])

                return -_along(along_first, x, pair[1])

            def of_column(x: Array, v: Array) -> Array:
                return _along(lambda x: jax.grad(total)(x, idx, frame), x, v)

            def at(x: Array) -> tuple[Array, Array]:
                of_pairs = lax.map(partial(of_pair, x), (first, second))
                return of_pairs, lax.map(partial(of_column, x), singles)

            def add(sums: Any, x: Array) -> Any:
                return jax.tree.map(jnp.add, sums, at(x)), None

            shapes = jax.eval_shape(at, points[0])
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return jax.tree.map(lambda x: x / len(points), lax.scan(add, zeros, points)[0])

        return jit_on_data(value_and_grad, self._options), jit_on_data(curvature, self._options)

    def value_and_grad(
        self, points: tuple[np.ndarray, np.ndarray], frame: Frame | None = None
    ) -> tuple[float, np.ndarray]:
        """The mean potential and gradient over points for the rows ``(s, n)``, and over others for
        the prior, in the coordinates of a frame."""
        center, bend = frame = self._frame(frame)
        slope = np.asarray(jnp.sum(bend.slopes, 0), float)
        of, c = np.asarray(bend.of), np.asarray(center, float)
        value, grad = -float(np.mean((points[1] - c)[:, of] @ slope)), np.zeros(self.size)
        grad[of] -= slope
        for part, (run, _), x in zip(self.parts, self.programs, points, strict=True):
            for weight, idx in part.pieces:
                v, g = (np.asarray(y, float) for y in run(jnp.asarray(x, self.dtype), idx, frame))
                with np.errstate(invalid="ignore"):  # of draws that are too far for the density
                    value += weight * float(np.mean(v))
                    grad += weight * np.mean(g, axis=0)
        return value, grad

    def _frame(self, frame: Frame | None) -> Frame:
        center, bend = (np.zeros(self.size), self.straight) if frame is None else frame
        return jnp.asarray(center, self.dtype), bend.astype(self.dtype)

    def precision(
        self,
        points: tuple[np.ndarray, np.ndarray],
        kinds: Collection[int] = (0, 1),
        frame: Frame | None = None,
    ) -> ArrowPrecision:
        """The mean curvature over these points, of both kinds of terms or of one."""
        frame = self._frame(frame)
        k, (L, w) = len(self.core), self.leaves.shape
        place = np.full(self.size, -1)
        place[self.core] = np.arange(k)
        between, across, within = np.zeros((k, k)), np.zeros((L, w, k)), np.zeros((L, w, w))
        columns = np.zeros((len(self.singles), self.size))
        leaf_of = {a: i for i, a in enumerate(self.leaf_colors)}
        for kind in kinds:
            part, (_, run), x = self.parts[kind], self.programs[kind], points[kind]
            for (weight, idx), seen in zip(part.pieces, part.seen, strict=True):
                each, own = run(jnp.asarray(x, self.dtype), idx, frame)
                each = weight * np.asarray(each, float)
                columns += weight * np.asarray(own, float)
                for (a, b), values in zip(self.pairs, each, strict=True):
                    both = (seen[a] >= 0) & (seen[b] >= 0) & (values != 0)
                    if not np.any(both):
                        continue
                    i, j, values = seen[a][both], seen[b][both], values[both]
                    if a in leaf_of and b in leaf_of:
                        sums = np.bincount(i, values, L)
                        p, q = leaf_of[a], leaf_of[b]
                        within[:, p, q] += sums
                        if p != q:
                            within[:, q, p] += sums
                        continue
                    if b in leaf_of:
                        a, b, i, j = b, a, j, i
                    of_b = self.colors[b].places
                    n_a, n_b = len(self.colors[a].places), len(of_b)
                    sums = np.bincount(i.astype(np.int64) * n_b + j, values, n_a * n_b)
                    sums = sums.reshape(n_a, n_b)
                    if a in leaf_of:
                        across[:, leaf_of[a], place[of_b]] += sums
                    else:
                        of_a = self.colors[a].places
                        between[np.ix_(place[of_a], place[of_b])] += sums
                        if a != b:
                            between[np.ix_(place[of_b], place[of_a])] += sums.T
        s = len(self.singles)
        between[:s] = columns[:, self.core]
        between[:, :s] = columns[:, self.core].T
        across[:, :, :s] = columns[:, self.leaves].transpose(1, 2, 0)
        return ArrowPrecision(self.core, self.leaves, between, across, within)

    @cached_property
    def _blocks(self) -> list[tuple[int, int]]:
        """The pairs of colors of which the effects are one block: of leaves, and each by itself."""
        leaves = [(a, b) for a, b in self.pairs if {a, b} <= set(self.leaf_colors)]
        return leaves + [(a, a) for a, b in self.pairs if a == b and a not in self.leaf_colors]

    def _turning(self, x: np.ndarray, i: int) -> list[np.ndarray]:
        """The derivatives in number i of the curvature of the prior's terms, ``(J,)`` of each
        block."""
        part = self.parts[1]
        ((_, idx),), v = part.pieces, jnp.asarray(np.eye(1, self.size, i)[0], self.dtype)
        each = np.asarray(self._third(jnp.asarray(x, self.dtype), v, idx), float)
        sums = []
        for (a, b), values in zip(self._blocks, each, strict=True):
            pair = part.seen[0][[a, b]]
            both = np.all(pair >= 0, axis=0)
            size = len(self.colors[a].places)
            sums.append(np.bincount(pair[0, both], np.asarray(values)[both], size))
        return sums

    @cached_property
    def _third(self) -> Any:
        part = self.parts[1]
        first, second = (self._directions[list(x)] for x in zip(*self._blocks, strict=True))

        def third(x: Array, v: Array, idx: dict[str, Array]) -> Array:
            def of_block(pair: tuple[Array, Array]) -> Array:
                fn: Any = lambda x: -part.terms(x, idx)  # noqa: E731
                for direction in (*pair, v):
                    fn = partial(_along, fn, v=direction)
                return fn(x)

            return lax.map(of_block, (first, second))

        return jit_on_data(third, self._options)

    @cached_property
    def straight(self) -> Bend:
        """The identity, as a bend by the numbers g on which the prior's curvature of an effect
        depends, such as scales of effects."""
        bending = [
            i
            for i in map(int, self.singles)
            if any(np.any(x != 0) for probe in self.probes for x in self._turning(probe, i))
        ]
        w = self.leaves.shape[1]
        rows, columns = (
            np.concatenate([np.zeros(0, int), *(self.leaves[:, pair[k]] for pair in _below(w))])
            for k in range(2)
        )
        of, rows, columns = (jnp.asarray(np.asarray(x, int)) for x in (bending, rows, columns))
        slopes, shears = (jnp.zeros((m, len(bending))) for m in (self.size, len(rows)))
        return Bend(of, slopes, rows, columns, shears)

    def bend(self, x: np.ndarray, of_rows: ArrowPrecision) -> Bend:
        r"""The bend in which the curvature :math:`\Lambda` of a block of effects stays as it is
        where the scales move, and with them the prior's, which is taken at x. With its derivative
        :math:`\Lambda'` and :math:`\Lambda^{-1} = B B^\top` that is to first order :math:`I + B\,
        low(-B^\top \Lambda' B)\, B^{-1}`, the lower triangle with half of its diagonal."""
        straight = self.straight
        (L, w), num = self.leaves.shape, len(straight.of)
        slopes, turns = np.zeros((self.size, num)), np.zeros((L, w, w, num))
        precision = of_rows.plus(self.precision((x[None], x[None]), [1]))
        B = precision.leaf_roots()[0]
        own = np.zeros(self.size)
        own[self.core] = np.diagonal(precision.between)
        for k, i in enumerate(np.asarray(straight.of)):
            within = np.zeros((L, w, w))
            for (a, b), values in zip(self._blocks, self._turning(x, i), strict=True):
                if a in self.leaf_colors:
                    p, q = self.leaf_colors.index(a), self.leaf_colors.index(b)
                    within[:, p, q] = within[:, q, p] = values
                else:
                    places = self.colors[a].places
                    slopes[places, k] = -values / (2 * own[places])
            low = np.tril(-B.transpose(0, 2, 1) @ within @ B)
            low[:, range(w), range(w)] /= 2
            turns[..., k] = B @ low @ np.linalg.inv(B)
        slopes[self.leaves] = np.diagonal(turns, axis1=1, axis2=2).transpose(0, 2, 1)
        slopes = np.clip(np.nan_to_num(slopes), -_MOST_BENT, _MOST_BENT)
        shears = [turns[:, p, q] for p, q in _below(w)]
        shears = np.concatenate([np.zeros((0, num)), *shears])
        return replace(straight, slopes=jnp.asarray(slopes), shears=jnp.asarray(shears))


def _below(w: int) -> list[tuple[int, int]]:
    return [(p, q) for p in range(w) for q in range(p)]
