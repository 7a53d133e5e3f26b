"""Structured auto-encoders on a pinwheel and on binary cycles, by expectation propagation and MF.

- `pinwheel`: 500 points on five arms, 15 components in a latent plane, 1,000 steps of batches of
  50. `ELBO` is that of all rows with 16 draws, per row; `purity` is the share of points whose
  cluster's most frequent arm is theirs; `entropy` is the mean of that of q(z) in nats; `alive` is
  the number of components that some point has as its most likely one. The columns are the first
  six seeds, and the last line counts over all of them.
- `cycle`: 800 cycles of three binary variables, networks of seven and three hidden layers, batches
  of 50. `accuracy` is that of the bits, up to a flip of all of them; `pair` is the largest share of
  one pair of neighbours. `random start` has uniform probabilities for each row of a batch.
- `linear`: 1,000 cycles are observed through noise without a network, with known parameters. The
  number is the share of bits for which the largest q(z_i) is right. `exact` enumerates the states,
  and `MF random` starts from random probabilities.
- `step`: milliseconds of a step at B = 50 and, for the pinwheel, B = 400, how often `svi.update`
  was compiled, and the multiple of a plain VAE: the same networks, `Trace_ELBO`, Adam alone.
- `memory`: temporary memory of a compiled step of mean field with at most 10 and 1,000 sweeps.

All seeds of a row run side by side in one program.

    python benchmarks/svae/run.py                        # pinwheel, linear, step and memory
    python benchmarks/svae/run.py --only cycle           # six runs of 5,000 steps for each rule
"""

import argparse
from collections.abc import Callable
import itertools
import time
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax

from numpyro_ext.expfam import NIW, Beta, Dirichlet, GaussianNatural
from numpyro_ext.optim import natural_gradient
from numpyro_ext.svae import (
    GMMEP,
    SVAEELBO,
    CycleEP,
    CycleMeanField,
    GaussianPotential,
    GMMMeanField,
    SVAEGuide,
    decoder_network,
    recognition_network,
)
from numpyro_ext.targets import crosshair, latent_cycle, pinwheel

COMPONENTS, SEEDS = 15, 6
Program = tuple[Callable[..., Any], SVAEGuide]


def expectations_of(rule: Any) -> str:
    return "EP" if type(rule).__name__.endswith("EP") else "MF"


def components(standard: dict[str, Any]) -> tuple[Array, Array]:
    loc, kappa, df, scale_matrix = standard.values()
    shape = jnp.shape(loc)[:-1]
    Sigma = numpyro.sample(
        "Sigma", dist.InverseWishart(df, scale_matrix=scale_matrix).expand(shape)
    )
    return Sigma, numpyro.sample("mu", dist.MultivariateNormal(loc, Sigma / kappa))


def pinwheel_program(rule: Any, **options: Any) -> Program:
    """The model and the guide of experiment 1, with options of the networks."""
    concentration = jnp.full(COMPONENTS, 1 + 0.05 / COMPONENTS)
    standard = {
        "loc": jnp.zeros((COMPONENTS, 2)),
        "kappa": 1.0,
        "df": 3.0,
        "scale_matrix": 3 * jnp.eye(2),
    }
    decoder = decoder_network(2, **options)

    def model(y: Array, B: int | None = None) -> None:
        pi = numpyro.sample("pi", dist.Dirichlet(concentration))
        Sigma, mu = components(standard)
        decode = numpyro.module("decoder", decoder, (2,))
        with numpyro.plate("data", len(y), subsample_size=B) as idx:
            z = numpyro.sample("z", dist.Categorical(pi))
            x = numpyro.sample("x", dist.MultivariateNormal(mu[z], Sigma[z]))
            numpyro.sample("y", dist.Normal(*decode(x)).to_event(1), obs=y[idx])

    prior = {
        "pi": Dirichlet.from_standard(concentration),
        "components": NIW.from_standard(**standard),
    }
    network = recognition_network(2, **options)
    return model, SVAEGuide(prior, network, rule, create_plates=plate_of)


def plate_of(y: Array, B: int | None = None) -> Any:
    return numpyro.plate("data", len(y), subsample_size=B)


def cycle_program(rule: Any, rng_key: Array) -> Program:
    """The model and the guide of experiment 2, whose prior is turned by a random angle."""
    angle = random.uniform(rng_key, maxval=2 * jnp.pi)
    turn = jnp.array([[jnp.cos(angle), jnp.sin(angle)], [-jnp.sin(angle), jnp.cos(angle)]])
    standard = {
        "loc": crosshair()[0] @ turn,
        "kappa": 100.0,
        "df": 102.0,
        "scale_matrix": jnp.eye(2) / 2,
    }
    options = {"residual": "identity", "init_scale": 1.0}
    decoder = decoder_network(2, hidden=(40,) * 3, **options)
    ones = jnp.full(3, 1 + 0.5 / 3)

    def model(y: Array, B: int | None = None) -> None:
        pi = numpyro.sample("pi", dist.Beta(ones, ones))
        Sigma, mu = components(standard)
        decode = numpyro.module("decoder", decoder, (2,))
        with numpyro.plate("data", len(y), subsample_size=B) as idx:
            z = numpyro.sample("z", dist.Bernoulli(pi).to_event(1))
            pair = z, jnp.roll(z, -1, axis=-1)
            x = numpyro.sample("x", dist.MultivariateNormal(mu[pair], Sigma[pair]).to_event(1))
            numpyro.sample("y", dist.Normal(*decode(x)).to_event(2), obs=y[idx])

    prior = {"pi": Beta.from_standard(ones, ones), "components": NIW.from_standard(**standard)}
    network = recognition_network(2, hidden=(40,) * 7, **options)
    return model, SVAEGuide(prior, network, rule, create_plates=plate_of)


def svi_of(program: Program, rho: float) -> SVI:
    model, guide = program
    optim = optax.multi_transform(
        {"natural": natural_gradient(rho, guide.domain), "network": optax.adam(1e-3)},
        guide.param_labels,
    )
    return SVI(model, guide, optim, SVAEELBO("explicit_only"))


def trained(svi: SVI, rng_key: Array, y: Array, steps: int, B: int = 50) -> Any:
    def step(state: Any, _: None) -> tuple[Any, Array]:
        return svi.update(state, y, B)

    state, _ = lax.scan(step, svi.init(rng_key, y, B), length=steps)
    return svi.get_params(state)


def elbo_of(program: Program, rng_key: Array, params: Any, y: Array) -> Array:
    """That of all rows, per row."""
    return -SVAEELBO(num_particles=16).loss(rng_key, params, *program, y) / len(y)


def run_pinwheel(rule: Any, steps: int, seeds: int, **options: Any) -> Array:
    """The mean entropy of q(z) of each seed."""

    @jax.jit
    @jax.vmap
    def run(key: Array) -> Any:
        key_data, key_run = random.split(key)
        y, labels = pinwheel(key_data)
        program = pinwheel_program(rule, **options)
        params = trained(svi_of(program, 0.02), key_run, y, steps)
        logits = program[1].local_posterior(params, y).natural["z"].logits
        return labels, logits, elbo_of(program, key_run, params, y)

    start = time.perf_counter()
    labels, logits, elbo = jax.device_get(run(random.split(random.key(0), seeds)))
    seconds = time.perf_counter() - start
    rows = []
    for label, logit in zip(labels, logits, strict=True):
        table = np.zeros((COMPONENTS, 5))
        np.add.at(table, (logit.argmax(1), label), 1)
        log_r = logit - np.logaddexp.reduce(logit, axis=1)[:, None]
        entropy = -(np.exp(log_r) * log_r).sum(1).mean()
        rows.append((table.max(1).sum() / len(label), entropy, (table.sum(1) > 0).sum()))
    purity, entropy, alive = np.array(rows).T
    name = f"pinwheel {expectations_of(rule)}, {options}"
    print(f"{name} ({steps} steps, {seconds:.0f} s for {seeds} seeds)")
    show("ELBO / N", elbo, ".2f")
    show("purity", purity, ".3f")
    show("entropy", entropy, ".3f")
    show("alive", alive, ".0f")
    good, pure = int((elbo > -6.5).sum()), int((purity > 0.94).sum())
    print(f"  of {seeds} seeds: {good} with ELBO / N > -6.5, {pure} with purity > 0.94")
    return entropy


def run_cycle(rule: Any, steps: int, seeds: int, rule_of_all: Any = None) -> None:
    """:param rule_of_all: the rule for all rows in place of a batch, where they differ."""

    @jax.jit
    @jax.vmap
    def run(key: Array) -> Any:
        key_data, key_turn, key_run = random.split(key, 3)
        data = latent_cycle(key_data)
        params = trained(svi_of(cycle_program(rule, key_turn), 0.0125), key_run, data.y, steps)
        program = cycle_program(rule_of_all or rule, key_turn)
        q = program[1].local_posterior(params, data.y).mean["z"].prob
        return data.z, q, elbo_of(program, key_run, params, data.y)

    start = time.perf_counter()
    z, q, elbo = jax.device_get(run(random.split(random.key(1), seeds)))
    seconds = time.perf_counter() - start
    bits = q > 0.5
    right = (bits == z).mean((1, 2))
    pairs = 2 * bits + np.roll(bits, -1, axis=-1)
    largest = [max(np.bincount(p.ravel(), minlength=4)) / p.size for p in pairs]
    name = f"cycle {expectations_of(rule)}"
    name += " random start" if getattr(rule, "init", None) is not None else ""
    print(f"{name} ({steps} steps, {seconds:.0f} s for {seeds} seeds)", flush=True)
    show("ELBO / N", elbo, ".2f")
    show("accuracy", np.maximum(right, 1 - right), ".3f")
    show("pair", largest, ".2f")


def exact_bits(odds: Array, log_pair: Array) -> Array:
    """Marginals of all states, ``(N, K)``."""
    K = odds.shape[-1]
    states = jnp.array(list(itertools.product((0, 1), repeat=K)))
    after = jnp.roll(states, -1, axis=1)
    log_p = states @ odds + sum(log_pair[:, i, states[:, i], after[:, i]] for i in range(K))
    return jax.nn.softmax(log_p, axis=-1) @ states


def run_linear() -> None:
    key_data, key_noise, key_start = random.split(random.key(2), 3)
    data = latent_cycle(key_data, num_data=1000)
    loc, covariance = crosshair()
    # The table is of equal probabilities: z and x are drawn again.
    key_z, key_x = random.split(key_data)
    z = random.bernoulli(key_z, 0.5, data.z.shape).astype(int)
    pair = z, jnp.roll(z, -1, axis=1)
    scale = jnp.sqrt(jnp.diagonal(covariance, axis1=-2, axis2=-1))
    x = loc[pair] + scale[pair] * random.normal(key_x, data.x.shape)
    known = {
        "pi": Beta.statistics(jnp.full(3, 0.5)),
        "components": NIW.statistics((loc, covariance)),
    }
    start = random.uniform(key_start, z.shape)
    rules = {
        "EP": CycleEP(),
        "MF": CycleMeanField(max_iter=1000),
        "MF random": CycleMeanField(np.asarray(start), max_iter=1000),
    }
    print("linear noise: share of the bits that are right")
    print("sigma  exact     " + "  ".join(f"{name:9}" for name in rules) + "  EP = exact")
    for sigma in (0.05, 0.3, 0.5, 1.0, 2.0):
        y = x + sigma * random.normal(key_noise, x.shape)
        precision = jnp.full_like(y, sigma**-2)
        psi = GaussianPotential.from_diagonal(precision * y, precision)
        mean = known["components"]
        eta = GaussianNatural(mean.precision_loc, mean.neg_half_precision)
        exact = exact_bits(jnp.zeros(3), psi.log_partition_ratio(eta)) > 0.5
        found = {n: jax.jit(r.infer)(known, psi).mean["z"].prob > 0.5 for n, r in rules.items()}
        shares = [float((bits == z).mean()) for bits in (exact, *found.values())]
        same = int((found["EP"] == exact).sum())
        line = "  ".join(f"{share:<9.3f}" for share in shares)
        print(f"{sigma:<6} {line} {same} of {exact.size}")


def plain_vae() -> SVI:
    """The networks of the pinwheel around a standard normal, as NumPyro has it."""
    decoder, recognition = decoder_network(2), recognition_network(2)

    def model(y: Array, B: int | None = None) -> None:
        decode = numpyro.module("decoder", decoder, (2,))
        with plate_of(y, B) as idx:
            x = numpyro.sample("x", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
            numpyro.sample("y", dist.Normal(*decode(x)).to_event(1), obs=y[idx])

    def guide(y: Array, B: int | None = None) -> None:
        recognise = numpyro.module("recognition", recognition, (2,))
        with plate_of(y, B) as idx:
            psi = recognise(y[idx])
            precision = 1 - 2 * jnp.diagonal(psi.W, axis1=-2, axis2=-1)
            x = dist.Normal(psi.h / precision, precision**-0.5)
            numpyro.sample("x", x.to_event(1))

    return SVI(model, guide, optax.adam(1e-3), Trace_ELBO())


def run_steps() -> None:
    y, y_cycle = pinwheel(random.key(0))[0], latent_cycle(random.key(0)).y
    runs = {}
    for name, svi, data, sizes in (
        ("plain VAE", plain_vae(), y, (50, 400)),
        ("pinwheel EP", svi_of(pinwheel_program(GMMEP()), 0.02), y, (50, 400)),
        ("pinwheel MF", svi_of(pinwheel_program(GMMMeanField()), 0.02), y, (50, 400)),
        ("cycle EP", svi_of(cycle_program(CycleEP(), random.key(0)), 0.02), y_cycle, (50,)),
        ("cycle MF", svi_of(cycle_program(CycleMeanField(), random.key(0)), 0.02), y_cycle, (50,)),
    ):
        for B in sizes:
            update = jax.jit(svi.update, static_argnums=2)
            runs[name, B] = update, svi.init(random.key(0), data, B), data
    best = dict.fromkeys(runs, np.inf)
    # The first round compiles; the rules take turns, so that a busy machine slows down all of them.
    for _ in range(11):
        for case, (update, state, data) in runs.items():
            start = time.perf_counter()
            for _ in range(20):
                state, _ = update(state, data, case[1])
            jax.block_until_ready(state)
            best[case] = min(best[case], (time.perf_counter() - start) / 20)
            runs[case] = update, state, data
    print("step         B    milliseconds  of B = 50  of a plain VAE  compiled")
    for (name, B), seconds in best.items():
        of_50 = f"{seconds / best[name, 50]:.1f}"
        of_plain = "" if "cycle" in name else f"{seconds / best['plain VAE', B]:.1f}"
        count = runs[name, B][0]._cache_size()
        print(f"{name:12} {B:<4} {1000 * seconds:<13.2f} {of_50:<10} {of_plain:<15} {count}")


def run_memory() -> None:
    y = pinwheel(random.key(0))[0]
    for max_iter in (10, 1000):
        svi = svi_of(pinwheel_program(GMMMeanField(max_iter=max_iter)), 0.02)
        state = svi.init(random.key(0), y, 50)
        compiled = jax.jit(svi.update, static_argnums=2).lower(state, y, 50).compile()
        size = compiled.memory_analysis().temp_size_in_bytes
        print(f"memory of a step of mean field, at most {max_iter} sweeps: {size} bytes")


def show(name: str, values: Any, form: str) -> None:
    print(f"  {name:9}" + " ".join(f"{value:{form}}".rjust(7) for value in values[:SEEDS]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    rows = ("pinwheel", "cycle", "linear", "step", "memory")
    parser.add_argument("--only", choices=rows)
    parser.add_argument("--steps", type=int, default=None, help="1,000 and 5,000 by default")
    parser.add_argument("--seeds", type=int, default=None, help="24 and 6 by default")
    parser.add_argument("--residual", default="orthogonal", help="of the pinwheel's networks")
    parser.add_argument("--init-scale", type=float, default=1e-2, help="of the same")
    args = parser.parse_args()
    chosen = [args.only] if args.only else [row for row in rows if row != "cycle"]
    if "pinwheel" in chosen:
        options = {"residual": args.residual, "init_scale": args.init_scale}
        ep, mf = (
            run_pinwheel(rule, args.steps or 1000, args.seeds or 24, **options)
            for rule in (GMMEP(), GMMMeanField())
        )
        print(f"larger entropy with EP than with MF: {(ep > mf).sum()} of {ep.size} seeds")
    if "cycle" in chosen:
        steps, seeds = args.steps or 5000, args.seeds or SEEDS
        run_cycle(CycleEP(), steps, seeds)
        run_cycle(CycleMeanField(), steps, seeds)
        start = np.asarray(random.uniform(random.key(2), (800, 3)))
        run_cycle(CycleMeanField(start[:50]), steps, seeds, CycleMeanField(start))
    if "linear" in chosen:
        run_linear()
    if "step" in chosen:
        run_steps()
    if "memory" in chosen:
        run_memory()


if __name__ == "__main__":
    main()
