"""A conditional normalizing flow over the local latents of each row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax import Array
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to
from numpyro.distributions.transforms import AffineTransform, IndependentTransform, Transform
from numpyro.handlers import block, substitute

from numpyro_ext._checks import check_count
from numpyro_ext._model.handlers import every_row
from numpyro_ext._typing import Params
from numpyro_ext.guides.amortized import AmortizedGuide, LocalSite
from numpyro_ext.guides.base import check_params
from numpyro_ext.guides.flows import other_halves, permute_between
from numpyro_ext.guides.networks import check_widths, flat_module, mlp
from numpyro_ext.transforms import AffineCoupling
from numpyro_ext.transforms.base import as_pytree


@dataclass(kw_only=True, eq=False, repr=False)
class FlowGuide(AmortizedGuide):
    r"""Local latents from the data of their row, with an exact density.

    For row i of the plate, with the features :math:`x_i` and :math:`(shift, \log scale, h) =
    net(x_i)`,

    .. math::
        z_i = shift_i + scale_i \odot (f_F \circ \dots \circ f_1)(e_i;\, h_i), \qquad
        e_i \sim N(0, I_L) ,

    in unconstrained space, where :math:`z_i \in R^L` holds all latent sites of the row and the
    network of each coupling :math:`f` reads the context :math:`h_i` too. The flows start at the
    identity. ``num_flows=0`` is the diagonal normal of a variational autoencoder. Every loss that
    needs a density works, with one bound per row where all latents are in the plate.

    *What it is biased by.* One network serves all rows (the amortisation gap; some steps for the
    rows at hand close it, ``examples/refine_amortised.py``), and the local latents do not depend on
    draws of the global ones.

    :param model: a NumPyro model with continuous latent sites inside the plate, in no other plate,
        and of a support that is the same for all rows.
    :param network: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, from the f
        features to at least :math:`2 L` outputs: L shifts, L log-scales, and the context of the
        flows, if any. Its weights are the vector ``{prefix}_net$params``, and the weights of the
        flows ``{prefix}_flow__{i}$params``.
    :param str plate: name of the plate.
    :param features: a function of the model's arguments, called inside the plate, that returns the
        features of the minibatch, ``(M, f)``: ``lambda x: numpyro.subsample(x, event_dim=1)``.
        For a network of images it returns ``(M, height, width, channels)`` with ``event_dim=3``.
    :param int num_flows: the number F of layers; two couplings leave out a correlation between two
        numbers of the same half.
    :param hidden_dims: widths of the hidden layers of each flow's network (ELU).
    :param global_guide: the class of the Auto guide of the latents outside the plate, or a
        ``functools.partial`` of one.

    **References:** *Variational inference with normalizing flows*, section 4, Rezende and Mohamed
    (ICML 2015); *Improving variational inference with inverse autoregressive flow*, algorithm 1,
    Kingma et al. (NIPS 2016)

    >>> from jax.example_libraries import stax
    >>> def model(x):
    ...     with numpyro.plate("rows", len(x)):
    ...         z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
    ...         numpyro.sample("x", dist.Normal(z, 0.5).to_event(1), obs=x)
    >>> net = stax.serial(stax.Dense(16), stax.Elu, stax.Dense(2 * 2 + 3))
    >>> guide = FlowGuide(model, net, plate="rows", features=lambda x: x)
    >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    >>> x = jax.random.normal(jax.random.key(0), (50, 2))
    >>> params = svi.run(jax.random.key(1), 20, x, progress_bar=False).params
    >>> guide.sample_posterior(jax.random.key(2), params, x[:7], sample_shape=(100,))["z"].shape
    (100, 7, 2)
    """

    num_flows: int = 4
    hidden_dims: Sequence[int] = (32, 32)

    def __post_init__(self) -> None:
        self.num_flows = check_count("num_flows", self.num_flows, minimum=0)
        self.hidden_dims = check_widths(self.hidden_dims)
        super().__post_init__()

    def get_posterior(self, params: Params, *args: Any, **kwargs: Any) -> dist.Distribution:
        """The distribution of the local vectors of all rows, in unconstrained space, of batch
        ``(N,)`` and event ``(local_dim,)``."""
        check_params(params, [f"{self.prefix}_net$params"], self)
        if self.prototype_trace is None:
            self._set_up(args, kwargs)
        with block(), substitute(data=params), every_row(), self.rows(args, kwargs) as x:
            return self.local_distribution(x)

    def draw_local(self, x: Array) -> Array:
        # The plate may be further left than any other: its rows have an axis of their own.
        q = self.local_distribution(x, (len(x), *(1,) * (-self.dim - 1)))
        z = numpyro.sample(f"_{self.prefix}_local", q, infer={"is_auxiliary": True})
        return jnp.reshape(z, (len(x), self.local_dim))

    def local_distribution(self, x: Array, batch_shape: tuple[int, ...] = ()) -> dist.Distribution:
        """The local vectors given features ``(M, f)``, of batch ``(M,)`` or another shape of M."""
        L = self.local_dim
        out = flat_module(f"{self.prefix}_net$params", self.network, x.shape[1:], x.dtype)(x)
        if jnp.shape(out)[:-1] != x.shape[:1] or out.shape[1] < 2 * L:
            raise ValueError(
                f"the network turns shape {x.shape} into {jnp.shape(out)}; it must give {len(x)}"
                f" rows of at least {2 * L} numbers: shifts, log-scales, context of the flows."
            )
        out = out.reshape(*(batch_shape or (len(x),)), out.shape[1])
        shift, log_scale, context = jnp.split(out, (L, 2 * L), axis=-1)
        scale = jnp.exp(log_scale)
        if self.num_flows == 0:
            return dist.Normal(shift, scale).to_event(1)
        steps = [other_halves(L, i) for i in range(self.num_flows - 1)]
        flows = permute_between([self._layer(i, context) for i in range(self.num_flows)], steps)
        affine = IndependentTransform(AffineTransform(shift, scale), 1)
        base = dist.Normal(jnp.zeros_like(shift), 1).to_event(1)
        return dist.TransformedDistribution(base, [*flows, affine])

    def _layer(self, i: int, context: Array) -> Transform:
        L, C = self.local_dim, context.shape[-1]
        name = f"{self.prefix}_flow__{i}$params"
        if L == 1:
            raise ValueError("a row has one latent number, a coupling needs two; use num_flows=0.")
        split = L // 2
        net = flat_module(name, mlp(self.hidden_dims, 2 * (L - split)), (split + C,))
        return AffineCoupling(partial(_with_context, as_pytree(net), context), split)

    def register(self, name: str, u: Array, site: LocalSite) -> Array:
        T = biject_to(site.support)
        value = T(u)
        log_det = T.log_abs_det_jacobian(u, value)
        batch = value.ndim - site.event_dim
        log_det = jnp.sum(log_det, tuple(range(batch, jnp.ndim(log_det))))
        fn = dist.Delta(value, log_density=-log_det, event_dim=site.event_dim)
        return jnp.asarray(numpyro.sample(name, fn, infer={"states_jacobian": True}))


def _with_context(net: Callable[[Array], Array], context: Array, z: Array) -> Array:
    context = jnp.broadcast_to(context, (*z.shape[:-1], context.shape[-1]))
    return net(jnp.concatenate([z, context], axis=-1))
