"""Writes what the pages and the code, or two pages, would otherwise say twice, when it is run.

The tables of ``docs/diagnose.md`` have the limits of the code. All else is made of
``docs/catalogue.tsv``, which has a line for each public name, in the order in which to try them: a
line of :class:`Entry`. From it come the tables of ``docs/algorithms.md`` and ``docs/evidence.md``,
and the lists of ``docs/api``: the names of a group, and when to use each. A comment on the page
names the group whose lines follow it.
"""

from functools import partial
from pathlib import Path
import re
import textwrap
from typing import NamedTuple

from numpyro_ext.diagnostics import limits
from numpyro_ext.svae.judgement import UNCONVERGED

DOCS = Path(__file__).parent


def within(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]} to {bounds[1]}"


SHAPE = within(limits.SHAPE)
# In the order of the lines.
QUANTITIES = {
    "every fit": f"""
draws not finite | share of the draws with a NaN; shown if there is one | 0 | smaller step
sites that do not vary | chains that are stuck, guides that are points; shown if there are any \
| 0 | see the line
problems | what did not hold where settings or proxies were made; shown if there are any | 0 \
| see the line
shift of the mean, worst | how far the mean of the draws is from the reference, in sds \
| {limits.SHIFT} | see the line
sd ratio, worst | sd of the draws over the sd of the reference | {within(limits.MOVED_RATIO)} \
| see the line
shape, worst | width of the middle half, or nine tenths, over the width in the reference | {SHAPE} \
| see the line
shares of the modes | how far off a mean may be because modes have other shares, in sds \
| {limits.SHARES} | see the line
""",
    "chains": f"""
divergences | trajectories that diverged, or refused transitions; shown if too many \
| 0; {limits.DIVERGING:.0%} of stochastic gradients | reparametrise
kinetic temperature | mean square of the momentum | T, {limits.TEMPERATURE} | smaller step
implied variance ratio | variance over the right one | {1 + limits.TEMPERATURE} | smaller step
largest R-hat | disagreement of the chains, or of restarts | {limits.RHAT}, or \
what chance makes; {limits.RHAT_OF_ENSEMBLE} of an ensemble | run longer
smallest ESS | number of independent draws | {limits.ESS_EACH} a chain, at most {limits.ESS} \
| run longer
""",
    "guides": f"""
change of the loss | in the last fifth of the steps | {limits.FALL} or 3 errors | train longer
k-hat | may the importance weights be used? | 0.7 or a little less | other lines
gap of the ELBO in nats | below the log evidence, of n numbers | {limits.GAP} + \
{limits.GAP_EACH} n | richer guide
""",
    "engines": f"""
residual | largest change by a further sweep, or by the rows that are drawn \
| given to the engine, or {limits.STEP_NOISE} | run longer
factors skipped | in the last step | 0 | see the line
""",
    "local inference": f"""
local inference not converged | share of the data | {UNCONVERGED} | raise max_iter
states in use | states that hold data | 5 % of the prior | another start
""",
    "particles": """
number of particles | against the dimension d; shown if too few | 2 d | more particles
""",
}
"""The lines of each table: quantity, meaning, limit and what to do."""


class Entry(NamedTuple):
    """A line of the catalogue behind its module and name; cells without a text are empty."""

    group: str
    """Heading of its list on the page of the module, empty for the list that has none."""
    what: str
    biased_by: str
    cost: str
    choice: str
    """When to use it; ``+`` if the entry above says that of both."""
    compared: str
    """``problem; reference; mean error; sd ratio``, separated by ``|`` if there are several."""
    found: str
    measured_by: str


def catalogue() -> dict[str, dict[str, Entry]]:
    """The entry of each name, by module."""
    found: dict[str, dict[str, Entry]] = {}
    for line in (DOCS / "catalogue.tsv").read_text().splitlines():
        module, name, *cells = line.split("\t")
        found.setdefault(module, {})[name] = Entry(*cells)
    return found


def in_order(names: dict[str, Entry]) -> list[tuple[str, Entry]]:
    return sorted(names.items(), key=lambda item: item[0].lower())


def after(mark: str, lines: str, text: str, old: str) -> str:
    """The page with these lines behind a comment, in place of those that match."""
    comment = f"<!-- {mark} -->"
    if text.count(f"{comment}\n") != 1:
        marks = ", ".join(re.findall(r"<!-- (.*?) -->", text))
        raise ValueError(
            f"a page has no place {comment} for what the catalogue has there; its places, which are"
            f" groups of docs/catalogue.tsv, are: {marks}."
        )
    pattern = rf"{re.escape(comment)}\n(?:\n(?:{old})+)?"
    return re.sub(pattern, lambda _: f"{comment}\n\n{lines}", text)


def of_diagnose(text: str) -> str:
    """The page, with a table after each comment that names one."""
    for of, lines in QUANTITIES.items():
        rows = ["quantity | meaning | limit | what to do", "--- | --- | --- | ---"]
        table = "".join(f"| {row} |\n" for row in [*rows, *lines.strip().split("\n")])
        text = after(of, table, text, r"\|.*\n")
    return text


def of_modules(text: str, *, evidence: bool) -> str:
    """The page, with the rows below the head of the table of each module that has some."""
    for module, names in catalogue().items():
        rows = ""
        for name, entry in in_order(names):
            cells = entry.what, entry.biased_by, entry.cost
            if evidence:
                cells = entry.found, entry.measured_by
            if cells[0]:
                rows += f"| `{name}` | {' | '.join(cells)} |\n"
        if not rows:
            continue
        head = rf"(^## {module}\n(?:(?!## |\|).*\n)*\|.*\n\|[-|]+\n)(?:\|.*\n)*"
        assert re.search(head, text, re.M), module
        text = re.sub(head, lambda match, rows=rows: match[1] + rows, text, flags=re.M)
    return text


def of_evidence(text: str) -> str:
    """The same, and what was compared with a posterior that is known."""
    names = {name: entry for names in catalogue().values() for name, entry in names.items()}
    rows = "| name | problem | reference | mean error | sd ratio |\n|---|---|---|---|---|\n"
    for name, entry in in_order(names):
        for compared in filter(None, entry.compared.split(" | ")):
            rows += f"| `{name}` | {' | '.join(compared.split('; '))} |\n"
    return after("compared", rows, of_modules(text, evidence=True), r"\|.*\n")


def filled(text: str) -> str:
    """A line of a list, in lines of 100 columns that do not break a piece of code."""
    whole = re.sub("`[^`]*`", lambda match: match[0].replace(" ", "\0"), text)
    options = {"break_long_words": False, "break_on_hyphens": False}
    lines = textwrap.fill(whole, 100, initial_indent="- ", subsequent_indent="  ", **options)
    return lines.replace("\0", " ") + "\n"


def of_choices(names: dict[str, Entry]) -> str:
    """A line for each name, or for several in a row, that says when to use it."""
    lines: list[tuple[list[str], str]] = []
    for name, entry in names.items():
        if entry.choice == "+":
            lines[-1][0].append(f"`{name}`")
        elif entry.choice:
            # Links are those of a page in docs.
            lines.append(([f"`{name}`"], re.sub(r"\]\((?!http)", "](../", entry.choice)))
    return "".join(filled(f"{', '.join(of)}: {choice}") for of, choice in lines)


def of_api(text: str, *, module: str) -> str:
    """The page, with the names of each group of a module and when to use each; states and results
    in full."""
    groups: dict[str, dict[str, Entry]] = {}
    for name, entry in catalogue()[module].items():
        groups.setdefault(entry.group, {})[name] = entry
    for group, names in groups.items():
        lines = [f".. currentmodule:: numpyro_ext.{module}", ""]
        if group.startswith(("States", "Results")):
            members = ["   :members:"] if module == "diagnostics" else []
            for name in names:
                lines += [f".. autoclass:: {name}", *members]
        else:
            lines += [".. autosummary::", f"   :toctree: {module}", "   :nosignatures:", ""]
            lines += [f"   {name}" for name in names]
        written, choices = "\n".join(["```{eval-rst}", *lines, "```\n"]), of_choices(names)
        old = r"```\{eval-rst\}\n(?:(?!```).*\n)*```\n(?:\n(?:(?:- |  ).*\n)+)?"
        text = after(group or "table", written + (choices and f"\n{choices}"), text, old)
    return text


PAGES = {
    "diagnose.md": of_diagnose,
    "algorithms.md": partial(of_modules, evidence=False),
    "evidence.md": of_evidence,
    **{f"api/{module}.md": partial(of_api, module=module) for module in catalogue()},
}

if __name__ == "__main__":
    for page, written in PAGES.items():
        path = DOCS / page
        path.write_text(written(path.read_text()))
