"""NumPyro's own tests with parts of this package in place of NumPyro's: a plugin for pytest.

``make upstream NUMPYRO=path/to/its/sources`` loads it. While a test file is imported, the names of
``SWAPS`` stand for parts of this package; all tests of the file then run with them. Nothing of
NumPyro's tests is in this repository.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
import traceback
from typing import Any

import numpyro.infer
import numpyro.infer.autoguide
import pytest

import numpyro_ext
from numpyro_ext.guides import (
    AutoHouseholderNormal,
    AutoHVI,
    AutoLaplaceGGN,
    AutoMAFNormal,
    AutoMixtureNormal,
    AutoPlanarNormal,
    AutoRealNVPNormal,
    AutoSplineNormal,
)
from numpyro_ext.mcmc import SGHMC, SGNHT
from numpyro_ext.objectives import VRELBO

PACKAGE = Path(numpyro_ext.__file__).parent
KINDS = (
    "passed",
    "skipped",
    "both refuse",
    "refused",
    "allowed",
    "host's names",
    "not installed",
    "other failure",
)


def elbo(num_particles: int = 1, **options: Any) -> VRELBO:
    """``VRELBO`` at order 1, which is the evidence lower bound, called as ``Trace_ELBO`` is."""
    return VRELBO(1.0, num_particles, **{"gradient": "standard"} | options)


def renyi(alpha: float = 0, num_particles: int = 2) -> VRELBO:
    return VRELBO(float(alpha), num_particles)


ADAPTATION = (
    "step_size inverse_mass_matrix adapt_step_size adapt_mass_matrix dense_mass num_steps"
    " target_accept_prob max_tree_depth trajectory_length find_heuristic_step_size"
    " regularize_mass_matrix"
).split()


def kernel(cls: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A kernel of this package, which finds its settings in place of the adaptation of ``NUTS``."""
    return cls(*args, **{k: v for k, v in options.items() if k not in ADAPTATION})


def flow(model: Any, **options: Any) -> AutoRealNVPNormal:
    """With a prefix of its own: ``AutoNormal`` may share a list of guides with one of the others,
    while two guides over all latent sites together need two prefixes, those of NumPyro too."""
    options.setdefault("prefix", "flow")
    return AutoRealNVPNormal(model, **options)


SWAPS = {
    numpyro.infer: {
        "Trace_ELBO": elbo,
        "RenyiELBO": renyi,
        "NUTS": partial(kernel, SGHMC),
        "HMC": partial(kernel, SGNHT),
    },
    numpyro.infer.autoguide: {
        "AutoNormal": flow,
        "AutoDiagonalNormal": AutoPlanarNormal,
        "AutoMultivariateNormal": AutoSplineNormal,
        "AutoLowRankMultivariateNormal": AutoMixtureNormal,
        "AutoIAFNormal": AutoMAFNormal,
        "AutoBNAFNormal": AutoHouseholderNormal,
        "AutoLaplaceApproximation": AutoLaplaceGGN,
        "AutoDAIS": AutoHVI,
    },
}
found: dict[str, tuple[str, str]] = {}


@contextmanager
def swapped() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module, names in SWAPS.items():
            for name, ours in names.items():
                patch.setattr(module, name, ours)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """A test file is imported, and its parameters are made, while it is collected."""
    with swapped():
        return (yield)


def pytest_configure(config):
    ours = "numpyro_ext.diagnostics.InferenceWarning"
    config.addinivalue_line("filterwarnings", f"ignore::{ours}")


def last_file(error: BaseException) -> Path | None:
    frame, file = error.__traceback__, None
    while frame is not None:
        file, frame = Path(frame.tb_frame.f_code.co_filename), frame.tb_next
    return file


def is_refusal(error: BaseException) -> bool:
    """Whether a sentence of this package, or an argument that it does not have, ended the test."""
    if not isinstance(error, ValueError | TypeError | NotImplementedError):
        return False
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        return True
    place = traceback.extract_tb(error.__traceback__)[-1:]
    return any(
        Path(one.filename).is_relative_to(PACKAGE) and (one.line or "").startswith("raise ")
        for one in place
    )


def kind_of(error: BaseException, test: Path) -> tuple[str, str]:
    """The kind of a failure, and the error that says why.

    ``allowed``: NumPyro's part raises an error or warns where the part of this package goes on.
    ``both refuse``: the test expects an error of the same type, with another sentence than ours. It
    fails in ``pytest.raises``, and our error is the context of that failure.
    """
    chain, one = [], error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__ or one.__context__
    for one in chain:
        if is_refusal(one):
            both = str(error).startswith("Regex pattern did not match")
            return "both refuse" if both else "refused", describe(one)
    if isinstance(error, pytest.fail.Exception) and str(error).startswith("DID NOT "):
        return "allowed", describe(error)
    if isinstance(error, ImportError):
        return "not installed", describe(error)
    if isinstance(error, AttributeError | KeyError) and last_file(error) == test:
        return "host's names", describe(error)
    return "other failure", describe(error)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.excinfo is not None and report.failed:
        found[report.nodeid] = kind_of(call.excinfo.value, item.path)
    elif report.skipped:
        found[report.nodeid] = ("skipped", "")
    elif call.when == "call":
        found.setdefault(report.nodeid, ("passed", ""))
    return report


def pytest_terminal_summary(terminalreporter):
    def say(line: str) -> None:
        terminalreporter.write_line(line)

    files = sorted({test.split("::")[0] for test in found})
    say("\n" + f"{'file':<20}" + "".join(f"{kind:>14}" for kind in (*KINDS, "all")))
    for file in files:
        counts = Counter(kind for test, (kind, _) in found.items() if test.split("::")[0] == file)
        numbers = [*(counts[kind] for kind in KINDS), counts.total()]
        say(f"{Path(file).name:<20}" + "".join(f"{n:>14}" for n in numbers))
    for kind in KINDS[2:]:
        say(f"\n{kind}")
        for test, (its, why) in found.items():
            if its == kind:
                say(f"  {test.split('::')[-1]}\n      {why[:300]}")
