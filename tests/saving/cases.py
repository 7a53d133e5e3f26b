"""Fits that a file has to hold: one table, by the constructors of the contract suites.

A case makes a method from nothing, runs it, and goes on from what it has; a process that has not
seen the first run does the last with what it loads. ``python -m tests.saving.cases load DIR
NAME ...`` is that process.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
import sys
from typing import Any
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoDAIS,
    AutoDelta,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
import optax

from numpyro_ext.ep import (
    ADF,
    DAEP,
    DSEP,
    EP,
    PBP,
    DistributedEP,
    StochasticDistributedEP,
    StochasticEP,
)
from numpyro_ext.guides import (
    AutoDropout,
    AutoMarkov,
    AutoMixtureNormal,
    AutoRealNVPNormal,
    with_critic,
)
from numpyro_ext.mcmc import SGHMC, SGLD
from numpyro_ext.objectives import DensityRatioELBO
from numpyro_ext.optim import ivon
from numpyro_ext.particles import PSGHMC, SVGD, AutoParticles, Blob, ParVI
from numpyro_ext.saving import load, save
from numpyro_ext.saving.container import write
from tests.ep.models import LOGISTIC, Y_SCALE, logistic, unknown_scale
from tests.guides import test_amortized as amortized
from tests.guides import test_contract as guides
from tests.mcmc import test_contract as kernels
from tests.mcmc.models import linear, linear_data, linear_full
from tests.particles import test_contract as particles
from tests.svae.models import RULES, Y
from tests.svae.models import guide_of as structured
from tests.svae.models import mixture as structured_model
from tests.turned import ANGLES, turned

STEPS = 3
X = jnp.asarray(np.linspace(-1.0, 2.0, 20)[:, None])


@dataclass
class Case:
    """How a method is made, run, and goes on to a tree of numbers."""

    make: Callable[[], Any]
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def run(self, method: Any) -> Any:
        if isinstance(method, MCMC):
            method.run(random.key(0), *self.args, **self.kwargs)
            return None
        return method.run(random.key(0), STEPS, *self.args, progress_bar=False, **self.kwargs)

    def go_on(self, method: Any, result: Any) -> Any:
        if isinstance(method, MCMC):
            method.post_warmup_state = method.last_state
            method.run(random.key(3), *self.args, **self.kwargs)
            return method.get_samples(), method.get_extra_fields()
        more = method.run(
            random.key(3),
            STEPS,
            *self.args,
            init_state=result.state,
            progress_bar=False,
            **self.kwargs,
        )
        draws = ()
        if hasattr(method.guide, "sample_posterior"):
            draws = method.guide.sample_posterior(
                random.key(4), result.params, *self.args, sample_shape=(3,), **self.kwargs
            )
        return more.params, more.losses, draws


def svi(guide: Any, loss: Any = None, optim: Any = None, model: Any = guides.model) -> SVI:
    return SVI(model, guide(), optim or optax.adam(1e-2), loss or Trace_ELBO())


def numpyros(cls: Any, **options: Any) -> Case:
    return Case(lambda: svi(lambda: cls(guides.model, **options)), (guides.X, guides.Y))


def small(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.5, 2.0).expand([3]).to_event(1))
    with numpyro.plate("rows", len(x)) as i:
        mean = w[0] + x[i, 0] * w[1] + w[2]
        numpyro.sample("y", dist.Normal(mean, 0.5), obs=None if y is None else y[i])


def matrix(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
    with numpyro.plate("rows", len(x)) as i:
        mean = jnp.tanh(x[i] @ w).sum(-1)
        numpyro.sample("y", dist.Normal(mean, 0.5), obs=None if y is None else y[i])


SMALL = X, jnp.sin(3 * X[:, 0])
AT_THE_CUT = jnp.pi, jnp.asarray(ANGLES)  # a posterior around pi, where NumPyro cuts the circle


def searched(cls: Any, **options: Any) -> Case:
    """A guide that begins at the modes, or particles there."""
    return Case(lambda: svi(lambda: cls(small, **options), model=small), SMALL)


def flax_network(x, y=None):
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(1)(linen.tanh(linen.Dense(4)(x)))

    from numpyro.contrib.module import flax_module

    net = flax_module("net", Net(), input_shape=(1,))
    sd = numpyro.sample("sd", dist.LogNormal(-1.0, 0.5))
    with numpyro.plate("rows", len(x)) as i:
        numpyro.sample("y", dist.Normal(net(x[i])[..., 0], sd), obs=None if y is None else y[i])


def equinox_network(x, y=None):
    import equinox
    from numpyro.contrib.module import eqx_module

    net = eqx_module("net", equinox.nn.MLP(1, 1, 4, 1, key=random.key(0)))
    sd = numpyro.sample("sd", dist.LogNormal(-1.0, 0.5))
    with numpyro.plate("rows", len(x)) as i:
        mean = jax.vmap(net)(x[i])[..., 0]
        numpyro.sample("y", dist.Normal(mean, sd), obs=None if y is None else y[i])


def in_parts() -> AutoGuideList:
    guide = AutoGuideList(small)
    guide.append(AutoNormal(small))
    return guide


def chains(kernel: Any, num_chains: int = 1, **options: Any) -> MCMC:
    return MCMC(
        kernel,
        num_warmup=kernels.WARMUP,
        num_samples=6,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
        **options,
    )


def ensemble(field: Any, optim: Any = None) -> MCMC:
    model = partial(particles.model, subsample_size=20)
    return chains(ParVI(model, field, optim, init_from=None), 8)


def day_after_day() -> EP:
    """An engine whose prior is the posterior of another."""
    first = EP(unknown_scale)
    fit = first.run(random.key(8), 5, Y_SCALE, progress_bar=False)
    return EP(unknown_scale, prior=(first, fit))


CASES = {
    **{
        name: Case(partial(lambda name: guides.new_svi(name)[1], name), (guides.X, guides.Y))
        for name in guides.GUIDES
    },
    **{
        cls.__name__: numpyros(cls)
        for cls in (AutoNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal, AutoDelta)
    },
    "AutoLaplaceApproximation": searched(AutoLaplaceApproximation),
    "AutoDAIS": searched(AutoDAIS, K=2),
    "parts": Case(lambda: svi(in_parts, model=small), SMALL),
    "RealNVP at the mode": searched(AutoRealNVPNormal),
    "mixture at the modes": searched(AutoMixtureNormal, num_components=2),
    "Markov at the mode": searched(AutoMarkov),
    "particles at the mode": Case(
        lambda: svi(lambda: AutoParticles(small, 10), SVGD(), model=small), SMALL
    ),
    "AutoDropout": Case(lambda: svi(lambda: AutoDropout(matrix), model=matrix), SMALL),
    "FlowGuide": Case(
        lambda: svi(
            lambda: amortized.flow(
                amortized.mixed,
                (amortized.net_init, amortized.net_apply),
                num_flows=1,
                global_guide=AutoMultivariateNormal,
            ),
            model=amortized.mixed,
        ),
        (amortized.X[:4],),
    ),
    "critic": Case(
        lambda: svi(
            lambda: with_critic(guides.GUIDES["implicit"](guides.model)), DensityRatioELBO()
        ),
        (guides.X, guides.Y),
    ),
    "IVON": Case(lambda: svi(lambda: AutoNormal(small), optim=ivon(0.1), model=small), SMALL),
    "Adam of NumPyro": Case(
        lambda: svi(lambda: AutoNormal(small), optim=numpyro.optim.Adam(0.01), model=small), SMALL
    ),
    "flax": Case(lambda: svi(lambda: AutoNormal(flax_network), model=flax_network), SMALL),
    "equinox": Case(lambda: svi(lambda: AutoNormal(equinox_network), model=equinox_network), SMALL),
    "structured": Case(
        lambda: svi(lambda: structured(RULES["mixture"]), model=structured_model), (Y,)
    ),
    **{
        f"kernel {name}": Case(
            partial(lambda name: chains(kernels.kernel_of(name)), name), linear_data()
        )
        for name in kernels.KERNELS
    },
    "kernel SGHMC, settings found": Case(lambda: chains(SGHMC(linear), 2), linear_data()),
    "kernel SGLD, settings found": Case(lambda: chains(SGLD(linear)), linear_data()),
    "flow of an angle": Case(
        lambda: svi(lambda: AutoRealNVPNormal(turned), model=turned), AT_THE_CUT
    ),
    "kernel of an angle": Case(lambda: chains(SGHMC(turned)), AT_THE_CUT),
    "ensemble of an angle": Case(
        lambda: chains(ParVI(turned, Blob(), partial(optax.adagrad, 0.1)), 8), AT_THE_CUT
    ),
    "kernel NUTS": Case(lambda: chains(NUTS(linear_full), 2), linear_data()),
    **{
        f"ensemble {make.values[0].__name__}": Case(
            partial(lambda make: ensemble(make(), partial(optax.adagrad, 0.1)), make.values[0]),
            (particles.INPUTS, particles.TARGETS),
        )
        for make in particles.FIELDS
    },
    "ensemble PSGHMC": Case(
        lambda: ensemble(Blob(), PSGHMC(0.01)), (particles.INPUTS, particles.TARGETS)
    ),
    "engine EP": Case(lambda: EP(unknown_scale), (Y_SCALE,)),
    "engine EP, day after day": Case(day_after_day, (Y_SCALE,)),
    "engine ADF": Case(lambda: ADF(logistic), LOGISTIC),
    "engine StochasticEP": Case(lambda: StochasticEP(logistic), LOGISTIC),
    "engine DistributedEP": Case(lambda: DistributedEP(logistic, 2), LOGISTIC),
    "engine StochasticDistributedEP": Case(lambda: StochasticDistributedEP(logistic, 2), LOGISTIC),
    "engine DSEP": Case(lambda: DSEP(logistic, 2), LOGISTIC),
    "engine DAEP": Case(lambda: DAEP(logistic, 2, family="diagonal"), LOGISTIC),
    "engine PBP": Case(lambda: PBP([1, 5, 1], method="sep"), SMALL),
}


def write_case(folder: Path, name: str) -> Any:
    """Run a case, save it, and return what it goes on to."""
    case = CASES[name]
    method = case.make()
    result = case.run(method)
    save(folder / f"{name}.npz", method, result)
    return case.go_on(method, result)


def load_case(folder: Path, name: str) -> Any:
    case = CASES[name]
    method = case.make()
    result = load(folder / f"{name}.npz", method, *case.args, **case.kwargs)
    return case.go_on(method, result)


if __name__ == "__main__":
    task, folder, *names = sys.argv[1:]
    warnings.simplefilter("ignore")  # of so few steps
    for name in names:
        run = {"write": write_case, "load": load_case}[task]
        leaves = jax.tree.leaves(run(Path(folder), name))
        write(Path(folder) / f"{name}, {task}.npz", leaves, "")
