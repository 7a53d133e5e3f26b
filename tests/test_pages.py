"""The Python of each page runs as a reader pastes it, from its first line in an empty namespace."""

from pathlib import Path
import re

import matplotlib.pyplot as plt
from numpyro.infer import MCMC, SVI
import pytest

from docs.run_page import code_of
from numpyro_ext import diagnostics
from numpyro_ext.ep import EPEngine

ROOT = Path(__file__).resolve().parents[1]
FEW = 10  # steps of a run, and draws of a chain, at most
PAGES = {
    str(page.relative_to(ROOT)): code
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    if "_build" not in page.parts and (code := code_of(page)).strip()
}
DEAR = ["docs/api/diagnostics.md", "docs/api/ep.md"]
DEAR += [
    f"docs/tutorials/{x}.md"
    for x in (
        "multilevel",
        "networks",
        "choosing_a_step_size",
        "comparing_variational_and_mcmc",
        "saving",
    )
]
DEAR += ["docs/tutorials/many_groups.md"]
DEAR += [page for page in PAGES if page.startswith("docs/choose/")]


@pytest.fixture
def short(monkeypatch):
    """Runs of a few steps, and tables without the moves: what they print is not judged here."""

    def run_of(run):
        def short_run(self, rng_key, num_steps, *args, **kwargs):
            kwargs["progress_bar"] = False
            return run(self, rng_key, min(num_steps, FEW), *args, **kwargs)

        return short_run

    def chain(self, sampler, *, num_warmup, num_samples, **kwargs):
        few = {"num_warmup": min(num_warmup, FEW), "num_samples": min(num_samples, FEW)}
        make(self, sampler, **kwargs | few | {"progress_bar": False})

    def restarts(make_svi, rng_key, num_restarts, num_steps, *args, **kwargs):
        return again(make_svi, rng_key, 2, FEW, *args, **kwargs | {"progress_bar": False})

    def table(*args, **kwargs):
        return judge(*args, **kwargs | {"num_moves": 0})

    make, again, judge = MCMC.__init__, diagnostics.restarts, diagnostics.diagnose
    monkeypatch.setattr(MCMC, "__init__", chain)
    monkeypatch.setattr(SVI, "run", run_of(SVI.run))
    monkeypatch.setattr(EPEngine, "run", run_of(EPEngine.run))
    monkeypatch.setattr(diagnostics, "restarts", restarts)
    monkeypatch.setattr(diagnostics, "diagnose", table)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # of so few steps
@pytest.mark.parametrize(
    "page", [pytest.param(x, marks=pytest.mark.nightly) if x in DEAR else x for x in PAGES]
)
def test_a_page_runs_as_printed(page, short, tmp_path, monkeypatch):
    """With a tenth of its rows, draws and steps, where these are 300, 500 or thousands."""
    monkeypatch.chdir(tmp_path)
    code = re.sub(r"\b([35]|\d+_?0)00\b", r"\g<1>0", PAGES[page]).replace("range(20)", "range(2)")
    exec(compile(code, ROOT / page, "exec"), {"__name__": "__main__"})
    plt.close("all")
