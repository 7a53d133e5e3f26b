"""Effect handlers for running a model: they choose the rows of plates and refuse mistakes."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpyro
from numpyro.distributions import Delta
from numpyro.handlers import block, substitute, uncondition
from numpyro.primitives import Messenger

from numpyro_ext._model.minibatch import plate_indices
from numpyro_ext._typing import Model, Trace


def check_num_rows(msg: dict[str, Any]) -> None:
    """An error for a plate that takes a minibatch without rows."""
    size, subsample_size = msg["args"]
    if subsample_size is not None and subsample_size < 1:
        raise ValueError(
            f"plate '{msg['name']}' has subsample_size {subsample_size}, a minibatch without rows;"
            f" use a subsample_size between 1 and {size}, or None for all rows."
        )


class valid_plates(Messenger):
    """Refuse a ``subsample_size`` above the size, and a minibatch inside the body of ``scan`` or
    ``cond``, to which no rows could be given."""

    in_body = False

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "control_flow":
            msg["args"] = _with_bodies(list(msg["args"]))
        if msg["type"] != "plate":
            return
        size, subsample_size = msg["args"]
        if subsample_size is not None and subsample_size > size:
            raise ValueError(
                f"plate '{msg['name']}' has subsample_size {subsample_size} but only {size} rows;"
                f" use a subsample_size between 1 and {size}."
            )
        if self.in_body and subsample_size is not None and subsample_size < size:
            raise ValueError(
                f"plate '{msg['name']}' takes a minibatch of {subsample_size} of {size} rows"
                " inside scan or cond; drop subsample_size, or write the loop without scan."
            )


class _in_body(valid_plates):
    in_body = True


def _with_bodies(args: list[Any]) -> tuple[Any, ...]:
    # ``scan`` has its body first, ``cond`` its branches after the predicate; what they carry may be
    # callable too.
    for i in (0,) if callable(args[0]) else (1, 2):
        args[i] = _in_body(args[i])
    return tuple(args)


class same_plates(Messenger):
    """Refuse a plate with another size in the guide that is replayed: rows would be dropped."""

    def __init__(self, fn: Model | None, guide_trace: Trace) -> None:
        super().__init__(fn)
        self.guide_trace = guide_trace

    def process_message(self, msg: dict[str, Any]) -> None:
        guide = self.guide_trace.get(msg.get("name"))  # type: ignore
        if msg["type"] != "plate" or guide is None or guide["type"] != "plate":
            return
        ours, theirs = ((N, N if M is None else M) for N, M in (msg["args"], guide["args"]))
        if ours != theirs:
            raise ValueError(
                f"plate '{msg['name']}' has {ours[1]} of {ours[0]} rows in the model but"
                f" {theirs[1]} of {theirs[0]} in the guide; give both the same numbers."
            )


class refuse_mutable(Messenger):
    """Refuse a model with mutable state, which each of many particles would update differently."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "mutable":
            raise ValueError(
                f"the model has the mutable site '{msg['name']}', which every particle would update"
                " in its own way; pass it as an argument of the model."
            )


class refuse_noise(Messenger):
    """Refuse noise outside the sample sites, such as dropout, where two runs must share it."""

    def __init__(self, fn: Model, because: str) -> None:
        super().__init__(fn)
        self.because = because

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "prng_key":
            raise ValueError(
                "the model draws noise by numpyro.prng_key outside its sample sites, as dropout,"
                f" {self.because}; draw it at a sample site, or leave it out."
            )


class latents_only(Messenger):
    """Leave the observed sites out of the density."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["is_observed"] and not msg["name"].startswith("_"):
            msg["fn"] = msg["fn"].mask(False)


class every_row(Messenger):
    """Give a subsampled plate all of its indices, and that size as its ``subsample_size``; the
    model's own sizes are ``plates``, ``{plate: (size, subsample_size)}``."""

    def __init__(self, fn: Model | None = None) -> None:
        super().__init__(fn)
        self.plates: dict[str, tuple[int, int | None]] = {}

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "plate":
            return
        check_num_rows(msg)
        size, subsample_size = self.plates[msg["name"]] = msg["args"]
        if subsample_size is not None and subsample_size != size:
            msg["args"] = (size, size)
            msg["value"] = jnp.arange(size)


class at_most_all_rows(Messenger):
    """Take all rows of a plate that has fewer than its minibatch, as new data may."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            size, subsample_size = msg["args"]
            if subsample_size is not None and subsample_size > size:
                msg["args"] = (size, size)


class on_first_rows(Messenger):
    """Give subsampled plates the rows ``0 .. B-1`` where only shapes matter; a draw is O(N)."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            size, subsample_size = msg["args"]
            if subsample_size is not None and subsample_size < size:
                msg["value"] = jnp.arange(subsample_size)


class given_rows(Messenger):
    """Read the arguments of the model as a minibatch of these plates, :attr:`ModelInfo.given`; the
    sites there keep the scale N / B."""

    def __init__(self, fn: Model, plates: Collection[str]) -> None:
        super().__init__(fn)
        self.plates = plates

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["name"] in self.plates:
            size, batch = msg["args"]
            batch = size if batch is None else batch
            msg["args"], msg["value"] = (batch, batch), jnp.arange(batch)


class weighted_rows(Messenger):
    """Let the rows of plates count as often as their weights say, ``{plate: (rows,)}``."""

    def __init__(self, fn: Model, weights: dict[str, Array]) -> None:
        super().__init__(fn)
        self.weights = weights

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample":
            return
        for frame in msg["cond_indep_stack"]:
            if frame.name in self.weights:
                weights = jnp.reshape(self.weights[frame.name], (-1, *(1,) * (-frame.dim - 1)))
                msg["scale"] = weights if msg["scale"] is None else msg["scale"] * weights


class at_rows(substitute):
    """Give plates these indices, of any length, whether or not they have a ``subsample_size``; a
    subsampled plate that the model did not have when it was read is an error."""

    def __init__(
        self, fn: Model, idx: dict[str, Array], plates: dict[str, tuple[int, int]]
    ) -> None:
        super().__init__(fn, data=idx)
        self.idx = idx
        self.plates = plates

    def process_message(self, msg: dict[str, Any]) -> None:
        super().process_message(msg)
        if msg["type"] != "plate":
            return
        name, (size, subsample_size) = msg["name"], msg["args"]
        before = self.plates[name][0] if name in self.plates else None
        if subsample_size is not None and subsample_size < size and before != size:
            raise ValueError(
                f"plate '{name}' has {size} rows, but {before} when the chain was initialised;"
                " make a new MCMC object for other data."
            )
        if name in self.idx:
            msg["args"] = (size, len(self.idx[name]))


@jax.custom_jvp
def _apart(x: Array) -> Array:
    """``x``, computed apart from what reads it; its derivative is one."""
    return lax.optimization_barrier(x)


_apart.defjvp(lambda x, dx: (_apart(*x), *dx))


class drawn_once(Messenger):
    """Keep the compiler of CPUs from drawing a value anew in every sum that reads it, which can
    take as long as the rest of a step."""

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and not (msg["is_observed"] or isinstance(msg["fn"], Delta)):
            for part in "value", "intermediates":
                msg[part] = jax.tree.map(_apart, msg[part])


@contextmanager
def inside_plates(trace: Trace, names: Iterable[str]) -> Iterator[None]:
    """Enter plates of a trace once more, on the same rows, without recording anything."""
    sites = (site for site in trace.values() if site["type"] == "sample")
    frames = {frame.name: frame for site in sites for frame in site["cond_indep_stack"]}
    rows = {name: trace[name]["value"] for name in names if name in trace}
    with block(), substitute(data=rows), ExitStack() as stack:
        for name in names:
            size = trace[name]["args"] if name in trace else (frames[name].size,)
            stack.enter_context(numpyro.plate(name, *size, dim=frames[name].dim))
        yield


def subsampled_plates(trace: Trace) -> dict[str, tuple[int, int]]:
    """``{name: (size, subsample_size)}`` of the plates of a trace that take a minibatch."""
    plates = {name: site["args"] for name, site in trace.items() if site["type"] == "plate"}
    return {name: (N, M) for name, (N, M) in plates.items() if M is not None and M < N}


class seed_plates(Messenger):
    """Draw the minibatches of plates by one key, so that all particles share one. The plates in
    ``idx`` have theirs already."""

    idx: dict[str, Array]

    def __init__(self, fn: Model | None, rng_key: Array) -> None:
        super().__init__(fn)
        self.rng_key, self.idx = rng_key, {}

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["value"] is None:
            drawn, name = self.idx.get(msg["name"]), msg["name"]
            drawn = plate_indices(self.rng_key, name, *msg["args"]) if drawn is None else drawn
            msg["value"] = drawn


class unobserved(uncondition):
    """Draw the observed sites, each in the shape of its data."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["is_observed"]:
            fn, shape = msg["fn"], jnp.shape(msg["value"])
            # Without a plate a distribution of one number may have data of many.
            batch = lax.broadcast_shapes(shape[: len(shape) - fn.event_dim], fn.batch_shape)
            if batch != tuple(fn.batch_shape):
                msg["fn"] = fn.expand(batch)
        super().process_message(msg)  # type: ignore[arg-type] - a message is a dict
