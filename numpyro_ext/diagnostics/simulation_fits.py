"""Fits that are repeated on simulated data: of a guide, of a Markov chain, of an engine."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
from jax import Array, lax, random
from numpyro.handlers import seed, substitute
from numpyro.infer import HMCECS, MCMC, SVI

from numpyro_ext._checks import check_count
from numpyro_ext._model.arguments import Arguments, split_arguments
from numpyro_ext._model.handlers import every_row
from numpyro_ext._model.read import latent_sites, trace_of
from numpyro_ext._numpyro import posterior_guide
from numpyro_ext._typing import Diagnosable, Model, Params, Sites
from numpyro_ext.diagnostics.full_data import minibatch_plates, on_all_rows

Fit = Callable[[Any, Model, tuple, dict[str, Any]], dict[str, Any]]
"""``fit(rng_key, model, args, kwargs)`` to draws ``{site: (S, ...)}`` of the latent sites."""


def _compiled(run: Callable[..., Sites]) -> Fit:
    """A fit as one compiled program of the key and the arrays, until it first looks at numbers."""

    @partial(jax.jit, static_argnums=(1, 2))
    def program(rng_key: Array, model: Model, static: Arguments, arrays: list[Array]) -> Sites:
        return run(rng_key, model, *static.whole(arrays))

    compiles = True

    def fit(rng_key: Array, model: Model, args: tuple, kwargs: dict[str, Any]) -> Sites:
        nonlocal compiles
        if compiles:
            try:
                return program(rng_key, model, *split_arguments(args, kwargs))
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
                compiles = False
        return run(rng_key, model, args, kwargs)

    return fit


def fit_svi(
    guide: Callable[[Model], Any],
    optim: Any,
    loss: Any,
    num_steps: int,
    *,
    num_draws: int = 1000,
) -> Fit:
    r"""A fit by ``SVI``, for :func:`simulation_based_calibration`.

    Each data set gets its own guide by ``guide(model)``, in one compiled program. A guide that is a
    function is called with a dict of the simulated data before the arguments of the model.

    :param guide: a function of the model that makes a guide, such as the class ``AutoNormal``.
    :param optim: an optimiser, of optax or NumPyro.
    :param loss: the loss of ``SVI``.
    :param int num_steps: steps of each fit.
    :param int num_draws: draws of each fit, of which as many as needed are used.
    :return: a function ``fit(rng_key, model, args, kwargs)``.

    >>> from numpyro_ext.diagnostics import fit_svi
    >>> from numpyro_ext.targets import normal_mean
    >>> fit = fit_svi(AutoNormal, optax.adam(0.01), Trace_ELBO(10), 1000)
    >>> draws = fit(jax.random.key(0), normal_mean, (jnp.array([0.5, -1.0, 2.0]),), {})
    >>> bool(abs(draws["z"].mean() - 0.375) < 0.15)  # the posterior mean
    True
    """
    num_steps, num_draws = check_count("num_steps", num_steps), check_count("num_draws", num_draws)

    def run(rng_key: Array, model: Model, args: tuple, kwargs: dict[str, Any]) -> Sites:
        key_fit, key_draws = random.split(rng_key)
        made = guide(model)
        svi = SVI(model, made, optim, loss)

        def step(state: Any, _: None) -> tuple[Any, None]:
            return svi.update(state, *args, **kwargs)[0], None

        state, _ = lax.scan(step, svi.init(key_fit, *args, **kwargs), length=num_steps)
        params = svi.get_params(state)
        return _draws(key_draws, made, params, args, kwargs, num_draws)

    return _compiled(run)


def fit_mcmc(make_kernel: Callable[[Model], Any], num_warmup: int, num_samples: int) -> Fit:
    r"""A fit by ``MCMC``, for :func:`simulation_based_calibration`.

    Each data set gets one chain. Of its draws the calibration keeps as many as it needs, equally
    spaced: draw several times as many, because ranks of correlated draws are heaped at both ends.
    A kernel that finds its own settings is set up and compiled anew for each chain.

    :param make_kernel: a function of the model that makes a kernel, such as the class ``NUTS``.
    :param int num_warmup: warmup of each chain.
    :param int num_samples: draws of each chain.
    :return: a function ``fit(rng_key, model, args, kwargs)``.

    >>> from numpyro.infer import NUTS
    >>> from numpyro_ext.diagnostics import fit_mcmc
    >>> from numpyro_ext.targets import normal_mean
    >>> fit = fit_mcmc(NUTS, 200, 1000)
    >>> draws = fit(jax.random.key(0), normal_mean, (jnp.array([0.5, -1.0, 2.0]),), {})
    >>> bool(abs(draws["z"].mean() - 0.375) < 0.15)  # the posterior mean
    True
    """
    num_warmup = check_count("num_warmup", num_warmup, 0)
    num_samples = check_count("num_samples", num_samples)

    def run(rng_key: Array, model: Model, args: tuple, kwargs: dict[str, Any]) -> Sites:
        kernel = make_kernel(model)
        plates = minibatch_plates(model, args, kwargs)
        if plates and not isinstance(kernel, Diagnosable | HMCECS):
            raise ValueError(
                f"{type(kernel).__name__} would keep one minibatch of '{next(iter(plates))}'; leave"
                " out its subsample_size, or take a kernel of numpyro_ext.mcmc."
            )
        mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
        mcmc.run(rng_key, *args, **kwargs)
        return cast(Sites, mcmc.get_samples())

    return _compiled(run)


def fit_engine(
    make_engine: Callable[[Model], Any], num_steps: int, *, num_draws: int = 1000
) -> Fit:
    r"""A fit by an engine such as :class:`~numpyro_ext.ep.EP`, for
    :func:`simulation_based_calibration`.

    One engine runs on each data set, from the start that it makes for these.

    :param make_engine: a function of the model that makes an engine, such as the class ``EP``.
    :param int num_steps: steps of each fit, at most.
    :param int num_draws: draws of the guide of each fit, of which as many as needed are used.
    :return: a function ``fit(rng_key, model, args, kwargs)``.

    >>> from numpyro_ext.diagnostics import fit_engine
    >>> from numpyro_ext.ep import EP
    >>> from numpyro_ext.targets import normal_mean
    >>> fit = fit_engine(EP, 10)
    >>> draws = fit(jax.random.key(0), normal_mean, (jnp.array([0.5, -1.0, 2.0]),), {})
    >>> bool(abs(draws["z"].mean() - 0.375) < 0.15)  # the posterior mean
    True
    """
    num_steps, num_draws = check_count("num_steps", num_steps), check_count("num_draws", num_draws)
    made: dict[str, Any] = {}

    def draws(rng_key: Array, _: Model, args: tuple, kwargs: dict[str, Any]) -> Sites:
        return _draws(rng_key, made["engine"].guide, args[0], args[1:], kwargs, num_draws)

    draw = _compiled(draws)

    def fit(rng_key: Any, model: Model, args: tuple, kwargs: dict[str, Any]) -> Sites:
        if made.get("model") is not model:
            made.update(engine=make_engine(model), model=model)
        key_fit, key_draws = random.split(rng_key)
        engine = made["engine"]
        result = engine.run(key_fit, num_steps, *args, progress_bar=False, **kwargs)
        return draw(key_draws, model, (result.params, *args), kwargs)

    return fit


def _draws(
    rng_key: Array, guide: Any, params: Params, args: tuple, kwargs: dict[str, Any], size: int
) -> Sites:
    """Draws of the guide on all rows, ``{site: (size, ...)}``."""
    whole, (params,) = posterior_guide(guide, [params], args, kwargs, every_row)

    def draw(rng_key: Array) -> Sites:
        fn = seed(substitute(on_all_rows(whole), data=params), rng_key)
        return {site["name"]: site["value"] for site in latent_sites(trace_of(fn, args, kwargs))}

    return jax.vmap(draw)(random.split(rng_key, size))
