"""An optimiser that moves a guide's mean in steps of standard deviations of the guide."""

from collections.abc import Mapping
from typing import Any

from jax import Array
import jax.numpy as jnp
import optax

from numpyro_ext._model.normal import Normal


def whitened(
    optimizer: optax.GradientTransformation, init_params: Mapping[str, Array]
) -> optax.GradientTransformation:
    r"""Adam, or any other optimiser, with steps of the mean in units of the posterior.

    With the mean c and the scale A of the guide at its start, the optimiser is given :math:`\xi` in
    place of the mean,

    .. math:: \mu = c + A \xi, \qquad \nabla_\xi = A^\top \nabla_\mu,

    and its step of :math:`\xi`, multiplied by A, moves the mean. All other parameters pass.

    Adam moves each number by about its learning rate, whatever the gradient is. Here a rate of 0.01
    is a hundredth of a posterior standard deviation, for any number of rows and any units.

    **When it fails.** It is only as fast as its start is good: give it, and ``svi.run``, parameters
    at a mode from ``taylor_proxy(...).init_params(guide, *args)`` or
    ``find_modes(...).whitening.init_params(guide, *args)``.

    :param optimizer: optax optimiser of all parameters, such as ``optax.adam(0.01)``.
    :param init_params: parameters of an ``AutoMultivariateNormal``, ``AutoDiagonalNormal`` or
        ``AutoNormal``: each ``*_loc`` with its ``*_scale_tril`` or ``*_scale``.

    >>> from numpyro_ext.optim import whitened
    >>> sds = jnp.array([3e-5, 4.])
    >>> start = {"auto_loc": jnp.array([2., -1.]), "auto_scale_tril": jnp.diag(sds)}
    >>> optim = whitened(optax.adam(0.01), start)  # for svi.run(..., init_params=start)
    >>> gradient = jax.tree.map(jnp.ones_like, start)
    >>> steps, _ = optim.update(gradient, optim.init(start), start)
    >>> print((steps["auto_loc"] / sds).round(3))
    [-0.01 -0.01]
    """
    normals = _normals(init_params)

    def coordinates(params: Any) -> Any:
        if params is None:
            return None
        xi = {n: normal.to_xi(jnp.ravel(params[n])) for n, normal in normals.items()}
        return {**params, **_in_shape(xi, params)}

    def init(params: Any) -> Any:
        return optimizer.init(coordinates(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        pulled = {n: normal.pull(jnp.ravel(updates[n])) for n, normal in normals.items()}
        steps: Any
        steps, state = optimizer.update(
            {**updates, **_in_shape(pulled, updates)}, state, coordinates(params)
        )
        pushed = {n: normal.push(jnp.ravel(steps[n])) for n, normal in normals.items()}
        return {**steps, **_in_shape(pushed, updates)}, state

    return optax.GradientTransformation(init, update)


def _normals(params: Mapping[str, Array]) -> dict[str, Normal]:
    """The mean and scale of each normal in a guide's parameters, by the name of its mean."""
    normals = {}
    for name, loc in params.items():
        stem = name.removesuffix("_loc")
        for scale in (f"{stem}_scale_tril", f"{stem}_scale"):
            if stem != name and scale in params and f"{stem}_cov_factor" not in params:
                factor = jnp.asarray(params[scale])
                dense = scale.endswith("tril")
                normals[name] = Normal(jnp.ravel(loc), factor if dense else jnp.ravel(factor))
                break
    if not normals:
        raise ValueError(
            f"init_params has no mean with a scale among {sorted(params)}; give the parameters of"
            " an AutoMultivariateNormal, AutoDiagonalNormal or AutoNormal."
        )
    return normals


def _in_shape(vectors: Mapping[str, Array], tree: Any) -> dict[str, Array]:
    return {
        name: vector.reshape(jnp.shape(tree[name])).astype(jnp.asarray(tree[name]).dtype)
        for name, vector in vectors.items()
    }
