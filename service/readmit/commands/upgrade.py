"""``readmit upgrade``: replace a node's processes by the installed release, one after the other, under traffic."""

import json
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from readmit.commands import Json, application, tell
from readmit.commands.restart import child, reexec, restarted, up
from readmit.config import DEFAULT_FILE, load
from readmit.daemon import ask_daemon
from readmit.gate.operator import order
from readmit.recovered import LIMIT_S, Recovered, account, is_drained, wait
from readmit.where import ConfigOption, Where
from weightcache import messages, paths
from weightcache.checkpoint import Folder
from weightcache.episodes import Replay
from weightcache.errors import CheckpointError, ConfigError
from weightcache.fingerprint import normalize_path
from weightcache.identity import digest_of
from weightcache.journal import Context, Journal
from weightcache.keeper.control import ask
from weightcache.version import VERSION

app = application()

PATIENCE_S: Final = 5.0
"""After so long it is said what is waited for."""
SETTLED: Final = ("ready", "draining", "stopped")
"""States at the gate of slots that are not on their way to serve."""
_LOOK_S: Final = 0.1


class Part(StrEnum):
    """What is replaced, in this order."""

    KEEPER = "keeper"
    DAEMON = "daemon"
    GATE = "gate"
    ENGINE = "engine"


@app.command("upgrade")
def command(
    only: Annotated[list[Part] | None, typer.Option(help="Only this part; repeatable. All of them, if absent.")] = None,
    cold_ok: Annotated[bool, typer.Option("--cold-ok", help="Also engines that would load from disk.")] = False,
    config: ConfigOption = None,
    as_json: Json = False,
) -> None:
    """Have everything run as the release that is installed now: keeper, daemon, gate, then engines one by one.

    At each step somebody else holds the weights, and nothing is loaded again. Stops at the first step that does not
    come out well, and before an engine that would not map resident weights.
    """
    where = Where.find(config)
    node = Node(where, config)
    parts = [part for part in Part if not only or part in only]
    recoveries: list[Recovered] = []
    for told in node.replace(parts, cold_ok=cold_ok):
        tell(str(told), as_json=as_json)
        recoveries += [told] if isinstance(told, Recovered) else []
    if len(recoveries) > 1:
        tell(account(recoveries), as_json=as_json)
    if as_json:
        typer.echo(
            json.dumps({"release": VERSION, "replaced": parts, "recoveries": [it.to_dict() for it in recoveries]})
        )


class Node:
    """A node whose processes are replaced.

    Args:
        where: its folders.
        config: its configuration, where it has one.
    """

    def __init__(self, where: Where, config: Path | None) -> None:
        self._where = where
        self._config = config
        self._socket = paths.socket_path()
        self._models: dict[str, str] = {}
        if config is not None or DEFAULT_FILE.exists():
            node = load(config or DEFAULT_FILE)
            self._socket = node.socket
            self._models = {slot.name: slot.model for slot in node.slot if slot.model}
        self._context = Context(ask(where.runtime_dir, {"status": True})["node"])
        self._journal = Journal(where.journal, self._context)
        self._replay = Replay()

    def replace(self, parts: list[Part], *, cold_ok: bool) -> Iterator[str | Recovered]:
        """Replace them; says what was done after each step, of an engine how it recovered.

        Raises:
            ConfigError: a step did not come out well; those after it were not begun.
        """
        if Part.KEEPER in parts:
            yield reexec(self._where, self._config)
        for role in (Part.DAEMON, Part.GATE):
            if role in parts:
                for each in self._children(role):
                    yield self._service(each)
        if Part.ENGINE in parts:
            for each in self._children(Part.ENGINE):
                yield from self._engine(each["name"], cold_ok=cold_ok)

    def _service(self, before: dict[str, Any]) -> str:
        holds = before["role"] == Part.DAEMON
        resident = self._resident() if holds else set()
        ask(self._where.runtime_dir, {"restart": before["name"]})
        told = up(self._where, before)
        if holds and (lost := resident - self._resident()):
            raise _stopped(f"the new daemon has not taken over {', '.join(sorted(lost))}", "readmit logs shows why")
        return f"{told}, with all {len(resident)} generations" if holds else told

    def _engine(self, slot: str, *, cold_ok: bool) -> Iterator[str | Recovered]:
        if child(self._where, slot)["state"] != "running":
            yield f"{slot} does not run, and is left alone"
            return
        if is_drained(self._where, slot):
            yield f"{slot} is drained, and is left alone (readmit drain {slot} --undo, readmit upgrade --only engine)"
            return
        self._wait_for_rest()
        verdict = self._forecast(slot)
        yield f"{slot} next: {verdict or 'it will map resident weights'}"
        if verdict and not cold_ok:
            raise _stopped(
                f"{slot} would not map resident weights",
                "Make them resident first (readmit cache load, or prepare), or say --cold-ok",
            )
        episode = restarted(self._where, slot, "upgrade")
        assert episode is not None
        recovered = wait(self._where, episode)
        yield recovered
        if not recovered.ready:
            raise _stopped(f"{slot} did not come back", "readmit report and readmit logs show why")

    def _forecast(self, slot: str) -> str | None:
        """Why a slot's next start would not map resident weights, None if it would.

        By what its last one asked for, with the model that is configured now, as its files are now.
        """
        known = self._recoveries().slots.get(slot)
        lookups = known.attempt.lookups if known and known.attempt else []
        asked = {it.rank: it.attributes for it in lookups if it.result != "off"}
        if not asked:
            return "it has not asked for resident weights before"
        for rank in sorted(asked):
            config = _as_it_is_now(asked[rank]["config"], self._models.get(slot))
            facts = self._ask(messages.Explain(config=config, device=asked[rank].get("device")))
            if not facts["would_hit"]:
                return f"miss, {facts['reason']}: {facts['message']}"
        return None

    def _wait_for_rest(self) -> None:
        """Wait until every slot that runs has been found right: with one on its way, the next would be an outage."""
        began, told = time.monotonic(), False
        while on_its_way := self._on_its_way():
            waited_s = time.monotonic() - began
            if waited_s > LIMIT_S:
                raise _stopped(f"slot {on_its_way} is not ready", "readmit status shows what it does")
            if waited_s > PATIENCE_S and not told:
                typer.echo(
                    f"waiting for {on_its_way}, at most {LIMIT_S:g} s: readmit status shows what it does", err=True
                )
                told = True
            time.sleep(_LOOK_S)

    def _on_its_way(self) -> str | None:
        """A slot that recovers, or whose engine a gate that was replaced just now has yet to ask."""
        if open_ := self._recoveries().open_episodes:
            return open_[0].slot
        try:
            slots = order(self._where.runtime_dir, "GET", "/api/status")["slots"]
        except ConfigError:  # no gate here
            return None
        return next((it["slot"] for it in slots if it["state"] not in SETTLED), None)

    def _recoveries(self) -> Replay:
        """The node's, up to date; what was read of the journal is not read again."""
        self._replay.catch_up(self._journal)
        return self._replay

    def _children(self, role: Part) -> list[dict[str, Any]]:
        return [it for it in ask(self._where.runtime_dir, {"status": True})["children"] if it["role"] == role]

    def _resident(self) -> set[str]:
        return {it["generation"] for it in self._ask(messages.Status())["generations"]}

    def _ask(self, request: messages.Request) -> dict[str, Any]:
        return ask_daemon(self._socket, request, self._context.node)


def _as_it_is_now(asked: dict[str, Any], model: str | None) -> dict[str, Any]:
    """What was asked for, with the identity of the model's files as they are.

    Raises:
        CheckpointError: another model is configured now, whose files cannot be seen from here.
    """
    path = model or str(asked["model_path"])
    try:
        return {**asked, "model_path": path, "checkpoint_digest": digest_of(Folder.open(path)).digest}
    except CheckpointError:
        if normalize_path(path) != normalize_path(str(asked["model_path"])):
            raise
        return asked


def _stopped(problem: str, remedy: str) -> ConfigError:
    return ConfigError("upgrade", f"the upgrade stops here: {problem}", remedy=remedy)
