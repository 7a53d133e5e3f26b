"""A conditional normalizing flow over the local latents of each row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to
from numpyro.distributions.transforms import AffineTransform, IndependentTransform, Transform
from numpyro.handlers import block, substitute
from numpyro.util import not_jax_tracer

from numpyro_ext._checks import check_choice, check_count
from numpyro_ext._model.handlers import every_row
from numpyro_ext._typing import Params
from numpyro_ext.guides.amortized import AmortizedGuide, LocalSite
from numpyro_ext.guides.base import check_params
from numpyro_ext.guides.flows import other_halves, permute_between
from numpyro_ext.guides.networks import check_widths, flat_module, masked_mlp, mlp
from numpyro_ext.transforms import AffineCoupling, MaskedAffineAutoregressive
from numpyro_ext.transforms.base import as_pytree


@dataclass(kw_only=True, eq=False, repr=False)
class FlowGuide(AmortizedGuide):
    r"""Local latents from the data of their row, with an exact density.

    For row i of the plate, with the features :math:`x_i` and :math:`(shift, \log scale, h) =
    net(x_i)`,

    .. math::
        z_i = shift_i + scale_i \odot (f_F \circ \dots \circ f_1)(e_i;\, h_i), \qquad
        e_i \sim N(0, I_L) ,

    in unconstrained space, where :math:`z_i \in R^L` holds all latent sites of the row and each
    :math:`f` is a coupling or an autoregressive layer whose network reads the context
    :math:`h_i` too. The flows start at the identity. ``num_flows=0`` is the diagonal normal of a
    variational autoencoder. Every loss that needs a density works, with one bound per row where all
    latents are in the plate.

    *What it is biased by.* One network serves all rows, so that each posterior is worse than one of
    its own would be (the amortisation gap); some steps for the rows at hand close it
    (``examples/refine_amortised.py``). The local latents do not depend on draws of the global ones.

    :param model: a NumPyro model whose latent sites inside the plate are continuous, in no other
        plate, and of a support that is the same for all rows.
    :param network: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, from the f
        features to at least :math:`2 L` outputs: L shifts, L log-scales, and the context of the
        flows, if any. It may also give two or three arrays: means ``(M, L)``, standard deviations
        ``(M, L)``, and the context. Its weights are the vector ``{prefix}_net$params``, those of
        the flows ``{prefix}_flow__{i}$params``.
    :param str plate: name of the plate.
    :param features: a function of the model's arguments, called inside the plate, that returns the
        features of the minibatch, ``(M, f)``: ``lambda x: numpyro.subsample(x, event_dim=1)``.
        For a network of images it returns ``(M, height, width, channels)`` with ``event_dim=3``.
    :param int num_flows: the number F of layers; two couplings leave a correlation between two
        numbers of the same half out.
    :param str flow: ``"realnvp"``, or ``"maf"``, of which a draw takes L passes.
    :param hidden_dims: widths of the hidden layers of each flow's network (ELU).
    :param global_guide: guide of the latents outside the plate: a class of Auto guides or a
        ``functools.partial`` of one (``AutoNormal`` by default), or a guide of your own.

    **References:** *Variational inference with normalizing flows*, section 4, Rezende and Mohamed
    (ICML 2015); *Improving variational inference with inverse autoregressive flow*, algorithm 1,
    Kingma et al. (NIPS 2016)

    >>> from jax.example_libraries import stax
    >>> from numpyro_ext.guides import FlowGuide
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
    flow: str = "realnvp"
    hidden_dims: Sequence[int] = (32, 32)

    def __post_init__(self) -> None:
        check_choice("flow", self.flow, ("realnvp", "maf"))
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
        """The distribution of the local vectors given the features ``(M, f)``.

        Its event is ``(local_dim,)``, and its batch ``(M,)`` or another shape of M elements.
        """
        L = self.local_dim
        out = flat_module(f"{self.prefix}_net$params", self.network, x.shape[1:], x.dtype)(x)
        shift, scale, context = _heads(out, x.shape, L, batch_shape or (len(x),))
        if self.num_flows == 0:
            return dist.Normal(shift, scale).to_event(1)
        steps = [
            other_halves(L, i) if self.flow == "realnvp" else np.arange(L)[::-1]
            for i in range(self.num_flows - 1)
        ]
        flows = permute_between([self._layer(i, context) for i in range(self.num_flows)], steps)
        affine = IndependentTransform(AffineTransform(shift, scale), 1)
        base = dist.Normal(jnp.zeros_like(shift), 1).to_event(1)
        return dist.TransformedDistribution(base, [*flows, affine])

    def _layer(self, i: int, context: Array) -> Transform:
        L, C = self.local_dim, context.shape[-1]
        name = f"{self.prefix}_flow__{i}$params"
        if self.flow == "maf":
            net = flat_module(name, masked_mlp(L, self.hidden_dims, C), (L + C,))
            return MaskedAffineAutoregressive(_given(net, context))
        if L == 1:
            raise ValueError(
                "a row has one latent number, and a coupling needs two; use num_flows=0, or"
                ' flow="maf".'
            )
        split = L // 2
        net = flat_module(name, mlp(self.hidden_dims, 2 * (L - split)), (split + C,))
        return AffineCoupling(_given(net, context), split)

    def register(self, name: str, u: Array, site: LocalSite) -> Array:
        T = biject_to(site.support)
        value = T(u)
        log_det = T.log_abs_det_jacobian(u, value)
        batch = value.ndim - site.event_dim
        log_det = jnp.sum(log_det, tuple(range(batch, jnp.ndim(log_det))))
        fn = dist.Delta(value, log_density=-log_det, event_dim=site.event_dim)
        return jnp.asarray(numpyro.sample(name, fn, infer={"states_jacobian": True}))


def _heads(
    out: Any, x_shape: tuple[int, ...], L: int, batch_shape: tuple[int, ...]
) -> tuple[Array, Array, Array]:
    """Shifts, scales and context of the rows, from the one, two or three arrays of a network."""
    n, shape = x_shape[0], jax.tree.map(jnp.shape, out)
    if isinstance(out, tuple | list):
        heads = out if len(out) == 3 else (*out, jnp.zeros((n, 0), jnp.result_type(*out)))
    else:
        shift, log_scale, context = jnp.split(out, (L, 2 * L), axis=-1)
        heads = shift, jnp.exp(log_scale), context
    shapes = [jnp.shape(head) for head in heads]
    if len(heads) != 3 or shapes[:2] != [(n, L), (n, L)] or len(shapes[2]) != 2:
        raise ValueError(
            f"the network turns shape {x_shape} into {shape}, but a row has {L} latent numbers; it"
            f" must give {n} rows of at least {2 * L} numbers: shifts, log-scales, and the context"
            f" of the flows; or a pair of arrays {(n, L)}, means and standard deviations, and"
            " after them a context if you like."
        )
    scale = heads[1]
    if isinstance(out, tuple | list) and not_jax_tracer(scale) and not bool((scale > 0).all()):
        raise ValueError(
            f"the second array of the network has the entry {float(scale.min()):.3g}, but it is the"
            " standard deviations; end it with an exponential or softplus."
        )
    shift, scale, context = (x.reshape(*batch_shape, x.shape[1]) for x in heads)
    return shift, scale, context


def _given(net: Callable[[Array], Array], context: Array) -> Callable[[Array], Array]:
    """The network of a flow as a function of the latents alone."""
    return partial(_with_context, as_pytree(net), context)


def _with_context(net: Callable[[Array], Array], context: Array, z: Array) -> Array:
    context = jnp.broadcast_to(context, (*z.shape[:-1], context.shape[-1]))
    return net(jnp.concatenate([z, context], axis=-1))
