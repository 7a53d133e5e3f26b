"""Keeps what an example prints and draws, for the pages that are built without running it.

    python docs/record.py neutra which_alpha
    python docs/record.py                                          # all that the pages show
    python docs/record.py meta_learned_sampler --data-dir ../data  # for those that read files

Writes ``docs/recorded/NAME.txt`` and ``NAME.png``, or ``docs/pictures/NAME*.png`` if the page of
the example runs it and a tutorial shows its pictures; of at most 1,000 pixels and 256 colours.
"""

import argparse
from datetime import date
from functools import partial
from pathlib import Path
import re
import subprocess
import sys

from PIL import Image

DOCS = Path(__file__).parent
RECORDED, PICTURES = DOCS / "recorded", DOCS / "pictures"
EXAMPLES = DOCS.parent / "examples"


def recorded() -> list[str]:
    """The examples whose docstring shows a recorded run."""
    paths = sorted(EXAMPLES.glob("*.py"))
    return [path.stem for path in paths if f"/recorded/{path.stem}.txt" in path.read_text()]


def keep(drawn: Path, folder: Path) -> None:
    with Image.open(drawn) as picture:
        picture = picture.convert("RGB")
        picture.thumbnail((1000, 1000))
        picture.quantize(256).save(folder / drawn.name, optimize=True)


def record(name: str, data_dir: Path | None) -> None:
    command = [f"examples/{name}.py", *(["--data-dir", str(data_dir)] if data_dir else [])]
    run = partial(subprocess.run, cwd=DOCS.parent, stdout=subprocess.PIPE, text=True)
    done = run([sys.executable, *command])
    lines = [re.sub(r".*\r", "", line).rstrip() for line in done.stdout.split("\n")]
    text = "\n".join(lines).strip("\n")
    shown = f"$ python examples/{name}.py{' --data-dir data' if data_dir else ''}"
    folder = RECORDED if name in recorded() else PICTURES
    if folder == RECORDED:
        (RECORDED / f"{name}.txt").write_text(f"{shown}  # on {date.today()}\n{text}\n")
    for drawn in (DOCS.parent / "out").glob(f"{name}*.png"):
        keep(drawn, folder)
    print(f"{name}: exit code {done.returncode}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--data-dir", type=Path)
    args = parser.parse_args()
    for name in args.names or recorded():
        record(name, args.data_dir)
