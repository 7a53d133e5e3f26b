"""Probabilistic backpropagation: a rectifier network by moment matching, one datum at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import (
    InferenceWarning,
    check_choice,
    check_count,
    check_positive,
    if_given,
)
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._numpyro import unpacking_of
from numpyro_ext._typing import Kwargs, Params
from numpyro_ext.ep.base import Engine
from numpyro_ext.ep.pbp.epochs import Belief, Gamma, PBPState, PriorSites, epoch, start_sites
from numpyro_ext.ep.pbp.moments import forward_moments
from numpyro_ext.ep.pbp.network import PRIOR, SCALING, Network, NetworkGuide, network_guide
from numpyro_ext.ep.state import EPRunResult

PBPRunResult = EPRunResult
"""The result of a run of :class:`PBP`; its state is a :class:`PBPState`."""


@dataclass(kw_only=True, eq=False, repr=False)
class PBP(Engine):
    r"""Probabilistic backpropagation: a rectifier network for a number, with nothing to tune.

    The model, which is ``pbp.model(X, y=None)``, has :math:`z_0 = x`, matrices :math:`w_l` of shape
    ``(outputs, inputs + 1)`` at the sites ``w0, w1, ...``, and

    .. math::

        a_l = w_l [z_{l-1}; 1] / \sqrt{d_l}, \quad z_l = \max(a_l, 0), \quad f = a_L, \qquad
        w \sim \mathrm N(0, 1/\lambda), \quad y \sim \mathrm N(f, 1/\gamma)

    with :math:`d_l` the number of inputs, the constant among them, and with the prior Gamma(6, 6),
    in standardised units, of :math:`\lambda` (``weight_precision``) and :math:`\gamma`
    (``noise_precision``). q is a normal distribution for each weight and a Gamma for each
    precision. The moments of f under q are known in closed form, layer by layer, and with
    :math:`Z = \mathrm N(y; \mu_f, \sigma_f^2 + \mathrm E[1/\gamma])` each weight N(m, v) moves by

    .. math::

        m \leftarrow m + v \, \partial_m \log Z, \qquad v \leftarrow v - v^2 \left[ (\partial_m
        \log Z)^2 - 2 \, \partial_v \log Z \right].

    One step is an epoch: each row once, in random order, then each weight's prior. Its loss is
    minus the sum of log Z over the rows, in standardised units.

    **Methods.** ``"adf"``, with which to start, absorbs every row again in every epoch. ``"ep"``
    has a site for each row and divides q by it first; ``"sep"`` has one site that all rows share,
    so that the state does not grow with N.

    **Bias.** The units of a layer are treated as normal and independent. ADF counts each row as
    often as there are epochs, so that the variance of the weights falls with them and the noise
    precision is too certain: choose the number of epochs by held-out rows. On few rows EP and SEP
    have too large standard deviations of f, and ADF too small ones
    (``benchmarks/ep/calibration.py``): of a sine with 80 rows and 50 units they know nothing, and
    end at its mean even where they go on from a fit by ADF; with 1,000 rows they have half of its
    error or less (``--only rows`` there). Weights of a network are not identified, and q is one
    mode of their posterior: judge the predictions (:meth:`predict`), not the weights. A row tens of
    standard deviations from the rest draws the fit to itself and, with EP and SEP, leaves no cavity
    for others; the run then warns.

    **Other than in the paper,** the constant of each layer has no variance, and X and y are
    standardised inside.

    ``result.params`` has the parameters of ``pbp.guide``, an ``AutoDiagonalNormal`` on the weights
    and a Gamma for each precision, and the scaling, which ``pbp.model`` reads, so that
    ``Predictive(pbp.model, guide=pbp.guide, params=result.params, num_samples=100)`` takes new X.

    :param layer_sizes: inputs, hidden units of each layer, and 1.
    :param str method: ``"adf"``, ``"ep"`` or ``"sep"``.
    :param float weight_precision, noise_precision: a precision that is known, in place of a prior.
    :param bool normalise: whether X and y are standardised; a constant column is only shifted.

    References: Hernandez-Lobato, Adams, *Probabilistic backpropagation for scalable learning of
    Bayesian neural networks* (ICML 2015), sections 3 and 4; Li, Hernandez-Lobato, Turner,
    *Stochastic expectation propagation* (NeurIPS 2015), algorithm 1 and section 5.

    >>> from numpyro_ext.ep import PBP
    >>> X = jnp.linspace(-4, 4, 60)[:, None]
    >>> y = 3 * jnp.abs(X[:, 0]) + 0.5 * jax.random.normal(jax.random.key(0), (60,))
    >>> pbp = PBP([1, 20, 1])
    >>> result = pbp.run(jax.random.key(1), 40, X, y, progress_bar=False)
    >>> mean, variance = pbp.predict(result.params, jnp.array([[-3.0], [3.0]]))
    >>> bool(jnp.all(jnp.abs(mean - 9) < 1))
    True
    """

    layer_sizes: Sequence[int] = field(kw_only=False)
    method: str = "adf"
    weight_precision: float | None = None
    noise_precision: float | None = None
    normalise: bool = True

    def __post_init__(self) -> None:
        sizes = self.layer_sizes
        if not isinstance(sizes, list | tuple) or len(sizes) < 2 or sizes[-1] != 1:
            raise ValueError(
                f"layer_sizes is {sizes!r}; it must be a list such as [X.shape[1], 50, 1]."
            )
        for k, size in enumerate(sizes):
            check_count(f"layer_sizes[{k}]", size)
        check_choice("method", self.method, ("adf", "ep", "sep"))
        precisions = {"weight": self.weight_precision, "noise": self.noise_precision}
        for kind, precision in precisions.items():
            if_given(check_positive, f"{kind}_precision", precision)
        self.model = Network(tuple(map(int, sizes)), precisions)

    def __getstate__(self) -> dict[str, Any]:
        # The guide holds closures; it is made again when it is asked for.
        return {k: v for k, v in vars(self).items() if k not in ("guide", "_places")}

    @cached_property
    def guide(self) -> NetworkGuide:
        """The guide of the parameters of a run."""
        with jax.ensure_compile_time_eval():
            return network_guide(self.model)

    @cached_property
    def _places(self) -> list[np.ndarray]:
        """Where the guide's vector has each weight, a matrix per layer."""
        unpack: Any = unpacking_of(self.guide)
        with jax.ensure_compile_time_eval():
            places = unpack(jnp.arange(self.guide.latent_dim))
        return [np.asarray(places[name]) for name in self.model.shapes]

    def init(self, rng_key: Array, X: Any, y: Any) -> PBPState:
        """The state before the first epoch on X ``(N, inputs)`` and y ``(N,)``: each weight is
        N(m, E[1 / precision]), with m from N(0, 1 / fan-in)."""
        X, y = self._data(X, y)
        scaling = _scaling_of(np.asarray(X, np.float64), np.asarray(y, np.float64), self.normalise)
        key_means, key_state = random.split(rng_key)
        shapes = list(self.model.shapes.values())
        means = [
            random.normal(key, shape) / shape[1] ** 0.5
            for key, shape in zip(random.split(key_means, len(shapes)), shapes, strict=True)
        ]
        weight, noise = (
            Gamma(*(jnp.asarray(x, float) for x in PRIOR)) if precision is None else None
            for precision in self.model.precisions.values()
        )
        a, b = PRIOR
        precision = self.weight_precision or (a - 1) / b
        q = Belief(means, [jnp.full(shape, 1 / precision) for shape in shapes], noise)
        zero, count = jnp.zeros(sum(m.size for m in means)), jnp.zeros((), jnp.int32)
        prior = None if weight is None else PriorSites(zero + precision, Gamma(zero, zero))
        site = start_sites(self.method, q, len(X))
        return PBPState(count, q, weight, prior, site, scaling, count, key_state)

    def update(self, state: PBPState, X: Any, y: Any) -> tuple[PBPState, Array]:
        """One epoch: the next state, and the loss. A pure function."""
        X, y = self._data(X, y)
        if self.method == "ep" and (rows := len(jax.tree.leaves(state.site)[0])) != len(X):
            raise ValueError(
                f"X has {len(X)} rows, and the state has sites of {rows}; use the same data."
            )
        noise = None if self.noise_precision is None else jnp.asarray(self.noise_precision, float)
        return epoch(self.method, noise, state, X, y)

    def begin(
        self, rng_key: Array, init_state: PBPState | None, args: tuple, kwargs: Kwargs
    ) -> tuple[Any, PBPState, list[Array]]:
        state = self.init(rng_key, *args, **kwargs) if init_state is None else init_state
        return None, state, list(self._data(*args, **kwargs))

    def steps(
        self, plan: Any, state: PBPState, arrays: list[Array], num_steps: int
    ) -> Iterator[tuple[PBPState, Array, str]]:
        left = 0
        for _ in range(num_steps):
            state, loss = self.update(state, *arrays)
            left += int(state.skipped)
            yield state, loss, ""
        share = left / num_steps / len(arrays[0])
        if share > 0.01:
            words = (
                f"{share:.1%} of the rows were left out, because their cavities were improper or"
                " the noise precision had no Gamma; look for rows far from the rest, or"
                + (" take more rows." if self.method == "adf" else " use method='adf'.")
            )
            warnings.warn(InferenceWarning(words), stacklevel=3)

    def get_params(self, state: PBPState) -> Params:
        """The parameters of an ``AutoDiagonalNormal``, concentration and rate of each precision
        that is not known, and ``auto_X_mean``, ``_X_sd``, ``_y_mean``, ``_y_sd``."""
        order = np.concatenate([place.ravel() for place in self._places])
        m, v = (jnp.concatenate([jnp.ravel(x) for x in xs]) for xs in state.q[:2])
        params = {"loc": jnp.zeros_like(m).at[order].set(m)}
        params["scale"] = jnp.sqrt(jnp.zeros_like(v).at[order].set(v))
        for name, gamma in (("weight", state.weight), ("noise", state.q.noise)):
            if gamma is not None:
                params |= {f"{name}_concentration": gamma.shape, f"{name}_rate": gamma.rate}
        return {f"auto_{name}": x for name, x in (params | state.scaling).items()}

    def restore(self, saved: Any, args: tuple, kwargs: Kwargs) -> None:
        """Nothing: the guide follows from the layers."""

    def convergence(self, state: PBPState) -> dict[str, float]:
        """For :func:`~numpyro_ext.diagnostics.diagnose`: rows left out; ADF has no residual."""
        return {"residual": 0.0, "limit": 0.0, "skipped": int(state.skipped), "inaccurate": 0}

    def predict(self, params: Params, X: Any) -> tuple[Array, Array]:
        """Mean and variance ``(n,)`` of y at new inputs ``(n, inputs)``, with the noise, in closed
        form and in the units of the data."""
        loc, scale = (jnp.asarray(params[f"auto_{name}"]) for name in ("loc", "scale"))
        q = Belief([loc[x] for x in self._places], [scale[x] ** 2 for x in self._places], None)
        if self.noise_precision is None:
            rate, shape = (params[f"auto_noise_{x}"] for x in ("rate", "concentration"))
            noise_variance = rate / (shape - 1)
        else:
            noise_variance = jnp.asarray(1 / self.noise_precision, float)
        scaling = {name: params[f"auto_{name}"] for name in SCALING}
        return _predict(q, scaling, noise_variance, self._inputs(X))

    def _inputs(self, X: Any) -> Array:
        X, d = _finite("X", X), self.layer_sizes[0]
        if X.ndim != 2 or X.shape[1] != d or len(X) == 0:
            raise ValueError(
                f"X has shape {X.shape}; it must be (N, {d}), as layer_sizes[0] is {d}: a single"
                " row is X[:1], and a single column X[:, None]."
            )
        return X

    def _data(self, X: Any, y: Any) -> tuple[Array, Array]:
        X, y = self._inputs(X), _finite("y", y)
        if y.shape != (len(X),):
            raise ValueError(f"y has shape {y.shape} and X {X.shape}; y must be ({len(X)},).")
        return X, y


def _finite(name: str, value: Any) -> Array:
    """An array of floats, or an error that names a row with NaN or an infinity."""
    x = jnp.asarray(value, float)
    if is_traced(x):
        return x
    bad = np.argwhere(~np.isfinite(np.asarray(x)))
    if len(bad):
        raise ValueError(
            f"{name} has {len(bad)} entries that are not finite, the first in row {bad[0, 0]};"
            " leave these rows out, or fill them."
        )
    return x


def _scaling_of(X: np.ndarray, y: np.ndarray, normalise: bool) -> dict[str, Array]:
    """Mean and standard deviation of X and y by name; 0 and 1 without ``normalise``."""

    def mean_and_sd(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not normalise:
            return np.zeros(x.shape[1:]), np.ones(x.shape[1:])
        # Rounding would give a constant column a small standard deviation.
        return x.mean(0), np.where(x.max(0) == x.min(0), 1.0, x.std(0))

    return {
        n: jnp.asarray(x, float)
        for n, x in zip(SCALING, (*mean_and_sd(X), *mean_and_sd(y)), strict=True)
    }


@jax.jit
def _predict(
    q: Belief, scaling: dict[str, Array], noise_variance: Array, X: Array
) -> tuple[Array, Array]:
    X = (X - scaling["X_mean"]) / scaling["X_sd"]
    mean, var = jax.vmap(partial(forward_moments, q.means, q.variances))(X)
    sd = scaling["y_sd"]
    return mean * sd + scaling["y_mean"], (var + noise_variance) * sd**2
