"""A guide with auxiliary variables, and the reverse model of its bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import Array
import jax.numpy as jnp
import numpyro
from numpyro.distributions import Normal, biject_to
from numpyro.handlers import block, substitute

from numpyro_ext._checks import check_count, if_given
from numpyro_ext._model.potential import supports_of
from numpyro_ext._networks import Network, as_pair
from numpyro_ext._typing import Params, Shape, Sites
from numpyro_ext.guides.base import AutoWithoutDensity, inverse_fixed_map, with_fixed_map
from numpyro_ext.guides.networks import check_widths, conditional_mlp, flat_module, mean_and_scale

# At 0 the auxiliary variables are without effect, which is a saddle point of the bound.
SLOPE = 0.5


@dataclass(kw_only=True, eq=False, repr=False)
class AutoAuxiliary(AutoWithoutDensity):
    r"""A normal distribution given auxiliary variables, integrated over them.

    In the model's unconstrained space of dimension :math:`d`, with e the latent vector in units of
    the guide, :math:`z = loc + scale \odot e`,

    .. math::
        a \sim N(0, I), \qquad e \mid a \sim N(\mu(a), \mathrm{diag}\, \sigma(a)^2), \qquad
        q(z) = \int q(z \mid a)\, q(a)\, da .

    That density is an integral. A second network, the reverse model :math:`r(a \mid z) = N(m(e),
    \mathrm{diag}\, s(e)^2)`, makes it tractable at a price: the bound is

    .. math::
        E[\log p^*(z) + \log r(a \mid z) - \log q(a) - \log q(z \mid a)]
        = \mathrm{ELBO}(q) - E_{q(z)}\, \mathrm{KL}(q(a \mid z) \,\|\, r(a \mid z)) ,

    as of :class:`~numpyro_ext.objectives.AuxiliaryELBO`. The guide subtracts :math:`\log r` by the
    factor ``{prefix}_reverse``: ``Trace_ELBO`` is that bound, and other losses of a density work on
    (z, a) together. With ``num_layers`` L the auxiliary variables are a chain :math:`a_1 \to \dots
    \to a_L \to z`, each normal given the one before, and the reverse model is the chain back. The
    guide starts at the normal approximation at the mode with a reverse model that is right to
    0.001.

    *Where it fails.* The bound is too low by the KL divergence of the reverse model, so modes that
    need a different a for the same z are lost. Take 8 particles or more and a falling rate.

    :param int aux_dim: length of a; d if None.
    :param network: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, from
        ``aux_dim`` numbers to :math:`\mu` and :math:`\log \sigma`, 2 d numbers, with weights in the
        vector ``{prefix}_net$params``. The default is a linear layer plus an MLP of ``hidden_dims``
        (ELU). Log-scales are kept between -5 and 5.
    :param reverse_network: the same for r, from e to m and :math:`\log s`, 2 ``aux_dim`` numbers.
    :param hidden_dims: widths of the hidden layers.
    :param int num_layers: the number L of auxiliary vectors.

    **References:** *An auxiliary variational method*, equation 7, Agakov and Barber (ICONIP 2004);
    *Hierarchical variational models*, equation 5, Ranganath et al. (ICML 2016)

    >>> guide = AutoAuxiliary(model, init_from=None)  # was: AutoNormal(model)
    >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
    >>> result = svi.run(jax.random.key(0), 2000, progress_bar=False)
    >>> draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(1000,))
    >>> bool(jax.numpy.corrcoef(draws["x"], draws["y"])[0, 1] > 0.7)  # AutoNormal has 0
    True
    """

    aux_dim: int | None = None
    network: Network | None = None
    reverse_network: Network | None = None
    hidden_dims: Sequence[int] = (32, 32)
    num_layers: int = 1

    def __post_init__(self) -> None:
        self.network = as_pair(self.network, optional=True)
        self.reverse_network = as_pair(self.reverse_network, "reverse_network", optional=True)
        self.hidden_dims = check_widths(self.hidden_dims)
        self.aux_dim = if_given(check_count, "aux_dim", self.aux_dim)
        self.num_layers = check_count("num_layers", self.num_layers)
        super().__post_init__()

    def sample_vector(self, sample_shape: Shape, args: tuple, kwargs: Params) -> Array:
        num_aux = self.aux_dim or self.latent_dim
        normal = Normal(0.0, 1.0).expand((*sample_shape, num_aux))
        aux: list[Any] = []
        for i in range(self.num_layers):
            if aux:
                normal = self._normal(f"aux__{i}", None, aux[-1], num_aux)
            aux.append(self.auxiliary(f"aux__{i}", normal.to_event(1)))
        loc, scale, fixed = self.loc_and_scale()
        e = self._normal("net", self.network, aux[-1], self.latent_dim)
        normal = Normal(loc + scale * e.loc, scale * e.scale).to_event(1)
        z = self.auxiliary("latent", with_fixed_map(normal, fixed))
        numpyro.factor(f"{self.prefix}_reverse", -self._reverse(z, aux))
        return z

    def reverse_log_prob(
        self, params: Params, aux: Sites, latents: Sites, *args: Any, **kwargs: Any
    ) -> Array:
        """:math:`\\log r(a \\mid z)`, a number, of the sites ``_{prefix}_aux__{i}`` given the
        latent sites of the model."""
        self.check_fitted(params)
        names = [f"_{self.prefix}_aux__{i}" for i in range(self.num_layers)]
        with block(), self.on_cuts(params):
            supports = supports_of(self, args, kwargs, values=latents)
            z = [jnp.ravel(biject_to(supports[n]).inv(latents[n])) for n in self.latent_sites]
        with block(), substitute(data=params):
            return self._reverse(jnp.concatenate(z), [aux[name] for name in names])

    def _reverse(self, z: Array, aux: Sequence[Array]) -> Array:
        loc, scale, fixed = self.loc_and_scale()
        z = inverse_fixed_map(z, fixed)
        num_aux = self.aux_dim or self.latent_dim
        before, pair, log_r = (z - loc) / scale, self.reverse_network, jnp.zeros(())
        for i in reversed(range(self.num_layers)):
            normal = self._normal(f"reverse__{i}", pair, before, num_aux)
            log_r = log_r + normal.log_prob(aux[i]).sum(-1)
            before, pair = aux[i], None
        return log_r

    def _normal(self, name: str, network: Network | None, x: Array, out_dim: int) -> Normal:
        pair = network or conditional_mlp(self.hidden_dims, x.shape[-1], out_dim, SLOPE)
        net = flat_module(f"{self.prefix}_{name}$params", pair, x.shape[-1:])
        what = "reverse_network" if name.startswith("reverse") else "network"
        return Normal(*mean_and_scale(net(x), out_dim, what))
