"""The same model on all of its data, whatever minibatches it was fitted with."""

from typing import Any

from jax import random
import jax.numpy as jnp
from numpyro.handlers import seed, substitute
from numpyro.infer import init_to_sample

from numpyro_ext._model.handlers import every_row, valid_plates
from numpyro_ext._model.read import sample_sites, shape_trace
from numpyro_ext._typing import Model, Trace


def minibatch_plates(
    model: Model, args: tuple, kwargs: dict[str, Any]
) -> dict[str, tuple[int, int]]:
    """``(size, subsample_size)`` of every plate of the model that takes a minibatch."""
    declared = every_row(model)  # the data may have fewer rows than a minibatch
    shapes_of(valid_plates(declared), args, kwargs)
    sizes = declared.plates.items()
    return {name: (size, batch) for name, (size, batch) in sizes if batch and batch < size}


def shapes_of(model: Model, args: tuple, kwargs: dict[str, Any]) -> Trace:
    """The model's trace, found without computing anything; only names and shapes are right."""
    seeded = seed(model, random.key(0))
    return shape_trace(substitute(seeded, substitute_fn=init_to_sample), args, kwargs)


def check_full_arrays(model: Model, args: tuple, kwargs: dict[str, Any]) -> None:
    """An error that explains what to do if one minibatch was passed in place of the data."""
    whole = every_row(model)

    def minibatches() -> list[str]:
        sizes = whole.plates.items()
        return [f"'{name}' ({N} rows)" for name, (N, M) in sizes if M is not None and M < N]

    try:
        trace = shapes_of(whole, args, kwargs)
        for site in sample_sites(trace) if minibatches() else ():
            if site["is_observed"]:
                jnp.broadcast_shapes(jnp.shape(site["value"]), site["fn"].shape())
    except (TypeError, ValueError) as error:
        if not minibatches():
            raise
        named = ", ".join(minibatches())
        raise ValueError(
            f"the model does not run on all of plate {named}: {error}; pass the full arrays as the"
            " model's arguments, not one minibatch."
        ) from error


def on_all_rows(model: Model) -> Model:
    """:func:`full_data`, where a plate may also have fewer rows than the minibatch of the run."""
    return valid_plates(every_row(model))


def full_data(model: Model, *args: Any, **kwargs: Any) -> Model:
    r"""The same model with every subsampled plate substituted by all its indices.

    Under a plate of size N that takes a minibatch B, NumPyro evaluates

    .. math:: \log p(z) + \frac{N}{M} \sum_{n \in B} \log p(x_n \mid z), \qquad |B| = M,

    for a random B. The model returned here has :math:`B = \{0, \dots, N-1\}` and the factor 1, so
    that it is what the minibatches estimate, and costs N data per evaluation. Plates without a
    ``subsample_size`` are left as they are; everything else of the model too. It takes a guide as
    well: local latents are then drawn for all N data.

    .. note:: A model that is given its minibatch as an argument has no subsampled plate: its
        arguments *are* the data. Pass the full arrays.

    :param model: a model (or guide) with NumPyro primitives.
    :param args: arguments of the model. If any are given, the model is traced on them (without
        computing anything), and one minibatch in place of the data is a ``ValueError``.
    :param kwargs: keyword arguments of the model, likewise.
    :return: a callable with the arguments of ``model``.

    >>> from numpyro.infer import log_likelihood
    >>> from numpyro_ext.diagnostics import full_data
    >>> def model(x):
    ...     loc = numpyro.sample("loc", dist.Normal())
    ...     with numpyro.plate("N", len(x), subsample_size=2) as idx:
    ...         numpyro.sample("x", dist.Normal(loc), obs=x[idx])
    >>> x = jnp.array([0.5, -1.0, 2.0])
    >>> draws = {"loc": jnp.zeros(100)}
    >>> log_likelihood(full_data(model, x), draws, x)["x"].shape  # 3 rows, not 2
    (100, 3)
    """
    if args or kwargs:
        check_full_arrays(valid_plates(model), args, kwargs)
    return every_row(valid_plates(model))
