"""Records the journals that the proof replays: ``python -m tests.observability.record FOLDER [NAME...]``.

Every run is real: keeper, daemon, gate and engines are processes, and faults are signals. What is written is the
journal, an event a line, with this machine's folders replaced, as it is while the node still runs. ``demo.jsonl`` is
what ``make demo`` left, written out the same way; ``gpu.jsonl`` was recorded on an NVIDIA H200.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.fixtures import checkpoints
from tests.observability.lab import ROOT, Lab
from tests.readmit.nodes import place, wait_for

from weightcache.journal.database import SELECT, connect


def pair(lab: Lab) -> None:
    """Two slots on the same weights: crashes, takeovers, a drill, an upgrade, a wrong answer, a loop that ends."""
    lab.configure("a", "b", node="pair")
    lab.up()
    for slot in lab.slots:
        lab.until_closed(slot, 1)
    for slot in "ab":
        lab.fault(slot)
    lab.fault("a", "daemon")
    lab.tell("a", die=["load_weights"])
    lab.fault("a")
    planned(lab, "b", "drill")
    lab.tell("b", config={"torch_version": "99"})
    planned(lab, "b", "upgrade")
    lab.tell("b", config={})
    lab.tell("a", answer=" London")
    count = len(lab.episodes("a"))
    wait_for(lambda: len(lab.episodes("a")) > count, "wrong answers eject slot a")
    lab.tell("a", answer=" Paris")
    lab.until_closed("a", count + 1)
    lab.rest(5)


def ranks(lab: Lab) -> None:
    """Two ranks an engine: hits, a rank that dies while it loads, a quantisation that cannot travel, lost weights."""
    lab.configure("a", node="ranks", limit=3)
    lab.tell("a", ranks=2)
    process = lab.up()
    lab.until_closed("a", 1)
    lab.fault("a")
    lab.tell("a", die=["load_weights"])
    lab.fault("a")
    lab.tell("a", barred="awq")
    lab.fault("a")
    lab.tell("a", barred=None)
    lose_weights(lab, process)
    lab.until_closed("a", 5)
    lab.fault("a")
    lab.tell("a", die=["graph_capture"] * 4)
    lab.fault("a")
    lab.tell("a", die=[])
    planned(lab, "a", "config_change")
    lab.rest(5)


def twins(lab: Lab) -> None:
    """Two slots that take over from each other."""
    lab.configure("a", "b", node="twins")
    lab.up()
    for slot in lab.slots:
        lab.until_closed(slot, 1)
    for slot in "abab":
        lab.rest(1)
        lab.fault(slot)
    lab.rest(5)


def gpu(lab: Lab, device: str = "cuda") -> None:
    """The reference engine on a GPU: a cold start, crashes, the daemon's death, an upgrade, weights lost, a crash."""
    model = checkpoints.with_tokenizer(checkpoints.plain(lab.folder / "model"))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"word{number}": number for number in range(2, checkpoints.VOCABULARY)}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))  # every token is a text now
    engine = [sys.executable, "-m", "readmit.engine", "{model}", "--port", "{port}", "--device", device]
    engine += ["--served-model-name", "tiny", "--weight-cache"]
    lab.configure("a", node="gpu", engine=[*engine, "client"], model=str(model))
    port = str(lab.ports["a"])
    with subprocess.Popen([word.format(model=model, port=port) for word in (*engine, "off")]) as good:
        probes = ["probe", "record", f"http://127.0.0.1:{port}", "--by", "tokens", "--out", "probes.json"]
        recorded = lab.readmit(*probes)
        good.kill()
    assert recorded.returncode == 0, recorded.stderr
    process = lab.up()
    lab.until_closed("a", 1)
    for also in ((), (), ("daemon",)):
        lab.fault("a", *also)
    planned(lab, "a", "upgrade")
    lose_weights(lab, process)
    lab.until_closed("a", 6)
    lab.fault("a")
    lab.rest(5)


SCENARIOS: dict[str, Callable[[Lab], None]] = {"pair": pair, "ranks": ranks, "twins": twins, "gpu": gpu}


def lose_weights(lab: Lab, keeper: subprocess.Popen[str]) -> None:
    """Kill all that holds them at once, and start anew."""
    pids = [child["pid"] for child in lab.children().values()]
    keeper.send_signal(signal.SIGKILL)
    for pid in pids:
        lab.signal(pid)
    keeper.communicate()
    lab.up()


def planned(lab: Lab, slot: str, cause: str) -> None:
    """An operator's restart."""
    count = len(lab.episodes(slot))
    result = lab.readmit("restart", slot, "--cause", cause)
    assert result.returncode == 0, result.stderr
    lab.until_closed(slot, count + 1)


def export(journal: Path, out: Path, folders: dict[str, str]) -> None:
    """Write a journal as lines of JSON."""
    rows = connect(journal).execute(f"{SELECT} ORDER BY id").fetchall()
    with out.open("w") as file:
        for row in rows:
            line = json.dumps([*row[1:-1], json.loads(row[-1])], separators=(",", ":"))
            for folder, name in folders.items():
                line = line.replace(folder, name)
            file.write(re.sub(r"/tmp/[\w.-]+", "/node", line) + "\n")


def main() -> None:
    out, *names = sys.argv[1:]
    for name in names or SCENARIOS:
        with place(Lab) as lab:
            SCENARIOS[name](lab)
            folders = {str(lab.folder): "/node", sys.prefix: "/env", sys.base_prefix: "/env", str(ROOT): "/readmit"}
            export(lab.journal.path or Path(), Path(out) / f"{name}.jsonl", folders)
        print(name, flush=True)


if __name__ == "__main__":
    main()
