"""Hierarchies that nobody tuned for: a flow, a kernel and particles as a newcomer runs them, by one
swapped name, beside NUTS.

The models are in `models.py`; the methods, columns and options those of
`benchmarks/newcomers/run.py`, but NUTS is timed with `--ratio` alone, and particles are 350, since
the models have up to 302 numbers. The truth is NUTS in `references.tsv`, two chains of 1,000 +
2,000 draws on the same posterior in the coordinates in which it mixes best; `--reference` makes it
again for `--model`.
"""

import argparse
from pathlib import Path
import sys

from jax import random
import numpy as np
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC, NUTS

sys.path.append(str(Path(__file__).parents[1]))
from hierarchies.models import HIERARCHIES, REFERENCES
from newcomers import run as newcomers

METHODS = ["AutoRealNVPNormal", "RegularizedSVGD", "SGHMC"]
WARMUP, DRAWS = 1000, 2000


def write_reference(name: str) -> None:
    """Draw with NUTS, and put the moments in the place of those that the file has."""
    problem = HIERARCHIES[name]()
    model = (problem.same or (problem.model, ()))[0]
    mcmc = MCMC(
        NUTS(model, target_accept_prob=0.9),
        num_warmup=WARMUP,
        num_samples=DRAWS,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *problem.rows)
    draws = {site: x for site, x in mcmc.get_samples(True).items() if site in problem.compared}
    r_hat = max(float(np.max(split_gelman_rubin(np.asarray(x)))) for x in draws.values())
    print(f"{name}: R-hat {r_hat:.3f}")
    lines = ["model\tsite\tmean\tsd"]
    if REFERENCES.is_file():
        lines = [x for x in REFERENCES.read_text().splitlines() if not x.startswith(f"{name}\t")]
    for site, x in draws.items():
        flat = np.asarray(x, float).reshape(2 * DRAWS, -1)
        lines += [
            f"{name}\t{site}\t{mean:.6g}\t{sd:.4g}"
            for mean, sd in zip(flat.mean(0), flat.std(0), strict=True)
        ]
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
            write_reference(name)
    else:
        newcomers.table(args.model, args.only, args.out, args.seed, args.ratio)


if __name__ == "__main__":
    main()
