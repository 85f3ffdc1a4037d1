"""``readmit cache preflight``, ``fingerprint``, ``explain`` and ``load`` of a checkpoint, run as commands."""

import json
import os
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures import checkpoints
from tests.fixtures.daemon import running_daemon
from tests.readmit.forked import forks
from tests.weightcache.publishing import packed, spoil
from typer.testing import CliRunner


def readmit(tmp_path: Path, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return forks().readmit("cache", *map(str, arguments), env={**os.environ, "READMIT_STATE": str(tmp_path / "state")})


def test_a_good_checkpoint_is_described(tmp_path: Path) -> None:
    folder = checkpoints.fp8(tmp_path / "t")
    done = readmit(tmp_path, "preflight", folder, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["files"] == 2
    assert (facts["quant_method"], facts["block_size"], facts["shareable"]) == ("fp8", [128, 128], True)
    assert facts["bytes"] == sum(facts["bytes_by_dtype"].values())
    assert set(facts["bytes_by_dtype"]) == {"F8_E4M3", "F32", "BF16"}


def test_one_that_cannot_be_shared_is_good_too_and_says_so(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t", quantization_config={"quant_method": "awq"})
    done = readmit(tmp_path, "preflight", folder, "--json")
    facts = json.loads(done.stdout)
    assert (done.returncode, facts["shareable"], facts["not_shareable_because"]["detail"]) == (0, False, "awq")
    assert "quant_method" in readmit(tmp_path, "preflight", folder).stdout


@pytest.mark.parametrize("command", ["preflight", "fingerprint"])
def test_a_bad_checkpoint_exits_2_with_the_facts(tmp_path: Path, command: str) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    shard = folder / checkpoints.SHARDS[1]
    header, data = checkpoints.read_raw(shard)
    header["lm_head.weight"]["data_offsets"][1] -= 2
    checkpoints.write_raw(shard, header, data)
    done = readmit(tmp_path, command, folder, "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    facts = json.loads(done.stderr)
    assert (facts["kind"], facts["reason"], facts["tensor"]) == ("checkpoint", "geometry", "lm_head.weight")
    assert facts["file"] == str(shard)
    assert facts["expected"]
    assert facts["found"]
    plain = readmit(tmp_path, command, folder)
    assert plain.returncode == 2
    assert "Traceback" not in plain.stderr
    assert checkpoints.SHARDS[1] in plain.stderr


def test_a_fingerprint_is_hashed_once_and_then_remembered(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    first, second = (json.loads(readmit(tmp_path, "fingerprint", folder, "--json").stdout) for _ in range(2))
    assert (first["digest_status"], second["digest_status"]) == ("hashed", "remembered")
    assert first["checkpoint_digest"] == second["checkpoint_digest"]
    assert second["model_arch"] == "LlamaForCausalLM"
    again = json.loads(readmit(tmp_path, "fingerprint", folder, "--hash", "--json").stdout)
    assert (again["digest_status"], again["checkpoint_digest"]) == ("hashed", first["checkpoint_digest"])


@pytest.mark.parametrize("make", [checkpoints.plain, checkpoints.tied, checkpoints.fp8])
def test_a_fingerprint_is_the_identity_that_an_engine_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path]
) -> None:
    import torch

    from weightcache.checkpoint import Folder
    from weightcache.fingerprint import FIELDS
    from weightcache.identity import digest_of
    from weightcache.integrations.transformers import cache_config, skeleton

    monkeypatch.setenv("READMIT_STATE", str(tmp_path / "state"))
    folder = Folder.open(make(tmp_path / "t"))
    facts = json.loads(readmit(tmp_path, "fingerprint", folder.path, "--tp-size", 2, "--tp-rank", 1, "--json").stdout)
    asked = cache_config(folder, skeleton(folder), digest_of(folder).digest, torch.device("cpu"), 2, 1)
    assert {name: facts[name] for name in FIELDS} == asked.to_dict()


def test_an_engine_on_a_gpu_is_told_what_that_gpu_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here torch says that there are two, and memory files stand for what is on them."""
    import torch

    from readmit.commands.cache import app
    from weightcache import messages
    from weightcache.checkpoint import Folder
    from weightcache.identity import digest_of
    from weightcache.integrations.transformers import cache_config, skeleton
    from weightcache.protocol import Connection
    from weightcache.publish import offer
    from weightcache.version import VERSION

    monkeypatch.setenv("READMIT_STATE", str(tmp_path / "state"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    monkeypatch.setattr("weightcache.device.uuid", lambda ordinal: f"GPU-{ordinal}")
    folder = Folder.open(checkpoints.plain(tmp_path / "t"))
    config = cache_config(folder, skeleton(folder), digest_of(folder).digest, torch.device("cuda", 0))
    with (
        running_daemon(tmp_path / "cache" / "cache.sock") as socket,
        closing(Connection(socket, messages.Hello(version=VERSION))) as publisher,
        closing(spoil(packed(config), arena="cuda_vmm", device="GPU-0")) as copy,
    ):
        publisher.ask(messages.Claim(config=config.to_dict(), device="GPU-0"), messages.Claimed)
        generation = offer(publisher, copy)

        def explained(device: str) -> dict[str, Any]:
            words = ["explain", folder.path, "--device", device, "--socket", str(socket), "--json"]
            facts: dict[str, Any] = json.loads(CliRunner().invoke(app, words).stdout)
            return facts

        assert explained("cuda:0")["generation"] == generation
        assert [explained(device)["reason"] for device in ("cuda:1", "cuda", "cpu")] == [
            *("device", "device"),
            "fingerprint",
        ]
        done = readmit(tmp_path, "load", folder.path, "--device", "cuda:1", "--socket", socket)
        assert "torch cannot use the device cuda:1" in done.stderr, "its worker is told, and here there is no GPU"


def test_a_revision_can_be_named(tmp_path: Path) -> None:
    repository = checkpoints.as_hub_cache(checkpoints.plain(tmp_path / "t"), tmp_path / "hub", "a" * 40)
    facts = json.loads(readmit(tmp_path, "preflight", repository, "--revision", "main", "--json").stdout)
    assert facts["revision"] == "a" * 40
    assert readmit(tmp_path, "preflight", repository, "--revision", "v9").returncode == 2


@pytest.mark.parametrize(
    "options", [["--tp-size", "2", "--tp-rank", "2"], ["--dtype", "int8"], ["--dtype", "half a float"]]
)
def test_there_is_no_identity_of_what_cannot_be(tmp_path: Path, options: list[str]) -> None:
    done = readmit(tmp_path, "fingerprint", checkpoints.plain(tmp_path / "t"), *options, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert options[-1] in done.stderr
    assert "Traceback" not in done.stderr


def test_no_path_is_not_the_present_folder(tmp_path: Path) -> None:
    done = readmit(tmp_path, "preflight", "", "--json")
    assert (done.returncode, json.loads(done.stderr)["reason"]) == (2, "folder_missing")


@pytest.mark.parametrize(
    "options",
    [
        ["--wait", "nan"],
        ["--wait", "-1"],
        ["--wait", "1e12"],
        ["--command", "'"],
        ["--command", ""],
        ["--device", "cuda:0", "--engine", "vllm"],
        ["--device", "cuda:0", "--command", "x"],
    ],
)
def test_a_load_that_cannot_be_asked_for_is_a_matter_of_usage(tmp_path: Path, options: list[str]) -> None:
    model = [] if "--command" in options else [tmp_path]
    done = readmit(tmp_path, "load", *model, *options)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert options[0] in done.stderr or "CUDA_VISIBLE_DEVICES" in done.stderr
