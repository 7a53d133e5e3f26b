"""A program cut at its ``numpyro.contrib.control_flow.scan``: what it does before the loop, and the
loop's body, so that the steps of two programs can be run side by side."""

from typing import Any, NamedTuple, cast

import jax
from jax import Array
import jax.numpy as jnp
from numpyro.handlers import replay, seed
from numpyro.primitives import Messenger

from numpyro_ext._model.arguments import indexed
from numpyro_ext._model.read import (
    FILLED,
    call_and_trace,
    frames,
    is_same_scale,
    layers,
    sample_sites,
)
from numpyro_ext._numpyro import mask_of
from numpyro_ext._typing import Model, Trace


class Scan(NamedTuple):
    """A loop that was reached: its arguments, its key, and the values that handlers around the
    program have for sites of the body."""

    body: Model
    carry: Any
    xs: Any
    length: int
    reverse: bool
    rng_key: Array | None
    given: list[Any]

    def step(
        self, carry: Any, x: Any, rng_key: Array, replayed: Trace | None = None
    ) -> tuple[Any, Trace]:
        """The next carry and the trace of one step, with the values of a trace that is given."""
        body, trace = seed(self.body, rng_key), cast(Any, replayed)
        body = body if trace is None else replay(body, trace)
        (carry, _), sites = call_and_trace(body, (carry, x), {})
        return carry, sites


class _Reached(Exception):
    def __init__(self, scan: Scan) -> None:
        self.scan = scan


class _stop_at_scan(Messenger):
    def process_message(self, msg: dict[str, Any]) -> None:
        # ``cond`` has a predicate before its branches.
        if msg["type"] == "control_flow" and callable(msg["args"][0]):
            body, carry, xs, length, reverse = msg["args"]
            if length is None:
                length = jnp.shape(jax.tree.leaves(xs)[0])[0]
            kwargs = msg["kwargs"]
            given = [values for _, values in kwargs["substitute_stack"]]
            raise _Reached(Scan(body, carry, xs, length, reverse, kwargs["rng_key"], given))


class refuse_no_steps(Messenger):
    """An error at a scan of no time steps, in which NumPyro cannot replay a guide."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "control_flow" and callable(msg["args"][0]):
            _, _, xs, length, _ = msg["args"]
            if length == 0 or (length is None and 0 in map(len, jax.tree.leaves(xs)[:1])):
                raise ValueError(
                    "a scan of model or guide has no time steps; give it data of at least one."
                )


def until_scan(program: Model, args: tuple, kwargs: dict[str, Any]) -> tuple[Trace, Scan | None]:
    """The trace of a program up to its first scan, and that scan, or None."""

    def run() -> Scan | None:
        try:
            with _stop_at_scan():
                program(*indexed(args), **indexed(kwargs))
        except _Reached as reached:
            return reached.scan
        return None

    scan, sites = call_and_trace(run, (), {})
    return {name: site for name, site in sites.items() if not name.endswith(FILLED)}, scan


def check_pieces(who: str, scan: Scan, before: Trace, step: Trace, whole: Trace) -> None:
    """An error unless the sites before the loop and in its body are the whole program, and nothing
    around the program acts on the body."""
    for values in scan.given:
        names = set(step) if callable(values) else set(step) & set(values)
        if names:
            raise ValueError(
                f"a handler around the program may give a value to the site '{min(names)}' inside"
                f" scan, which {who} does not see; give it to the body, by obs= or as an argument."
            )
    for site in step.values():
        if site["type"] == "param":
            raise ValueError(
                f"numpyro.param('{site['name']}') is inside the body of scan, where NumPyro does"
                " not train it; call it before scan."
            )
    for site in sample_sites(whole):
        name = site["name"]
        if name not in before and name not in step:
            raise ValueError(
                f"the site '{name}' comes after scan, so its density belongs to no time step of"
                f" {who}; move it into the body, or use IWELBO."
            )
        if name in step and not _same_handlers(site, step[name]):
            raise ValueError(
                f"a plate or handler (scale, mask) around scan acts on its site '{name}', which"
                f" {who} does not see; put it inside the body."
            )


def _same_handlers(a: Any, b: Any) -> bool:
    scales = (1.0 if site["scale"] is None else site["scale"] for site in (a, b))
    masks = [sum(mask_of(x) is not None for x in layers(site["fn"])) for site in (a, b)]
    return frames(a) == frames(b) and masks[0] == masks[1] and is_same_scale(*scales)
