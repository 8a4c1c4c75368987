"""The answer of a plan: the table of candidates, the best one's command, and what was left out."""

import shlex
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from tftpu.amounts import format_duration, format_duration_range, format_price, format_size
from tftpu.errors import counted
from tftpu.launch.plan.bounds import Estimate
from tftpu.launch.plan.candidates import ATTENTION, MESH, Candidate, Space
from tftpu.launch.plan.search import (
    NO_CHEAPER,
    NO_FASTER,
    OVER_BUDGET,
    TOO_SLOW,
    Goal,
    Search,
)
from tftpu.preflight import columns
from tftpu.preflight.pricing.prices import BASES
from tftpu.tpu.slices import parse_slice

_CHANGES = "changes of the config"
_TEXT = ("slice", "mesh", _CHANGES, "")  # columns aligned to the left
# Columns that a narrow terminal leaves out, in this order.
_OPTIONAL = ("time/run", "MFU", "range", "host/core", "HBM", "cost/1B tokens")


def build_rows(search: Search, space: Space, top: int) -> list[dict[str, Any]]:
    """Returns the best candidates, and the best of each other slice, as plain data.

    Args:
        search: the search.
        space: the candidates that the config allows.
        top: the number of best candidates.
    """
    rows, firsts = [], search.list_firsts()
    for candidate in [one for n, one in enumerate(search.list_best()) if n < top or one in firsts]:
        verdict = search.verdicts[candidate]
        seconds = search.goal.steps * (verdict.step_seconds or 0.0)
        usd_hour = search.find_usd_hour(candidate)
        rows.append(
            {
                "slice": candidate.slice,
                "mesh": candidate.mesh,
                "changes": space.list_changes(candidate),
                "remat": candidate.remat,
                "hbm_bytes": verdict.hbm_bytes,
                "host_bytes": verdict.host_bytes,
                "step_seconds": verdict.step_seconds,
                "step_seconds_low": verdict.step_seconds_low,
                "step_seconds_high": verdict.step_seconds_high,
                "mfu": verdict.mfu,
                "hours": seconds / 3600,
                "usd": usd_hour * seconds / 3600,
                "usd_per_1b_tokens": search.goal.price_tokens(
                    verdict.step_seconds or 0.0, usd_hour
                ),
                "meets_goal": search.meets_goal(candidate),
            }
        )
    return rows


def build_table(rows: Sequence[dict[str, Any]], missed: str, width: int) -> Table:
    """Returns the table of candidates.

    Args:
        rows: see `build_rows`.
        missed: the remark on a candidate that misses the limit of the plan.
        width: characters of a line.
    """
    cells = [_format_cells(row, missed) for row in rows]
    names = [name for name in cells[0] if name == _CHANGES or any(row[name] for row in cells)]
    shown = [{name: row[name] for name in names} for row in cells]
    return columns.build_table(shown, width, _OPTIONAL, _TEXT, (_CHANGES,))


def _format_cells(row: dict[str, Any], missed: str) -> dict[str, str]:
    per_tokens = row["usd_per_1b_tokens"]
    ends = row["step_seconds_low"], row["step_seconds_high"]
    changes = [text for text in row["changes"] if not text.startswith(f"{MESH}=")]
    return {
        "slice": row["slice"],
        "mesh": row["mesh"],
        _CHANGES: _format_settings(changes, row["remat"]),
        "HBM": _format_memory(row["slice"], row["hbm_bytes"]),
        "host/core": format_size(row["host_bytes"]) if row["host_bytes"] else "",
        "step": format_duration(row["step_seconds"]),
        "range": format_duration_range(*ends) if all(ends) else "",
        "MFU": f"{row['mfu']:.0%}" if row["mfu"] else "",
        "time/run": format_duration(3600 * row["hours"]),
        "cost/run": format_price(row["usd"]),
        "cost/1B tokens": format_price(per_tokens) if per_tokens else "",
        "": "" if row["meets_goal"] else missed,
    }


def _format_settings(changes: Sequence[str], remat: str) -> str:
    """Returns the changes, and in brackets the config's own `remat` if it is not changed."""
    text = " ".join(changes)
    if remat != "none" and "remat=" not in text:
        text = f"{text} (remat={remat})".strip()
    return text or "(as configured)"


def format_command(
    verb: str, config: str, overrides: Sequence[str], candidate: Candidate, space: Space
) -> str:
    """Returns the shell command `tftpu VERB CONFIG ...` with the settings of a candidate."""
    changes = [f"--config.{change}" for change in space.list_changes(candidate)]
    chosen = {change.partition("=")[0] for change in changes}
    kept = [word for word in overrides if word.partition("=")[0] not in chosen]
    return shlex.join(["tftpu", verb, config, *kept, *changes])


def describe_estimates(search: Search, space: Space, parameters: int) -> list[str]:
    """Returns lines with rough estimates for the most promising candidate of each slice.

    Args:
        search: the search, with the verdicts of earlier plans.
        space: the candidates that the config allows.
        parameters: the number of the model's parameters.
    """
    other = "" if search.goal.budget is None else " (the cheapest of all: without --budget)"
    count = counted(search.size, "candidate")
    lines = [
        f"{counted(parameters, 'parameter')}. Looking for {search.goal.aim}{other}, among {count}. "
        "Rough estimates for the first one of each slice; whether it fits is known once it is "
        "compiled"
    ]
    for one in search.list_promising():
        step = format_duration(search.expect_seconds(one))
        chips = counted(parse_slice(one.candidate.slice).chips, "chip")
        place = f"  {one.candidate.slice} ({chips}, {format_price(one.usd_hour)} an hour)"
        shown = " ".join([place, *space.list_changes(one.candidate)])
        lines.append(f"{shown}: {step} per step, {_format_estimate(search, one)}")
    return lines + describe_ruled_out(search, space)


def describe_hours(search: Search) -> str:
    """Returns a line with the number of chips and the hourly price of each slice."""
    hours = {one.slice: search.find_usd_hour(one) for one in search.candidates}
    said = (
        f"{name} ({counted(parse_slice(name).chips, 'chip')}) {format_price(usd)}"
        for name, usd in hours.items()
    )
    return ", ".join(said) + " an hour"


def describe_verdict(search: Search, space: Space, candidate: Candidate) -> str:
    """Returns the verdict on a candidate as text, and the number of candidates left."""
    verdict, shown = search.verdicts[candidate], space.format_candidate(candidate)
    left = f"; {search.left or 'none'} left"
    held = f", {_format_memory(candidate.slice, verdict.hbm_bytes)}" if verdict.hbm_bytes else ""
    if not verdict.fits:
        reason = "does not fit" if verdict.too_large else verdict.error.splitlines()[0][:120]
        return f"{shown}: {reason}{held}{left}"
    if verdict.step_seconds is None:
        return f"{shown}: fits{held}, not priced{left}"
    step = format_duration(verdict.step_seconds)
    prices = _format_prices(search.goal, verdict.step_seconds, search.find_usd_hour(candidate))
    return f"{shown}: fits{held}, {step} per step, {prices}{left}"


def _format_prices(goal: Goal, step_seconds: float, usd_hour: float) -> str:
    """Returns the price of a run and, if the examples are tokens, that of 1 billion tokens."""
    run = f"{format_price(goal.steps * step_seconds * usd_hour / 3600)} a run"
    per_tokens = goal.price_tokens(step_seconds, usd_hour)
    return run if per_tokens is None else f"{run} ({format_price(per_tokens)} per 1B tokens)"


def _format_memory(name: str, used: int) -> str:
    return f"{format_size(used)} of {format_size(parse_slice(name).generation.hbm_limit)}"


def describe_next(search: Search, space: Space) -> list[str]:
    """Returns a line about the most promising candidate that is left, if there is one."""
    one = search.find_promising()
    if one is None:
        return []
    shown = f"{space.format_candidate(one.candidate)}, {_format_estimate(search, one)}"
    expected = search.goal.rank(search.expect_seconds(one), one.usd_hour)
    best = search.list_best()
    known = ""
    if best and expected >= search.rank(best[0]):
        known = f", which is {search.goal.miss if expected[0] else 'no better than the best'}"
    return [f"  the most promising candidate left{known}, roughly: {shown}"]


def describe_unpriced(search: Search) -> list[str]:
    """Returns a line for each slice on which no candidate fits yet and some are left to compile."""
    return [
        f"  {name}: no price yet; roughly {_format_estimate(search, found)}"
        for name, found in search.list_unpriced().items()
        if isinstance(found, Estimate)
    ]


def describe_priced(search: Search) -> list[str]:
    """Returns a line once each of several slices has a price, while candidates are left."""
    if search.list_unpriced() or not search.left or len(search.list_firsts()) < 2:
        return []
    return ["  Each slice has a price. Cheaper ones may be left; Ctrl-C prints the best so far."]


def describe_ruled_out(search: Search, space: Space) -> list[str]:
    """Returns a line for each slice on which no candidate fits and none is left to compile."""
    lines = []
    for name, found in search.list_unpriced().items():
        if isinstance(found, Estimate):
            continue
        said = _describe_smallest(search, space, name)
        reasons = "; ".join(f"{count} {reason}" for reason, count in found.most_common())
        said += f"; left out: {reasons}" if reasons else ""
        if found.keys() & {NO_CHEAPER, NO_FASTER, TOO_SLOW, OVER_BUDGET}:
            said += f"; {_format_least(search, name)}"
        lines.append(f"  {name}: {said}")
    return lines


def _describe_smallest(search: Search, space: Space, name: str) -> str:
    """Returns why a slice has no row in the table, and the least memory needed there, if known."""
    tried = {one: verdict for one, verdict in search.verdicts.items() if one.slice == name}
    large = [one for one, verdict in tried.items() if verdict.too_large and verdict.hbm_bytes]
    if not large:
        return "none of the compiled candidates runs" if tried else "no row"
    least = min(large, key=lambda one: tried[one].hbm_bytes)
    memory = _format_memory(name, tried[least].hbm_bytes)
    return f"no row; the smallest that is too large needs {memory}: {space.format_candidate(least)}"


def _format_least(search: Search, name: str) -> str:
    """Returns the time and price of a run on a slice at the chip's peak speed."""
    seconds, usd_hour = search.find_least(name)
    prices = _format_prices(search.goal, seconds, usd_hour)
    run = format_duration(search.goal.steps * seconds)
    return f"at the chip's peak {run} and {prices}"


def describe_losers(search: Search) -> list[str]:
    """Returns a line for each slice on which a pruned candidate may be better than those shown."""
    lines = []
    for place, first in enumerate(search.list_firsts()):
        why = {reason for one, reason in search.pruned.items() if one.slice == first.slice}
        beaten = place > 0 and why & {NO_CHEAPER, NO_FASTER}
        if beaten or (not search.meets_goal(first) and why & {TOO_SLOW, OVER_BUDGET}):
            least = search.goal.rank(*search.find_least(first.slice))
            said = "its row may not be the best there"
            if place > 0 and least >= search.rank(search.list_best()[0]):
                better = "cheaper" if search.goal.budget is None else "faster"
                said += f", but nothing there is {better} than the first row"
            lines.append(f"  {first.slice}: {said}; {_format_least(search, first.slice)}")
    return lines


def describe_ranges(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the possible error of predicted times by generation, such as "±16% on v5e"."""
    names = dict.fromkeys(parse_slice(row["slice"]).generation.name for row in rows)
    by_share: dict[str, list[str]] = {}
    for name in names:
        by_share.setdefault(f"{1 - BASES[name].low:.0%}", []).append(name)
    return ", ".join(f"±{share} on {' and '.join(some)}" for share, some in by_share.items())


def _format_estimate(search: Search, one: Estimate) -> str:
    likely = search.expect_seconds(one)
    prices, least = (
        _format_prices(search.goal, seconds, one.usd_hour)
        for seconds in (likely, one.least_seconds)
    )
    run = format_duration(search.goal.steps * likely)
    return f"{run} and {prices}, at the chip's peak {least}"


def explain_nothing(search: Search) -> str:
    """Returns why no candidate can be shown, and what to change."""
    if search.left:
        flags = {"slice": "--slices", "mesh": f"--config.{MESH}=fsdp:-1"}
        flags["attention"] = f"--config.{ATTENTION}=auto"
        several = [
            flag
            for name, flag in flags.items()
            if len({getattr(one, name) for one in search.candidates}) > 1
        ]
        fewer = f", or fewer candidates with {' '.join(several)}" if several else ""
        return f"No candidate that fits is known yet: give more time with --time_limit{fewer}."
    if any(verdict.fits for verdict in search.verdicts.values()):
        return "Of the candidates that fit, none could be priced."
    if OVER_BUDGET in search.pruned.values():
        return "No candidate that fits is within the budget: raise --budget, or name other slices."
    if TOO_SLOW in search.pruned.values():
        return "No candidate that fits ends in time: raise --deadline, or name larger --slices."
    return "No candidate fits: name larger --slices."


def describe_search(
    search: Search, refusals: dict[str, str], undivided: Sequence[str]
) -> list[str]:
    """Returns lines about what was compiled, what was not, and why.

    Args:
        search: the search.
        refusals: for each slice that the config cannot use, by its name, the reason.
        undivided: for each mesh that cannot shard the model, the reason.
    """
    failed = [v for v in search.verdicts.values() if not v.fits]
    large = sum(v.too_large for v in failed)
    said = [f"{large} too large"] if large else []
    if len(failed) > large:
        said.append(f"{len(failed) - large} failed to compile or run")
    unpriced = sum(v.fits and not v.step_seconds for v in search.verdicts.values())
    said += [f"{unpriced} not priced"] if unpriced else []
    compiled = f"{len(search.verdicts):,} compiled" + (f" ({', '.join(said)})" if said else "")
    pruned = f"{len(search.pruned):,} pruned"
    left = f"{search.left:,} left"
    if search.left:
        left += ": the same command continues with them, for as long as --time_limit says"
    lines = [f"{counted(search.size, 'candidate')}: {compiled}, {pruned}, {left}."]
    if search.running:
        lines.append(
            f"  {search.running} being compiled at the end, which will start anew: --time_limit "
            "must be longer than one of them takes"
        )
    lines += [f"  {count} {reason}" for reason, count in search.count_pruned().items()]
    errors = dict.fromkeys(v.error.splitlines()[0] for v in failed if not v.too_large and v.error)
    lines += [f"  failed to compile or run: {error[:240]}" for error in list(errors)[:3]]
    if undivided:
        lines.append(f"  {counted(len(undivided), 'mesh')} left out: {undivided[0]}")
    return lines + [f"  {name} is left out: {reason}" for name, reason in refusals.items()]
