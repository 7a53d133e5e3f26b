"""How :class:`SVAEELBO` tells a guide which gradients it needs, and learns what the guide has."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from numpyro.primitives import Messenger, apply_stack

from numpyro_ext.expfam import straight_through_kl, straight_through_mean

__all__ = ["DRAWN", "Terms", "analytic", "global_terms"]

DRAWN = "svae_drawn"
"""In ``infer`` of the local latent vectors, whose draws carry the gradient of the likelihood."""
_KIND = "numpyro_ext.svae"


class Terms(NamedTuple):
    """What the global factors contribute to a run of the guide."""

    mean: dict[str, Any]
    """Expected statistics, for the divergence of local variables."""
    inner: dict[str, Any]
    """The same numbers, for local inference."""
    kl: Array
    """The divergence of all global factors from their priors."""


class analytic(Messenger):
    """Gives the guide inside it natural gradients in place of ordinary ones.

    :param fn: the guide.
    :param str implicit: ``"full"``, or ``"explicit_only"``, where local inference has no gradient
        in the global factors.
    """

    def __init__(self, fn: Any, implicit: str) -> None:
        self.explicit_only = implicit == "explicit_only"
        self.prefix: str | None = None
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == _KIND:
            self.prefix = msg["kwargs"]["prefix"]
            msg["value"] = self._terms(*msg["args"])

    def _terms(
        self, families: Mapping[str, Any], natural: dict[str, Any], prior: Mapping[str, Any]
    ) -> Terms:
        mean = {name: straight_through_mean(families[name], n) for name, n in natural.items()}
        inner = jax.lax.stop_gradient(mean) if self.explicit_only else mean
        kl = jnp.zeros(())
        for name, q in natural.items():
            one = straight_through_kl(families[name], q, prior[name], mean[name])
            kl = kl + jnp.sum(one)
        return Terms(mean, inner, kl)


def global_terms(
    prefix: str,
    families: Mapping[str, Any],
    natural: dict[str, Any],
    prior: Mapping[str, Any],
) -> Terms:
    """The terms of the global factors, with the gradients that the loss around it has chosen."""

    def ordinary(*args: Any, **kwargs: Any) -> Terms:
        mean = {name: families[name].mean(n) for name, n in natural.items()}
        kl = jnp.zeros(())
        for name, q in natural.items():
            kl = kl + jnp.sum(families[name].kl(q, prior[name]))
        return Terms(mean, mean, kl)

    msg = apply_stack(
        {
            "type": _KIND,
            "fn": ordinary,
            "args": (families, natural, prior),
            "kwargs": {"prefix": prefix},
            "value": None,
        }
    )
    return msg["value"]
