"""Log importance weights of a fitted guide, from which its bounds are evaluated."""

from functools import partial
from typing import Any

import jax
from jax import Array

from numpyro_ext._checks import check_count
from numpyro_ext._typing import Model, Params
from numpyro_ext.objectives.base import Draws, Objective, State


class _Evaluation(Objective):
    can_infer_discrete = True
    linear = True

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        for plate, size, batch in draws.layout.subsampled:
            raise ValueError(
                f"plate '{plate}' has a subsample of {batch} of {size} rows; log_weights needs all"
                " of them: call it with the whole data set and no subsample_size."
            )
        return draws.each(lambda particle: particle.log_weight)


def log_weights(
    rng_key: Array,
    params: Params,
    model: Model,
    guide: Model,
    *args: Any,
    num_samples: int = 5000,
    batch_size: int | None = None,
    **kwargs: Any,
) -> Array:
    r"""Log importance weights of a fitted guide,

    .. math::
        \log w_s = \log p(x, z_s) - \log q(z_s), \qquad z_s \sim q,

    from which every bound of this package can be estimated with many more draws than in training.
    If plates enclose every site of model and guide, there is one weight for each of their elements,
    and their bounds are to be summed. Sites may be discrete. A subsampled plate is an error.

    :param jax.random.key rng_key: random number generator seed.
    :param dict params: values of the ``param`` sites, as ``svi.get_params(state)`` gives them;
        values of ``mutable`` sites may be added.
    :param args: arguments of ``model`` and ``guide``, and so are ``kwargs``.
    :param int num_samples: number of draws S.
    :param int batch_size: draws that are evaluated at once; all of them if ``None``.
    :return: weights of shape ``(num_samples, *independent plates)``.

    >>> def guide(x):
    ...     numpyro.sample("z", dist.Normal(x[0] / 2., 0.5 ** 0.5))
    >>> x = jnp.array([1.5])
    >>> lw = log_weights(jax.random.key(0), {}, normal_mean, guide, x, num_samples=100)
    >>> print(f"{lw.mean():.4f} {float(lw.std()) < 1e-5}")  # log p(x): q is the posterior
    -1.8280 True
    """
    num_samples = check_count("num_samples", num_samples)
    batch_size = num_samples if batch_size is None else check_count("batch_size", batch_size)
    # lax.map compiles one program for a chunk, where vmap alone would run operation by operation.
    chunks = partial(jax.lax.map, batch_size=batch_size)
    objective = _Evaluation(num_samples, vectorize_particles=chunks)
    return objective.estimate(Draws(objective, rng_key, params, model, guide, args, kwargs))[0]
