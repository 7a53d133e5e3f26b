"""Seconds of `find_modes` on the newcomers' models, with compilation, each in a process of its own,
and what it found: of the heaviest mode the kind, the ELBO of its normal and how far this is from
the greatest (`slope`, with which a step would gain half of its square in nats).

    python benchmarks/newcomers/search.py
    PYTHONPATH=another/checkout python benchmarks/newcomers/search.py
"""

import argparse
import os
from pathlib import Path
import subprocess
import sys
import time
import warnings

from numpyro_ext.optim import find_modes

sys.path.append(str(Path(__file__).parents[1]))
from _shared.statsmodels_models import STATSMODELS
from _shared.unseen_models import MODELS as UNSEEN

MODELS = {**UNSEEN, **STATSMODELS}
MANY_ROWS = "visits", "ratings"


def line(name: str) -> str:
    problem = MODELS[name]()
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modes = find_modes(problem.batched, *problem.rows)
    seconds, best = time.perf_counter() - began, modes.heaviest
    kind = "greatest ELBO" if best.variational else "mode"
    cells = f"{seconds:.1f}", kind, f"{best.elbo:.2f}", f"{best.slope:.2f}", f"{best.departure:.2f}"
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    names = [name for name in MODELS if name not in MANY_ROWS]
    parser.add_argument("--model", nargs="*", default=names, choices=list(MODELS))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(line(args.model[0]))
        return
    print("| model | seconds | kind | ELBO | slope | departure |\n|---|---|---|---|---|---|")
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    for name in args.model:
        command = [sys.executable, __file__, "--model", name, "--one"]
        print(subprocess.check_output(command, env=environment, text=True).strip(), flush=True)


if __name__ == "__main__":
    main()
