"""The root of the command line: quick, complete, and clear when it refuses."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.readmit.nodes import Place, free_port, place, wait_for

from readmit.cli import COMMANDS, _group
from readmit.commands import user
from readmit.commands.cache import told
from readmit.commands.status import table
from weightcache.journal import Journal
from weightcache.version import VERSION

HEAVY = {"torch", "transformers", "fastapi", "aiohttp", "pydantic", "prometheus_client", "opentelemetry", "rich"}


@pytest.fixture
def here() -> Iterator[Place]:
    with place() as place_:
        yield place_


def modules_after(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    return set(shown.splitlines()[-1].split())


def test_help_lists_every_command_and_imports_none(here: Place) -> None:
    shown = here.readmit("--help")
    assert shown.returncode == 0
    for name, entry in COMMANDS.items():
        assert f"  {name} " in shown.stdout
        assert entry.help in shown.stdout
    help_ = "import contextlib, readmit.cli\nwith contextlib.suppress(SystemExit): readmit.cli.main(['--help'])"
    assert not modules_after(help_) & HEAVY


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(here: Place, name: str) -> None:
    shown = here.readmit(name, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "usage: readmit" in shown.stdout.lower()


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that typer parses, by the words that call it."""
    for name, command in group.commands.items():
        if not path and COMMANDS[name].plain:
            continue
        found = group.resolve_command(None, [name])[1] if not path else command
        if getattr(found, "commands", None):
            yield from commands(found, (*path, name))
        yield (*path, name), found


def test_every_option_of_every_command_says_what_it_is_for() -> None:
    silent = [
        (*words, parameter.name)
        for words, command in commands(_group())
        for parameter in command.params
        if not getattr(parameter, "help", None) and not getattr(parameter, "hidden", False)
    ]
    assert silent == []


def test_whatever_prints_facts_prints_json_too() -> None:
    of_people = {"up", "run", "logs", "model", "gate", "cache", "cache serve", "probe", "probe record"}
    without = {
        " ".join(words)
        for words, command in commands(_group())
        if not any("--json" in parameter.opts for parameter in command.params)
    }
    assert without <= {*of_people, "config"}


def test_the_first_things_that_anybody_tries(here: Place) -> None:
    assert here.readmit("--version").stdout == f"readmit {VERSION}\n"
    assert here.readmit("-h").stdout == here.readmit("--help").stdout
    assert "Exit status: 0 good; 1 the answer is no" in here.readmit("-h").stdout
    assert "--kills" in here.readmit("drill", "-h").stdout
    assert "Did you mean" in here.readmit("cache", "stauts").stderr
    assert "--json" in here.readmit("report", "--jsn").stderr


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("re", {"restart", "report"}),
        ("drill --fault ", {"sigkill", "sigabrt", "sigstop", "daemon", "both"}),
        ("cache rel", {"release"}),
        ("engine --no", set()),
    ],
)
def test_a_shell_completes_commands_options_and_choices(here: Place, words: str, found: set[str]) -> None:
    line = f"readmit {words}"
    number = len(line.split()) - (0 if line.endswith(" ") else 1)
    shown = here.readmit(_READMIT_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(number))
    assert (set(shown.stdout.split()), shown.stderr) == (found, "")


def test_an_engine_does_not_wait_for_typer() -> None:
    engine = (
        "import contextlib, readmit.cli\nwith contextlib.suppress(SystemExit): readmit.cli.main(['engine', '--help'])"
    )
    assert not modules_after(engine) & {"typer", "torch", "transformers", "pydantic"}


def test_an_unknown_command_is_answered_with_the_nearest(here: Place) -> None:
    refused = here.readmit("statsu")
    assert refused.returncode == 2
    assert "status" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_an_error_is_one_paragraph_or_json(here: Place) -> None:
    plain = here.readmit("config", "check", "none.toml")
    assert plain.returncode == 2
    assert plain.stderr.startswith("readmit: the configuration none.toml cannot be read: No such file")
    assert plain.stderr.count("\n") == 1
    data = json.loads(here.readmit("config", "check", "none.toml", "--json").stderr)
    assert (data["kind"], data["reason"], data["path"]) == ("config", "config_file", "none.toml")


def test_config_check_and_show(here: Place) -> None:
    (here.folder / "readmit.toml").write_text(
        '[[slot]]\nname = "a"\ncommand = ["x"]\nurl = "http://127.0.0.1:8101"\n[cache]\ncapacity = "1GiB"\n'
    )
    assert "good, slots: a\n" in here.readmit("config", "check").stdout
    shown = here.readmit("config", "show", READMIT__CACHE__CAPACITY="2GiB").stdout
    assert "capacity = 2147483648" in shown
    assert "# probes is not set" in shown
    assert 'command = ["x"]' in shown
    assert json.loads(here.readmit("config", "show", "--json").stdout)["cache"]["capacity"] == 1 << 30
    # What is shown can be used.
    (here.folder / "again.toml").write_text(shown)
    assert json.loads(here.readmit("config", "show", "again.toml", "--json").stdout)["cache"]["capacity"] == 2 << 30


def test_status_tells_what_an_engine_is_and_what_its_next_start_will_be() -> None:
    recovery = {"open": True, "cause": "crash", "seconds": 1, "attempt": 1, "phase": None, "slot_state": "stopped"}
    engine = {"name": "a", "role": "engine", "state": "running", "pid": 7, "uptime_s": 1, "recovery": recovery}
    assert "a     engine  running  7" in table([{**engine, "gate": None}]), "stopped is the one before"
    asked = {"state": "verifying", "message": "probe-1: error: 404"}
    assert table([{**engine, "gate": asked}]).endswith("attempt 1; probe-1: error: 404")
    gate = {"state": "ready", "active": True, "cost": None, "next_start": {"would_hit": False, "reason": "absent"}}
    assert "serves; next start would miss (absent)" in table([{**engine, "gate": gate}])
    assert "next start" not in table([{**engine, "gate": {**gate, "next_start": {"would_hit": True, "reason": ""}}}])
    assert "next start" not in table([{**engine, "gate": {**gate, "next_start": None}}])


def test_why_a_start_would_miss_does_not_send_anybody_to_the_command_that_says_it() -> None:
    miss = {"reason": "fingerprint", "message": "it differs: expected 1. See: explain.", "remedy": "See: explain"}
    assert told({**miss, "differences": [{}]}) == "miss, reason fingerprint: it differs: expected 1."
    assert told({**miss, "differences": []}).endswith("See: explain.")


def test_status_without_a_keeper_says_so(here: Place) -> None:
    answer = here.readmit("status")
    assert answer.returncode == 1
    assert "no keeper answers" in answer.stderr
    assert json.loads(here.readmit("status", "--json").stdout)["children"] == []
    assert here.readmit("status", "--alive").returncode == 1
    assert here.left_behind() == []
    assert not here.state_dir.exists()


def test_a_cache_without_a_keeper_is_run_as_the_nodes_configuration_says(here: Place) -> None:
    folders = f'runtime_dir = "{here.runtime_dir}"\nstate_dir = "{here.state_dir}"\n'
    text = f'[node]\nname = "n"\n{folders}[cache]\ncapacity = "1GiB"\nmetrics = "127.0.0.1:{free_port()}"\n'
    (here.folder / "readmit.toml").write_text(text)
    here.start("cache", "serve", "--config", "readmit.toml", "--capacity", "2GiB")
    wait_for(lambda: here.readmit("cache", "status").returncode == 0, "the daemon answers")
    assert json.loads(here.readmit("cache", "status", "--json").stdout)["capacity"] == 2 << 30, "options win"
    assert {event.node for event in Journal(here.state_dir / "journal.sqlite3").query("")} == {"n"}


@pytest.mark.parametrize("alone", [[], ["--unsupervised"]])
def test_a_gate_whose_engines_no_keeper_starts_says_so(here: Place, alone: list[str]) -> None:
    here.gate = f"127.0.0.1:{free_port()}"
    gate = here.start("gate", "--slot", "a=http://127.0.0.1:1", "--listen", here.gate, "--drain-notice", "0", *alone)
    wait_for(here.readiness, "the gate answers")
    said = here.end(gate)[2]
    assert ("no keeper answers" in said) is not bool(alone)


def test_the_cache_is_found_by_the_nodes_configuration_as_everything_else_is(here: Place) -> None:
    (here.folder / "readmit.toml").write_text('[node]\nruntime_dir = "here"\n')
    (here.folder / "other.toml").write_text('[node]\nruntime_dir = "there"\n')

    def asked(*words: str, **environment: str) -> str:
        answer = here.readmit("cache", *words, **environment)
        assert answer.returncode == 2
        return answer.stderr

    for words in (("status",), ("release", "--all"), ("quarantine", "g"), ("load", "m")):
        assert f"no socket at {here.folder}/here/cache.sock" in asked(*words)
        assert f"no socket at {here.folder}/there/cache.sock" in asked(*words, "--config", "other.toml")
    assert "no socket at w.sock" in asked("status", WEIGHTCACHE_SOCKET="w.sock"), "an engine's own word comes first"
    assert "no socket at s.sock" in asked("status", "--socket", "s.sock", "--config", "other.toml")


def test_in_a_container_an_operator_may_have_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert user() == f"uid {os.getuid()}"
