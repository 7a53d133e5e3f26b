"""Whether a mode is missing, or has another share of the draws than of the mass."""

from collections.abc import Sequence

import numpy as np

from numpyro_ext.diagnostics._crossing import least_crossing
from numpyro_ext.diagnostics.checks.chains import split_by_mode
from numpyro_ext.diagnostics.checks.draws import has_moves
from numpyro_ext.diagnostics.checks.modes import SHARES_OF_MODES, draws_at_modes, searched
from numpyro_ext.diagnostics.checks.moves import MovedGroup, move_groups
from numpyro_ext.diagnostics.context import FitContext
from numpyro_ext.diagnostics.limits import CROSSING
from numpyro_ext.diagnostics.table import Row, equally_spaced

_WHERE_FROM = {
    "particles": "as many particles are on a side as began there; AutoMixtureNormal, whose"
    " importance weights check the shares, says how many belong there",
    "guide": "the share of each side is that of the guide; train longer, or take AutoMixtureNormal"
    " until its weights may be used and check the shares",
}


def missing_modes(context: FitContext, others: Sequence[Row]) -> list[Row]:
    """The line of the modes that the start has found; otherwise of two sides between which hardly a
    chain moves, or of the modes that a search finds where no other line has found anything."""
    by_mode = draws_at_modes(context)
    if by_mode is not None:
        # Chains that agree have visited what modes there are with the right shares.
        agree = context.kind == "chains" and split_by_mode(context) is None
        return [] if agree and by_mode.row.ok is not None else [by_mode.row]
    if context.kind == "chains":
        return []
    groups = [group for group in move_groups(context) if isinstance(group, MovedGroup)]
    if rows := [row for group in groups for row in _sides(context, group)]:
        return rows[:1]
    if context.kind == "guide" and context.num_moves != 0 and has_moves(context):
        fine = all(row.ok is not False for row in others)
        by_mode = searched(context) if fine else None
        return [] if by_mode is None else [by_mode.row]
    return []


def _sides(context: FitContext, group: MovedGroup) -> list[Row]:
    """The line of two sides between which hardly a chain moves, where nothing else judges how many
    draws belong to each."""
    if group.shares_known:
        return []
    comparison = group.moved
    value, k = least_crossing(*np.asarray(comparison.ends, float))
    if value >= CROSSING:
        return []
    k = int(equally_spaced(len(comparison.ratio), comparison.ends.shape[-1])[k])
    verdict = (
        f"the draws lie on two sides of a value of {group.name(k)} that only so small a share of"
        " the Markov chains crosses, so nothing has checked how many belong on each:"
        f" {_WHERE_FROM[context.kind]}."
    )
    return [Row(SHARES_OF_MODES, value, None, f"> {CROSSING}", False, verdict, True)]
