"""A fit in a file, and back in another process."""

from collections.abc import Iterator
import re
import sys
from typing import Any, cast

import jax
from jax import random
from numpyro.handlers import seed
from numpyro.infer import MCMC, SVI
from numpyro.infer.autoguide import AutoGuide, AutoGuideList

from numpyro_ext._model.handlers import on_first_rows
from numpyro_ext._model.read import (
    check_site_table,
    sample_sites,
    set_up,
    shape_trace,
    sites_in_trace,
)
from numpyro_ext._numpyro import draws_of_mcmc, mcmc_of_draws, set_up_at, start_of
from numpyro_ext._typing import Kwargs, Restorable
from numpyro_ext.saving.container import Unknown, fit_to, read, write

_UNITS = re.compile("_(center|root|root_.*|bend|bend_.*|modes|particles)$")
"""Parameters that a search would find for a guide that is called without them."""


def save(path: Any, method: Any, result: Any = None) -> None:
    """
    Write a fit to a file, from which :func:`load` takes it up in another process.

    The file is an ``npz`` archive of arrays with a header in JSON, which NumPy alone can read
    (``numpy.load(path)``). It holds what a run has found: parameters, states of the optimiser, of
    chains and of engines, random keys, draws; the start of a guide, and the settings of a kernel.
    It holds no code and no data: neither the model, nor the guide, nor the optimiser, which the
    other process makes anew. The file is replaced once it is whole.

    :param path: the file.
    :param method: what has made the fit: an ``SVI``, an ``MCMC``, an engine of
        :mod:`numpyro_ext.ep`, a guide, or a kernel.
    :param result: the result of ``svi.run`` or ``engine.run``, the state of a loop of one's own
        around ``svi.update``, ``engine.update`` or ``kernel.sample``, or the parameters of a guide;
        or a tuple or dict with one of these beside arrays, numbers and words. An ``MCMC`` has its
        draws and its last state itself.

    >>> import tempfile
    >>> from numpyro.infer.autoguide import AutoNormal
    >>> from numpyro_ext.saving import load, save
    >>> from numpyro_ext.targets import normal_mean
    >>> y = jnp.array([0.5, -1.0, 2.0])
    >>> def make():
    ...     guide = AutoNormal(normal_mean)
    ...     return SVI(normal_mean, guide, optax.adam(0.01), Trace_ELBO())
    >>> svi = make()
    >>> path = tempfile.mkdtemp() + "/fit.npz"
    >>> save(path, svi, svi.run(jax.random.key(0), 100, y, progress_bar=False))
    >>> svi = make()  # tomorrow, in another process
    >>> result = load(path, svi, y)
    >>> more = svi.run(jax.random.key(1), 100, y, init_state=result.state, progress_bar=False)
    >>> svi.guide.sample_posterior(jax.random.key(2), more.params, sample_shape=(5,))["z"].shape
    (5,)
    """
    if isinstance(method, MCMC):
        if result is not None:
            raise TypeError("an MCMC has its draws itself; call save(path, mcmc) without a result.")
        if method.last_state is None:
            raise ValueError("this MCMC has not run, so it has nothing to save; call run first.")
        result = draws_of_mcmc(method), method.last_state, method.post_warmup_state
    elif result is None:
        raise TypeError(
            f"save was given no result of this {type(method).__name__}; pass that of its run, as in"
            " save(path, svi, result)."
        )
    units = {}
    if isinstance(method, SVI):
        params = _params_of(method, result)
        units = {name: x for name, x in params.items() if _UNITS.search(name)}
    own = _own(method)
    content = {
        "method": _name_of(method),
        "guides": [_start(guide) for guide in _guides_of(method)],
        "own": own.saved() if isinstance(own, Restorable) else {},
        "units": units,
        "result": result,
    }
    write(path, content, sys.modules["numpyro_ext"].__version__)


def load(path: Any, method: Any, /, *args: Any, **kwargs: Any) -> Any:
    """
    Take up a fit from a file of :func:`save`.

    The method is made by the same code as the one that was saved, and is afterwards as that was
    after its run: ``guide.sample_posterior``, ``Predictive``, ``to_arviz``, ``diagnose``,
    ``posterior_as_prior``, ``svi.update``, ``engine.run(..., init_state=result.state)`` and
    ``mcmc.run`` go on with it. Its model is run once on the arguments, without a search or a step.

    An error says where the file and the method differ: in the latent sites, their shapes and
    supports, in the parameters, or in the state of the optimiser. Nothing in a file is run.

    :param path: the file.
    :param method: an ``SVI``, an ``MCMC``, an engine, a guide or a kernel that has not run, with
        the model, the guide and the optimiser of the one that was saved.
    :param args: arguments of the model: as in the fit, to go on with it, or others on which its
        latent sites have the same shapes, as the rows of another day. What ``sample_posterior``
        computes from the arguments of the fit, where it is given none, it computes from these.
    :param kwargs: keyword arguments of the model, likewise.
    :return: what was saved as ``result``; of an ``MCMC``, itself with its draws.

    >>> import tempfile
    >>> from numpyro_ext.mcmc import SGLD
    >>> from numpyro_ext.saving import load, save
    >>> def make():
    ...     kernel = SGLD(normal_mean, 1e-2)
    ...     return MCMC(kernel, num_warmup=10, num_samples=20, progress_bar=False)
    >>> path, y, mcmc = tempfile.mkdtemp() + "/run.npz", jnp.array([0.5, -1.0, 2.0]), make()
    >>> mcmc.run(jax.random.key(0), y)
    >>> save(path, mcmc)
    >>> mcmc = load(path, make(), y)  # tomorrow, in another process
    >>> mcmc.post_warmup_state = mcmc.last_state
    >>> mcmc.run(jax.random.key(1), y)
    >>> int(mcmc.last_state.i)
    50
    """
    content = read(path)
    name = _name_of(method)
    if content["method"] != name:
        raise ValueError(
            f"{path} has a fit by {content['method']}, and load was given {name}; give it the same."
        )
    own, result = _own(method), content["result"]
    starts = list(zip(_guides_of(method), content["guides"], strict=True))
    for guide, start in starts:
        _check_start(guide, start, args, kwargs)
    if isinstance(own, Restorable):
        own.restore(content["own"], args, kwargs)
    for guide, start in starts:
        _take_start(guide, start, args, kwargs)
    if isinstance(method, SVI):
        return _of_svi(method, result, content["units"], args, kwargs)
    for x in jax.tree.leaves(result, is_leaf=lambda x: isinstance(x, Unknown)):
        if isinstance(x, Unknown):
            raise ValueError(
                f"{path} has a {x.name}, a class that this process has not imported; import it"
                " before load, in the module in which it was."
            )
    if isinstance(method, MCMC):
        draws, last_state, warm = result
        num_chains = len(jax.tree.leaves(draws)[0])
        if num_chains != method.num_chains:
            raise ValueError(
                f"{path} has {num_chains} chains, and this MCMC {method.num_chains}; make it with"
                f" num_chains={num_chains}."
            )
        mcmc_of_draws(method, draws, last_state, args, kwargs)
        method.post_warmup_state = warm
        return method
    if not isinstance(own, Restorable):
        set_up(method, args, kwargs)
    return result


def _own(method: Any) -> Any:
    """The object that has what the runs of a method have found."""
    return method.sampler if isinstance(method, MCMC) else method


def _name_of(method: Any) -> str:
    """The classes by which a method is compared with a file."""
    part = method.sampler if isinstance(method, MCMC) else getattr(method, "guide", None)
    names = [type(method).__name__]
    if part is not None:
        names.append(getattr(part, "__name__", type(part).__name__))
    return " with ".join(names)


def _guides_of(method: Any) -> list[AutoGuide]:
    """The auto guides of a method, all parts of a list among them, and inside wrappers."""

    def inside(guide: Any) -> Iterator[AutoGuide]:
        while not isinstance(guide, AutoGuide) and hasattr(guide, "fn"):
            guide = guide.fn
        if isinstance(guide, AutoGuideList):
            for part in guide:
                yield from inside(part)
        elif isinstance(guide, AutoGuide):
            yield guide

    return list(inside(getattr(method, "guide", method)))


def _start(guide: AutoGuide) -> dict[str, Any] | None:
    """Where a guide began, with the sites of its model; None for one that was not called, and for
    one that begins at its parameters alone."""
    trace = guide.prototype_trace
    if not trace:
        return None
    return {
        "sites": sites_in_trace(trace),
        "observed": [x["name"] for x in sample_sites(trace) if x["is_observed"]],
        "local": getattr(guide, "integrated", []),
        "start": start_of(guide),
        "cuts": getattr(guide, "cuts", {}),
        "modes": getattr(guide, "start_modes", None),
    }


def _check_start(
    guide: AutoGuide, start: dict[str, Any] | None, args: tuple, kwargs: Kwargs
) -> None:
    """An error unless the fit had these latent sites; its observed ones may be predicted."""
    if start is None or guide.prototype_trace is not None or guide.model is None:
        return
    trace = shape_trace(seed(on_first_rows(guide.model), random.key(0)), args, kwargs)
    inside = {name for name, *_ in start["sites"]}
    ignored = {*start["observed"], *start["local"]} - inside
    table = [site for site in sites_in_trace(trace) if site[0] not in ignored]
    check_site_table(start["sites"], table)


def _take_start(
    guide: AutoGuide, start: dict[str, Any] | None, args: tuple, kwargs: Kwargs
) -> None:
    if start is None:
        return
    if guide.prototype_trace is None:
        if start["cuts"]:
            cast(Any, guide).take_cuts(start["cuts"], args, kwargs)
        set_up_at(guide, start["start"], args, kwargs)
    if hasattr(guide, "start_modes"):
        vars(guide)["start_modes"] = start["modes"]


def _is_of_svi(x: Any) -> bool:
    """Whether a node is the state or the result of an ``SVI``."""
    return hasattr(x, "optim_state") or (hasattr(x, "params") and hasattr(x, "state"))


def _params_of(svi: SVI, result: Any) -> Any:
    nodes = jax.tree.leaves(result, is_leaf=_is_of_svi)
    fit = next(filter(_is_of_svi, nodes), result)
    if hasattr(fit, "optim_state"):
        return svi.get_params(fit)
    return getattr(fit, "params", fit)


def _of_svi(svi: SVI, result: Any, units: dict[str, Any], args: tuple, kwargs: Kwargs) -> Any:
    """A tree with results and states, or parameters, in the classes that this SVI has for them."""
    first = svi.init(random.key(0), *args, init_params=units, **kwargs)
    params = svi.get_params(first)

    def known(x: Any) -> Any:
        if hasattr(x, "optim_state"):
            return fit_to(x, first._replace(rng_key=x.rng_key), "state")
        if _is_of_svi(x):
            return x._replace(params=fit_to(x.params, params, "params"), state=known(x.state))
        return x

    if not any(map(_is_of_svi, jax.tree.leaves(result, is_leaf=_is_of_svi))):
        return fit_to(result, params, "params")
    return jax.tree.map(known, result, is_leaf=_is_of_svi)
