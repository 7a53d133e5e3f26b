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
from typing import Any, NamedTuple

from numpyro_ext.diagnostics import limits
from numpyro_ext.scores.implied_sd import IMPLIED_RATIO, IMPLIED_SHIFT

DOCS = Path(__file__).parent


def within(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]} to {bounds[1]}"


def after_moves(ratio: tuple[float, float], shift: Any, remedy: str) -> str:
    return f"""\
sd against exact moves, worst | sd over that of moved draws | {within(ratio)} | {remedy}
shift against exact moves, worst | mean of moved draws, in sds | {shift} | {remedy}
shape against exact moves, worst | ranges over those of moved draws | {SHAPE} | {remedy}
crossing rate between modes | exchange between two modes | {limits.CROSSING} | see the line"""


SHAPE = within(limits.RANGE)
UNVISITED = f"mass of an unvisited mode | found by a search | {limits.UNVISITED} | see the line"
FEW_MOVED = f"of m > 100 particles 3 / sqrt(m), at least {limits.MOVED_SHIFT}"
# In the order of the lines; `...` stands for a number or for the name of a site.
QUANTITIES = {
    "stochastic gradients": f"""
kinetic temperature | that of the momentum | T, {limits.TEMPERATURE} | smaller step
gradient noise over injected noise | noise not corrected for | 1 | more friction
implied variance ratio | variance over the right one | {1 + limits.TEMPERATURE} | smaller step
share of diverging draws | refused transitions | {limits.DIVERGING} | smaller step
step scale after warmup | the step was halved in warmup | 1 | smaller step
problems of the settings | assumptions that did not hold | 0 | see the line
""",
    "chains": f"""
divergences | trajectories of HMC and NUTS that diverged | 0 | reparametrise
share of draws not finite | draws outside of the support | 0 | smaller step
sites that never move | sites stuck at their start | 0 | another start
largest R-hat | disagreement of the chains | {limits.RHAT} | run longer
shares of the modes, off in sds | those of the draws | {limits.SHARES} | more chains
smallest ESS | number of independent draws | {limits.ESS_EACH} a chain, at most {limits.ESS} \
| run longer
ESS per gradient | price of an independent draw |  | compare
ESS per transition | the same, of a kernel without gradients |  | compare
ESS per pass over the data | the same, for minibatches |  | compare
transitions per independent draw | against the law of the kernel | {limits.SLOWER} times \
| reparametrise
{after_moves(limits.MOVED_RATIO, limits.MOVED_SHIFT, "smaller step")}
{UNVISITED}
""",
    "guides": f"""
change of the loss | in the last fifth of the steps | {limits.FALL} or 3 errors | train longer
spread of the draws | 0 of a point estimate | > 0 | another guide
sites that do not vary | sites of which draws are equal | 0 | no Delta
proxy of the loss | shown if not of these data | of these data | another one
noise of the proxy in nats | of rows that stand in for all | {limits.PROXY_NOISE} | move it
noise of the penalties in nats | of expectations under the guide | {limits.PENALTY_NOISE} \
| see the line
k-hat | may the weights be used? | 0.7 or a little less | other lines
share of units with k-hat > ... | the same, of independent units | {limits.BAD_UNITS} | other lines
ELBO (order 1) | bound of the log evidence |  | compare
bound of order 0 | estimate of the log evidence |  | compare
shift by reweighting, worst | mean by the weights, in sds | {limits.WEIGHTED_SHIFT} | richer guide
sd ratio to reweighted, worst | sd over that by weights | {within(limits.WEIGHTED_RATIO)} \
| richer guide
shape by reweighting, worst | ranges over those by weights | {SHAPE} | richer guide
gap of the ELBO in nats | below the bound of order 0, n numbers | {limits.GAP} + \
{limits.GAP_EACH} n | richer guide
{after_moves(limits.MOVED_RATIO, limits.MOVED_SHIFT, "richer guide")}
{UNVISITED}
different restarts | shown where restarts may differ |  | compare
""",
    "engines": f"""
residual | largest change by a further sweep | given to the engine | run longer
noise of the steps | of rows drawn, in sds | {limits.STEP_NOISE} | more rows
factors skipped | in the last step | 0 | see the line
nodes too few | quadratures that did not resolve a factor |  | more nodes
""",
    "local inference": f"""
local inference not converged | share of the data | {limits.UNCONVERGED} | raise max_iter
largest share of ... | data in one state | {limits.COLLAPSED} | another start
states of ... in use | states with data | 5 % of the prior | another start
sd ratio of ... to a Gibbs step | sd over that after it | {limits.NARROW} | NUTS
""",
    "particles": f"""
number of particles | against the dimension d | 2 d | more particles
implied sd ratio, worst | sd over that of the gradients | {within(IMPLIED_RATIO)} | run longer
shift in sds | mean of the gradients | {IMPLIED_SHIFT} or 1 / sqrt(m) | run longer
noise of a minibatch in sds | the same, of one minibatch |  | larger batch
{after_moves(limits.PARTICLES_RATIO, f"{limits.PARTICLES_SHIFT}; {FEW_MOVED}", "twice as many")}
shares of the modes, off in sds | those of particles | {limits.SHARES} | more of them
squared KSD | kernel Stein discrepancy |  | compare
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
