"""The guide of a structured auto-encoder.

Johnson et al., "Composing graphical models with neural networks for structured representations and
fast inference" (2016).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
import numpyro
from numpyro.handlers import seed, substitute
import numpyro.distributions as dist

from numpyro_ext._model.read import latent_sites, trace_of
from numpyro_ext._typing import Params, Sites
from numpyro_ext.svae.analytic import global_terms
from numpyro_ext.svae.local_inference.base import LocalInference, LocalPosterior

__all__ = ["SVAEGuide"]


class SVAEGuide:
    r"""Guide in which a network gives potentials, and message passing the local posterior.

    .. math::

        q(\theta) = p(\theta \mid \tau), \qquad
        q(x_n, z_n) = \text{local inference}(\mathrm{E}_{q(\theta)} t(\theta),\,
        \psi(x; y_n, \phi)).

    It pairs with a model of conjugate global variables, local latents x (and z), and a likelihood
    of x alone. With :class:`SVAEELBO` the natural parameters :math:`\tau` have natural gradients;
    with ``Trace_ELBO``, ``Predictive`` and handlers it is an ordinary guide with ordinary ones.
    Potentials enter q alone, so that the bound holds whatever the network says.

    Its parameters are ``{prefix}_natural``, a dict of the natural parameters of each global factor,
    and ``{prefix}_recognition$params``. Besides the model's latent sites it has the deterministic
    sites ``{prefix}_kl_global``, ``{prefix}_kl_local`` of shape ``(B,)``, and ``_num_iter``,
    ``_residual`` and ``_converged`` of local inference.

    :param dict prior: natural parameters of the prior, by the names of ``local_inference.families``.
        Natural parameters are not concentrations: ``Dirichlet.from_standard(concentration)``.
    :param recognition: a pair ``(init_fn, apply_fn)`` whose ``apply_fn`` returns a potential, such
        as :func:`recognition_network`.
    :param local_inference: a rule, such as :class:`GMMEP`.
    :param data: ``data(*args, **kwargs)`` picks the data y, with rows first, from the arguments of
        the model; the first argument by default.
    :param create_plates: ``create_plates(*args, **kwargs)`` returns the data plate;
        ``numpyro.plate("data", len(y))`` by default. If y has as many rows as the plate, it is
        indexed by the minibatch; if it has ``subsample_size`` rows, it is the minibatch.
    :param str prefix: what the names of the guide's own sites start with.
    :param init_natural: where natural parameters start: a dict, or ``rng_key -> dict``; that of the
        rule by default.
    :param dict site_names: other names of the model's sites, as ``{"Sigma": "cov"}``.

    References: Johnson et al., *Composing graphical models with neural networks for structured
    representations and fast inference* (NIPS 2016), algorithm 1.
    """

    def __init__(
        self,
        prior: Mapping[str, Any],
        recognition: tuple[Callable[..., Any], Callable[..., Any]],
        local_inference: LocalInference,
        *,
        data: Callable[..., Any] | None = None,
        create_plates: Callable[..., Any] | None = None,
        prefix: str = "svae",
        init_natural: Any = None,
        site_names: Mapping[str, str] | None = None,
    ) -> None:
        if sorted(prior) != sorted(local_inference.families):
            raise ValueError(
                f"prior has {sorted(prior)}, but {type(local_inference).__name__} has the global"
                f" factors {sorted(local_inference.families)}; give natural parameters of each."
            )
        for name, family in local_inference.families.items():
            if not isinstance(prior[name], family.Natural):
                raise TypeError(
                    f"prior['{name}'] is a {type(prior[name]).__name__}; it must be a"
                    f" {family.Natural.__name__}, such as {family.__name__}.from_standard returns."
                )
        self.prior = dict(prior)
        self.recognition = recognition
        self.local_inference = local_inference
        self.data = data
        self.create_plates = create_plates
        self.prefix = prefix
        self.start = init_natural
        self.site_names = _renamed(local_inference.site_names, site_names or {})

    def __call__(self, *args: Any, **kwargs: Any) -> Sites:
        y = self._data(args, kwargs)
        natural = self._registered()
        terms = global_terms(self.prefix, self.local_inference.families, natural, self.prior)
        self._report("kl_global", terms.kl)
        sites = self._sample_globals(natural)
        with self._plate(y, args, kwargs) as idx:
            rows = self._rows(y, idx)
            local = self._infer(terms.inner, rows)
            self._report("kl_local", self.local_inference.local_kl(terms.mean, local))
            for name, value in local.info._asdict().items():
                self._report(name, value)
            return {**sites, **self._sample_locals(local)}

    def _data(self, args: tuple, kwargs: dict[str, Any]) -> Array:
        y = jnp.asarray(self.data(*args, **kwargs) if self.data is not None else args[0])
        return y

    def _registered(self) -> dict[str, Any]:
        if not self.prior:
            return {}
        name = f"{self.prefix}_natural"
        natural: Any = numpyro.param(name)
        if natural is None:
            key: Any = numpyro.prng_key()
            natural = numpyro.param(name, self._init_natural(key))
        return natural

    def _init_natural(self, rng_key: Array) -> dict[str, Any]:
        if self.start is None:
            return self.local_inference.init_natural(rng_key, self.prior)
        return self.start(rng_key) if callable(self.start) else self.start

    def _plate(self, y: Array, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.create_plates is not None:
            return self.create_plates(*args, **kwargs)
        return numpyro.plate("data", y.shape[0])

    def _rows(self, y: Array, idx: Array) -> Array:
        ...

    def _infer(self, global_mean: Mapping[str, Any], rows: Array) -> LocalPosterior:
        network = numpyro.module(f"{self.prefix}_recognition", self.recognition, rows.shape[1:])
        return self.local_inference.infer(global_mean, network(rows))

    def _report(self, name: str, value: Array) -> None:
        numpyro.deterministic(f"{self.prefix}_{name}", value)

    def _sample_globals(self, natural: dict[str, Any]) -> Sites:
        sites: Sites = {}
        for name, family in self.local_inference.families.items():
            fn, (first, *others) = family.to_distribution(natural[name]), self.site_names[name]
            if isinstance(fn, tuple):
                fn, conditional = fn
                sites[first] = numpyro.sample(first, fn)
                sites[others[0]] = numpyro.sample(others[0], conditional(sites[first]))
            else:
                sites[first] = numpyro.sample(first, fn)
        return sites

    def _sample_locals(self, local: LocalPosterior) -> Sites:
        sites: Sites = {}
        for name, fn in self.local_inference.distributions(local).items():
            (site,) = self.site_names[name]
            infer = {} if fn.is_discrete else {"svae": "drawn"}
            sites[site] = numpyro.sample(site, fn, infer=infer)
        return sites

    def global_natural(self, params: Params) -> dict[str, Any]:
        """Natural parameters of the global factors by name.

        :param dict params: the guide's parameters, from ``svi.get_params``.
        """
        return params[f"{self.prefix}_natural"] if self.prior else {}

    def global_mean(self, params: Params) -> dict[str, Any]:
        """Expected statistics of the global factors by name."""
        families = self.local_inference.families
        return {name: families[name].mean(n) for name, n in self.global_natural(params).items()}

    def local_posterior(self, params: Params, y: Array) -> LocalPosterior:
        """q of the local variables of any data.

        :param dict params: the guide's parameters, from ``svi.get_params``.
        :param y: rows of data, ``(B, ...)``.
        """
        _, apply = self.recognition
        potential = apply(params[f"{self.prefix}_recognition$params"], jnp.asarray(y))
        return self.local_inference.infer(self.global_mean(params), potential)

    def param_labels(self, params: Params) -> dict[str, str]:
        """``"natural"`` or ``"network"`` for each parameter, for ``optax.multi_transform``."""
        natural = f"{self.prefix}_natural"
        return {name: "natural" if name == natural else "network" for name in params}

    def domain(self, params: Params) -> Array:
        """Whether all natural parameters are those of densities, for ``natural_gradient``."""
        families = self.local_inference.families
        inside = jnp.ones((), bool)
        for name, natural in self.global_natural(params).items():
            inside &= jnp.all(families[name].in_domain(natural))
        return inside


def _renamed(
    names: Mapping[str, tuple[str, ...]], other: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    known = {site for sites in names.values() for site in sites}
    if not set(other) <= known:
        raise ValueError(
            f"site_names renames {sorted(set(other) - known)}, but the sites are {sorted(known)}."
        )
    return {key: tuple(other.get(site, site) for site in sites) for key, sites in names.items()}
