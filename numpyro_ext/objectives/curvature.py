"""The evidence lower bound of a mean-field normal with scales that learn from curvature."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
from jax.lax import stop_gradient
import jax.numpy as jnp
from numpyro.distributions import Normal
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._checks import check_choice
from numpyro_ext._model.density import row_log_lik, scales_rooted, seen
from numpyro_ext._model.handlers import valid_plates
from numpyro_ext._model.read import Site, base_distribution, frames, is_data, sample_sites
from numpyro_ext._model.units import drawn_sites
from numpyro_ext._typing import Sites, Trace
from numpyro_ext.objectives.base import STEP, Draws, MapT, Objective, Particle, State

Curvature = Literal["empirical_fisher", "fisher", "squared_gradient", "hessian", "reparam"]


class CurvatureELBO(Objective):
    r"""The evidence lower bound in nats, with a gradient that is made of gradients and curvatures.

    For a normal guide :math:`z = \mu + \mathrm{sd} \cdot \epsilon` of independent numbers and
    :math:`f(z) = -\log p(x, z)` the gradients of the loss are (Bonnet, Price)

    .. math::
        \frac{\partial L}{\partial \mu} = E_q[\nabla f(z)], \qquad
        \frac{1}{\mathrm{sd}} \frac{\partial L}{\partial \mathrm{sd}}
            = E_q[\operatorname{diag} \nabla^2 f(z)] - \mathrm{sd}^{-2}.

    The value is ``Trace_ELBO``'s at the same draws, and of the gradient the diagonal
    :math:`h \approx \operatorname{diag} \nabla^2 f_y` is replaced, where :math:`f_y = -\sum_n
    \ell_n(z)` is minus the log likelihood of N rows, and M of them are in the minibatch B:

    - ``"empirical_fisher"``: :math:`\frac{N}{M} \sum_{n \in B} (\nabla \ell_n)^2`, squares of each
      row, which are not the Gauss-Newton matrix J'HJ.
    - ``"fisher"``: the same with labels that are drawn from the model at z, which has the mean
      J'HJ.
    - ``"squared_gradient"``: :math:`\frac1N (\nabla f_y)^2`, the square of the sum (Vadam).
    - ``"hessian"``: the second derivatives, d Hessian-vector products: for small d.
    - ``"reparam"``: :math:`\nabla f \cdot \epsilon / \mathrm{sd}`, what ``Trace_ELBO`` has.

    Under ``numpyro.handlers.scale`` the gradient of a row has the root of the scale in the squares.
    The entropy is taken in closed form. The second derivative of the log prior is :math:`v \cdot (H
    v)` with random signs v: exact where the prior factorises, and unbiased elsewhere.

    VOGN is :func:`~numpyro_ext.optim.von` with ``"empirical_fisher"``, VON with ``"hessian"``, and
    Vadam for any number of draws is ``vadam(squares="scale")`` with ``"squared_gradient"``.

    **Biased.** ``"hessian"`` and ``"reparam"`` are unbiased. ``"fisher"`` is where the likelihood
    is normal, or any other with its natural parameter linear in z. ``"empirical_fisher"`` is right
    in expectation over data that come from the model. ``"squared_gradient"`` makes the scales up to
    :math:`\sqrt M` times too large, and has lost the curvature where M is N.

    The guide is ``AutoNormal``, ``AutoDiagonalNormal``, or your own of independent normal sites.
    All observed sites are in one data plate, and its rows share all latent sites. The squares of
    rows cost M backward passes: of one row each if the model indexes its data by the plate
    (``numpyro.subsample``, or ``X[idx]``), and of all M rows if it does not.

    :param str curvature: one of the above.

    **References:** *Fast and scalable Bayesian deep learning by weight-perturbation in Adam*, Khan
    et al., ICML 2018 (eqs. 7 to 12); *SLANG: Fast structured covariance approximations for Bayesian
    deep learning with natural gradient*, Mishkin et al., NeurIPS 2018 (eq. 5, the squares of rows);
    *Practical variational inference for neural networks*, Alex Graves, NIPS 2011 (eqs. 15, 17);
    *Limitations of the empirical Fisher approximation for natural gradient descent*, Kunstner et
    al., NeurIPS 2019

    >>> from numpyro_ext.optim import ivon
    >>> guide = AutoNormal(normal_mean, init_scale=0.02)
    >>> svi = SVI(normal_mean, guide, ivon(0.05), CurvatureELBO("fisher", 4))
    >>> x = jnp.array([1.0, 2.0, 3.0])
    >>> params = svi.run(jax.random.key(0), 1000, x, progress_bar=False).params
    >>> loc, sd = params["z_auto_loc"], params["z_auto_scale"]
    >>> bool(abs(loc - 1.5) < 0.3), bool(abs(sd - 0.5) < 0.1)  # the posterior is N(1.5, 0.5^2)
    (True, True)
    """

    per_datum = True

    def __init__(
        self,
        curvature: Curvature = "empirical_fisher",
        num_particles: int = 1,
        *,
        vectorize_particles: bool | MapT = True,
    ) -> None:
        check_choice("curvature", curvature, get_args(Curvature))
        self.curvature = curvature
        super().__init__(num_particles, vectorize_particles=vectorize_particles)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        self._refuse(draws)

        def bound_and_natural(key: Array) -> tuple[tuple[Array, Array], State]:
            mean, sd, weight, unravel = _normals(draws, key)
            z = stop_gradient(ravel_pytree(draws.values(key))[0])

            def particle_at(x: Array) -> Particle:
                return draws.particle(key, params=draws.stopped, values=unravel(x))

            def log_lik(x: Array) -> Array:
                return draws.total(particle_at(x).log_lik)

            def log_lik_rooted(x: Array) -> Array:
                layout, trace = draws.layout, particle_at(x).model_trace
                sites = sample_sites(scales_rooted(trace, layout.scale))
                return draws.total(layout.sum_sites(sites, local=True))

            def log_prior(x: Array) -> Array:
                particle = particle_at(x)
                drawn = drawn_sites(particle.guide_trace).values()
                log_q = draws.layout.sum_sites(drawn, local=False, log_prob=draws.log_q)
                # What is left of log q is the Jacobian of the constraints.
                return particle.log_prior - (particle.log_q_global - log_q)

            of_data, of_prior = jax.grad(log_lik)(z), jax.grad(log_prior)(z)
            gradient = -of_data - of_prior
            if self.curvature == "reparam":
                curvature = gradient * (z - mean) / sd**2
            elif self.curvature == "hessian":
                log_p, axes = lambda x: log_lik(x) + log_prior(x), jnp.eye(z.size, dtype=z.dtype)
                curvature = -lax.map(lambda e: jnp.vdot(e, _times_hessian(log_p, z, e)), axes)
            else:
                if self.curvature == "squared_gradient":
                    count = draws.total(draws.layout.observed(particle_at(z).model_trace))
                    squares = jax.grad(log_lik_rooted)(z) ** 2 / jnp.maximum(count, 1)
                else:
                    squares = draws.layout.scale * self._squares(draws, key, particle_at, z)
                signs = random.rademacher(random.fold_in(key, 3), z.shape, z.dtype)
                curvature = squares - signs * _times_hessian(log_prior, z, signs)
            natural = jnp.vdot(stop_gradient(gradient), mean) - jnp.vdot(weight, jnp.log(sd))
            natural += jnp.vdot(stop_gradient(curvature), sd**2) / 2
            # The value, and the gradient of the model's own parameters.
            particle = draws.particle(key, guide_params=draws.stopped, values=unravel(z))
            bound = particle.log_prior - particle.log_q_global + draws.total(particle.log_lik)
            return (-bound, natural), particle.state

        (loss, natural), state = draws.map(bound_and_natural, draws.keys)
        natural = jnp.mean(natural)
        return jnp.mean(loss) + natural - stop_gradient(natural), state

    def _squares(
        self, draws: Draws, key: Array, particle_at: Callable[[Array], Particle], z: Array
    ) -> Array:
        """The sum over the minibatch of the squared gradient of each row."""
        (plate,) = draws.layout.plates
        key_labels = random.fold_in(key, 2)
        trace = particle_at(z).model_trace
        rows = trace[plate]["value"]

        def log_liks(trace: Any, rng_key: Array) -> Array:
            drawn = _labels_drawn(trace, plate, rng_key) if self.curvature == "fisher" else trace
            return row_log_lik(drawn, plate, rooted=True)

        def alone(x: Array, n: Array, rng_key: Array) -> Array:
            data, sizes = {**draws.stopped, **particle_at(x).values}, (draws.layout.size,) * 2
            with valid_plates():
                trace = draws.program(key, data, {plate: sizes}).trace(rows={plate: n[None]})
            return log_liks(trace, rng_key)

        if _is_one_row(alone, z, rows[0], key_labels):
            gradient = jax.grad(lambda x, *row: alone(x, *row)[0])
            each = jax.vmap(gradient, (None, 0, 0))(z, rows, random.split(key_labels, len(rows)))
        else:
            each = jax.jacrev(lambda x: log_liks(particle_at(x).model_trace, key_labels))(z)
        return jnp.sum(each**2, 0)

    def _refuse(self, draws: Draws) -> None:
        layout, name = draws.layout, type(self).__name__
        if layout.drawn_local:
            raise ValueError(
                f"{name}: the latent sites {sorted(layout.drawn_local)} belong to single rows, but"
                " all rows must share them; use Trace_ELBO."
            )
        if mutable := [site for site in layout.mutable if site != STEP]:
            raise ValueError(
                f"{name}: the mutable sites {mutable} make a row depend on the others (BatchNorm);"
                " use a network without them, or Trace_ELBO."
            )


def _normals(draws: Draws, key: Array) -> tuple[Array, Array, Array, Callable[[Array], Sites]]:
    """Means, standard deviations and weights of the guide, flat, and the way back to its sites."""
    drawn = drawn_sites(draws.guide_trace(key))
    for name, site in drawn.items():
        if not isinstance(base_distribution(site["fn"]), Normal):
            kind = type(base_distribution(site["fn"])).__name__
            raise ValueError(
                f"CurvatureELBO: site '{name}' of the guide is a {kind}; it must be a Normal of"
                " independent numbers: use AutoNormal or AutoDiagonalNormal, or Trace_ELBO."
            )

    def parts(values: Sites) -> tuple[Sites, Sites]:
        sites = drawn_sites(draws.guide_trace(key, values=values))
        each = {n: (base_distribution(s["fn"]), jnp.shape(s["value"])) for n, s in sites.items()}
        return (
            {n: jnp.broadcast_to(fn.loc, shape) for n, (fn, shape) in each.items()},
            {n: jnp.broadcast_to(fn.scale, shape) for n, (fn, shape) in each.items()},
        )

    values = {name: site["value"] for name, site in drawn.items()}
    origins = eval_provenance(lambda **values: parts(values), **values)
    for name in drawn:
        if depends_on := origins[0][name] | origins[1][name]:
            raise ValueError(
                f"CurvatureELBO: the normal of site '{name}' of the guide depends on the draws of"
                f" {sorted(map(str, depends_on))}, but its numbers must be independent: use"
                " AutoNormal, or Trace_ELBO."
            )
    loc, scale = parts(values)
    mean, unravel = ravel_pytree(loc)
    weight = ravel_pytree({name: _weight(site) for name, site in drawn.items()})[0]
    return mean, ravel_pytree(scale)[0], weight, unravel


def _weight(site: Site) -> Array:
    """How often each number counts in log q, by ``handlers.scale`` and masks around the guide."""
    scale = jnp.asarray(1.0 if site["scale"] is None else site["scale"])
    events = (1,) * (site["fn"].event_dim if scale.ndim else 0)
    return jnp.reshape(scale, scale.shape + events) * seen(site)


def _is_one_row(alone: Callable[..., Array], *args: Array) -> bool:
    """Return whether a row can be computed alone: the model uses the indices of the plate."""
    try:
        return jax.eval_shape(alone, *args).shape == (1,)
    except (TypeError, ValueError):  # what is not indexed may not broadcast with one row
        return False


def _times_hessian(fn: Callable[[Array], Array], x: Array, v: Array) -> Array:
    return jax.jvp(jax.grad(fn), (x,), (v,))[1]


def _labels_drawn(trace: Trace, plate: str, rng_key: Array) -> Trace:
    """The trace with values of its observed sites in a plate that are drawn from their own
    distributions, at the latent values of the trace."""
    drawn = dict(trace)
    for i, site in enumerate(sample_sites(trace)):
        if plate in frames(site) and site["is_observed"]:
            if not is_data(site):
                raise ValueError(
                    f"site '{site['name']}' is a numpyro.factor, of which no labels can be drawn;"
                    " write it as an observed site, or use another curvature."
                )
            value = site["fn"].sample(random.fold_in(rng_key, i))
            drawn[site["name"]] = {**site, "value": stop_gradient(value), "intermediates": []}
    return drawn
