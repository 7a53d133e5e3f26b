"""The numbers of all constructors of the contract tables at fixed keys, to compare others with.

``python tests/same_numbers.py write FILE.npz`` runs kernels, losses, guides, particles, structured
auto-encoders and engines for a few steps, diagnoses fits of every kind, and writes what they give.
``python tests/same_numbers.py compare FILE.npz`` runs them again and says which arrays differ, and
by how much; it exits with 1 if one differs by more than rounding does. A word after the file
chooses a part: ``compare FILE.npz mcmc``. A refactor that changes no number has only equal arrays.
"""

from functools import partial
from pathlib import Path
import sys
import time
import warnings

sys.path.insert(0, str(Path.cwd()))  # the repository whose numbers are wanted

import tests.conftest  # noqa: F401, I001  (sets the environment before jax is imported)

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax

from numpyro_ext.diagnostics import diagnose
from numpyro_ext.ep import (
    ADF,
    DAEP,
    DSEP,
    EP,
    PBP,
    ClosedForm,
    DistributedEP,
    ImportanceSampling,
    NUTSProjection,
    StochasticDistributedEP,
    StochasticEP,
)
from numpyro_ext.guides import AutoRealNVPNormal
from numpyro_ext.mcmc import PSGLD, SGHMC, SGLD, SGNHT, SGRLD
from numpyro_ext.particles import SVGD, PSGHMC, AutoParticles, ParVI, RiemannianSVGD, SteinNewton
from numpyro_ext.svae import GMMEP, SVAEELBO, GMMMeanField, HMMMeanField
from tests.diagnostics import drawn, test_contract as fits, test_target
from tests.ep import models as ep, test_distributed as parts, test_local as local
from tests.guides import test_contract as guides
from tests.mcmc import models, test_contract as kernels
from tests.objectives import test_contract as objectives
from tests.particles import test_contract as particles
from tests.svae import models as svae

# A difference over the largest number of the array; a chain of some steps amplifies rounding.
ROUNDING = 1e-4
KEY = random.key(3)


def metric(z):
    return jnp.array([[1.0, 0.2, 0.0], [0.2, 2.0, 0.0], [0.0, 0.0, 0.5]])


def chain(kernel, *args, draws=12, chains=1, warmup=kernels.WARMUP):
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method="vectorized" if chains > 1 else "sequential",
        progress_bar=False,
    )
    mcmc.run(KEY, *args, extra_fields=("potential_energy",))
    return mcmc


def chains_of_kernels():
    for name in kernels.KERNELS:
        mcmc = chain(kernels.kernel_of(name), *models.linear_data())
        yield name, {"draws": mcmc.get_samples(), "fields": mcmc.get_extra_fields()}
    shared = {"SGLD": SGLD, "SGHMC": SGHMC, "SGHMC euler": partial(SGHMC, integrator="euler")}
    found = shared | {"SGNHT": SGNHT, "PSGLD": PSGLD, "SGRLD": partial(SGRLD, metric=metric)}
    for name, make in found.items():
        mcmc = chain(make(models.linear), *models.linear_data(), draws=6)
        settings = mcmc.sampler.settings
        numbers = {
            key: getattr(settings, key)
            for key in ("step_size", "noise", "noise_control_variate", "variance_ratio")
        }
        numbers |= {"transitions": settings.transitions, "center": settings.center}
        yield f"{name}, found", {"draws": mcmc.get_samples(), "settings": numbers}


def losses():
    params = {"m": jnp.array(0.5), "s": jnp.array(0.4)}
    for name, make in objectives.OBJECTIVES.items():
        loss, guide = make(), objectives.GUIDES.get(name, objectives.guide)

        @jax.jit
        def value_and_grad(params, loss=loss, guide=guide):
            def value(p):
                return loss.loss(KEY, p, objectives.model, guide, objectives.X)

            return jax.value_and_grad(value)(params)

        yield name, dict(zip(("loss", "gradient"), value_and_grad(params), strict=True))


def draws_of_guides():
    args = (guides.X, guides.Y)
    for name in guides.GUIDES:
        guide, svi = guides.new_svi(name)
        state = svi.init(KEY, *args)
        flat, unravel = ravel_pytree(svi.optim.get_params(state.optim_state))
        off = unravel(flat + 0.1 * random.normal(random.key(1), flat.shape))

        @jax.jit
        def numbers(off, guide=guide, svi=svi):
            def value(p):
                return svi.loss.loss(KEY, svi.constrain_fn(p), guides.model, guide, *args)

            loss, gradient = jax.value_and_grad(value)(off)
            params = svi.constrain_fn(off)
            sites = guide.sample_posterior(KEY, params, sample_shape=(3,))
            latent = guide.sample_latent(KEY, params, 3)
            return {"loss": loss, "gradient": gradient, "sites": sites, "latent": latent}

        yield name, {"start": svi.get_params(state), **numbers(off)}


def moves_of_particles():
    x, g = particles.X[:, :2], particles.G[:, :2]
    fields = {param.id: param.values[0]() for param in particles.FIELDS}
    fields["RiemannianSVGD"] = RiemannianSVGD(lambda x: jnp.diag(1.0 + x**2))
    velocities = {name: field.velocity for name, field in fields.items()}
    hessian = -(jnp.eye(2) + 0.1 * jax.vmap(jnp.outer)(x, x))
    velocities["SteinNewton"] = lambda x, g: SteinNewton().velocity(x, g, hessian)
    for name, velocity in velocities.items():
        yield f"{name} velocity", {"v": jax.jit(velocity)(x, g)}
    data = particles.INPUTS, particles.TARGETS
    model = partial(particles.model, subsample_size=20)
    for name, field in (fields | {"SteinNewton": SteinNewton()}).items():
        if name == "RiemannianSVGD":  # two numbers there, three latent ones here
            continue
        svi = SVI(model, AutoParticles(model, 8, init_from=None), optax.adam(0.1), field)
        result = svi.run(KEY, 4, *data, progress_bar=False)
        yield f"{name} in SVI", {"losses": result.losses, "params": result.params}
    for name in ("SVGD", "RegularizedSVGD"):
        kernel = ParVI(model, fields[name], optax.adagrad(0.1), init_from=None)
        yield f"{name} in ParVI", chain(kernel, *data, draws=4, chains=6).get_samples()
    kernel = ParVI(model, fields["SVGD"], init_from=None)
    yield "ParVI, own step", chain(kernel, *data, draws=4, chains=6).get_samples()
    kernel = ParVI(model, optim=PSGHMC(0.05), init_from=None)
    yield "PSGHMC", chain(kernel, *data, draws=4, chains=6).get_samples()


def structured_guides():
    rules = svae.RULES | {"GMM mean field": GMMMeanField(), "HMM mean field": HMMMeanField()}
    for name, rule in rules.items():
        kind = svae.kind_of(rule)
        params, (model, y) = svae.params_of(kind), svae.program(rule)
        for how in ("full", "explicit_only") if name == "mixture" else ("full",):

            @jax.jit
            def numbers(params, y, model=model, rule=rule, how=how):
                def value(p):
                    loss, guide = SVAEELBO(how), svae.guide_of(rule)
                    return loss.loss(KEY, p, model, guide, y, svae.B)

                return jax.value_and_grad(value)(params)

            yield f"{name}, {how}", dict(zip(("loss", "gradient"), numbers(params, y), strict=True))
        guide = svae.guide_of(rule)
        yield f"{name}, draws", jax.jit(partial(guide.sample_posterior, KEY))(params, y)


def engines():
    """Runs of few steps, then the evidence, a step on other data and a run from there."""
    probit, logistic = (ep.probit, *ep.PROBIT), (ep.logistic, *ep.LOGISTIC)
    scale, half = (ep.unknown_scale, ep.Y_SCALE), (ep.unknown_scale, ep.Y_SCALE, True)
    schools, few = (ep.schools, *ep.SCHOOLS), ImportanceSampling(num_samples=64)
    nuts = NUTSProjection(num_warmup=100, num_samples=200)

    def closed(shift, precision, index, power):
        cov = jnp.linalg.inv(precision + power * jnp.eye(len(shift)))
        return cov @ (shift + power * index), cov, jnp.nan

    moments = partial(DAEP, partition=parts.PARTS, mean="moments")
    for name, make, (model, *args) in (
        ("EP", EP, probit),
        ("EP rank 2", EP, half),
        ("EP schools", EP, schools),
        ("EP power 0", partial(EP, power=0.0), logistic),
        ("EP power 2", partial(EP, power=2.0, schedule="parallel"), probit),
        ("EP diagonal", partial(EP, family="diagonal"), logistic),
        ("EP parallel", partial(EP, schedule="parallel"), scale),
        ("EP parallel schools", partial(EP, schedule="parallel", damping=0.7), schools),
        ("EP parallel diagonal", partial(EP, family="diagonal", schedule="parallel"), half),
        ("EP points", partial(EP, projection=few, max_rank=0), logistic),
        ("EP points power 0", partial(EP, projection=few, power=0.0), scale),
        ("EP closed form", partial(EP, projection=ClosedForm(closed)), logistic),
        ("EP labels", EP, (local.labelled,)),
        ("EP local", partial(EP, schedule="parallel"), (local.effects, local.Y)),
        ("EP two local", partial(EP, projection=few), (local.effects, local.Y, 2)),
        ("ADF", ADF, half),
        ("ADF diagonal", partial(ADF, family="diagonal"), logistic),
        ("SEP", partial(StochasticEP, batch_size=2), probit),
        ("SEP schools", StochasticEP, schools),
        ("SEP power 0, diagonal", partial(StochasticEP, power=0.0, family="diagonal"), logistic),
        ("SEP points", partial(StochasticEP, projection=few, max_rank=0), logistic),
        ("AEP", partial(StochasticEP, batch_size=6, step=0.5), half),
        ("DEP", partial(DistributedEP, partition=parts.PARTS), logistic),
        ("DEP NUTS", partial(DistributedEP, partition=2, projection=nuts), logistic),
        ("SDEP", partial(StochasticDistributedEP, partition=2, schedule="serial"), half),
        ("ADEP", partial(StochasticDistributedEP, partition=parts.PARTS, power=0.5), logistic),
        ("DSEP", partial(DSEP, partition=parts.PARTS), logistic),
        ("DSEP rank 2", partial(DSEP, partition=2, step=lambda i: 1 / (i + 2)), half),
        ("DAEP", partial(DAEP, partition=3, family="diagonal"), half),
        ("DAEP moments", moments, logistic),
        ("DAEP moments diagonal", partial(moments, family="diagonal", power=0.5), logistic),
    ):
        engine = make(model)
        first = engine.run(KEY, 6, *args, progress_bar=False)
        numbers = {"first": first, "convergence": engine.convergence(first.state)}
        if isinstance(engine, EP | ADF):
            numbers["evidence"] = engine.log_evidence(first.state, *args)
        numbers["draws"] = engine.guide.sample_posterior(KEY, first.params, sample_shape=(3,))
        if args:
            other = (args[0] * 0.9, *args[1:])
            numbers["update"] = engine.update(first.state, *other)
            again = {"init_state": first.state, "progress_bar": False}
            numbers["second"] = engine.run(KEY, 3, *other, **again)
        yield name, numbers
    x = jnp.linspace(-2, 2, 12)[:, None]
    for method in ("adf", "ep", "sep"):
        pbp = PBP([1, 5, 1], method=method)
        result = pbp.run(KEY, 3, x, jnp.abs(x[:, 0]), progress_bar=False)
        drawn = pbp.guide.sample_posterior(KEY, result.params, sample_shape=(3,))
        predicted = pbp.predict(result.params, x)
        yield f"PBP {method}", {"run": result, "draws": (drawn, predicted)}


def diagnoses():
    """``(name, what diagnose takes)``: an answer of every kind, by fits of a few steps."""
    args = {"model_args": (fits.Y,)}

    def svi_of(guide, steps, model=fits.model, data=(fits.Y,), optim=None, loss=None):
        svi = SVI(model, guide, optim or optax.adam(0.02), loss or Trace_ELBO())
        return svi, svi.run(KEY, steps, *data, progress_bar=False)

    def chains_of(kernel, *data, draws, chains=2, fields=()):
        mcmc = MCMC(
            kernel,
            num_warmup=200,
            num_samples=draws,
            num_chains=chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(KEY, *data, extra_fields=fields)
        return mcmc

    yield "NUTS", chains_of(NUTS(fits.model), fits.Y, draws=300, fields=("num_steps",)), {}
    fields = ("kinetic_temperature", "diverging")
    found = chains_of(SGHMC(fits.model), fits.Y, 10, draws=1000, fields=fields)
    yield "SGHMC, found", found, {}
    given = chains_of(SGLD(fits.model, 1e-3), fits.Y, 10, draws=200)
    yield "SGLD, given", given, {}
    guide = AutoNormal(fits.model)
    svi, early = svi_of(guide, 1000)
    late = svi.run(random.key(5), 2000, fits.Y, progress_bar=False)
    yield "AutoNormal", svi, {"result": late, **args}
    yield "AutoNormal, restarts", svi, {"result": [late, early], "num_moves": 0, **args}
    yield "AutoDelta", (delta := svi_of(AutoDelta(fits.model), 50))[0], {"result": delta[1], **args}
    flow, result = svi_of(AutoRealNVPNormal(fits.model), 300)
    yield "AutoRealNVPNormal", flow, {"result": result, **args}
    yield "no density", *(fit := fits.FITS["implicit guide"]())[:1], {"result": fit[1], **args}
    particles = AutoParticles(fits.model, 30)
    swarm, result = svi_of(particles, 200, data=(fits.Y, 5), loss=SVGD(), optim=optax.adagrad(0.1))
    yield "AutoParticles", swarm, {"result": result, "model_args": (fits.Y, 5)}
    ensemble = chains_of(ParVI(fits.model), fits.Y, draws=4, chains=12)
    yield "ParVI", ensemble, {}
    ep = EP(fits.model)
    yield "EP", ep, {"result": ep.run(KEY, 10, fits.Y, progress_bar=False), **args}
    by_all, params, data, _ = test_target.fitted()
    yield "by proxy", by_all, {"result": params, "model_args": data, "num_samples": 100}
    one = {"z": (drawn.LOCS[0], drawn.SDS[0])}
    modes = drawn.drawing(drawn.two_modes, one)
    yield "another mode", modes, {"result": {}, "model_args": (0.2,)}
    local, svae_args = svae.guide_of(GMMEP()), (svae.Y,)
    coded, result = svi_of(local, 3, svae.mixture, svae_args, optax.sgd(0.01), SVAEELBO())
    yield "SVAE", coded, {"result": result, "model_args": svae_args, "num_samples": 100}


def tables():
    for name, obj, given in diagnoses():
        table = diagnose(obj, rng_key=KEY, **given) if given else diagnose(obj)
        numbers = {
            f"{k} {row.quantity}": np.array(
                [
                    row.value,
                    np.nan if row.error is None else row.error,
                    *(row.ok is x for x in (True, False)),
                ],
                float,
            )
            for k, row in enumerate(table.rows)
        }
        yield name, {**numbers, "text": np.frombuffer(str(table).encode(), np.uint8)}


PARTS = {
    "mcmc": chains_of_kernels,
    "objectives": losses,
    "guides": draws_of_guides,
    "particles": moves_of_particles,
    "svae": structured_guides,
    "ep": engines,
    "diagnostics": tables,
}


def numbers_of(part):
    """name -> array."""
    start, found = time.time(), {}
    for name, tree in PARTS[part]():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = random.key_data(leaf)
            found[f"{part}: {name}{jax.tree_util.keystr(path)}"] = np.asarray(leaf)
    print(f"{part}: {len(found)} arrays, {time.time() - start:.0f} s", flush=True)
    return found


def difference(now, before):
    """The largest one, over the largest number."""
    if now.shape != before.shape:
        return np.inf
    both = np.isnan(now) & np.isnan(before)
    now, before = (np.where(both, 0, x).astype(float) for x in (now, before))
    gap = np.max(np.abs(np.where(now == before, 0, now - before)), initial=0)
    return gap / max(np.max(np.abs(before), initial=0), 1e-30) if np.isfinite(gap) else np.inf


def compare(now, before):
    """Whether all are equal up to rounding; prints what is not."""
    for name in sorted(now.keys() ^ before.keys()):
        print(f"only {'now' if name in now else 'before'}: {name}")
    names = sorted(now.keys() & before.keys())
    others = [n for n in names if not np.array_equal(now[n], before[n], equal_nan=True)]
    worst = sorted(((difference(now[n], before[n]), n) for n in others), reverse=True)
    print(f"{len(names)} arrays, {len(names) - len(others)} equal to the bit")
    for gap, name in worst:
        print(f"{gap:.1e}  {name}{'  <- more than rounding' if gap > ROUNDING else ''}")
    return now.keys() == before.keys() and all(gap <= ROUNDING for gap, _ in worst)


def main(verb, path, *parts):
    warnings.simplefilter("ignore")
    before = dict(np.load(path)) if Path(path).exists() else {}
    same = True
    for part in parts or PARTS:
        now = numbers_of(part)
        if verb == "write":  # what other parts have written stays
            before |= now
            np.savez(path, **before)
        else:
            old = {name: x for name, x in before.items() if name.startswith(f"{part}: ")}
            same = compare(now, old) and same
    sys.exit(not same)


if __name__ == "__main__":
    main(*sys.argv[1:])
