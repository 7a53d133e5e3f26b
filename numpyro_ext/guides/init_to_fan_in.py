"""A start for the weights of networks: small and random matrices, and biases of zero."""

from collections.abc import Mapping
from functools import partial
import math
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import init_to_median

from numpyro_ext._model.read import elementwise

InAxis = int | Mapping[str, int] | None


def init_to_fan_in(site: dict[str, Any] | None = None, in_axis: InAxis = None) -> Any:
    r"""Start weight matrices at random in +-1/sqrt(fan-in), as the layers of networks are started.

    It is a value of ``init_loc_fn`` (guides) or ``init_strategy`` (kernels). A real latent site of
    shape :math:`(d_1, \dots, d_k)`, plates left out, starts at

    .. math::
        w \sim U\Big(-\frac{1}{\sqrt{f}}, \frac{1}{\sqrt{f}}\Big), \qquad
        f = \prod_{i \ne \text{out}} d_i, \qquad k \ge 2,

    where f is the fan-in, the number of inputs of one output, and at 0 if it is a vector
    (:math:`k = 1`). A vector in a plate, such as an embedding, is drawn too, with f its length,
    because a product of factors has no gradient at 0. Numbers and constrained sites start at
    :func:`~numpyro.infer.initialization.init_to_median`.

    **Which axis is the input.** A site with a name that ends in ``weight`` is (out, in, ...), as
    Equinox and PyTorch have it; every other matrix is (..., in, out), as the ``kernel`` of Flax and
    ``x @ w`` have it. ``in_axis`` says otherwise, and so does a site's own ``infer={"in_axis":
    -1}``. A site with a name that ends in ``bias`` starts at 0 in any shape; the vector ``scale``
    or ``weight`` of a normalising layer inside a module (a name with a ``/``) starts at 1.

    **It fails** where weights have a prior mean far from zero.

    :param in_axis: the axis of the inputs, or a dict of these by site; None goes by the name.
    :return: a ``functools.partial``, which NumPyro requires.

    **Reference:** *Efficient BackProp*, section 4.6, LeCun, Bottou, Orr and Mueller (1998)

    >>> from numpyro_ext.targets import bayesian_mlp
    >>> X = jnp.ones((30, 4))
    >>> guide = AutoNormal(bayesian_mlp, init_loc_fn=init_to_fan_in(), init_scale=0.02)
    >>> svi = SVI(bayesian_mlp, guide, optax.adam(0.01), Trace_ELBO())
    >>> start = svi.get_params(jax.jit(svi.init)(jax.random.key(0), X, jnp.ones(30)))
    >>> print(f"{abs(start['w0_auto_loc']).max():.2f} {abs(start['b0_auto_loc']).max():.2f}")
    0.50 0.00
    """
    if site is None:
        return partial(init_to_fan_in, in_axis=in_axis)
    if site["type"] != "sample" or site["is_observed"] or site["fn"].support.is_discrete:
        return None
    shape = _own_shape(site)
    is_real = elementwise(site["fn"].support) is constraints.real
    if site["value"] is not None or not shape or not is_real:
        return init_to_median(site)
    full = (*site["kwargs"].get("sample_shape", ()), *site["fn"].shape())
    own, _, last = site["name"].rpartition("/")[2].rpartition(".")
    if last.endswith("bias") or (len(shape) == 1 and not site["cond_indep_stack"]):
        normalises = "/" in site["name"] and last in ("scale", "weight") and bool(own)
        return jnp.full(full, float(normalises and len(shape) == 1))
    bound = 1 / math.sqrt(_fan_in(site, shape, in_axis))
    return dist.Uniform(-bound, bound).sample(site["kwargs"]["rng_key"], full)


def _fan_in(site: dict[str, Any], shape: tuple[int, ...], in_axis: InAxis) -> int:
    """The product of all axes except the outputs'; the length of a vector."""
    name = site["name"]
    if len(shape) == 1:
        return max(1, shape[0])
    axis = in_axis.get(name) if isinstance(in_axis, Mapping) else in_axis
    if axis is None:
        axis = site["infer"].get("in_axis")
    if axis is None:
        out = 0 if name.endswith("weight") else len(shape) - 1
    elif -len(shape) <= axis < len(shape):
        # (..., in, out) if the input is the axis before the last, otherwise (out, ...).
        out = len(shape) - 1 if axis % len(shape) == len(shape) - 2 else 0
    else:
        raise ValueError(f"in_axis is {axis}, but site '{name}' has the shape {shape}.")
    return max(1, math.prod(shape) // max(1, shape[out]))


def _own_shape(site: dict[str, Any]) -> tuple[int, ...]:
    """The shape of a site without the axes of its plates."""
    fn, plates = site["fn"], {frame.dim for frame in site["cond_indep_stack"]}
    num_batch = len(fn.batch_shape)
    own = tuple(n for i, n in enumerate(fn.batch_shape) if i - num_batch not in plates)
    return (*own, *fn.event_shape)
