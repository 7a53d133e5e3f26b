"""A guide around another guide, which registers parameters or factors of its own."""

from typing import Any

from numpyro_ext._typing import Model

# The methods of the Protocols of ``_typing``, which Python looks up without ``__getattr__``.
_PROTOCOLS = (
    "components",
    "conditional",
    "critic",
    "reverse_log_prob",
    "sample_latent",
    "sample_mixing",
)


class GuideWrapper:
    """Base of guides around another guide, ``fn``, that gives them the attributes they lack."""

    fn: Any

    def __init__(self, guide: Model, caller: str) -> None:
        if not callable(guide) or isinstance(guide, type):
            raise TypeError(f"{caller} was given {guide!r}; it wraps a guide, not its class.")
        self.fn = guide
        self.__name__ = getattr(guide, "__name__", type(guide).__name__)
        for name in _PROTOCOLS:
            if hasattr(guide, name) and not hasattr(type(self), name):
                setattr(self, name, getattr(guide, name))

    def __getattr__(self, name: str) -> Any:
        # While it is unpickled there is no inner guide yet.
        if name == "fn" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.fn, name)
