"""Examples run from their first line to their picture, at sizes that make no claim, and every page
of the gallery shows a run."""

import ast
from pathlib import Path
import runpy
import sys

from matplotlib.figure import Figure
import matplotlib.pyplot as plt
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
DOCS = EXAMPLES.parent / "docs"
TINY = {
    "conjugate_ascent": ["--rows", "400"],
    "conjugate_lda": ["--documents", "300"],
    "hierarchical_groups": ["--scale", "0.01", "--methods", "EP", "AutoNormal"],
    "implicit_generator": ["--steps", "20", "--keys", "1"],
    "max_margin_topics": "--corpora 1 --documents 20 --steps 5 --strengths 0 3".split(),
    "neutra": ["--steps", "20", "--num-samples", "20", "--guides", "AutoRealNVPNormal"],
    "order_of_renyis_bound": ["--steps", "20", "--repeats", "20"],
    "posterior_regularisation": "--splits 1 --steps 20 --num-samples 20 --strengths 0 5".split(),
    "sigmoid_belief_network": ["--steps", "5", "--draws", "5"],
    "which_alpha": ["--splits", "2", "--steps", "20"],
    "streaming_updates": ["--days", "2", "--num-samples", "50"],
    "vae_digits": ["--half", "--steps", "16", "--draws", "20"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [x if x == "conjugate_ascent" else pytest.param(x, marks=pytest.mark.nightly) for x in TINY],
)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    script, picture = EXAMPLES / f"{name}.py", tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", [str(script), *TINY[name], "--out", str(picture)])
    plt.switch_backend("Agg")
    printed, save = [], Figure.savefig

    def savefig(*args, **kwargs):
        printed.append(capsys.readouterr().out)
        save(*args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    plt.close("all")
    assert end.value.code in (0, 1)  # 1 says that the numbers are off, as they may be here
    assert picture.stat().st_size > 10_000
    # A disk that is full when the picture is saved loses no number.
    assert len("".join(printed).splitlines()) > 3 and not capsys.readouterr().out


def pages_that_run():
    """``RUN`` of ``docs/conf.py``, which cannot be imported without Sphinx."""
    for node in ast.parse((DOCS / "conf.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RUN":
            return ast.literal_eval(node.value)
    raise AssertionError("docs/conf.py has no RUN")


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_a_page_shows_a_run(script):
    name, text = script.stem, script.read_text()
    recorded = [DOCS / "recorded" / f"{name}.{kind}" for kind in ("txt", "png")]
    if name in pages_that_run():
        assert not any(path.exists() for path in recorded)
    else:
        assert all(path.stat().st_size > 0 for path in recorded)
        assert f'sphinx_gallery_thumbnail_path = "recorded/{name}.png"' in text
        assert f".. image:: /recorded/{name}.png" in text
        assert f".. literalinclude:: /recorded/{name}.txt" in text
