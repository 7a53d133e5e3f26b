"""What a kernel and a gradient estimator may ask of a model."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from numpyro.distributions import constraints
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.util import compute_log_probs, constrain_fn, initialize_model, unconstrain_fn
from numpyro.primitives import Messenger
from numpyro.util import is_prng_key

from numpyro_ext._model.handlers import subsampled_plates, valid_plates
from numpyro_ext._model.read import continuous_latents
from numpyro_ext._typing import Model, Sites

__all__ = [
    "Oracle",
    "PreparedModel",
    "check_names",
    "check_sites",
    "first_rows",
    "prepare_model",
]


class first_rows(Messenger):
    """Subsampled plates take rows ``0 .. B-1``: their own draw is O(N), and only shapes matter here."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            size, subsample_size = msg["args"]
            if subsample_size is not None and subsample_size < size:
                msg["value"] = jnp.arange(subsample_size)


class _rows(substitute):
    """Give the plates these indices, of any length; the plates must be those that ``sizes`` names."""

    def __init__(self, idx: dict[str, Array], plates: dict[str, tuple[int, int]]) -> None:
        super().__init__(data=idx)
        self.idx = idx
        self.plates = plates

    def process_message(self, msg: dict[str, Any]) -> None:
        super().process_message(msg)
        if msg["type"] != "plate":
            return
        name, (size, subsample_size) = msg["name"], msg["args"]
        known = self.plates[name][0] if name in self.plates else None
        if subsample_size is not None and subsample_size < size and known != size:
            raise ValueError(
                f"plate '{name}' has {size} rows, but {known} when the chain was initialised; make a new"
                " MCMC object for other data."
            )
        if name in self.idx:
            msg["args"] = (size, len(self.idx[name]))


def check_names(what: str, values: Any, like: dict[str, Any]) -> None:
    """A dict with just the sites of ``like``, or a ``ValueError``."""
    if not isinstance(values, dict) or set(values) != set(like):
        given = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"{what} has {given}; it must be a dict with the sites {sorted(like)}.")


def check_sites(
    what: str, values: Any, like: dict[str, Any], batch_shape: tuple[int, ...] = ()
) -> Sites:
    """``values`` as arrays of the shapes and types of ``like``, or a ``ValueError`` that names the site."""
    check_names(what, values, like)
    for name, expected in like.items():
        shape = batch_shape + expected.shape
        if jnp.shape(values[name]) != shape:
            raise ValueError(
                f"{what} has shape {jnp.shape(values[name])} at site '{name}'; it must be {shape}."
            )
    return {name: jnp.asarray(values[name], expected.dtype) for name, expected in like.items()}


class Oracle:
    """
    The potential ``U`` of a model, its gradient, and what is known about its sites.

    ``z`` and gradients are dicts of unconstrained sites, ``idx`` holds the indices of every plate in ``plates``.

     - **plates** - ``{name: (size, subsample_size)}``.
     - **supports** - ``{site: constraint}``.
     - **like** - ``{site: jax.ShapeDtypeStruct}`` of one unconstrained point.
    """

    def __init__(
        self, prepared: "PreparedModel", model_args: tuple, model_kwargs: dict[str, Any]
    ) -> None:
        self.plates, self.supports, self.like = prepared.plates, prepared.supports, prepared.like
        self._constrained = prepared.constrained
        self._potential_fn = prepared.potential_fn(*model_args, **model_kwargs)
        self._model = seed(first_rows(prepared.model), random.key(0))
        self._args = (model_args, model_kwargs)

    def potential(self, z: Sites, idx: dict[str, Array]) -> Array:
        """``U`` with the likelihood of the rows ``idx`` scaled by ``size / len(idx)`` of their plates."""
        with _rows({name: jnp.asarray(rows) for name, rows in idx.items()}, self.plates):
            return self._potential_fn(z)

    def value_and_grad(self, z: Sites, idx: dict[str, Array]) -> tuple[Array, Sites]:
        """:meth:`potential` and its gradient: one minibatch."""
        return jax.value_and_grad(self.potential)(z, idx)

    def full_value_and_grad(self, z: Sites, chunk_size: int = 10_000) -> tuple[Array, Sites]:
        """
        ``U`` and its gradient over all rows, ``chunk_size`` rows of a plate at a time.

        Each piece ``c`` of a plate has the whole prior and the scale ``N/|c|``, so the pieces are averaged with
        weights ``|c|/N``; with several plates over all combinations of their pieces.
        """
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(self.value_and_grad, z, self._first_rows()),
        )

        def add(total: Any, part: Any, weight: float) -> Any:
            return jax.tree.map(lambda a, b: a + weight * b, total, part)

        def average(names: list[str], idx: dict[str, Array]) -> Any:
            if not names:
                return self.value_and_grad(z, idx)
            name, *rest = names
            size = self.plates[name][0]
            chunk = min(chunk_size, size)
            whole = size // chunk

            def body(k: Array, total: Any) -> Any:
                rows = k * chunk + jnp.arange(chunk)
                return add(total, average(rest, idx | {name: rows}), chunk / size)

            total = lax.fori_loop(0, whole, body, zeros)
            if whole * chunk < size:
                rows = jnp.arange(whole * chunk, size)
                total = add(total, average(rest, idx | {name: rows}), len(rows) / size)
            return total

        return average(list(self.plates), {})

    def unconstrain(self, what: str, values: Sites) -> Sites:
        """Constrained values of all latent sites turned unconstrained; ``what`` names them in an error."""
        values = check_sites(what, values, self._constrained)
        return check_sites(what, unconstrain_fn(self._model, *self._args, values), self.like)

    def nonfinite_site(self, z: Sites, idx: dict[str, Array]) -> str | None:
        """The first site whose log density is not finite at ``z``."""
        with _rows(idx, self.plates):
            values = constrain_fn(self._model, *self._args, z)
            return _nonfinite_site(self._model, *self._args, values)

    def check_start(
        self, z: Sites, idx: dict[str, Array], potential: Array, grad: Sites, single: bool
    ) -> None:
        """A ``ValueError`` that names the site if a chain starts where U or its gradient is not finite."""
        if all(jnp.all(jnp.isfinite(x)) for x in (potential, *grad.values())):
            return
        chains = (z, idx, potential, grad)
        if single:
            chains = jax.tree.map(lambda x: x[None], chains)
        for c, u in enumerate(chains[2]):
            z, idx, _, grad = jax.tree.map(lambda x, c=c: x[c], chains)
            bad = [name for name, g in grad.items() if not jnp.all(jnp.isfinite(g))]
            if bad or not jnp.isfinite(u):
                raise ValueError(
                    _nonfinite_message(self.nonfinite_site(z, idx) or (bad[0] if bad else None))
                )

    def _first_rows(self) -> dict[str, Array]:
        return {name: jnp.arange(batch) for name, (_, batch) in self.plates.items()}


class PreparedModel(NamedTuple):
    """A model read once: what is static in it, and NumPyro's functions of its arguments."""

    model: Model
    plates: dict[str, tuple[int, int]]
    supports: dict[str, constraints.Constraint]
    like: dict[str, Any]
    constrained: dict[str, Any]
    potential_fn: Callable[..., Any]
    postprocess_fn: Callable[..., Any]

    def oracle(self, model_args: tuple, model_kwargs: dict[str, Any]) -> Oracle:
        return Oracle(self, model_args, model_kwargs)


def _nonfinite_site(
    model: Model, model_args: tuple, model_kwargs: dict[str, Any], values: Sites
) -> str | None:
    log_probs, _ = compute_log_probs(model, model_args, model_kwargs, values)
    return next((name for name, value in log_probs.items() if not jnp.isfinite(value)), None)


def _read_model(
    model: Model, init_strategy: Callable[..., Any], model_args: tuple, model_kwargs: dict[str, Any]
) -> tuple[dict[str, tuple[int, int]], dict[str, dict[str, Any]]]:
    """The subsampled plates and the latent sites of a model that a kernel can take."""
    box: dict[str, dict[str, Any]] = {}

    def run() -> None:
        seeded = valid_plates(first_rows(seed(model, random.key(0))))
        prepared = substitute(seeded, substitute_fn=init_strategy)
        box.update(trace(prepared).get_trace(*model_args, **model_kwargs))

    jax.eval_shape(run)
    latents, plates = continuous_latents(box), subsampled_plates(box)
    for name, site in latents.items():
        for frame in site["cond_indep_stack"]:
            if frame.name in plates:
                raise ValueError(
                    f"latent site '{name}' is inside the subsampled plate '{frame.name}'; local latents are"
                    " not supported with a minibatch: sum them out of the model, or drop subsample_size."
                )
    return plates, latents


def prepare_model(
    rng_key: Array,
    model: Model,
    init_strategy: Callable[..., Any],
    model_args: tuple,
    model_kwargs: dict[str, Any],
) -> tuple[PreparedModel, Sites]:
    """The model as a kernel needs it, and an unconstrained starting point for each key of ``rng_key``."""
    plates, latents = _read_model(model, init_strategy, model_args, model_kwargs)
    try:
        info, potential_fn, postprocess_fn, _ = initialize_model(
            rng_key,
            first_rows(model),
            init_strategy=init_strategy,
            dynamic_args=True,
            model_args=model_args,
            model_kwargs=model_kwargs,
            validate_grad=False,
        )
    except RuntimeError as error:
        if "valid initial" not in str(error):
            raise
        seeded = seed(first_rows(model), rng_key if is_prng_key(rng_key) else rng_key[0])
        start = substitute(seeded, substitute_fn=init_strategy)
        drawn = trace(start).get_trace(*model_args, **model_kwargs)
        values = {name: drawn[name]["value"] for name in latents}
        name = _nonfinite_site(seeded, model_args, model_kwargs, values)
        raise ValueError(_nonfinite_message(name)) from error
    batch_ndim = 0 if is_prng_key(rng_key) else 1
    z = {name: jnp.asarray(x, jnp.result_type(x, float)) for name, x in info.z.items()}
    like = {
        name: jax.ShapeDtypeStruct(x.shape[batch_ndim:], x.dtype) for name, x in sorted(z.items())
    }
    supports = {name: site["fn"].support for name, site in latents.items()}
    constrained = {
        name: jax.ShapeDtypeStruct(jnp.shape(site["value"]), jnp.result_type(float))
        for name, site in latents.items()
    }
    prepared = PreparedModel(
        model, plates, supports, like, constrained, potential_fn, postprocess_fn
    )
    return prepared, z


def _nonfinite_message(name: str | None) -> str:
    """One sentence for a start at which the potential or its gradient is not finite."""
    place = "the initial point" if name is None else f"the initial point: see site '{name}'"
    return (
        f"the potential or its gradient is not finite at {place}; check the data, or give another"
        " init_strategy or init_params."
    )
