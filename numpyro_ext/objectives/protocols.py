"""How a loss asks a guide for what the guide alone knows, and says so where it is missing."""

from typing import Any

from numpyro_ext.objectives.base import Draws

__all__ = ["guide_with", "unwrapped"]


def unwrapped(guide: Any, protocol: type) -> Any:
    """The guide, or what the handlers around it hold, that satisfies a Protocol; or None."""
    while not isinstance(guide, protocol):
        if not hasattr(guide, "fn"):
            return None
        guide = guide.fn
    return guide


def guide_with(draws: Draws, protocol: type, methods: str, example: str) -> Any:
    """The guide, or the one inside a handler around it, if it satisfies a Protocol.

    :param str methods: what the Protocol asks for.
    :param str example: a guide that has it.
    """
    guide = unwrapped(draws.guide, protocol)
    if guide is None:
        guide = draws.guide
        while hasattr(guide, "fn"):
            guide = guide.fn
        name = getattr(guide, "__name__", type(guide).__name__)
        raise TypeError(
            f"{type(draws.objective).__name__} needs a guide with {methods}, which {name} does not"
            f" have; use {example}."
        )
    return guide
