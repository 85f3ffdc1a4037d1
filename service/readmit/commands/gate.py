"""``readmit gate``: run the gate, or have it let engines in for a while whatever they answer."""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from readmit.commands import Json, application, user
from readmit.gate.operator import order
from readmit.gate.settings import GateSettings, SlotSettings
from readmit.where import ConfigOption, Where, check_ours
from weightcache import paths
from weightcache.errors import ConfigError
from weightcache.keeper.control import ask
from weightcache.logs import configure

app = application()

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600}

log = logging.getLogger("readmit.gate")


@app.callback(invoke_without_command=True)
def command(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="The node's configuration; nothing else is then taken from options.")
    ] = None,
    slot: Annotated[
        list[str] | None, typer.Option(help="NAME=URL, in order of preference; repeat for several.")
    ] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT; port 0 for any free one.")] = "127.0.0.1:8000",
    probes: Annotated[Path | None, typer.Option(help="The file with the golden answers, or a folder of such.")] = None,
    unverified_ok: Annotated[
        bool, typer.Option("--unverified-ok", help="Open without golden answers, and say so.")
    ] = False,
    journal: Annotated[
        Path | None, typer.Option(help="The node's journal; READMIT_JOURNAL or the state folder's if absent.")
    ] = None,
    unsupervised: Annotated[
        bool, typer.Option("--unsupervised", help="No keeper runs the engines: take whoever listens on their ports.")
    ] = False,
    runtime_dir: Annotated[
        Path | None, typer.Option(help="The keeper's runtime folder, to have hanging engines restarted.")
    ] = None,
    cache_socket: Annotated[
        Path | None, typer.Option(help="The weight cache's socket, to have wrong weights quarantined.")
    ] = None,
    eject_last: Annotated[
        bool, typer.Option("--eject-last", help="Eject for wrong answers, or none, even when no other slot is ready.")
    ] = False,
    max_in_flight: Annotated[int, typer.Option(min=1, help="More requests at a time are answered 429.")] = 512,
    max_wait: Annotated[float, typer.Option(min=0, help="Seconds that requests may wait for a slot to be ready.")] = 0,
    max_queue: Annotated[int, typer.Option(min=1, help="How many requests may wait for one.")] = 64,
    verify_interval: Annotated[float, typer.Option(help="Seconds between verifications of an idle slot.")] = 10.0,
    probe_limit: Annotated[
        float, typer.Option(help="Seconds after which an answer to a golden question is late.")
    ] = 10,
    hang_limit: Annotated[float, typer.Option(help="Seconds without an answer after which an idle engine hangs.")] = 30,
    start_limit: Annotated[
        float, typer.Option(help="Seconds after its start at which an engine that never answered hangs.")
    ] = GateSettings.start_limit_s,
    first_byte_limit: Annotated[
        float, typer.Option(help="Seconds within which an engine must begin its response.")
    ] = GateSettings.first_byte_limit_s,
    drain_notice: Annotated[float, typer.Option(help="Seconds to serve on after SIGTERM.")] = 5.0,
    drain_limit: Annotated[float, typer.Option(help="Seconds that running requests get to finish.")] = 60.0,
    token_file: Annotated[
        Path | None, typer.Option(help="Holds the token that the status page and /api then ask for.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Serve HTTPS with this certificate chain (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="The longest body of a request.")
    ] = GateSettings.max_body_bytes,
    explain_refusals: Annotated[
        bool, typer.Option("--explain-refusals", help="Say in a 503 what the golden questions found.")
    ] = False,
    log_format: Annotated[str | None, typer.Option(help="text or json; READMIT_LOG_FORMAT if absent.")] = None,
) -> None:
    """Let traffic in only when the model answers correctly."""
    if context.invoked_subcommand is not None:
        return
    configure(log_format)
    from readmit.gate.server import run  # here, so that --help needs no web framework

    if config is not None:
        from readmit.config import load

        node = load(config)
        check_ours(node.journal.parent)
        raise typer.Exit(run(node.gate_settings()))
    settings = GateSettings(
        slots=_slots(slot or (), supervised=not unsupervised),
        listen=listen,
        journal=journal or paths.journal_path(),
        runtime_dir=runtime_dir,
        cache_socket=cache_socket,
        probes=probes,
        unverified_ok=unverified_ok,
        eject_last=eject_last,
        max_in_flight=max_in_flight,
        max_wait_s=max_wait,
        max_queue=max_queue,
        verify_interval_s=verify_interval,
        probe_limit_s=probe_limit,
        hang_limit_s=hang_limit,
        start_limit_s=start_limit,
        first_byte_limit_s=first_byte_limit,
        drain_notice_s=drain_notice,
        drain_limit_s=drain_limit,
        token_file=token_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        max_body_bytes=max_body_bytes,
        explain_refusals=explain_refusals,
    )
    if settings.journal is not None:
        check_ours(settings.journal.parent)
    if not unsupervised:
        try:
            ask(runtime_dir or paths.runtime_dir(create=False), {"status": True})
        except ConfigError as error:
            log.warning("%s No engine is let in that no keeper started, unless --unsupervised", error)
    raise typer.Exit(run(settings))


@app.command("override")
def override_command(
    ttl: Annotated[str | None, typer.Option(help="For how long: 90s, 15m, 2h; at most 24h.")] = None,
    reason: Annotated[str | None, typer.Option(help="Why, for the journal, /readyz and the page.")] = None,
    lift: Annotated[bool, typer.Option("--lift", help="End it now.")] = False,
    config: ConfigOption = None,
    as_json: Json = False,
) -> None:
    """Let engines that answer in whatever they answer, for a limited time. It ends by itself.

    The journal keeps who said so and why; /readyz, the status page and a metric show it while it lasts. When it ends,
    whoever was let in by it must answer correctly or leave.
    """
    where, by = Where.find(config), {"user": user()}
    if lift:
        facts = order(where.runtime_dir, "DELETE", "/api/override", by)
        told = "the override is lifted"
    elif ttl is None or reason is None:
        raise typer.BadParameter("an override has a --ttl and a --reason (or --lift ends one)")
    else:
        wanted = {"ttl_s": _seconds(ttl), "reason": reason, **by}
        facts = order(where.runtime_dir, "POST", "/api/override", wanted)
        told = f"engines that answer are let in whatever they answer, for {facts['ttl_s']:g} s"
    typer.echo(json.dumps(facts) if as_json else told)


def _seconds(text: str) -> int:
    match = re.fullmatch(r"(\d+)([smh])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no length of time; write 90s, 15m or 2h", param_hint="--ttl")
    return int(match[1]) * _UNITS_S[match[2]]


def _slots(texts: Sequence[str], *, supervised: bool) -> tuple[SlotSettings, ...]:
    slots = []
    for text in texts:
        name, equals, url = text.partition("=")
        if not equals or not name:
            raise ConfigError(
                "slots",
                "a slot has no name or no URL",
                expected="NAME=URL",
                found=text,
                remedy="Write for example --slot a=http://127.0.0.1:8101",
            )
        slots.append(SlotSettings(name, url, supervised))
    return tuple(slots)
