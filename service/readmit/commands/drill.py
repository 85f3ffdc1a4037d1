"""``readmit drill``: real faults on a live node, and what its recoveries took."""

import json
import ssl
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from readmit.commands import Json, application
from readmit.commands.tables import quantile, table, titled
from readmit.config import DEFAULT_FILE, load, split_address
from readmit.drill import LIMIT_S, Drill, DrillPath, Fault, Order, Traffic, deed
from readmit.drill_report import ByPath, DrillReport, Spread
from readmit.gate.access import read_token
from readmit.gate.operator import SOCKET
from readmit.gate.operator import order as ask_gate
from readmit.quantiles import QUANTILES
from readmit.where import ConfigOption, Where
from weightcache import paths
from weightcache.errors import ConfigError
from weightcache.vocabulary import PHASES, SUB_PHASES, UNATTRIBUTED

app = application()


@app.command("drill")
def command(
    kills: Annotated[int, typer.Option(min=1, help="How many faults, one after the other.")] = 1,
    fault: Annotated[Fault, typer.Option(help="What happens to the engine, the daemon, or both.")] = Fault.SIGKILL,
    path: Annotated[DrillPath, typer.Option(help="How the recoveries are to get their weights.")] = DrillPath.HIT,
    slot: Annotated[str | None, typer.Option(help="Which engine; the one that serves, if absent.")] = None,
    pause: Annotated[float, typer.Option(min=0, help="Seconds between a recovery and the next fault.")] = 1.0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds until a recovery is not waited for.")] = LIMIT_S,
    gate: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The gate, where no configuration says it.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Holds the gate's token, where no configuration says it.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="Ask the gate by HTTPS, and trust these certificates (PEM).")] = None,
    yes_really: Annotated[bool, typer.Option("--yes-really", help="Also while clients use the node.")] = False,
    config: ConfigOption = None,
    as_json: Json = False,
) -> None:
    """Kill what serves, for real, and measure from each fault to the first correct answer.

    Every recovery is recorded with the cause drill. A miss is arranged by giving the resident weights up before the
    fault; hit, off and standby are as the node is configured. Refuses while the gate has clients.
    Exits 1 when a recovery failed or took another path.
    """
    where = Where.find(config)
    socket, asked = paths.socket_path(), Asked(gate, token_file, ca)
    if config is not None or DEFAULT_FILE.exists():
        node = load(config)
        socket = node.socket
        if node.gate.enabled:
            known = node.gate_settings()
            own = known.tls_cert if gate is None and ca is None else None
            asked = Asked(gate or known.listen, token_file or known.token_file, ca or own, is_its_own=own is not None)
    order = Order(kills, fault, path, slot, pause, limit)
    clients = partial(traffic, asked, where.runtime_dir)
    drill = Drill(where, socket, order, clients, lambda text: typer.echo(text, err=True))
    report = drill.run(yes_really=yes_really)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1))
    else:
        show(report, Console())
    raise typer.Exit(0 if report.passed else 1)


class Asked(NamedTuple):
    """How the gate is asked by TCP: by HTTPS where there are certificates to trust.

    ``is_its_own``: they are the gate's own, from the node's configuration; whatever names they carry, it has the key.
    """

    listen: str | None
    token_file: Path | None = None
    ca: Path | None = None
    is_its_own: bool = False

    def status(self) -> dict[str, Any]:
        """What the gate says.

        Raises:
            OSError, ValueError: it says nothing.
            ConfigError: ``token``: there is none in the file.
        """
        host, port = split_address(self.listen or "")
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        where = f"{f'[{host}]' if ':' in host else host}:{port}/api/status"
        headers = {"Authorization": f"Bearer {read_token(self.token_file).decode()}"} if self.token_file else {}
        context = None
        if self.ca is not None:
            context = ssl.create_default_context(cafile=str(self.ca))
            if self.is_its_own:
                context.check_hostname = False
                context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be a root's
        request = urllib.request.Request(f"{'https' if context else 'http'}://{where}", headers=headers)
        with urllib.request.urlopen(request, timeout=30, context=context) as reply:
            facts: dict[str, Any] = json.load(reply)
        return facts


def traffic(asked: Asked, runtime_dir: Path | None = None) -> Traffic:
    """What the gate says of its clients: by its socket, which needs no token, or by TCP where it has none there."""
    if runtime_dir is not None and (runtime_dir / SOCKET).exists():
        try:
            return _said(ask_gate(runtime_dir, "GET", "/api/status"))
        except ConfigError as error:
            return Traffic(problem=f"the gate does not say: {error}")
    if asked.listen is None:
        return Traffic(problem="no gate is known here that could say")
    try:
        return _said(asked.status())
    except (OSError, ValueError) as error:
        remedy = " (--token-file)" if isinstance(error, urllib.error.HTTPError) and error.code == 401 else ""
        return Traffic(problem=f"the gate at {asked.listen} does not say: {error}{remedy}")


def _said(facts: dict[str, Any]) -> Traffic:
    if "last_request_s" not in facts:
        return Traffic(problem="the gate does not say: it is of another release")
    return Traffic(0.0 if facts["in_flight"] else facts["last_request_s"], serving=facts.get("serving"))


def show(report: DrillReport, console: Console) -> None:
    """Print a drill for people."""
    order = report.order
    outcomes = [f"{n} {outcome}" for outcome, n in report.outcomes.items()]
    outcomes += [f"{report.astray} by another path than {order['path']}"] if report.astray else []
    console.print(
        f"{order['kills']} x {deed(order['fault'], report.slot)} on {report.node}"
        + (f", path {order['path']}: {', '.join(outcomes)}" if report.recoveries else "")
    )
    if report.stopped:
        console.print(f"Stopped early: {report.stopped}.")
    shown = table("", "n", *QUANTILES, "max")
    for it in report.paths:
        shown.add_row(it.path, *_cells(it.recovery))
        shown.add_row("  of it no slot ready", *_cells(it.outage), style="dim")
    if report.daemon:
        shown.add_row("daemon serves the same weights again", *_cells(report.daemon))
    console.print(titled("From the fault to the first correct answer", shown))
    if report.daemons:
        kept = sum(it.generations_kept for it in report.daemons), sum(it.generations for it in report.daemons)
        leases = sum(it.leases_kept for it in report.daemons), sum(it.leases for it in report.daemons)
        console.print(f"The daemon kept {kept[0]} of {kept[1]} generations and {leases[0]} of {leases[1]} leases.")
    if report.paths:
        console.print(titled("Mean seconds of each phase", _phases(report.paths)))
    facts = report.machine
    console.print(
        f"readmit {facts['readmit']}, {facts['cpu']}, {facts['cores']} cores, "
        f"{facts['memory_bytes'] / 2**30:.0f} GiB, load {facts['load_average'][0]}",
        style="dim",
    )


def _cells(spread: Spread) -> list[str]:
    quantiles = [quantile(name, value, "{:.2f} s".format) for name, value in spread.quantiles.items()]
    return [str(spread.n), *quantiles, f"{spread.max_s:.2f} s"]


def _phases(by_path: list[ByPath]) -> Table:
    shown = table("", *(it.path for it in by_path))
    for phase in (*PHASES, UNATTRIBUTED):
        if any(phase in it.phases_s for it in by_path):
            shown.add_row(phase, *(_seconds(it.phases_s.get(phase)) for it in by_path))
        for part in (f"{phase}.{name}" for name in SUB_PHASES.get(phase, ())):
            if any(part in it.parts_s for it in by_path):
                cells = (_seconds(it.parts_s.get(part)) for it in by_path)
                shown.add_row(f"  {part.partition('.')[2]}", *cells, style="dim")
    return shown


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
