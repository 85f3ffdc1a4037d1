"""``readmit report``: recoveries, how long and why."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from readmit.commands import Json, application
from readmit.commands.tables import quantile, table, titled
from readmit.report import Group, Report, build
from readmit.where import ConfigOption, Where
from weightcache.errors import ConfigError
from weightcache.starting_state import COMPARED
from weightcache.vocabulary import PHASES, SUB_PHASES, UNATTRIBUTED

app = application()

_SHOWN_QUANTILES: Final = ("p50", "p95")
_UNITS_S: Final = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@app.command("report")
def command(
    since: Annotated[str | None, typer.Option(help="Only what ended in the last 90m, 12h, 30d, 4w.")] = None,
    slot: Annotated[str | None, typer.Option(help="One slot only.")] = None,
    config: ConfigOption = None,
    as_json: Json = False,
) -> None:
    """Show what recoveries took by path and phase, why resident weights were missed, and what to do about it."""
    where = Where.find(config)
    if not where.journal.exists():
        raise ConfigError(
            "no_journal",
            "there is no journal to report on",
            expected="a file that readmit up, run or cache serve writes",
            found=f"nothing at {where.journal}",
            remedy="Start something with readmit, or name the journal in READMIT_JOURNAL",
        )
    since_ns = None if since is None else time.time_ns() - _seconds(since) * 1_000_000_000
    with where.reading() as journal:
        output = where.state_dir / "output"
        report = build(journal, since_ns=since_ns, slot=slot, output=output, objectives=where.objectives)
    if slot is not None and not report.slots:
        raise ConfigError(
            "no_such_slot",
            f"the journal knows no slot {slot}",
            expected="a slot that has run here",
            found=slot,
            remedy="readmit status and readmit report without --slot list them",
        )
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1))
    else:
        show(report, Console())


def show(report: Report, console: Console) -> None:
    """Print the report for people."""
    if not report.started:
        console.print("No recovery so far.")
        return
    for section in _sections(report):
        console.print(section)
        console.print()


def _sections(report: Report) -> Iterator[RenderableType]:
    yield titled("From the fault to the first correct answer", _paths(report))
    yield _hit_rate(report)
    if report.reasons:
        yield titled("Why resident weights were missed", _reasons(report))
    if report.groups:
        yield titled("Where the time goes: mean seconds and share", _phases(report.groups))
        yield _amdahl(report)
    yield titled("Engine recovery, by slot", _clocks(report))
    yield _outages(report)
    if report.open:
        yield titled("Open now", _open(report))
    if report.dead:
        kept = {str(Path(it.output).parent) for it in report.dead if it.output}
        yield titled(f"Engines that ended{''.join(f'; last words in {folder}' for folder in kept)}", _dead(report))
    if report.spool_bytes:
        yield f"{report.spool_bytes} bytes of events wait to be merged into the journal, and are not in here."


def _seconds(text: str) -> int:
    match = re.fullmatch(r"(\d+)([mhdw])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no length of time; write 90m, 12h, 30d or 4w", param_hint="--since")
    return int(match[1]) * _UNITS_S[match[2]]


def _paths(report: Report) -> Table:
    shown = table("path", "n", "open", "late", "limit", "worst", *_SHOWN_QUANTILES)
    for path in report.paths:
        outcomes = ", ".join(f"{n} {outcome}" for outcome, n in path.outcomes.items() if outcome != "ready")
        n = f"{path.closed}" + (f" ({outcomes})" if outcomes else "")
        n += f" ({path.unverified} unverified)" if path.unverified else ""
        told = [quantile(name, path.quantiles[name], _s) for name in _SHOWN_QUANTILES]
        shown.add_row(path.path, n, str(path.open), str(path.late), _s(path.threshold_s), _s(path.worst_s), *told)
    return shown


def _hit_rate(report: Report) -> str:
    attaches = report.hits + report.misses
    if not attaches:
        return "Hit rate: no engine has tried to map resident weights."
    recoveries = f"{report.mapped} of {report.tried} recoveries on every rank" if report.tried else "no recovery yet"
    return f"Hit rate: {recoveries}; {report.hits} of {attaches} attaches ({report.hits / attaches:.0%})."


def _reasons(report: Report) -> Table:
    shown = table("reason", "recoveries", "attaches")
    shown.add_column("what to do", overflow="fold")
    for it in report.reasons:
        reason = f"{it.reason} / {it.detail}" if it.detail else it.reason
        shown.add_row(reason, str(it.recoveries), str(it.lookups), it.remedy)
        if it.message:
            shown.add_row("", "", "", Text(it.message.removesuffix(f" {it.remedy}."), style="dim"))
    return shown


def _phases(groups: list[Group]) -> Table:
    heads = [f"{group.path} (n={group.n})\n{_state(group)}" for group in groups]
    shown = table("phase", *heads)
    parts = {name for group in groups for name in group.parts}
    for phase in (*PHASES, UNATTRIBUTED):
        if any(phase in group.phases for group in groups):
            shown.add_row(phase, *(_share(group.phases.get(phase), group.total_s) for group in groups))
        for name in (f"{phase}.{part}" for part in SUB_PHASES.get(phase, ())):
            if name in parts:
                cells = (_share(group.parts.get(name), group.total_s) for group in groups)
                shown.add_row(f"  {name.partition('.')[2]}", *cells, style="dim")
    shown.add_row("total", *(_s(group.total_s) for group in groups), style="bold")
    return shown


def _state(group: Group) -> str:
    state = group.state or {}
    known = [f"{name.replace('_', ' ')} {state[name]}" for name in COMPARED if state.get(name)]
    return "\n".join(known) or "starting state\nnot recorded"


def _share(seconds: float | None, total_s: float) -> str:
    return "-" if seconds is None else f"{_s(seconds)} {seconds / total_s if total_s else 0:4.0%}"


def _amdahl(report: Report) -> str:
    account = report.amdahl
    if account is None:
        return "No speed-up is given: " + "; ".join(report.refused) + "."
    text = (
        f"Weights are F = {account.fraction:.1%} of a cold recovery of {_s(account.cold_s)} and are there "
        f"S = {account.factor:.0f} times faster: {account.predicted:.2f} times by Amdahl's law, "
        f"{account.measured:.2f} measured, {account.limit:.2f} at most."
    )
    if account.next_phase:
        text += f" Of the {_s(account.resident_s)} left, {account.next_phase} takes most: {_s(account.next_phase_s)}."
    return text


def _clocks(report: Report) -> Table:
    shown = table("slot", "not ready", "observed", "ready")
    for slot in report.slots:
        ratio = 1 - slot.unready_s / slot.observed_s if slot.observed_s else 0.0
        shown.add_row(slot.slot, _s(slot.unready_s), _s(slot.observed_s), f"{ratio:.3%}")
    return shown


def _outages(report: Report) -> str:
    lasting = f"; one has lasted {_s(report.outage_open_s)}" if report.outage_open_s is not None else ""
    return (
        f"Service outages, no slot ready: {report.outages}, {_s(report.outage_s)} in all, "
        f"the longest {_s(report.worst_outage_s)}{lasting}."
    )


def _open(report: Report) -> Table:
    shown = table("episode", "slot", "cause", "age", "attempts", "phase", "path", "")
    for it in report.open:
        path = f"{it.path} ({it.reason})" if it.reason else it.path
        late = "late" if it.late else ""
        row = (it.episode[:8], it.slot, it.cause, _s(it.age_s), str(it.attempts), it.phase or "-", path, late)
        shown.add_row(*row, style="red" if it.late else None)
    return shown


def _dead(report: Report) -> Table:
    shown = table("episode", "slot", "attempt", "outcome", "status", "last words")
    for it in report.dead[-10:]:
        status = f"signal {it.signal}" if it.signal else f"exit {it.exit_code}" if it.exit_code is not None else "-"
        words = Path(it.output).name if it.output else "-"
        shown.add_row(it.episode[:8], it.slot, str(it.attempt), it.outcome, status, words)
    return shown


def _s(seconds: float) -> str:
    """Seconds with as many digits as mean something."""
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s" if seconds < 1000 else f"{seconds:,.0f} s"
