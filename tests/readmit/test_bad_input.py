"""Bad input, as a user meets it: one paragraph that names the thing, what was found and the remedy; nothing is left."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.fixtures import checkpoints, http
from tests.readmit.forked import forks
from tests.readmit.nodes import Place, free_port, place, wait_for

from readmit.probes import Expectation, Probe, ProbeSet

ENGINE = Path(__file__).parent / "gate" / "scripted_engine.py"


@pytest.fixture
def here() -> Iterator[Place]:
    with place() as place_:
        yield place_
        for path in [place_.folder, *place_.folder.rglob("*")]:
            path.chmod(0o700)


def refused(here: Place, *words: str, status: int = 2, **environment: str) -> str:
    """What a command says that must refuse: one paragraph, no trace of Python, no process or socket left."""
    before = sorted(here.folder.rglob("*"))
    # Root may read everything, unless it gives that up.
    result = forks().readmit(
        *words, cwd=here.folder, env={**here.environment, **environment}, limits={"capabilities": 0}
    )
    assert result.returncode == status, result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert sorted(here.folder.rglob("*")) == before
    return result.stderr


@pytest.fixture
def model(here: Place) -> Path:
    return checkpoints.with_tokenizer(checkpoints.plain(here.folder / "model"))


def test_a_model_that_may_not_be_read(model: Path, here: Place) -> None:
    shard = model / checkpoints.SHARDS[0]
    shard.chmod(0)
    said = refused(here, "engine", str(model), "--port", "0", status=os.EX_CONFIG)
    assert f"{shard} cannot be read: expected a readable file, found Permission denied" in said
    model.chmod(0)
    said = refused(here, "engine", str(model), "--port", "0", status=os.EX_CONFIG)
    assert f"{model}/config.json cannot be read" in said, "it is there, and it does not say otherwise"
    (here.folder / "locked").mkdir()
    (here.folder / "locked").chmod(0)
    said = refused(here, "engine", str(here.folder / "locked" / "m"), "--port", "0", status=os.EX_CONFIG)
    assert "locked/m cannot be read: expected a readable file, found Permission denied" in said


def test_a_config_that_is_no_json(model: Path, here: Place) -> None:
    (model / "config.json").write_text("{")
    said = refused(here, "engine", str(model), "--port", "0", status=os.EX_CONFIG)
    assert f"{model}/config.json is not valid JSON: expected a JSON object" in said


@pytest.mark.parametrize("folder", ["READMIT_RUNTIME", "READMIT_STATE"])
def test_a_folder_that_may_not_be_made(here: Place, folder: str) -> None:
    (here.folder / "mine").mkdir(mode=0o500)
    here.runtime_dir.mkdir(mode=0o700)
    said = refused(here, "run", "--", "true", **{folder: str(here.folder / "mine" / "x")})
    assert f"{here.folder}/mine/x cannot be made: Permission denied. Name another one" in said


def test_a_socket_that_may_not_be_made(here: Place) -> None:
    (here.folder / "mine").mkdir(mode=0o500)
    said = refused(here, "cache", "serve", "--socket", "mine/x/cache.sock", "--metrics", "127.0.0.1:0")
    assert "mine/x cannot be made: Permission denied" in said


@pytest.mark.parametrize("words", [("cache", "serve", "--metrics", "127.0.0.1:0"), ("cache", "status")])
def test_a_socket_whose_path_is_too_long(here: Place, words: tuple[str, ...]) -> None:
    path = here.folder / ("x" * 108)
    said = refused(here, *words, "--socket", str(path))
    assert f"expected at most 107 bytes, found {len(str(path))} bytes" in said


def test_an_engine_whose_socket_has_too_long_a_path(model: Path, here: Place) -> None:
    words = ["--port", "0", "--weight-cache", "client", "--socket", str(here.folder / ("x" * 108))]
    assert "expected at most 107 bytes" in refused(here, "engine", str(model), *words, status=os.EX_CONFIG)


@pytest.mark.parametrize(
    ("port", "problem"),
    [("80", "this user may serve on, found Permission denied"), ("65536", "from 0 to 65535, found 65536")],
)
def test_a_port_that_cannot_be_had(model: Path, here: Place, port: str, problem: str) -> None:
    if problem.endswith("denied") and int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 80:
        return  # this kernel gives it to anybody
    said = refused(here, "engine", str(model), "--port", port, status=os.EX_CONFIG)
    assert f"cannot serve on 127.0.0.1:{port}" in said
    assert problem in said


@pytest.mark.parametrize("words", [("engine", "model", "--port", "0"), ("cache", "status"), ("run", "--", "true")])
def test_a_place_in_the_node_that_is_none(here: Place, words: tuple[str, ...]) -> None:
    status = os.EX_CONFIG if words[0] == "engine" else 2
    said = refused(here, *words, status=status, READMIT_RANK="x")
    assert "READMIT_RANK is no number: expected 0, 1, 2, ..., found x. Unset READMIT_RANK" in said


def test_a_place_for_the_model_that_is_none(here: Place) -> None:
    (here.folder / "file").touch()
    said = refused(here, "model", READMIT_HOME=str(here.folder / "file"))
    assert "cannot be made: Not a directory. Name another place (READMIT_HOME)" in said


def test_a_command_that_is_no_program(here: Place) -> None:
    (here.folder / "engine").touch(mode=0o600)
    said = refused(here, "run", "--", "./engine")
    assert "there is no program ./engine: expected an executable file, found a file that may not be executed" in said
    assert "found a folder" in refused(here, "run", "--", str(here.folder))


def test_golden_answers_that_are_none(here: Place) -> None:
    (here.folder / "probes.json").write_text("{}")
    said = refused(here, "run", "--url", "http://127.0.0.1:9", "--probes", "probes.json", "--", "true")
    assert "probes.json is not a probe file" in said
    assert "Record it anew" in said


def test_golden_answers_that_do_not_match(here: Place) -> None:
    engine, gate = free_port(), free_port()
    probe = Probe("capital", "The capital of France is", 1, Expectation(text=" Atlantis"))
    ProbeSet(model="scripted", probes=(probe,)).save(here.folder / "probes.json")
    options = ["--url", f"http://127.0.0.1:{engine}", "--probes", "probes.json", "--gate", f"127.0.0.1:{gate}"]
    run = here.start("run", *options, "--", sys.executable, str(ENGINE), str(engine))

    def refusal(path: str) -> str:
        try:
            answer = http.get(f"http://127.0.0.1:{gate}{path}", timeout=60)
        except httpx.TransportError:
            return ""
        assert answer.status_code == 503
        return answer.text

    wait_for(lambda: "wrong" in refusal("/v1/completions"), "the engine has been asked")
    assert "Atlantis" not in refusal("/v1/completions"), "a golden answer is nobody's business who is refused"
    assert "' Atlantis'" in refusal("/readyz?verbose")
    assert "' Paris'" in refusal("/readyz?verbose")
    # The same, asked for by hand.
    verified = here.readmit("probe", "verify", f"http://127.0.0.1:{engine}", "probes.json")
    assert verified.returncode == 1
    assert "' Atlantis'" in verified.stdout
    assert "' Paris'" in verified.stdout
    assert here.end(run)[0] == 0
    assert here.left_behind() == []
    episode = here.replay().episodes[0]
    assert (episode.outcome, episode.verified) == ("abandoned", None)


def test_an_engine_that_ends_at_once_again_and_again(here: Place) -> None:
    fails = "import sys; sys.exit('there are no such weights')"
    (here.folder / "readmit.toml").write_text(f"""
[node]
runtime_dir = "{here.runtime_dir}"
state_dir = "{here.state_dir}"
[cache]
metrics = "127.0.0.1:{free_port()}"
[gate]
enabled = false
[[slot]]
name = "a"
command = {json.dumps([sys.executable, "-c", fails])}
backoff_s = [0]
limit = 3
""")
    keeper = here.start("up")
    wait_for(lambda: here.children().get("a", {}).get("state") == "failed", "it is given up")
    assert here.children()["daemon"]["state"] == "running", "what else there is goes on"
    shown = here.readmit("status")
    (line,) = (line for line in shown.stdout.splitlines() if line.startswith("a "))
    assert "failed" in line
    assert "abandoned" in line
    status, _, said = here.end(keeper)
    assert status == 0
    assert "a is given up: it ended 3 times within 600 s without becoming ready" in said
    assert "there are no such weights" in said
    assert [path.name for path in here.left_behind() if path.suffix != ".lock"] == []
    (episode,) = here.replay().episodes
    assert (episode.outcome, [it.exit_code for it in episode.attempts]) == ("abandoned", [1, 1, 1])
    assert sum(episode.phases_s().values()) == pytest.approx(episode.total_s)


@pytest.mark.parametrize("locked", ["runtime_dir", "state_dir"])
def test_a_node_of_another_user(here: Place, locked: str) -> None:
    for folder in (here.runtime_dir, here.state_dir):
        folder.mkdir()
        (folder / "journal.sqlite3").touch()
    folder = getattr(here, locked)
    folder.chmod(0)
    commands = ["status", "report", "logs a", "logs --episode x", "drain a", "restart a", "upgrade", "drill"]
    commands += ["gate override --lift"] + (["gate --slot a=http://127.0.0.1:1"] if locked == "state_dir" else [])
    for command in commands:
        said = refused(here, *command.split())
        assert said.startswith(f"readmit: this user may not look into {folder}: expected uid "), said
        assert "sudo -u USER" in said
    here.folder.chmod(0o600)
    assert "this user may not look into" in refused(here, "report", READMIT_STATE=f"{here.folder}/s")


def test_golden_answers_that_could_not_be_written(here: Place) -> None:
    (here.folder / "locked").mkdir(mode=0o500)
    for out in ("locked/probes.json", "nowhere/probes.json"):
        said = refused(here, "probe", "record", "http://127.0.0.1:1", "--out", out)
        assert f"{out} cannot be written: expected a folder that this user may write in" in said
