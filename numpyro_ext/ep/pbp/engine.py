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
    check_nonnegative,
    check_positive,
    check_rate,
)
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._numpyro import unpacking_of
from numpyro_ext._typing import Params
from numpyro_ext.ep.base import Engine
from numpyro_ext.ep.pbp.epochs import (
    Belief,
    Constants,
    Counts,
    Gamma,
    PBPState,
    PriorSites,
    epoch,
    start_sites,
)
from numpyro_ext.ep.pbp.moments import forward_moments
from numpyro_ext.ep.pbp.network import SCALING, Network, NetworkGuide, network_guide
from numpyro_ext.ep.state import EPRunResult

PBPRunResult = EPRunResult
"""The result of a run of :class:`PBP`, whose state is a :class:`PBPState`."""


@dataclass(kw_only=True, eq=False, repr=False)
class PBP(Engine):
    r"""Probabilistic backpropagation: a rectifier network for a number, with nothing to tune.

    The model, which is ``pbp.model(X, y=None)``, has :math:`z_0 = x`, matrices :math:`w_l` of shape
    ``(outputs, inputs + 1)`` at the sites ``w0, w1, ...``, and

    .. math::

        a_l = w_l [z_{l-1}; 1] / \sqrt{d_l}, \quad z_l = \max(a_l, 0), \quad f = a_L, \qquad
        w \sim \mathrm N(0, 1/\lambda), \quad y \sim \mathrm N(f, 1/\gamma)

    with :math:`d_l` the number of inputs, the constant among them, and with Gamma priors on
    :math:`\lambda` (``weight_precision``) and :math:`\gamma` (``noise_precision``). q is a normal
    distribution for each weight and a Gamma for each precision. The moments of f under q are known
    in closed form, layer by layer, and with :math:`Z = \mathrm N(y; \mu_f, \sigma_f^2 + \mathrm
    E[1/\gamma])` each weight N(m, v) moves by

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
    (``benchmarks/ep/calibration.py``). Weights of a network are not identified, and q is one mode
    of their posterior: judge the predictions (:meth:`predict`), not the weights. A row tens of
    standard deviations from the rest draws the fit to itself and, with EP and SEP, leaves no cavity
    for others; the run then warns.

    **Other than in the paper,** the constant of each layer has no variance, and X and y are
    standardised inside. The sites of EP and SEP begin with the random means of the start, and
    forget them.

    ``result.params`` has the parameters of ``pbp.guide``, an ``AutoDiagonalNormal`` on the weights
    and a Gamma for each precision, and the scaling, which ``pbp.model`` reads, so that
    ``Predictive(pbp.model, guide=pbp.guide, params=result.params, num_samples=100)`` takes new X.

    :param layer_sizes: inputs, hidden units of each layer, and 1.
    :param str method: ``"adf"``, ``"ep"`` or ``"sep"``.
    :param float prior_shape, prior_rate: of the prior of the weight precision; a shape above 1.
    :param float noise_shape, noise_rate: of the prior of the noise precision; a shape above 1.
    :param float weight_precision, noise_precision: a precision that is known, in place of a prior.
    :param bool use_bias: whether a constant 1 is among the inputs of each layer.
    :param bool normalise: whether X and y are standardised; a constant column is only shifted.
    :param bool refine_prior: whether an epoch ends with the priors; otherwise q keeps the prior
        N(0, b / (a - 1)) of the start, and the weight precision its Gamma.
    :param float damping: d in (0, 1] for EP and SEP, where 1 replaces a site by the new one.
    :param float init_scale: times :math:`1 / \sqrt{d_l}`, the standard deviation of the means at
        the start; at 0 all units of a layer stay alike.
    :param str prefix: prefix of the names of the parameters.

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
    prior_shape: float = 6.0
    prior_rate: float = 6.0
    noise_shape: float = 6.0
    noise_rate: float = 6.0
    weight_precision: float | None = None
    noise_precision: float | None = None
    use_bias: bool = True
    normalise: bool = True
    refine_prior: bool = True
    damping: float = 1.0
    init_scale: float = 1.0
    prefix: str = "auto"

    def __post_init__(self) -> None:
        sizes = self.layer_sizes
        if not isinstance(sizes, list | tuple) or len(sizes) < 2 or sizes[-1] != 1:
            raise ValueError(
                f"layer_sizes is {sizes!r}; it must be a list of the number of inputs, the hidden"
                " units of each layer, and 1, such as [X.shape[1], 50, 1]."
            )
        for i, size in enumerate(sizes):
            check_count(f"layer_sizes[{i}]", size)
        check_choice("method", self.method, ("adf", "ep", "sep"))
        for name in ("prior_shape", "noise_shape", "prior_rate", "noise_rate"):
            check_positive(name, getattr(self, name))
            if name.endswith("shape") and getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; it must be above 1 for a mean variance."
                )
        for name in ("weight_precision", "noise_precision"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_nonnegative("init_scale", self.init_scale)
        check_rate("damping", self.damping)
        if self.damping < 1 and self.method == "adf":
            raise ValueError(
                f"damping is {self.damping!r}; it must be 1 for method='adf', which keeps no sites."
            )
        priors = {
            "weight": self.weight_precision or (self.prior_shape, self.prior_rate),
            "noise": self.noise_precision or (self.noise_shape, self.noise_rate),
        }
        self.model = Network(tuple(map(int, sizes)), priors, bool(self.use_bias), self.prefix)

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

    @property
    def _constants(self) -> Constants:
        tau = self.noise_precision
        return Constants(
            None if tau is None else jnp.asarray(tau, float),
            None if self.damping == 1 else jnp.asarray(self.damping, float),
        )

    def init(self, rng_key: Array, X: Any, y: Any) -> PBPState:
        """The state before the first epoch: each weight is N(m, E[1 / precision]), with m from N(0,
        1 / fan-in) times ``init_scale``.

        :param rng_key: a random number generator key.
        :param X: ``(N, inputs)`` numbers.
        :param y: ``(N,)`` numbers.
        """
        X, y = self._data(X, y)
        scaling = _scaling_of(np.asarray(X, np.float64), np.asarray(y, np.float64), self.normalise)
        key_means, key_state = random.split(rng_key)
        shapes = list(self.model.shapes.values())
        means = [
            self.init_scale / shape[1] ** 0.5 * random.normal(key, shape)
            for key, shape in zip(random.split(key_means, len(shapes)), shapes, strict=True)
        ]
        weight, noise = (
            Gamma(*(jnp.asarray(x, float) for x in prior)) if isinstance(prior, tuple) else None
            for prior in self.model.priors.values()
        )
        a, b = self.prior_shape, self.prior_rate
        precision = self.weight_precision or (a - 1) / b
        q = Belief(means, [jnp.full(shape, 1 / precision) for shape in shapes], noise)
        prior = None
        if self.refine_prior and weight is not None:
            zero = jnp.zeros(sum(m.size for m in means))
            prior = PriorSites(zero + precision, Gamma(zero, zero))
        count = jnp.zeros((), jnp.int32)
        return PBPState(
            i=count,
            q=q,
            weight=weight,
            prior=prior,
            site=start_sites(self.method, q, len(X)),
            scaling=scaling,
            counts=Counts(count, count, count, count),
            skipped=count,
            num_data=jnp.asarray(len(X), jnp.int32),
            rng_key=key_state,
        )

    def update(self, state: PBPState, X: Any, y: Any) -> tuple[PBPState, Array]:
        """One epoch: the next state, and the loss. A pure function."""
        return epoch(self.method, self._constants, state, *self._data(X, y, state))

    def begin(
        self, rng_key: Array, init_state: PBPState | None, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, PBPState, list[Array]]:
        state = self.init(rng_key, *args, **kwargs) if init_state is None else init_state
        X, y = self._data(*args, **kwargs, state=state)
        return None, state._replace(num_data=jnp.asarray(len(X), jnp.int32)), [X, y]

    def steps(
        self, plan: Any, state: PBPState, arrays: list[Array], num_steps: int
    ) -> Iterator[tuple[PBPState, Array, str]]:
        for _ in range(num_steps):
            state, loss = epoch(self.method, self._constants, state, *arrays)
            yield state, loss, ""

    def get_params(self, state: PBPState) -> Params:
        """The parameters of an ``AutoDiagonalNormal``, concentration and rate of each precision
        that is not known, and ``{prefix}_X_mean``, ``_X_sd``, ``_y_mean``, ``_y_sd``."""
        order = np.concatenate([place.ravel() for place in self._places])
        m, v = (jnp.concatenate([jnp.ravel(x) for x in xs]) for xs in state.q[:2])
        params = {"loc": jnp.zeros_like(m).at[order].set(m)}
        params["scale"] = jnp.sqrt(jnp.zeros_like(v).at[order].set(v))
        for name, gamma in (("weight", state.weight), ("noise", state.q.noise)):
            if gamma is not None:
                params |= {f"{name}_concentration": gamma.shape, f"{name}_rate": gamma.rate}
        return {f"{self.prefix}_{name}": x for name, x in (params | state.scaling).items()}

    def convergence(self, state: PBPState) -> dict[str, float]:
        """For :func:`~numpyro_ext.diagnostics.diagnose`: the rows that the last epoch left out.
        There is no residual, because ADF has no fixed point."""
        return {"residual": 0.0, "limit": 0.0, "skipped": int(state.skipped), "inaccurate": 0}

    def predict(self, params: Params, X: Any) -> tuple[Array, Array]:
        """Mean and variance of y at new inputs, with the noise, in closed form.

        :param params: the parameters of a run.
        :param X: ``(n, inputs)`` numbers, in the units of the data.
        :return: two arrays ``(n,)``.
        """
        X = _inputs_of(X, self.model.layer_sizes[0])
        loc, scale = (jnp.asarray(params[f"{self.prefix}_{name}"]) for name in ("loc", "scale"))
        q = Belief([loc[x] for x in self._places], [scale[x] ** 2 for x in self._places], None)
        if self.noise_precision is None:
            names = [f"{self.prefix}_noise_{what}" for what in ("rate", "concentration")]
            rate, shape = (params[name] for name in names)
            noise_variance = rate / (shape - 1)
        else:
            noise_variance = jnp.asarray(1 / self.noise_precision, float)
        scaling = {name: params[f"{self.prefix}_{name}"] for name in SCALING}
        return _predict(q, scaling, noise_variance, X)

    def _data(self, X: Any, y: Any, state: PBPState | None = None) -> tuple[Array, Array]:
        """X and y as arrays ``(N, inputs)`` and ``(N,)`` that fit the sites of a state."""
        X, y = _inputs_of(X, self.model.layer_sizes[0]), _finite("y", y)
        if y.shape != (len(X),):
            raise ValueError(
                f"y has shape {y.shape} and X {X.shape}; y must be ({len(X)},), a number for each"
                " row of X."
            )
        if state is None or state.site is None or is_traced(state.num_data):
            return X, y
        if len(X) != int(state.num_data):
            raise ValueError(
                f"X has {len(X)} rows, and the state has sites of {int(state.num_data)}; use the"
                " same data, or method='adf', which keeps no sites."
            )
        return X, y

    def warn(self, first: PBPState, state: PBPState, num_steps: int) -> None:
        """Warn of kinds of updates that were left out in more than 1 % of the visits."""
        left = jax.tree.map(lambda a, b: int(a) - int(b), state.counts, first.counts)
        visits = num_steps * int(state.num_data)
        shares = {
            "of the data, whose cavities were improper,": left.data / visits,
            "of the weights' updates": left.entries / visits / sum(m.size for m in state.q.means),
            "of the noise precision's updates": left.noise / visits,
        }
        large = [f"{share:.1%} {what}" for what, share in shares.items() if share > 0.01]
        if large:
            words = (
                f"{' and '.join(large)} were left out, because they gave no distribution; look for"
                " rows far from the rest, or use method='adf', or a smaller damping for 'ep' and"
                " 'sep'."
            )
            warnings.warn(InferenceWarning(words), stacklevel=3)


def _inputs_of(X: Any, num_inputs: int) -> Array:
    """X as an array ``(N, num_inputs)``."""
    X = _finite("X", X)
    if X.ndim != 2 or X.shape[1] != num_inputs or len(X) == 0:
        raise ValueError(
            f"X has shape {X.shape}; it must be (N, {num_inputs}), as layer_sizes[0] is"
            f" {num_inputs}; use X[:, None] for a single input."
        )
    return X


def _finite(name: str, value: Any) -> Array:
    """An array of floats, or an error that names a row with NaN or an infinity."""
    if is_traced(value):
        return value
    numbers = np.asarray(value, None if isinstance(value, Array) else np.float64)
    if len(bad := np.argwhere(~np.isfinite(numbers))):
        raise ValueError(
            f"{name} has {len(bad)} entries that are not finite, the first in row {bad[0, 0]};"
            " leave these rows out, or fill them."
        )
    return jnp.asarray(value if isinstance(value, Array) else numbers, float)


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
