"""A reverse model for a guide of your own with auxiliary variables."""

from typing import Any

from jax import Array
import jax.numpy as jnp
import numpyro
from numpyro.handlers import block, substitute
from numpyro.primitives import Messenger

from numpyro_ext._model.density import log_prob, scaled
from numpyro_ext._model.read import Site, call_and_trace, sample_sites, split_auxiliary, values_of
from numpyro_ext._typing import Model, Params, Sites
from numpyro_ext.guides.wrapper import GuideWrapper


class with_reverse(GuideWrapper):
    r"""A guide with auxiliary variables a, and the reverse model :math:`r(a \mid z)` of its bound.

    The auxiliary sites of ``guide`` carry ``infer={"is_auxiliary": True}``. The reverse model
    ``reverse(latents, *args, **kwargs)`` has ``numpyro.sample`` sites of the same names, given the
    dict of the other sites of the guide. The result is called like ``guide``, with a
    ``numpyro.factor`` of :math:`-\log r` for each, so that every loss of a density computes

    .. math::
        L = E[\log p(x, z) + \log r(a \mid z) - \log q(a) - \log q(z \mid a)] ,

    which is the ELBO of :math:`q(z) = \int q(z \mid a) q(a) da` less :math:`E_q\,
    \mathrm{KL}(q(a \mid z) \| r(a \mid z))`. Of ``reverse`` only the parameters are seen.

    :param guide: a guide with auxiliary sites.
    :param reverse: a Python callable with NumPyro primitives, normalised: it has one sample site
        for each auxiliary site, and neither observed sites nor factors.

    **Reference:** *Hierarchical variational models*, equation 5, Ranganath et al. (ICML 2016)

    >>> def model():
    ...     numpyro.sample("z", dist.Normal(0.0, 1.0))
    >>> def guide():
    ...     a = numpyro.sample("a", dist.Normal(0.0, 1.0), infer={"is_auxiliary": True})
    ...     numpyro.sample("z", dist.Normal(a, 0.5))
    >>> def reverse(latents):
    ...     numpyro.sample("a", dist.Normal(0.8 * latents["z"], 0.2**0.5))
    >>> loss = Trace_ELBO(1000)
    >>> kl = loss.loss(jax.random.key(0), {}, model, with_reverse(guide, reverse))
    >>> bool(abs(kl - 0.0134) < 0.03)  # this reverse is exact, and so is the KL divergence
    True
    """

    def __init__(self, guide: Model, reverse: Model) -> None:
        super().__init__(guide, "with_reverse")
        self.reverse = reverse

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result, trace = call_and_trace(self.fn, args, kwargs)
        aux, latents = split_auxiliary(trace)
        if not aux:
            raise ValueError(
                "with_reverse was given a guide without auxiliary sites; mark them by"
                ' numpyro.sample(..., infer={"is_auxiliary": True}).'
            )
        rows = values_of(trace, "plate")
        sites = reverse_sites(self.reverse, aux, latents, args, kwargs, rows)
        prefix = getattr(self.fn, "prefix", "auto")
        for name, (site, log_r) in sites.items():
            with plates_of(site):
                numpyro.factor(f"{prefix}_reverse_{name}", -log_r)
        return result

    def reverse_log_prob(
        self, params: Params, aux: Sites, latents: Sites, *args: Any, **kwargs: Any
    ) -> Array:
        """:math:`\\log r(a \\mid z)`, a number, of the auxiliary sites given the other ones."""
        with block(), substitute(data=params):
            sites = reverse_sites(self.reverse, aux, latents, args, kwargs, {})
        return sum((jnp.sum(scaled(site, log_r)) for site, log_r in sites.values()), jnp.zeros(()))


def reverse_sites(
    reverse: Model, aux: Sites, latents: Sites, args: tuple, kwargs: dict[str, Any], rows: Sites
) -> dict[str, tuple[Site, Array]]:
    """``{name: (site, log r)}`` of the auxiliary sites; ``rows`` are the indices of its plates."""

    def value_of(site: Site) -> Array | None:
        name = site["name"]
        if site["type"] == "plate":
            return rows.get(name)
        if site["type"] != "sample":
            return None
        if site["is_observed"] or name not in aux:
            raise ValueError(
                f"the reverse model has the site or factor '{name}'; it must be a density of the"
                f" auxiliary sites {sorted(aux)} and have no others."
            )
        return aux[name]

    with block(hide_fn=lambda site: site["type"] != "param"):
        fn = substitute(reverse, substitute_fn=value_of)
        trace = call_and_trace(fn, (latents, *args), kwargs)[1]
    sites = {site["name"]: (site, log_prob(site)) for site in sample_sites(trace)}
    for name in aux:
        if name not in sites:
            raise ValueError(
                f"the reverse model has no site '{name}', an auxiliary site of the guide."
            )
    return sites


class plates_of(Messenger):
    """Sites that lie in the plates of another site and under its scale."""

    def __init__(self, site: Site) -> None:
        super().__init__(None)
        self.site = site

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample":
            msg["cond_indep_stack"] = list(self.site["cond_indep_stack"])
            msg["scale"] = self.site["scale"]
