"""The distance of draws from a posterior, by its score, or from other draws."""

from collections.abc import Callable
from typing import Any

from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import check_count
from numpyro_ext._model.circles import cut_by_draws
from numpyro_ext._model.operations import jit_on_data
from numpyro_ext._model.read import model_info
from numpyro_ext._typing import Model, Sites
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._fit_of import check_arguments
from numpyro_ext.diagnostics.full_data import full_data
from numpyro_ext.scores.discrepancy import squared_ksd, squared_mmd


def _draws_of(name: str, x: Any) -> dict[str, np.ndarray] | None:
    """``{site: (S, *site)}`` of a ``DataTree``, its part or a dict; None for an array."""
    if isinstance(x, np.ndarray | Array | list | tuple):
        return None

    from xarray import DataTree

    if isinstance(x, DataTree):
        group: Any = x["posterior"] if "posterior" in x.children else x
        arrays = {str(n): x.transpose("chain", "draw", ...) for n, x in group.data_vars.items()}
        draws = {n: x.to_numpy().reshape(-1, *x.shape[2:]) for n, x in arrays.items()}
    elif isinstance(x, dict):
        draws = {site: np.asarray(value) for site, value in x.items()}
    else:
        return None
    lengths = {np.shape(value)[:1] for value in draws.values()}
    if len(lengths) != 1:
        raise ValueError(f"{name} has sites of {sorted(lengths)} draws; it must be one number.")
    return draws


def _points_and_score(fit: Fit) -> tuple[Array, Array]:
    """The draws of a fit in unconstrained space, and there minus the gradient of the potential."""
    info = cut_by_draws(model_info(fit.proto.trace, sums=True), fit.existing[0])
    potential = fit.potential(fit.params[0], info)

    def at_draw(draw: Sites) -> tuple[Array, Array]:
        x = info.ravel(potential.unconstrain("x", draw))
        return x, -potential.value_and_grad_flat(x, {})[1]

    drawn = {name: jnp.asarray(fit.existing[0][name]) for name in info.latents}
    return jit_on_data(lambda draws: lax.map(at_draw, draws, batch_size=fit.block))(drawn)


def _every(num_rows: int, num_samples: int | None) -> np.ndarray:
    """Equally spaced rows, ``num_samples`` at most."""
    if num_samples is None:
        return np.arange(num_rows)
    num_samples = min(check_count("num_samples", num_samples), num_rows)
    return np.arange(num_samples) * num_rows // num_samples


def kernel_stein_discrepancy(
    x: Any,
    score: Array | Callable[[Array], Array] | None = None,
    kernel: Any = None,
    *,
    model: Model | None = None,
    model_args: tuple = (),
    model_kwargs: dict[str, Any] | None = None,
    num_samples: int | None = None,
    statistic: str = "u",
    block_size: int | None = None,
) -> Array:
    r"""Squared kernel Stein discrepancy of draws from a posterior that is known up to its constant.

    The mean over pairs of draws of

    .. math::

        k_0(x, y) = k\, s(x)^\top s(y) + s(x)^\top \nabla_y k + s(y)^\top \nabla_x k
                    + \mathrm{tr}\, \partial_x \partial_y k, \qquad s = \nabla \log p,

    which needs no density of the draws. Draws of a ``model`` are mapped to unconstrained space,
    where s is minus the gradient of the potential on all N data, Jacobian included. The discrepancy
    is 0 if the draws have the law of the posterior, and does not see the weights of well separated
    modes. It has no absolute scale: compare two runs. **Cost:** S gradients, and S^2 d.

    :param x: an array ``(S, d)`` with ``score``; or, with ``model``, a ``DataTree`` (its
        ``posterior``, chains flattened) or a dict ``{site: (S, *site)}`` of constrained draws.
    :param score: for an array: the target's score, ``(S, d)`` values or a callable that gives them.
    :param kernel: a kernel of :mod:`numpyro_ext.scores`; default ``IMQ("median_distance")``.
    :param model: the model, for a ``DataTree`` or a dict, without ``numpyro.param`` sites.
    :param tuple model_args: the model's arguments, with all data.
    :param dict model_kwargs: its keyword arguments.
    :param int num_samples: at most this many draws, equally spaced; default: all.
    :param str statistic: ``"u"`` (unbiased) or ``"v"`` (never negative, biased up).
    :param int block_size: rows of pairs at a time, which bounds the memory to O(S * block_size).
    :return: a scalar, the *square*; draws that are not finite are an error, or NaN if traced.

    **References**

    1. *A Kernelized Stein Discrepancy for Goodness-of-fit Tests*, Q. Liu, J. Lee, M. Jordan
       (ICML 2016), equations 7 and 14.
    2. *Measuring Sample Quality with Kernels*, J. Gorham, L. Mackey (ICML 2017).

    >>> from numpyro_ext.diagnostics import kernel_stein_discrepancy
    >>> def model(x):
    ...     loc = numpyro.sample("loc", dist.Normal())
    ...     with numpyro.plate("N", len(x), subsample_size=1) as idx:
    ...         numpyro.sample("x", dist.Normal(loc), obs=x[idx])
    >>> x = jnp.array([0.5, -1.0, 2.0])
    >>> noise = jax.random.normal(jax.random.key(0), (300,))
    >>> posterior, prior = {"loc": 0.375 + 0.5 * noise}, {"loc": noise}
    >>> right, wrong = (
    ...     kernel_stein_discrepancy(draws, model=model, model_args=(x,), statistic="v")
    ...     for draws in (posterior, prior))
    >>> bool(right < 0.1 * wrong)
    True
    """
    draws = _draws_of("x", x)
    if (draws is None) is (score is None) or (draws is None) is (model is not None):
        raise ValueError("pass an array with score=, or a DataTree or dict of draws with model=.")
    if draws is None:
        assert score is not None
        if not callable(score) and jnp.shape(score) != jnp.shape(x):
            raise ValueError(f"score has shape {jnp.shape(score)} and x has shape {jnp.shape(x)}.")
        rows = _every(len(x), num_samples)
        x = jnp.asarray(x)[rows]
        score = score if callable(score) else jnp.asarray(score)[rows]
    else:
        assert model is not None
        rows = _every(len(next(iter(draws.values()))), num_samples)
        chosen: Any = {site: value[rows] for site, value in draws.items()}
        args, kwargs = check_arguments(model_args, model_kwargs or {})
        fit = Fit(full_data(model, *args, **kwargs), args, kwargs, [{}], existing=[chosen])
        x, score = _points_and_score(fit)
    return squared_ksd(x, score, kernel, statistic=statistic, block_size=block_size)


def maximum_mean_discrepancy(
    x: Any, y: Any, kernel: Any = None, *, statistic: str = "u", block_size: int | None = None
) -> Array:
    r"""Squared maximum mean discrepancy between two sets of draws.

    .. math:: \mathrm{MMD}^2 = E\,k(x, x') + E\,k(y, y') - 2\,E\,k(x, y).

    It compares the joint distributions in the space of the draws, without a transformation: rescale
    sites of very different spread, or the widest decides. The cost is O((S + n)^2 d).

    :param x: an array ``(S, d)``, a ``DataTree`` (its ``posterior``, chains flattened) or a dict
        ``{site: (S, *site)}``, with the sites put together in the order of their names.
    :param y: ``n`` other draws of the same kind, with the same d or the same sites.
    :param kernel: a kernel of :mod:`numpyro_ext.scores`; default ``RBF("median_distance")``, the
        distance taken over x and y together.
    :param str statistic: ``"u"`` (unbiased) or ``"v"`` (never negative, biased up).
    :param int block_size: rows of pairs at a time, which bounds the memory.
    :return: a scalar, the *square*; draws that are not finite are an error, or NaN if traced.

    **References**

    1. *A Kernel Two-Sample Test*, A. Gretton et al. (JMLR 2012), equations 3 and 5.

    >>> from numpyro_ext.diagnostics import maximum_mean_discrepancy
    >>> noise = jax.random.normal(jax.random.key(0), (3, 300))
    >>> x, same, other = {"loc": noise[0]}, {"loc": noise[1]}, {"loc": 1.0 + noise[2]}
    >>> bool(maximum_mean_discrepancy(x, same) < 0.05 < maximum_mean_discrepancy(x, other))
    True
    """
    draws_x, draws_y = _draws_of("x", x), _draws_of("y", y)
    if draws_x is not None and draws_y is not None:
        shapes_x, shapes_y = (
            {site: value.shape[1:] for site, value in draws.items()} for draws in (draws_x, draws_y)
        )
        if shapes_x != shapes_y:
            raise ValueError(
                f"x has sites of shapes {shapes_x} and y {shapes_y}; keep only the common ones."
            )
        x, y = (
            jnp.concatenate(
                [jnp.reshape(draws[site], (len(draws[site]), -1)) for site in sorted(shapes_x)],
                axis=1,
            ).astype(float)
            for draws in (draws_x, draws_y)
        )
    return squared_mmd(x, y, kernel, statistic=statistic, block_size=block_size)
