"""Guides that follow the gradient of the model, at an equal number of gradients in a draw.

All begin at NumPyro's start. The targets are densities of log evidence 0, so that minus the bound
is its gap. The sds are of 20,000 draws, divided by the right ones, least and largest of the sites
whose sds are known.
"""

import argparse
from collections.abc import Callable
import time
from typing import Any

from jax import random
import numpy as np
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDAIS
import optax
from targets import TARGETS

from numpyro_ext.guides import AutoHVI, AutoLangevinDiffusion

GUIDES: dict[str, Callable[..., Any]] = {
    'AutoLangevinDiffusion(backward="ula")': lambda model, n: AutoLangevinDiffusion(
        model, num_steps=n - 1, backward="ula", init_from=None
    ),
    "AutoLangevinDiffusion": lambda model, n: AutoLangevinDiffusion(
        model, num_steps=n - 1, init_from=None
    ),
    "AutoHVI": lambda model, n: AutoHVI(model, num_steps=n // 2, init_from=None),
    "AutoDAIS of NumPyro": lambda model, n: AutoDAIS(model, K=n),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--only", default="", help="guides whose name has this")
    parser.add_argument("--keys", type=int, default=1)
    args = parser.parse_args()
    print("| target | gradients in a draw | guide | gap of the bound, by key | sds | us a step |")
    print("|---|---|---|---|---|---|")
    for name in ("correlated", "banana"):
        target = TARGETS[name]()
        for gradients in (4, 16):
            for kind, make in GUIDES.items():
                if args.only not in kind:
                    continue
                gaps, ratios, seconds = [], [], []
                for seed in range(args.keys):
                    guide = make(target.model, gradients)
                    optim = optax.adam(optax.cosine_decay_schedule(1e-2, args.steps))
                    svi = SVI(target.model, guide, optim, Trace_ELBO(4))
                    start = time.perf_counter()
                    fit = svi.run(random.key(seed), args.steps, progress_bar=False)
                    seconds.append(time.perf_counter() - start)
                    loss = Trace_ELBO(20_000).loss(random.key(1), fit.params, target.model, guide)
                    gaps.append(float(loss) + float(target.log_evidence or 0.0))
                    draws = guide.sample_posterior(
                        random.key(2), fit.params, sample_shape=(20_000,)
                    )
                    for site, sd in (target.sds or {}).items():
                        ratios += list(np.ravel(np.std(draws[site], 0) / sd))
                print(
                    f"| {name} | {gradients} | `{kind}` | {', '.join(f'{x:.3f}' for x in gaps)} |"
                    f" {min(ratios):.2f} to {max(ratios):.2f} |"
                    f" {min(seconds) / args.steps * 1e6:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
