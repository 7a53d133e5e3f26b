"""The same model on all of its data, whatever minibatches it was fitted with."""

from typing import Any

from jax import random
from numpyro.handlers import seed, substitute
from numpyro.infer import init_to_sample

from numpyro_ext._model.handlers import every_row, valid_plates
from numpyro_ext._model.read import shape_trace
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


def on_all_rows(model: Model) -> Model:
    """:func:`full_data`, where a plate may also have fewer rows than the minibatch of the run."""
    return valid_plates(every_row(model))


def full_data(model: Model, *args: Any, **kwargs: Any) -> Model:
    r"""The same model with every subsampled plate substituted by all its indices.

    Under a plate of size N that takes a minibatch B, NumPyro evaluates

    .. math:: \log p(z) + \frac{N}{M} \sum_{n \in B} \log p(x_n \mid z), \qquad |B| = M,

    for a random B. The model returned here has :math:`B = \{0, \dots, N-1\}` and the factor 1. It
    takes a guide as well: local latents are then drawn for all N data.

    .. note:: A model that is given its minibatch as an argument has no subsampled plate: its
        arguments *are* the data. Pass the full arrays.

    :param model: a model (or guide) with NumPyro primitives.
    :param args: arguments of the model, which are not needed.
    :param kwargs: its keyword arguments, likewise.
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
    return every_row(valid_plates(model))
