"""Hierarchies that nobody tuned for: a flow, a kernel and particles as a newcomer runs them, by one
swapped name, beside NUTS.

The models are in `models.py`; the methods, columns and options those of
`benchmarks/newcomers/run.py`, but NUTS is timed with `--ratio` alone, and particles are 350, since
the models have up to 302 numbers. Where each group has one number, the truth is a quadrature.
Otherwise it is NUTS in double precision, in `references.tsv`: two chains of 1,000 + 2,000 draws on
the same posterior in the coordinates in which it mixes best, and 2,000 more of each at a time while
the standard error of a mean is above 0.03 sd or that of a standard deviation above 3 %, up to
20,000; `--reference` makes it again for `--model`.
"""

import argparse
import math
from pathlib import Path
import sys
import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS

sys.path.append(str(Path(__file__).parents[1]))
from hierarchies.models import EXACT, HIERARCHIES, REFERENCES
from newcomers import run as newcomers

METHODS = [
    "AutoRealNVPNormal",
    newcomers.FALLING,
    "RegularizedSVGD",
    newcomers.LANGEVIN,
    "SGHMC",
]
WARMUP, DRAWS, MOST = 1000, 2000, 10
PRECISE = 0.03
"""The standard error of a mean, in standard deviations, and of a standard deviation over itself, at
which a reference is long enough."""


def write_reference(name: str) -> None:
    """Draw with NUTS, and put the moments in the place of those that the file has."""
    problem, began = HIERARCHIES[name](), time.perf_counter()
    model = (problem.same or (problem.model, ()))[0]
    pieces: list[np.ndarray] = []
    with jax.enable_x64(True):
        data = jax.tree.map(jnp.asarray, problem.data)
        mcmc = MCMC(
            NUTS(model, dense_mass=True, target_accept_prob=0.9),
            num_warmup=WARMUP,
            num_samples=DRAWS,
            num_chains=2,
            chain_method="sequential",
            progress_bar=False,
        )
        for k in range(MOST):
            mcmc.run(random.key(k), *data)
            mcmc.post_warmup_state = mcmc.last_state
            draws = mcmc.get_samples(group_by_chain=True)
            sites = {site: np.shape(draws[site])[2:] for site in problem.compared}
            flat = [np.asarray(draws[site]).reshape(2, DRAWS, -1) for site in sites]
            pieces.append(np.concatenate(flat, 2))
            x = np.concatenate(pieces, 1)
            mean, sd = x.mean((0, 1)), x.std((0, 1))
            of_mean = effective_sample_size(x) ** -0.5
            square = ((x - mean) / sd) ** 2
            of_sd = square.std((0, 1)) / 2 / effective_sample_size(square) ** 0.5
            if max(of_mean.max(), of_sd.max()) <= PRECISE:
                break
    r_hat = float(np.max(split_gelman_rubin(x)))
    seconds = time.perf_counter() - began
    print(
        f"{name}: 2 x {x.shape[1]:,} draws, R-hat {r_hat:.3f}, errors of the means at most"
        f" {of_mean.max():.3f} sd, of the sds {of_sd.max():.1%}, {seconds:.0f} s",
        flush=True,
    )
    lines = ["model\tsite\tmean\tsd"]
    if REFERENCES.is_file():
        lines = [x for x in REFERENCES.read_text().splitlines() if not x.startswith(f"{name}\t")]
    names = [site for site, shape in sites.items() for _ in range(math.prod(shape))]
    lines += [f"{name}\t{a}\t{b:.6g}\t{c:.4g}" for a, b, c in zip(names, mean, sd, strict=True)]
    REFERENCES.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", nargs="*", default=list(HIERARCHIES), choices=list(HIERARCHIES))
    parser.add_argument("--only", nargs="*", default=METHODS, choices=newcomers.METHODS)
    parser.add_argument("--out", type=Path, default=Path("out/hierarchies"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ratio", action="store_true", help="time NUTS too")
    parser.add_argument("--reference", action="store_true", help="make the truth and fit nothing")
    args = parser.parse_args()
    if args.reference:
        for name in args.model:
            if name not in EXACT:
                write_reference(name)
    else:
        newcomers.table(args.model, args.only, args.out, args.seed, args.ratio)


if __name__ == "__main__":
    main()
