"""The Python of each page runs as a reader pastes it, from its first line in an empty namespace."""

from pathlib import Path
import re
import textwrap

import matplotlib.pyplot as plt
from numpyro.infer import MCMC, SVI
import pytest

from numpyro_ext.ep import EPEngine

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.M | re.S)
STEPS, DRAWS = 30, 20  # of a run and of a chain, at most


def code_of(page: Path) -> str:
    """The blocks in the lines in which they are on the page; doctests run on their own."""
    text, lines = page.read_text(), [""] * len(page.read_text().splitlines())
    for block in BLOCK.finditer(text):
        if ">>>" not in block[2]:
            code = textwrap.dedent(block[2]).splitlines()
            start = text.count("\n", 0, block.start(2))
            lines[start : start + len(code)] = code
    return "\n".join(lines)


PAGES = {
    str(page.relative_to(ROOT)): code
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    if "_build" not in page.parts and (code := code_of(page)).strip()
}


@pytest.fixture
def short_runs(monkeypatch):
    """What the pages run is cut short, so that only the mathematics of their numbers is lost."""

    def cut(cls):
        run = cls.run

        def short(self, rng_key, num_steps, *args, **kwargs):
            steps = min(num_steps, STEPS)
            return run(self, rng_key, steps, *args, **{**kwargs, "progress_bar": False})

        monkeypatch.setattr(cls, "run", short)

    def init(self, sampler, *, num_warmup, num_samples, **kwargs):
        few = {"num_warmup": min(num_warmup, DRAWS), "num_samples": min(num_samples, DRAWS)}
        make(self, sampler, **{**kwargs, **few, "progress_bar": False})

    make = MCMC.__init__
    monkeypatch.setattr(MCMC, "__init__", init)
    cut(SVI)
    cut(EPEngine)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # of so few steps
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_as_printed(page, short_runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(PAGES[page], ROOT / page, "exec"), {"__name__": "__main__"})
    plt.close("all")
