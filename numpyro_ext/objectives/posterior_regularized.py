"""Posterior regularisation: a penalty of expectations under the guide, around any loss."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array, random
from jax.lax import stop_gradient
import jax.numpy as jnp
import numpyro
from numpyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO

from numpyro_ext._checks import check_several
from numpyro_ext._model.losses import finite_step
from numpyro_ext._model.read import Site, call_and_trace, frames
from numpyro_ext._typing import Model, Params, Sites
from numpyro_ext.objectives.base import Draws, MapT, Objective, Particle, State

type Penalty = Callable[[Array], Array]
"""A function of the expectation of a site, in its shape; its values are summed."""

OF_NUMPYRO = Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO


class PosteriorRegularizedELBO(Objective):
    r"""Any loss plus a penalty of expectations under the guide.

    .. math::
        \mathcal{L}(q) + \sum_j \sum_n h_j\big( E_q[f_{jn}(z)] \big),

    where :math:`\mathcal L` is the loss ``base``, and f_j is a site of the model,
    ``numpyro.deterministic("f", ...)``, or a latent one. With minus the ELBO as base this is
    regularised Bayesian inference (RegBayes): the guide is pulled to the set :math:`E_q[f] \le b`
    by :math:`h(e) = c \max(0, e - b)`. With the margin of a document, :math:`f_n = y_n \eta^\top
    \theta_n`, and the hinge :math:`h(e) = c \max(0, \ell - e)` it is MedLDA.

    **The penalty of the mean is not the mean of the penalty**, which is what ``numpyro.factor("f",
    -h(f))`` in the model has. The latter is larger if h is convex (Jensen), and narrows the guide.

    **Minibatches.** Inside a subsampled plate f_j has a number for each row of the minibatch, and
    the penalty of it is scaled by N/M, which is unbiased if h is a sum over the rows.

    **Biased.** With S draws of q the value is :math:`h(\bar f)`, too large where h bends, by
    :math:`h'' \mathrm{Var}_q[f] / (2 S)`, and by at most :math:`0.4\, c\, \mathrm{sd}_q[f] /
    \sqrt S` at the corner of a hinge. The gradient is

    .. math:: \frac1S \sum_s h'(\bar f_{-s}) \nabla f(z_s),

    with the mean :math:`\bar f_{-s}` of the other draws. It is unbiased for linear and quadratic h;
    for others the noise of the mean smooths a corner, and does not narrow the guide. Sites of the
    guide have to be reparameterised, whatever the base; they need no density.

    **The best guide.** With minus the ELBO as base, the best of all q is known up to its own means,

    .. math:: q(z) \propto p(z \mid x) \exp\Big(-\sum_j \sum_n h_j'\big(E_q[f_{jn}]\big)\,
        f_{jn}(z)\Big),

    and ``diagnose`` compares q with this, with the slopes :math:`E[h'(\bar f_{-s})]` of the
    training at the means that q has. With another base it compares q with the posterior.

    :param base: the loss, any ``ELBO`` of NumPyro or of this module.
    :param penalties: the functions h by the names of the sites f.
    :param int num_particles: the number of draws S of the expectations, at least 2.

    **References:** *Posterior regularization for structured latent variable models*, Ganchev et
    al., JMLR 11, 2010 (eq. 8: the slack is minimised out here); *Bayesian inference with posterior
    regularization and applications to infinite latent SVMs*, Zhu et al., JMLR 15, 2014 (RegBayes);
    *MedLDA: maximum margin supervised topic models*, Zhu et al., JMLR 13, 2012

    >>> # The posterior is N(0.5, 0.5). The mean is pulled to at least 2, the variance is not.
    >>> loss = PosteriorRegularizedELBO(
    ...     Trace_ELBO(10), {"z": lambda mean: 9.0 * jax.nn.relu(2.0 - mean)})
    >>> guide, x = AutoNormal(normal_mean), jnp.array([1.])
    >>> svi = SVI(normal_mean, guide, optax.adam(optax.linear_schedule(0.05, 0.0, 2000)), loss)
    >>> params = svi.run(jax.random.key(0), 2000, x, progress_bar=False).params
    >>> loc, scale = params["z_auto_loc"], params["z_auto_scale"]
    >>> bool(abs(loc - 2.0) < 0.4), bool(abs(scale - 0.71) < 0.1)
    (True, True)
    """

    linear = True

    def __init__(
        self,
        base: ELBO,
        penalties: Mapping[str, Penalty],
        num_particles: int = 10,
        *,
        vectorize_particles: bool | MapT = True,
    ) -> None:
        why = "with one draw the penalty of the mean is the mean of the penalty"
        check_several(num_particles, why)
        self.base, self.penalties = base, dict(penalties)
        super().__init__(num_particles, vectorize_particles=vectorize_particles)

    def loss_with_mutable_state(
        self,
        rng_key: Array,
        param_map: Params,
        model: Model,
        guide: Model,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The loss with the penalty, and the mutable state of the base."""
        key_penalty = random.fold_in(rng_key, 1)  # the base takes the key itself

        def step(params: Params) -> tuple[Any, State]:
            loss_of_base: Any = self.base.loss_with_mutable_state
            of_base = loss_of_base(rng_key, params, model, guide, *args, **kwargs)
            draws = Draws(self, key_penalty, params, model, guide, args, kwargs)
            penalty, _ = self.estimate(draws)
            return of_base["loss"] + penalty, of_base["mutable_state"] or {}

        loss, state = finite_step(step, param_map)
        return {"loss": loss, "mutable_state": state or None}

    @property
    def tilts(self) -> bool:
        """Whether the best guide is the posterior of :meth:`tilted`."""
        return getattr(self.base, "minus_elbo", isinstance(self.base, OF_NUMPYRO))

    def tilted(self, model: Model) -> Model:
        """The model times exp(-slope f), with the slopes of :meth:`slopes` as parameters."""

        def with_slopes(*args: Any, **kwargs: Any) -> Any:
            result, trace = call_and_trace(model, args, kwargs)
            for name in self.penalties:
                f = trace[name]["value"]
                slope = numpyro.param(f"_slope of {name}", jnp.zeros(jnp.shape(f)))
                numpyro.factor(f"_penalty of {name}", -jnp.sum(slope * f))
            return result

        return with_slopes

    def slopes(self, values: Sites) -> tuple[Params, float]:
        """The slopes of the training at draws ``(m, *site)`` of the sites, and the standard
        deviation of their errors in the log density, in nats."""
        slopes, variance = {}, 0.0
        for name in (name for name in self.penalties if name in values):
            f, penalty = jnp.asarray(values[name]), self.penalties[name]
            size = min(self.num_particles - 1, len(f))
            groups = f[: len(f) // size * size].reshape(-1, size, *f.shape[1:])
            each = jax.vmap(_slope(penalty))(groups.mean(1))
            slopes[f"_slope of {name}"] = each.mean(0)
            variance += float(jnp.sum(each.var(0) / len(each) * f.var(0)))
        return slopes, variance**0.5

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        """The penalty, without the base."""
        subsampled = {plate: (size, batch) for plate, size, batch in draws.layout.subsampled}

        def sites(particle: Particle) -> dict[str, tuple[Array, Array]]:
            trace = particle.model_trace
            return {
                name: (trace[name]["value"], _scale(trace[name], subsampled))
                for name in self.penalties
            }

        drawn, state = draws.each(sites)
        parts = [
            scale[0] * _of_mean(self.penalties[name], values)
            for name, (values, scale) in drawn.items()
        ]
        return jnp.sum(jnp.stack(parts)), state


def _scale(site: Site, subsampled: dict[str, tuple[int, int]]) -> Array:
    """N/M of the plates around a site."""
    shape = jnp.shape(site["value"])
    scale = 1.0
    for plate, dim in frames(site).items():
        size, batch = subsampled.get(plate, (1, 1))
        scale *= size / batch
        if plate in subsampled and batch not in shape[: len(shape) + dim + 1]:
            raise ValueError(
                f"the site '{site['name']}' has the shape {shape} inside the plate '{plate}' of"
                f" {batch} of {size} rows; it must have a number for each row."
            )
    return jnp.asarray(scale)


def _of_mean(penalty: Penalty, values: Array) -> Array:
    """The penalty of the mean, with the means of the other draws inside of its derivative."""

    K = len(values)
    stopped = stop_gradient(values)
    mean = jnp.mean(stopped, 0)
    others = mean + (mean - stopped) / (K - 1)
    slope = jax.vmap(_slope(penalty))(others)
    return stop_gradient(jnp.sum(penalty(mean))) + jnp.sum(slope * (values - stopped)) / K


def _slope(penalty: Penalty) -> Callable[[Array], Array]:
    """The derivative of the sum in each number of the mean."""
    return jax.grad(lambda mean: jnp.sum(penalty(mean)))
