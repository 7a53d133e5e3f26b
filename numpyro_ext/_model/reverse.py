"""The auxiliary sites of a guide, and the densities that a reverse model gives them."""

from typing import Any

from jax import Array
from numpyro.handlers import block, substitute
from numpyro.primitives import Messenger

from numpyro_ext._model.density import log_prob
from numpyro_ext._model.read import Site, call_and_trace, latent_sites, sample_sites
from numpyro_ext._typing import Model, Sites, Trace


def split_auxiliary(guide_trace: Trace) -> tuple[Sites, Sites]:
    """Values of the sites marked ``is_auxiliary``, and of the other latent sites."""
    aux, latents = {}, {}
    for site in latent_sites(guide_trace):
        is_auxiliary = site["infer"].get("is_auxiliary", False)
        (aux if is_auxiliary else latents)[site["name"]] = site["value"]
    return aux, latents


def reverse_sites(
    reverse: Model, aux: Sites, latents: Sites, args: tuple, kwargs: dict[str, Any], rows: Sites
) -> dict[str, tuple[Site, Array]]:
    """``{name: (site, log r)}`` of the auxiliary sites, from a run of which only params are seen.

    :param dict rows: indices for the plates of ``reverse``.
    """

    def value_of(site: Site) -> Array | None:
        name = site["name"]
        if site["type"] == "plate":
            return rows.get(name)
        if site["type"] != "sample":
            return None
        if site["is_observed"]:
            raise ValueError(
                f"the reverse model has the observed site or factor '{name}', so it is no density"
                " of the auxiliary sites; leave it out."
            )
        if name not in aux:
            raise ValueError(
                f"the reverse model has the site '{name}', which is no auxiliary site of the guide;"
                f" it must have the sites {sorted(aux)} and no others."
            )
        return aux[name]

    with block(hide_fn=lambda site: site["type"] != "param"):
        fn = substitute(reverse, substitute_fn=value_of)
        trace = call_and_trace(fn, (latents, *args), kwargs)[1]
    found = {site["name"]: (site, log_prob(site)) for site in sample_sites(trace)}
    for name in aux:
        if name not in found:
            raise ValueError(
                f"the reverse model has no site '{name}', an auxiliary site of the guide; give it"
                f' numpyro.sample("{name}", ...), a distribution given the latents.'
            )
    return found


class in_place_of(Messenger):
    """Sites that lie in the plates of another site and under its scale."""

    def __init__(self, site: Site) -> None:
        super().__init__(None)
        self.site = site

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample":
            msg["cond_indep_stack"] = list(self.site["cond_indep_stack"])
            msg["scale"] = self.site["scale"]
