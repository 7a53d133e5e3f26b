"""Cost, memory and gradient noise of the objectives, compared with those of NumPyro.

There are six tables: the time of a step of ``VRELBO``, ``RenyiELBO`` and ``Trace_ELBO`` (alone:
``--only numpyro``); that of ``CurvatureELBO`` and of ``ivon`` on a network (alone: ``--only
curvature``); the time of the four gradients of ``VRELBO`` on a VAE; the compiled memory with
``vectorize_particles=False``; and the standard deviation of the four gradient estimators; and what
their noise costs on several guides (alone: ``--only defaults``), which decides the default of
``VRELBO``. ``--only row_effects`` compares, by quadrature, the places in which a recognition
network can stand in an energy of global latents.
"""

import argparse
from collections.abc import Callable
from functools import partial
import time
from typing import Any

import jax
from jax import Array, lax, random
from jax.example_libraries import stax
import jax.flatten_util
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import ELBO, SVI, RenyiELBO, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoIAFNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
import optax

from numpyro_ext.guides import (
    AutoMAFNormal,
    AutoRealNVPNormal,
    AutoSplineNormal,
    init_to_fan_in,
)
from numpyro_ext.objectives import IWELBO, VRELBO, BBAlphaELBO, CurvatureELBO, NestedVRELBO
from numpyro_ext.optim import ivon
from numpyro_ext.targets import bayesian_mlp

CURVATURES = ("empirical_fisher", "fisher", "squared_gradient", "reparam", "hessian")
GRADIENTS = ("standard", "single", "stl", "dreg")
# Each objective of the first table is compiled so often: where buffers lie makes some percent.
COPIES = 5


def regression(x: Array, y: Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def vae(pixels: int, latent: int = 50, width: int = 200) -> tuple[Callable[..., None], ...]:
    """784-200-200-50 and back, tanh, Bernoulli."""

    def hidden() -> tuple[Any, ...]:
        return stax.Dense(width), stax.Tanh, stax.Dense(width), stax.Tanh

    decoder = stax.serial(*hidden(), stax.Dense(pixels))
    heads = stax.parallel(stax.Dense(latent), stax.Dense(latent))
    encoder = stax.serial(*hidden(), stax.FanOut(2), heads)

    def model(images: Array) -> None:
        decode = numpyro.module("decoder", decoder, (latent,))
        with numpyro.plate("images", len(images)):
            z = numpyro.sample("z", dist.Normal().expand([latent]).to_event(1))
            numpyro.sample("x", dist.Bernoulli(logits=decode(z)).to_event(1), obs=images)

    def guide(images: Array) -> None:
        loc, log_scale = numpyro.module("encoder", encoder, (pixels,))(images)
        with numpyro.plate("images", len(images)):
            numpyro.sample("z", dist.Normal(loc, jnp.exp(log_scale)).to_event(1))

    return model, guide


def stepper(
    loss: ELBO, model: Any, guide: Any, steps: int, *data: Array, optim: Any = None
) -> Callable[[], Any]:
    """``steps`` updates of ``SVI`` in one compiled call, of Adam if there is no ``optim``."""
    svi = SVI(model, guide, optax.adam(1e-3) if optim is None else optim, loss)
    state = svi.init(random.key(1), *data)

    @jax.jit
    def run(state: Any, *data: Array) -> Any:
        return lax.scan(lambda state, _: svi.update(state, *data), state, length=steps)

    return lambda: run(state, *data)


def caller(loss: ELBO, model: Any, guide: Any, steps: int, *data: Array) -> Callable[[], Any]:
    """The same, with a call for each update."""
    svi = SVI(model, guide, optax.adam(1e-3), loss)
    first, update = svi.init(random.key(1), *data), jax.jit(svi.update)

    def run() -> Any:
        state = first
        for _ in range(steps):
            state, loss = update(state, *data)
        return state, loss

    return run


def shortest(repeats: int, *runs: Callable[[], Any]) -> list[float]:
    """Shortest seconds of each run; the runs are interleaved, so that all have the same load."""
    for run in runs:
        jax.block_until_ready(run())
    times = [[] for _ in runs]
    for _ in range(repeats):
        for seconds, run in zip(times, runs, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds.append(time.perf_counter() - start)
    return [min(seconds) for seconds in times]


def against_numpyro(repeats: int, steps: int) -> None:
    print("\n## A step against NumPyro's objectives (logistic regression, 500 rows, d columns)\n")
    print("In a compiled loop, or in one of Python with a call for each step:\n")
    print(
        "| loop | d | K | Trace_ELBO, us | RenyiELBO, us | VRELBO, us | / RenyiELBO | / Trace_ELBO"
        " | others, us |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    key_x, key_y = random.split(random.key(0))
    sizes = ((20, 1), (20, 10), (20, 50), (500, 10), (500, 100))
    cases = [("compiled", *size) for size in sizes] + [("Python", *size) for size in sizes[:3:2]]
    for loop, d, num in cases:
        x = random.normal(key_x, (500, d))
        y = random.bernoulli(key_y, jax.nn.sigmoid(x[:, 0])).astype(float)
        # Many in a call of a loop, which itself takes longer than a step.
        updates = max(500, int(steps * min(10, 200 / (d * num)))) if loop == "compiled" else 300
        run = {"compiled": stepper, "Python": caller}[loop]
        losses = [
            Trace_ELBO(num),
            RenyiELBO(0.5, num),
            VRELBO(0.5, num),
            IWELBO(num),
            BBAlphaELBO(0.5, num),
        ]
        runs = [
            run(loss, regression, AutoNormal(regression), updates, x, y) for loss in COPIES * losses
        ]
        seconds = np.reshape(shortest(repeats, *runs), (COPIES, len(losses)))
        t = 1e6 * np.median(seconds, axis=0) / updates
        others = f"IWELBO {t[3]:.1f}, BBAlphaELBO {t[4]:.1f}"
        print(
            f"| {loop} | {d} | {num} | {t[0]:.1f} | {t[1]:.1f} | {t[2]:.1f} | {t[2] / t[1]:.2f}"
            f" | {t[2] / t[0]:.2f} | {others} |"
        )


def curvatures_of_a_network(repeats: int, steps: int) -> None:
    inputs, hidden, num_data, batch = 13, 50, 500, 32
    weights = (inputs + 1) * hidden + hidden + 1
    print(
        f"\n## A step of CurvatureELBO and of ivon (network {inputs}-{hidden}-1, {weights} weights,"
        f" batch {batch} of {num_data})\n"
    )
    print("| loss | optimiser | K = 1, us | / Trace_ELBO | K = 4, us | / Trace_ELBO |")
    print("|---|---|---|---|---|---|")
    key_x, key_y = random.split(random.key(0))
    X = random.normal(key_x, (num_data, inputs))
    y = jnp.sin(X[:, 0]) + 0.1 * random.normal(key_y, (num_data,))

    def model(X: Array, y: Array) -> None:
        bayesian_mlp(X, y, hidden=(hidden,), subsample_size=batch)

    rows = [("Trace_ELBO", "adam"), ("Trace_ELBO", "ivon")]
    rows += [(curvature, "ivon") for curvature in CURVATURES]
    columns = []
    for num in (1, 4):
        times = []
        for names in (rows[:-1], rows[-1:]):
            # The Hessian has so many products with vectors that some of its steps are enough.
            updates = steps if len(names) > 1 else max(1, steps // 50)
            runs = []
            for loss, optim in names:
                elbo = Trace_ELBO(num) if loss == "Trace_ELBO" else CurvatureELBO(loss, num)
                rule = ivon(1e-3) if optim == "ivon" else None
                guide = AutoNormal(model, init_loc_fn=init_to_fan_in(), init_scale=0.02)
                runs.append(stepper(elbo, model, guide, updates, X, y, optim=rule))
            times += [1e6 * t / updates for t in shortest(repeats, *runs)]
        columns.append([(t, t / times[0]) for t in times])
    for (loss, optim), *cells in zip(rows, *columns, strict=True):
        name = loss if loss == "Trace_ELBO" else f'CurvatureELBO("{loss}")'
        found = " | ".join(f"{t:,.0f} | {ratio:.2f}" for t, ratio in cells)
        print(f"| {name} | {optim} | {found} |")


def gradients_of_a_vae(repeats: int, num: int) -> None:
    print(
        f"\n## A step of the four gradients (VAE 784-200-200-50 and back, batch 100, K = {num})\n"
    )
    print("In a compiled loop of 10 steps, and compiled alone:\n")
    print("| gradient | in a loop, ms | standard / this | alone, ms | standard / this |")
    print("|---|---|---|---|---|")
    model, guide = vae(784)
    images = random.bernoulli(random.key(0), 0.3, (100, 784)).astype(float)
    losses = [VRELBO(0.0, num, gradient=g) for g in GRADIENTS]
    columns = []
    for steps in (10, 1):
        runs = (stepper(loss, model, guide, steps, images) for loss in losses)
        t = [1e3 * seconds / steps for seconds in shortest(repeats, *runs)]
        columns.append([f"{x:.0f} | {t[0] / x:.2f}" for x in t])
    for gradient, *cells in zip(GRADIENTS, *columns, strict=True):
        print(f"| {gradient} | {' | '.join(cells)} |")


def memory() -> None:
    print("\n## Temporary memory of the compiled gradient, KiB (the same VAE, batch 20)\n")
    print("| `vectorize_particles` | K = 4 | K = 256 | ratio |")
    print("|---|---|---|---|")
    model, guide = vae(784)
    images = jnp.zeros((20, 784))
    svi = SVI(model, guide, optax.adam(1e-3), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0), images))
    for vectorize in (True, False):
        used = []
        for num in (4, 256):
            loss = VRELBO(0.5, num, vectorize_particles=vectorize)
            gradient = jax.jit(
                jax.grad(lambda p, loss=loss: loss.loss(random.key(1), p, model, guide, images))
            )
            used.append(
                gradient.lower(params).compile().memory_analysis().temp_size_in_bytes / 1024
            )
        print(f"| {vectorize} | {used[0]:,.0f} | {used[1]:,.0f} | {used[1] / used[0]:.2f} |")


def gradient_noise(num_keys: int, num: int) -> None:
    print(
        "\n## Standard deviation of the gradient in the guide's mean and scale"
        f" (K = {num}, {num_keys:,} keys)\n"
    )
    print("z ~ N(0, 1), x ~ N(z, 1), x = 1.5; posterior N(0.75, 0.707)\n")
    print("| guide | alpha | " + " | ".join(GRADIENTS) + " |")
    print("|---|---|" + "---|" * len(GRADIENTS))

    def model() -> None:
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(z, 1.0), obs=1.5)

    def guide() -> None:
        s = numpyro.param("s", 1.0, constraint=constraints.positive)
        numpyro.sample("z", dist.Normal(numpyro.param("m", 0.0), s))

    keys = random.split(random.key(0), num_keys)
    for m, s in ((0.76, 0.72), (0.0, 1.0)):
        for alpha in (0.0, 0.5, -1.0):
            cells = []
            for gradient in GRADIENTS:
                loss = VRELBO(alpha, num, gradient=gradient)

                def draw(key: Array, loss: ELBO = loss, m: float = m, s: float = s) -> Any:
                    params = {"m": jnp.array(m), "s": jnp.array(s)}
                    return jax.grad(lambda p: loss.loss(key, p, model, guide))(params)

                g = jax.jit(jax.vmap(draw))(keys)
                cells.append(f"{g['m'].std():.4f}, {g['s'].std():.4f}")
            print(f"| N({m:g}, {s:g}) | {alpha:g} | " + " | ".join(cells) + " |")


def defaults(repeats: int) -> None:
    print("\n## Noise at equal time: seconds times variance, over those of the standard gradient\n")
    print(
        "Logistic regression of 500 rows and 20 columns, posterior normal; and Neal's funnel, four"
        " latent numbers. The ratio of variances is the median over the parameters, first where the"
        " guide begins, then after 2,000 steps.\n"
    )
    print("| model | guide | K | alpha | gradient | time | at first | at the end |")
    print("|---|---|---|---|---|---|---|---|")
    key_x, key_y = random.split(random.key(0))
    x = random.normal(key_x, (500, 20))
    y = random.bernoulli(key_y, jax.nn.sigmoid(x[:, 0])).astype(float)

    def funnel() -> None:
        v = numpyro.sample("v", dist.Normal(0.0, 1.5))
        numpyro.sample("x", dist.Normal(0.0, jnp.exp(v / 2)).expand([3]).to_event(1))

    kinds: dict[str, Any] = {
        "AutoNormal": AutoNormal,
        "AutoMultivariateNormal": AutoMultivariateNormal,
        "AutoIAFNormal": AutoIAFNormal,
        "AutoRealNVPNormal": AutoRealNVPNormal,
        "AutoMAFNormal": AutoMAFNormal,
        "AutoSplineNormal": AutoSplineNormal,
    }
    for model, data in ((regression, (x, y)), (funnel, ())):
        for name, kind in kinds.items():
            guide = kind(model)
            svi = SVI(model, guide, optax.adam(5e-3), VRELBO(1.0, 4, gradient="standard"))
            first = svi.init(random.key(1), *data)
            last = svi.run(random.key(1), 2000, *data, progress_bar=False, init_state=first).params
            places = svi.get_params(first), last
            for alpha, other in ((1.0, "stl"), (0.5, "dreg"), (0.0, "dreg")):
                for num in (1, 10) if alpha == 1 else (10,):
                    losses = [VRELBO(alpha, num, gradient=g) for g in ("standard", other)]
                    runs = [_noise(loss, model, guide, data) for loss in losses]
                    seconds = shortest(repeats, *(partial(run, last) for run in runs))
                    time = seconds[1] / seconds[0]
                    cells = []
                    for params in places:
                        old, new = (jax.flatten_util.ravel_pytree(run(params))[0] for run in runs)
                        cells.append(f"{time * float(jnp.median((new / old)[old > 0])):.2g}")
                    print(
                        f"| {model.__name__} | {name} | {num} | {alpha:g} | {other} | {time:.2f} |"
                        f" {' | '.join(cells)} |",
                        flush=True,
                    )


def _noise(loss: ELBO, model: Any, guide: Any, data: Any) -> Callable[[Any], Any]:
    """The variances of the gradient over 200 keys."""

    @jax.jit
    def run(params: Any) -> Any:
        def one(key: Array) -> Any:
            return jax.grad(lambda params: loss.loss(key, params, model, guide, *data))(params)

        return jax.tree.map(lambda g: jnp.var(g, 0), lax.map(one, random.split(random.key(2), 200)))

    return run


X = jnp.array([-1.2, 0.3, 0.9, 1.4, 3.1])
NODES, WEIGHTS = (jnp.asarray(x) for x in np.polynomial.hermite_e.hermegauss(60))
LOG_WEIGHTS = jnp.log(WEIGHTS / WEIGHTS.sum())


def log_normal(x: Array, loc: Any, scale: Any) -> Array:
    return dist.Normal(loc, scale).log_prob(x)


def mean_of_power(log_w: Array, order: float, axis: int, log_weights: Array) -> Array:
    """``log E[w^order] / order`` of values at the nodes."""
    shape = [1] * log_w.ndim
    shape[axis] = -1
    log_p = log_weights.reshape(shape)
    if order == 0:
        return jnp.sum(jnp.exp(log_p) * log_w, axis)
    return logsumexp(order * log_w + log_p, axis) / order


def energy(params: dict[str, Array], outer: float, inner: float) -> Array:
    """(1 / outer) sum_n log E_theta [(E_z [w_n^inner]^(1 / inner) (p0 / q)^(1 / N))^outer]."""
    theta = params["m"] + params["s"] * NODES
    loc, scale = params["a"] * X + params["b"], params["v"]
    z = loc[:, None] + scale * NODES
    log_w = log_normal(z, theta[:, None, None], 1.0) + log_normal(X[:, None], z, 1.0)
    log_w = log_w - log_normal(z, loc[:, None], scale)  # (theta, rows, z)
    rows = mean_of_power(log_w, inner, 2, LOG_WEIGHTS)
    share = (log_normal(theta, 0.0, 2.0) - log_normal(theta, params["m"], params["s"])) / len(X)
    return jnp.sum(mean_of_power(rows + share[:, None], outer, 0, LOG_WEIGHTS))


def row_effects() -> None:
    print("\n## Where a recognition network stands\n")
    print(
        "theta ~ N(0, 4), z_n ~ N(theta, 1), x_n ~ N(z_n, 1), n = 1 to 5;"
        " q(z_n) = N(a x_n + b, v^2)\n"
    )
    covariance = 4 * jnp.ones((5, 5)) + 2 * jnp.eye(5)
    evidence = dist.MultivariateNormal(0.0, covariance).log_prob(X)
    precision = 1 / 4 + 5 / 2
    sd = precision**-0.5
    print(
        f"exact: log evidence {evidence:.4f}, theta {jnp.sum(X) / 2 / precision:.4f} +- {sd:.4f}\n"
    )
    print("| power of theta | power of z | which | energy | mean of theta | sd of theta | v |")
    print("|---|---|---|---|---|---|---|")
    names = {
        (0.0, 0.0): "`Trace_ELBO`",
        (0.0, 0.5): "`NestedVRELBO(0.5)`: power EP inside VI",
        (0.5, 0.0): "VI inside power EP",
        (0.5, 0.5): "`BBAlphaELBO(0.5)`: a network inside power EP",
        (0.5, 1.0): "power EP, z integrated out",
    }
    start = {"m": 0.5, "s": 0.7, "a": 0.4, "b": 0.2, "v": 0.6}
    at_start = {name: jnp.array(value) for name, value in start.items()}
    found = {}
    for orders, name in names.items():
        adam = optax.adam(optax.cosine_decay_schedule(0.02, 3000))

        def step(carry: Any, _: None, orders: Any = orders, adam: Any = adam) -> Any:
            params, state = carry
            grads = jax.grad(lambda p: -energy(p, *orders))(params)
            updates, state = adam.update(grads, state)
            return (optax.apply_updates(params, updates), state), None

        run = jax.jit(lambda c, step=step: lax.scan(step, c, length=3000)[0])
        params, _ = run((at_start, adam.init(at_start)))
        found[orders] = params
        m, s, v = (float(params[n]) for n in ("m", "s", "v"))
        width = "-" if orders[1] == 1 else f"{v:.3f}"
        cells = f"{energy(params, *orders):.4f} | {m:.4f} | {s:.4f} | {width}"
        print(f"| {orders[0]:g} | {orders[1]:g} | {name} | {cells} |")

    def model(x: Array) -> None:
        theta = numpyro.sample("theta", dist.Normal(0.0, 2.0))
        with numpyro.plate("rows", len(x)):
            z = numpyro.sample("z", dist.Normal(theta, 1.0))
            numpyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x: Array) -> None:
        m, s, a, b, v = (numpyro.param(name, start[name]) for name in "msabv")
        numpyro.sample("theta", dist.Normal(m, s))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("z", dist.Normal(a * x + b, v))

    at = found[(0.5, 0.5)]
    print("\nall powers of z at the q of BBAlphaELBO(0.5), from VI inside to z integrated out:")
    print(
        ", ".join(
            f"{inner:g}: {energy(at, 0.5, inner):.4f}" for inner in (0.0, 0.25, 0.5, 0.75, 1.0)
        )
    )
    for loss, orders in (
        (BBAlphaELBO(0.5, 200_000), (0.5, 0.5)),
        (NestedVRELBO(0.5, 2000, num_inner=500), (0.0, 0.5)),
    ):
        value, exact = -loss.loss(random.key(0), found[orders], model, guide, X), found[orders]
        print(f"{type(loss).__name__}: {value:.4f}, by quadrature {energy(exact, *orders):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--steps",
        type=int,
        default=500,
        help="updates per timed run; the first table has fewer"
        " where a step takes longer, and up to 10 times as many where it does not",
    )
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument(
        "--only",
        choices=["numpyro", "curvature", "defaults", "row_effects"],
        help="this table alone",
    )
    args = parser.parse_args()
    print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}; shortest of {args.repeats} runs"
        " that take turns"
    )
    if args.only in (None, "row_effects"):
        row_effects()
    if args.only in (None, "defaults"):
        defaults(args.repeats)
    if args.only in (None, "numpyro"):
        against_numpyro(args.repeats, args.steps)
    if args.only in (None, "curvature"):
        curvatures_of_a_network(args.repeats, args.steps)
    if args.only is not None:
        return
    gradients_of_a_vae(args.repeats, 50)
    memory()
    gradient_noise(args.keys, 5)


if __name__ == "__main__":
    main()
