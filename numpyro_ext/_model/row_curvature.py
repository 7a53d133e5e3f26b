r"""The curvature of a hierarchy from the second derivatives of its terms. Each term sees few
latent numbers.

A row of a crossed model sees one effect of each factor. If the effects of a site are the *color* a,
and :math:`v_a` is 1 on them and 0 elsewhere, then :math:`\partial^2 l_n(x + s v_a + t v_b) /
\partial s \partial t` is the second derivative of the row's log likelihood in the one effect of a
and the one of b that it sees, for all rows by two forward derivatives. Which effect it is follows
from a derivative along directions with other numbers in the place of 1. So nothing need be known of
the model, and a term that sees several effects of a site, such as a path in time, is found out.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, combinations_with_replacement
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import block_diag

from numpyro_ext._model.arrow import ArrowPrecision, lower_root
from numpyro_ext._model.bend import WIDEST, Bend
from numpyro_ext._model.density import row_log_prob, scaled
from numpyro_ext._model.modes import Problem
from numpyro_ext._model.operations import jit_on_data
from numpyro_ext._model.potential import Potential
from numpyro_ext._numpyro import site_of_log_det

_FEW = 16
"""Numbers of a site up to which each is a coordinate of the core by itself."""
_MOST_SINGLES, _MOST_CORE, _MOST_ACROSS = 512, 4096, 4e7
"""The most coordinates with a column each, coordinates of the core, and numbers between core and
leaves."""
_SAME, _MOST_BENT, _LEAST_SHARE = 1e-3, 2.0, 1e-6
"""The most that a bend may change by, and the least share of a curvature that may change."""
_FEW_ROWS, _MOST_OF = 10_000, 32
"""Rows and globals up to which a bend knows how the rows change."""
Frame = tuple[Any, Bend]


class Color(NamedTuple):
    """One number of each effect of a site: the places in the flat order, ``(J,)``."""

    site: str
    places: np.ndarray


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
        if not kept:
            return
        self.pairs = list(combinations_with_replacement(range(len(self.colors)), 2))
        self._directions = self._ones([color.places for color in self.colors])
        self._lay_out()

    def _ones(self, places: Any) -> np.ndarray:
        """Vectors that are 1 at places in the flat order."""
        vectors = np.zeros((len(places), self.size), self.dtype)
        for v, at in zip(vectors, places, strict=True):
            v[at] = 1
        return vectors

    def _colors_of(self, name: str) -> list[Color]:
        info = self.potential.info
        shape = info.latents[name].unconstrained.shape
        places = np.arange(self.size)[info.slices[name]]
        if len(places) <= _FEW:
            return []
        event = info.latents[name].support.event_dim or len(shape) > 1
        width = shape[-1] if event and len(shape) > 1 and shape[-1] <= WIDEST else 1
        return [Color(name, x) for x in places.reshape(-1, width).T]

    def _read(self, rows: bool, colors: list[Color], weights: np.ndarray) -> tuple[_Part, set[str]]:
        """The effects that terms see, and the sites with several effects in one term."""
        latents = self.potential.info.latents

        def terms(x: Array, idx: dict[str, Array]) -> Array:
            """The log densities of the observed sites, or of all others."""
            here = self.potential.with_rows(idx) if rows else self.potential
            of_sites = [
                jnp.ravel(jnp.asarray(scaled(site, row_log_prob(site)), x.dtype))
                for name, site in here.trace(here.info.unravel(x), idx).items()
                if site["type"] == "sample"
                and (site["is_observed"] and site_of_log_det(name, latents) == name) is rows
            ]
            return jnp.concatenate(of_sites) if of_sites else jnp.zeros(0, x.dtype)

        pieces = list(self.potential.pieces()) if rows else [(1.0, self.potential.first_rows())]

        def probe(x: Array, idx: dict[str, Array], directions: Array) -> Array:
            return lax.map(lambda v: _along(lambda x: terms(x, idx), x, v), directions)

        run, several = jit_on_data(probe, self._options), set()
        directions = np.zeros((4 * len(colors), self.size), self.dtype)
        for a, (_, places) in enumerate(colors):
            # The number of an effect in two digits, which float32 keeps.
            digits = np.divmod(np.arange(len(places)), math.isqrt(len(places)) + 1)
            for v, value in zip(directions[4 * a :], (1, *digits, weights[places]), strict=False):
                v[places] = value
        seen: list[np.ndarray] = []
        for _, idx in pieces if colors else ():
            # At the larger of two derivatives: either may vanish by chance.
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

    def problems(self) -> tuple[Problem, ...]:
        """Sentences on effects that no row sees, and on two sites with the same effects."""
        first: dict[str, int] = {}
        for a, color in enumerate(self.colors):
            first.setdefault(color.site, a)
        pieces = self.parts[0].seen
        rows = {site: np.concatenate([seen[a] for seen in pieces]) for site, a in first.items()}
        (of_prior,) = self.parts[1].seen
        # Of the terms of the prior one for each effect is its own, and with more its effects are
        # means of others, as regions of customers; a model without data has no rows.
        problems = [
            Problem(f"no row sees an effect of '{site}', which keeps its prior.", "no rows")
            for site, a in first.items()
            if len(rows[site]) and np.all(rows[site] < 0)
            if np.sum(of_prior[a] >= 0) <= len(self.colors[a].places)
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

    def _program(self, part: _Part) -> tuple[Any, Any]:
        """Compiled ``value_and_grad(points, idx, frame)``, for each of the points, and
        ``curvature``, its mean over them: the second derivative of each term in each pair of
        colors, and the columns of the Hessian at single numbers; in the coordinates of a frame, a
        :class:`Bend` and its center."""
        singles = self._ones(self.singles)
        first, second = (self._directions[list(x)] for x in zip(*self.pairs, strict=True))

        def terms(x: Array, idx: dict[str, Array], frame: Frame) -> Array:
            center, bend = frame
            bent, log_det = bend(x - center)
            of_part = part.terms(center + bent, idx)
            return of_part if part is self.parts[0] else jnp.append(of_part, log_det)

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
        self,
        points: tuple[np.ndarray, np.ndarray],
        frame: Frame | None = None,
        kinds: Collection[int] = (0, 1),
    ) -> tuple[float, np.ndarray]:
        """The mean potential and gradient over points for the rows ``(s, n)``, and over others for
        the prior, in the coordinates of a frame; of both kinds of terms or of one."""
        frame, value, grad = self._frame(frame), 0.0, np.zeros(self.size)
        for kind in kinds:
            part, (run, _), x = self.parts[kind], self.programs[kind], points[kind]
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
                each = each[:, : seen.shape[1]]  # the last is the bend's, which is of no effect
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
        """The pairs of colors with effects in one block: of leaves, and each by itself."""
        leaves = [(a, b) for a, b in self.pairs if {a, b} <= set(self.leaf_colors)]
        return leaves + [(a, a) for a, b in self.pairs if a == b and a not in self.leaf_colors]

    def _turning(self, x: np.ndarray, i: int, kind: int, turns: np.ndarray) -> list[np.ndarray]:
        """The derivatives in number i of the curvature of one kind of terms, ``(J,)`` of each
        block, and ``(t,)`` along each of ``turns``."""
        part, unit = self.parts[kind], np.eye(1, self.size, i)[0]
        first, second = (self._directions[list(x)] for x in zip(*self._blocks, strict=True))
        pairs = np.concatenate([first, turns]), np.concatenate([second, turns])
        at, v, *both_of = (jnp.asarray(y, self.dtype) for y in (x, unit, *pairs))
        sums = [np.zeros(len(self.colors[a].places)) for a, _ in self._blocks]
        of_turns = np.zeros(len(turns))
        for (weight, idx), seen in zip(part.pieces, part.seen, strict=True):
            each = np.asarray(self._thirds[kind](at, v, both_of, idx), float)
            for (a, b), values, total in zip(self._blocks, each, sums, strict=False):
                pair = seen[[a, b]]
                both = np.all(pair >= 0, axis=0)
                total += weight * np.bincount(pair[0, both], values[both], len(total))
            of_turns += weight * np.sum(each[len(sums) :], axis=1)
        return [*sums, of_turns]

    @cached_property
    def _thirds(self) -> list[Any]:
        def third(part: _Part, x: Array, v: Array, pairs: Any, idx: dict[str, Array]) -> Array:
            def of_pair(pair: Any) -> Array:
                fn: Any = lambda x: -part.terms(x, idx)  # noqa: E731
                for direction in (*pair, v):
                    fn = partial(_along, fn, v=direction)
                return fn(x)

            return lax.map(of_pair, pairs)

        return [jit_on_data(partial(third, part), self._options) for part in self.parts]

    def _together(self, of_prior: ArrowPrecision, whole: ArrowPrecision) -> Iterator[Any]:
        """Of each site whose numbers go together, such as a path in time, its places and Q, with
        which the whole curvature becomes 1 and the prior's diagonal."""
        for places in self.potential.info.slices.values():
            at = np.arange(self.size)[places]
            if len(at) > _FEW and np.all(np.isin(at, self.singles)):
                own = np.ix_(*[np.searchsorted(self.singles, at)] * 2)
                L, _ = lower_root(whole.between[own])
                yield at, L @ np.linalg.eigh(L.T @ of_prior.between[own] @ L)[1]

    @cached_property
    def few_rows(self) -> bool:
        return sum(seen.shape[1] for seen in self.parts[0].seen) <= _FEW_ROWS

    @cached_property
    def straight(self) -> Bend:
        """The identity, as a bend by the numbers of small sites on which the prior's curvature of
        an effect depends, such as scales of effects; of few rows by all numbers of small sites."""
        slices = self.potential.info.slices.values()
        of = [i for y in slices if y.stop - y.start <= _FEW for i in range(y.start, y.stop)]
        if not (self.few_rows and len(of) <= _MOST_OF):
            none = np.zeros((0, self.size))
            of = [
                i
                for i in of
                if any(np.any(x) for y in self.probes for x in self._turning(y, i, 1, none))
            ]
        below = _below(self.leaves.shape[1])
        rows, columns = (
            np.concatenate([np.zeros(0, int), *(self.leaves[:, pair[k]] for pair in below)])
            for k in range(2)
        )
        return Bend.straight(self.size, of or [0], rows, columns)

    def bend(self, x: np.ndarray, of_rows: ArrowPrecision) -> Bend:
        r"""The bend in which the curvature of effects, and where it pulls them, stay as they are
        where globals move, by derivatives at x: for each kind of terms the curvature
        :math:`\Lambda` in an effect, its slope :math:`\Lambda'` in a global, the gradient G and
        the mixed derivative q. With all in units of the whole curvature, :math:`a = \Lambda' /
        \Lambda` and :math:`K = a G - q`. Of many rows the curvature alone is known, ``of_rows``.

        For effects of several numbers, with :math:`\Lambda^{-1} = B B^\top`, it is to first order
        :math:`I + B\, low(-B^\top \Lambda' B)\, B^{-1}`, the lower triangle with half of its
        diagonal, by the prior."""
        straight, at_x = self.straight, (x[None], x[None])
        if not np.isin(straight.of, self.singles).all():  # there are no globals
            return straight
        (L, w), of, b = self.leaves.shape, np.asarray(straight.of), len(straight.of)
        few = self.few_rows
        of_rows = self.precision(at_x, [0]) if few else of_rows
        of_prior = self.precision(at_x, [1])
        precision = of_rows.plus(of_prior)
        B = precision.leaf_roots()[0]
        turned, within = np.zeros((2, self.size, b)), np.zeros((L, w, w, b))
        blocks = list(self._together(of_prior, precision))
        at = np.concatenate([np.zeros(0, int), *(places for places, _ in blocks)])
        Q: Any = block_diag(*(Q for _, Q in blocks)) if blocks else np.zeros((0, 0))
        directions = np.zeros((len(at), self.size))
        directions[:, at] = Q.T
        for k, i in enumerate(of):
            for kind in range(2) if few else [1]:
                *each, turned[kind, at, k] = self._turning(x, i, kind, directions)
                for pair, values in zip(self._blocks, each, strict=True):
                    if w > 1 and set(pair) <= set(self.leaf_colors):
                        p, q = map(self.leaf_colors.index, pair)
                        within[:, p, q, k] = within[:, q, p, k] = values * kind
                    else:
                        turned[kind, self.colors[pair[0]].places, k] = values
        pull = self.value_and_grad(at_x, kinds=[1])[1]
        own, mixed = zip(*(self._own(y, of) for y in (of_rows, of_prior)), strict=True)
        single = np.zeros(self.size, bool)
        for a, color in enumerate(self.colors):
            single[color.places] = w == 1 or a not in self.leaf_colors
        if len(at):
            single[at], pull[at] = True, Q.T @ pull[at]
            core = np.ix_(*[np.searchsorted(self.singles, at)] * 2)
            for y, q, part in zip(own, mixed, (of_rows, of_prior), strict=True):
                y[at], q[at] = np.einsum("ij,ik,kj->j", Q, part.between[core], Q), Q.T @ q[at]
        with np.errstate(divide="ignore", invalid="ignore"):
            whole = own[0] + own[1]
            p, pull = np.clip(own[1] / whole, 0, 1), pull / whole
            a = [
                np.where(np.abs(y / whole) > _LEAST_SHARE, t.T / y, 0).T
                for y, t in zip(own, turned, strict=True)
            ]
            a = np.clip(np.nan_to_num(a), -2 * _MOST_BENT, 2 * _MOST_BENT)
            # The rows pull as much to the other side.
            K = [
                sign * y * pull[:, None] - q / whole[:, None]
                for sign, y, q in zip((-1, 1), a, mixed, strict=True)
            ]
        of_effects = np.where(single & np.isfinite(p + pull), (p, pull), 0)
        parts = np.array([a[1], a[0], K[1], K[0] if few else 0 * K[0]])
        parts = np.where((of_effects[0] > 0)[:, None], np.nan_to_num(parts), 0)
        low = np.tril(-np.einsum("lji,ljmk,lmn->lkin", B, within, B))
        low[..., range(w), range(w)] /= 2
        sheared = np.einsum("lij,lkjm,lmn->link", B, low, np.linalg.inv(B))
        slopes = np.zeros((self.size, b))
        slopes[self.leaves] = np.diagonal(sheared, axis1=1, axis2=2).transpose(0, 2, 1)
        slopes = np.clip(np.nan_to_num(slopes), -_MOST_BENT, _MOST_BENT)
        shears = np.concatenate([np.zeros((0, b)), *(sheared[:, p, q] for p, q in _below(w))])
        return replace(
            straight,
            of_effects=jnp.asarray(of_effects),
            of_parts=jnp.asarray(parts),
            slopes=jnp.asarray(slopes),
            shears=jnp.asarray(shears),
            turned=jnp.asarray(at),
            turns=jnp.asarray(np.array([Q, np.linalg.inv(Q)])),
        )

    def _own(self, precision: ArrowPrecision, of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The diagonal ``(n,)``, and the columns ``(n, b)`` of globals."""
        columns = np.searchsorted(self.singles, of)  # singles are the first of the core, in order
        own, mixed = np.zeros(self.size), np.zeros((self.size, len(of)))
        own[self.core] = np.diagonal(precision.between)
        own[self.leaves] = np.diagonal(precision.within, axis1=1, axis2=2)
        mixed[self.core], mixed[self.leaves] = (
            y[..., columns] for y in (precision.between, precision.across)
        )
        return own, mixed


def _below(w: int) -> list[tuple[int, int]]:
    return [(p, q) for p in range(w) for q in range(p)]
