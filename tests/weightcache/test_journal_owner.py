"""Two nodes never share a journal: whoever comes second is told whose it is."""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.readmit.nodes import Place, place
from tests.weightcache.caches import Cache, wait_for

from weightcache.errors import ConfigError
from weightcache.journal import Context, Journal
from weightcache.journal.owner import check_owner, own


def test_another_node_is_refused_until_the_owner_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "journal.sqlite3"
    script = """
        import sys, time
        from pathlib import Path
        from weightcache.journal.owner import own
        assert own(Path(sys.argv[1]), "one") is not None
        print("owned", flush=True)
        time.sleep(1000)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(path)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "owned\n"
        for ask in (own, check_owner):
            with pytest.raises(ConfigError) as refused:
                ask(path, "two")
            assert refused.value.reason == "journal_owned"
            assert "node one" in str(refused.value)
            assert f"pid {owner.pid}" in str(refused.value)
            assert "state folder of its own" in str(refused.value)
        assert own(path, "one") is None, "an engine's own daemon writes to its node's journal as well"
        check_owner(path, "one")
        owner.send_signal(signal.SIGKILL)
    descriptor = own(path, "two")
    assert descriptor is not None
    os.close(descriptor)


def test_an_owner_that_has_not_yet_said_whose_the_journal_is_refuses_nobody(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite3"
    with open(f"{path}.owner", "w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        assert own(path, "one") is None


def test_where_nothing_can_be_locked_weights_are_served_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert own(tmp_path / "file" / "journal.sqlite3", "one") is None


def test_a_daemon_on_the_journal_of_another_node_does_not_start(served: Cache) -> None:
    wait_for(served.journal_path.exists, "the first node's journal")
    before = Journal(served.journal_path, Context("n")).last_id()
    command = [*served.command[:3], "--socket", str(served.folder / "two.sock"), "--metrics", "127.0.0.1:0"]
    environment = {**os.environ, **served.environment, "READMIT_NODE": "two"}
    second = subprocess.run(
        [*command, "--journal", str(served.journal_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert second.returncode == 2
    assert "is that of node" in second.stderr
    assert "state folder of its own" in second.stderr
    assert served.pid() is not None
    events = Journal(served.journal_path, Context("n")).events(before)
    assert {event.node for event in events} <= {os.uname().nodename, "n"}


def test_readmit_up_on_the_state_folder_of_another_node_is_refused() -> None:
    with place(Place) as one:
        journal = one.state_dir / "journal.sqlite3"
        descriptor = own(journal, "one")
        assert descriptor is not None
        one.state_dir.chmod(0o700)
        (one.folder / "readmit.toml").write_text(
            f'[node]\nname = "two"\nruntime_dir = "{one.runtime_dir}"\nstate_dir = "{one.state_dir}"\n'
            '[cache]\nmetrics = "127.0.0.1:0"\n[gate]\nlisten = "127.0.0.1:0"\nunverified_ok = true\n'
            '[[slot]]\nname = "a"\nurl = "http://127.0.0.1:1"\ncommand = ["sleep", "1"]\n'
        )
        second = one.readmit("up", "readmit.toml")
        os.close(descriptor)
    assert second.returncode == 2, second.stdout
    assert "is that of node one" in second.stderr
