"""The guide of a structured auto-encoder."""

from collections.abc import Callable, Mapping
import math
from typing import Any, NamedTuple, cast

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.handlers import block, seed, substitute

from numpyro_ext._model.arguments import is_traced
from numpyro_ext._networks import Network, as_pair
from numpyro_ext._typing import Model, Params, Sites
from numpyro_ext.expfam import multiply
from numpyro_ext.svae.checks import certain, check_factor_rows, check_model, check_naturals
from numpyro_ext.svae.judgement import judge, narrowest
from numpyro_ext.svae.local_inference.base import LocalInference, LocalPosterior, global_statistics
from numpyro_ext.svae.missing import MissingNetwork


class GlobalTerms(NamedTuple):
    """What a run takes of the global factors."""

    mean: dict[str, Any]  # expected statistics, for the divergence of the local variables
    inner: dict[str, Any]  # the same for local inference
    kl: Array  # the divergence of all factors from their priors

    @classmethod
    def exact(
        cls, families: Mapping[str, Any], natural: Mapping[str, Any], prior: Mapping[str, Any]
    ) -> "GlobalTerms":
        """The terms at natural parameters, with ordinary gradients."""
        mean = {name: families[name].mean(q) for name, q in natural.items()}
        kls = (jnp.sum(families[name].kl(q, prior[name])) for name, q in natural.items())
        return cls(mean, mean, sum(kls, jnp.zeros(())))


class GuideRun(NamedTuple):
    """A run of the guide: latent sites, the names of continuous local ones, with draws that carry
    the gradient of the likelihood, and the divergences from the prior, ``()`` and ``(B,)``."""

    sites: Sites
    vectors: tuple[str, ...]
    kl_global: Array
    kl_local: Array


class SVAEGuide:
    r"""Guide in which a network gives potentials, and message passing the local posterior.

    .. math::
        q(\theta) = p(\theta \mid \tau), \qquad
        q(x_n, z_n) = \text{local inference}(\mathrm{E}_{q(\theta)} t(\theta),\,
        \psi(x; y_n, \phi)).

    It pairs with a model of conjugate global variables, local latents x (and z), and a likelihood
    of x alone; its first argument are the data y, with rows first. With :class:`SVAEELBO` the
    natural parameters :math:`\tau` have natural gradients; with other losses ordinary ones.
    Potentials enter q alone, so that the bound holds whatever the network returns.

    **Bias.** Global variables are independent of local ones under q, and z of x. So the standard
    deviations of global variables are too small wherever the data leave local ones open, as for
    components that overlap; ``diagnose`` estimates by how much.

    Its parameters are ``{prefix}_natural``, a dict of the natural parameters of each global factor,
    and ``{prefix}_recognition$params``. Besides the model's latent sites it has the deterministic
    sites ``{prefix}_kl_global`` and ``{prefix}_kl_local``, ``_num_iter``, ``_residual`` and
    ``_converged`` of each row.

    :param dict prior: natural parameters of the prior, named as in ``local_inference.families``.
        Natural parameters are not concentrations: ``Dirichlet.from_standard(concentration)``.
    :param recognition: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, that
        returns a potential, such as :func:`recognition_network`; :func:`allow_missing` of it, if
        data have NaN. Where y is x with normal noise of a known precision, ``(lambda key, shape:
        (shape, {}), lambda params, y: GaussianPotential.from_diagonal(precision * y, precision))``
        is exact.
    :param local_inference: a rule, such as :class:`GMMEP`.
    :param create_plates: ``create_plates(*args, **kwargs)`` returns the data plate;
        ``numpyro.plate("data", len(y))`` by default. If y has as many rows as the plate, it is
        indexed by the minibatch; if it has ``subsample_size`` rows, it is the minibatch.
    :param str prefix: prefix of the names of the guide's own sites.
    :param init_natural: where natural parameters start: a dict, or ``rng_key -> dict``; by
        default the rule's.

    References: Johnson et al., *Composing graphical models with neural networks* (NIPS 2016),
    algorithm 1.

    >>> from numpyro_ext.expfam import Gaussian
    >>> from numpyro_ext.svae import (
    ...     FixedGaussian, SVAEELBO, SVAEGuide, decoder_network, recognition_network)
    >>> def model(y):
    ...     decode = numpyro.module("decoder", decoder_network(2, hidden=(8,)), (1,))
    ...     with numpyro.plate("data", len(y)):
    ...         x = numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(1), jnp.eye(1)))
    ...         numpyro.sample("y", dist.Normal(*decode(x)).to_event(1), obs=y)
    >>> rule = FixedGaussian(Gaussian.from_standard(jnp.zeros(1), jnp.eye(1)))
    >>> guide = SVAEGuide({}, recognition_network(1, hidden=(8,)), rule)
    >>> y = jnp.array([[-3.0, 3.0], [-3.1, 2.9], [3.0, -3.0], [2.9, -3.1]])
    >>> svi = SVI(model, guide, optax.adam(1e-2), SVAEELBO())
    >>> result = svi.run(jax.random.key(0), 100, y, progress_bar=False)
    >>> guide.local_posterior(result.params, y).mean["x"].x.shape
    (4, 1)
    """

    def __init__(
        self,
        prior: Mapping[str, Any],
        recognition: Network,
        local_inference: LocalInference,
        *,
        create_plates: Callable[..., Any] | None = None,
        prefix: str = "svae",
        init_natural: Any = None,
    ) -> None:
        check_naturals("prior", prior, local_inference)
        self.prior = dict(prior)
        self.recognition = as_pair(recognition, "recognition")
        self.local_inference = local_inference
        self.create_plates = create_plates
        self.prefix = prefix
        self.start = init_natural
        self.site_names = dict(local_inference.site_names)

    def __call__(self, *args: Any, **kwargs: Any) -> Sites:
        return self.run(GlobalTerms.exact, *args, **kwargs).sites

    def run(self, terms: Callable[..., GlobalTerms], /, *args: Any, **kwargs: Any) -> GuideRun:
        """One run, with the gradients that ``terms(families, natural, prior)`` gives the global
        factors: ordinary ones in a call of the guide, natural ones in :class:`SVAEELBO`."""
        if not args:
            raise ValueError(
                "the data are the first positional argument of the model and the guide, and there"
                f" are the keywords {sorted(kwargs)} alone."
            )
        y = self._checked(args[0])
        name = f"{self.prefix}_natural"
        natural: Any = numpyro.param(name, self._init_natural) if self.prior else {}
        mean, inner, kl_global = terms(self.local_inference.families, natural, self.prior)
        self._report("kl_global", kl_global)
        sites = self._sample_globals(natural)
        if self.create_plates is None:
            plate = numpyro.plate("data", y.shape[0])
        else:
            plate = self.create_plates(*args, **kwargs)
        is_batch = _is_batch(y, plate)
        name = f"{self.prefix}_recognition"
        shape = (1, *y.shape[1:]) if y.ndim > 1 else ()
        network: Any = numpyro.module(name, self.recognition, shape)
        with plate as idx:
            rows = y if is_batch else y[idx]
            factor = network(rows)
            check_factor_rows(factor, rows)
            local = self.local_inference.infer(inner, factor)
            kl_local = self.local_inference.local_kl(mean, local)
            self._report("kl_local", kl_local)
            for name, value in local.info._asdict().items():
                self._report(name, value)
            vectors = []
            for name, fn in self.local_inference.distributions(local).items():
                (site,) = self.site_names[name]
                sites[site] = cast(Array, numpyro.sample(site, fn))
                if not fn.is_discrete:
                    vectors.append(site)
        return GuideRun(sites, tuple(vectors), kl_global, kl_local)

    def _checked(self, y: Any) -> Array:
        allowed = is_traced(y) or isinstance(self.recognition, MissingNetwork)
        if not allowed and np.isnan(np.asarray(y, float)).any():
            raise ValueError(
                "the data of the guide have NaN; drop these rows, or give SVAEGuide"
                " allow_missing(recognition)."
            )
        return jnp.asarray(y)

    def _init_natural(self, rng_key: Array) -> dict[str, Any]:
        if self.start is None:
            return self.local_inference.init_natural(rng_key, self.prior)
        start: Any = self.start(rng_key) if callable(self.start) else self.start
        check_naturals("init_natural", start, self.local_inference)
        return start

    def _report(self, name: str, value: Array) -> None:
        numpyro.deterministic(f"{self.prefix}_{name}", value)

    def _sample_globals(self, natural: dict[str, Any]) -> Sites:
        sites: Sites = {}
        for name, family in self.local_inference.families.items():
            fn, names = family.to_distribution(natural[name]), self.site_names[name]
            fns = fn if isinstance(fn, tuple) else (fn,)
            # The conditional distribution is a function of the site before it.
            value: Any = None
            for site, fn in zip(names, fns, strict=True):
                value = numpyro.sample(site, fn if value is None else fn(value))
                sites[site] = value
        return sites

    def global_natural(self, params: Params) -> dict[str, Any]:
        """Natural parameters of the global factors by name."""
        return params[f"{self.prefix}_natural"] if self.prior else {}

    def global_mean(self, params: Params) -> dict[str, Any]:
        """Expected statistics of the global factors by name."""
        families = self.local_inference.families
        return {name: families[name].mean(n) for name, n in self.global_natural(params).items()}

    def local_posterior(self, params: Params, y: Array) -> LocalPosterior:
        """q of the local variables of any data ``(B, ...)``, such as ``.mean["z"].probs``."""
        _, apply = self.recognition
        y = self._checked(y)
        factor = apply(params[f"{self.prefix}_recognition$params"], y)
        check_factor_rows(factor, y)
        return self.local_inference.infer(self.global_mean(params), factor)

    def sample_posterior(
        self,
        rng_key: Array,
        params: Params,
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> Sites:
        """Draws of the global sites, and of the local ones for the data in the arguments; the rows
        of a minibatch differ between draws."""

        def draw(key: Array) -> Sites:
            with block():
                fn: Any = substitute(seed(self, key), data=params)
                return fn(*args, **kwargs)

        if not sample_shape:
            return draw(rng_key)
        draws = jax.vmap(draw)(random.split(rng_key, math.prod(sample_shape)))
        return jax.tree.map(lambda x: x.reshape(*sample_shape, *x.shape[1:]), draws)

    def sample_globals(self, rng_key: Array, sites: Sites) -> Sites:
        """A draw of the global sites from their exact posterior given local ones for all data."""
        rule = self.local_inference
        mean = {name: family.mean(self.prior[name]) for name, family in rule.families.items()}
        values = {name: sites[self.site_names[name][0]] for name in rule.local_families}
        added = global_statistics(rule, mean, certain(rule, mean, values))
        naturals = {name: multiply(self.prior[name], added[name]) for name in rule.families}
        with block(), seed(rng_seed=rng_key):
            return self._sample_globals(naturals)

    judge_local = judge
    narrowest_global = narrowest

    def param_labels(self, params: Params) -> dict[str, str]:
        """``"natural"`` or ``"network"`` for each parameter, for ``optax.multi_transform``."""
        natural = f"{self.prefix}_natural"
        return {name: "natural" if name == natural else "network" for name in params}

    def domain(self, params: Params) -> Array:
        """Return whether all natural parameters are in their domains, for ``natural_gradient``."""
        families, naturals = self.local_inference.families, self.global_natural(params)
        inside = [jnp.all(families[name].in_domain(x)) for name, x in naturals.items()]
        return jnp.all(jnp.array(inside, bool))

    def check(self, model: Model, rng_key: Array, *args: Any, **kwargs: Any) -> None:
        """An error that names the site where model and guide have different densities.

        The model's log density at random values is compared with ``prior``, and with the p(x, z |
        theta) of the rule of local inference. A few rows are enough, and of sequences a few steps:
        float32 loses the density of random dynamics that grow over many. Leave out a
        ``numpyro.handlers.scale`` around both model and guide.
        """
        check_model(self, model, rng_key, args, kwargs)


def _is_batch(y: Array, plate: Any) -> bool:
    """Return whether the data are only the rows of the minibatch, and not all rows."""
    rows = y.shape[0] if y.ndim else 0
    if rows in (plate.size, plate.subsample_size):
        return rows == plate.subsample_size
    taken = f"{plate.size} rows"
    if plate.subsample_size != plate.size:
        taken = f"{plate.subsample_size} of {plate.size} rows"
    raise ValueError(
        f"the data have {rows} rows, but the plate '{plate.name}' takes {taken}; pass all rows or a"
        " minibatch, or give SVAEGuide the model's plate by create_plates."
    )
