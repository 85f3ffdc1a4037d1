"""``python -m readmit.demo``: the main job, shown."""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from readmit import demo_model
from readmit.demo.script import PROMPT, Demo
from weightcache import amdahl
from weightcache.errors import ConfigError
from weightcache.vocabulary import PHASES, UNATTRIBUTED


def main() -> None:
    options = _parser().parse_args()
    console = Console()
    model = _prepared(console)
    folder = Path(tempfile.mkdtemp(prefix="readmit-demo-"))
    report_file = (options.json or folder / "demo.json").resolve()
    with console.status("starting") as status:
        demo = Demo(
            folder,
            model,
            options.prompt,
            step=lambda text: console.print(f"[bold]{text}"),
            tell=lambda text: status.update(f"   {text}"),
        )
        console.print(f"[dim]everything this demo makes is below {folder}")
        try:
            report = demo.run()
        except BaseException as error:
            if isinstance(error, ConfigError) and not hasattr(demo, "node"):  # nothing has been started
                shutil.rmtree(folder)
                console.print(f"make demo: {error}", style="red")
                raise SystemExit(2) from error
            if hasattr(demo, "node"):
                demo.node.down()
            console.print(f"the demo failed; its logs and journal are below {folder}")
            raise
        if not options.keep:
            demo.node.down()
    report_file.write_text(json.dumps(report, indent=1) + "\n")
    show(console, report)
    console.print(f"report: {report_file}")
    if options.keep:
        console.print(f"it runs on: status page {demo.node.url}/   metrics {demo.node.metrics_url}")
        console.print(f"traces (OTLP-JSON lines): {demo.node.spans}   end it with: {demo.node.detach()}")
    else:
        console.print("while it runs it has a status page, metrics and traces: make demo ARGS=--keep")
        for copy in (demo.model, demo.twin.parent):
            shutil.rmtree(copy)
    failed = failures(report)
    for failure in failed:
        console.print(f"[red]{failure}")
    raise SystemExit(1 if failed else 0)


def failures(report: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    expected = ["off", "off", "miss", "hit", "hit", "hit", "miss", "hit", "standby"]
    paths = [each["path"] for each in report["recoveries"]]
    checks = {
        f"the recoveries took the paths {paths}, not {expected}": paths == expected,
        f"wrong answers reached the client: {report['client']['wrong_answers']}": report["client"]["wrong"] == 0,
        "requests hung": report["client"]["hung"] == 0,
        "the standby's client got wrong answers or none": report["standby"]["client"]["wrong"] == 0
        and report["standby"]["client"]["hung"] == 0
        and report["standby"]["client"]["answers"] > 0,
        "the engine behind the standby did not come back on resident weights": report["standby"]["engine_path"]
        == "hit",
        "a wrong golden answer opened the gate": report["controls"]["wrong_golden_refused"],
        "a damaged manifest was made resident": report["controls"]["damaged_manifest_refused"],
        "the daemon's death ended weights, leases or the engine": report["daemon"]["generations_kept"]
        and report["daemon"]["engine_kept"]
        and report["daemon"]["leases_kept"] == 1,
    }
    return [text for text, good in checks.items() if not good]


def show(console: Console, report: dict[str, Any]) -> None:
    """The table and what it says."""
    recoveries = report["recoveries"]
    phases = [name for name in (*PHASES, UNATTRIBUTED) if any(each["phases"].get(name) for each in recoveries)]
    table = Table(title="From the fault to the first correct answer, seconds", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("step", no_wrap=True)
    for each in recoveries:
        table.add_column(each["step"].split()[0], justify="right")
    table.add_row("path", *(each["path"] for each in recoveries))
    for name in phases:
        table.add_row(name, *(f"{each['phases'][name]:.2f}" if name in each["phases"] else "" for each in recoveries))
    table.add_row("total", *(f"{each['total_s']:.2f}" for each in recoveries), style="bold")
    console.print(table)
    for each in recoveries:
        console.print(f"{each['step']}: {each['path']}, cause {each['cause']}")
        if each["message"]:
            reason = "/".join(word for word in (each["reason"], each["detail"]) if word)
            console.print(f"  {reason}: {each['message']}")
    daemon, client, rate = report["daemon"], report["client"], report["hit_rate"]
    console.print(
        f"daemon: {daemon['rss_mib']} MiB, serving again {daemon['readopt_s']} s after SIGKILL; "
        f"keeper: {report['keeper']['rss_mib']} MiB; hits: {rate['hits']} of {rate['attempts']} attaches"
    )
    console.print(
        f"client at {client['rate']:.0f} requests/s: {client['answers']} right answers, {client['refused']} refused "
        f"(503), {client['overload']} too many at once (429), {client['broken']} broken by a kill, "
        f"{client['unreachable']} while no gate ran, "
        f"[bold]{client['wrong']} wrong, {client['hung']} hung"
    )
    console.print(two_clocks(report["standby"]))
    console.print(honest(recoveries))


def two_clocks(standby: dict[str, Any]) -> str:
    """What the takeover took, and what it left to be done."""
    parked, client = standby["parked"] or {}, standby["client"]
    cost = f" It costs {parked['private_bytes'] / 2**20:.0f} MiB of its own." if parked.get("private_bytes") else ""
    return (
        f"With a standby two clocks run: service outage {standby['service_outage_s']:.3f} s to the first golden answer "
        f"({standby['kill_to_answer_s']:.3f} s from kill -9 to a client's next answer), engine recovery "
        f"{standby['engine_recovery_s']:.2f} s ({standby['engine_path']}), after which that engine stands by.{cost} "
        f"Its client meanwhile: {client['answers']} right answers, {client['wrong']} wrong, {client['broken']} broken "
        f"by the kill, {client['refused']} refused, {client['hung']} hung."
    )


def honest(recoveries: list[dict[str, Any]]) -> str:
    """What these figures do and do not show."""
    off = next(each for each in recoveries if each["path"] == "off" and each["cause"] != "first_start")
    hits = [each["total_s"] for each in recoveries if each["path"] == "hit"]
    load = off["phases"]["load_weights"]
    share = load / off["total_s"]
    limit = amdahl.limit(share)
    return (
        f"Said plainly: after the same kill this 135M model took {off['total_s']:.2f} s without the cache and "
        f"{min(hits):.2f} to {max(hits):.2f} s on resident weights. Loading weights is {share:.0%} of that start, so "
        f"Amdahl's law caps the whole gain at {limit:.2f} x however fast the attach. The cache pays where weights are "
        "large: benchmarks/attach.py has the 4 GiB rows."
    )


def _prepared(console: Console) -> Path:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("preparing the model", total=None)
        return demo_model.prepare(report=lambda done, total: progress.update(task, completed=done, total=total))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--prompt", default=PROMPT, help="what the steady client asks")
    parser.add_argument("--keep", action="store_true", help="leave the node running at the end")
    return parser


if __name__ == "__main__":
    main()
