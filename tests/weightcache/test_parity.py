"""Two copies of a model, compared and the conclusion kept; resident weights of another version used after a proof."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import typer
from tests.fixtures import checkpoints
from tests.fixtures.daemon import running_daemon
from tests.fixtures.versions import version
from torch import nn
from typer.testing import CliRunner

from readmit.commands.load import prepare, require_room
from readmit.commands.parity import parity as parity_command
from readmit.daemon import ask_daemon
from weightcache import messages, parity
from weightcache.errors import CacheMiss, CheckpointError, ConfigError, ResourceError
from weightcache.fingerprint import FIELDS, CacheConfig
from weightcache.integrations import transformers, transformers_census
from weightcache.vocabulary import MISS_REASONS


class Model(nn.Module):
    """A parameter under two names, a buffer of each kind, and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8, bias=False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)
        self.table = [torch.zeros(2)]


def model() -> Model:
    torch.manual_seed(checkpoints.SEED)
    return Model()


def test_equal_models_have_no_disparity() -> None:
    census = parity.take_census(model())
    assert {name: item.kind for name, item in census.items()} == {
        "embed.weight": "parameter",
        "head.weight": "parameter",
        "mean": "buffer",
        "inv_freq": "non_persistent_buffer",
        "table.0": "attribute",
    }
    assert parity.disparities(census, parity.take_census(model())) == []


def untie(it: Model) -> None:
    it.head.weight = nn.Parameter(it.embed.weight.detach().clone())


def change_a_bit(it: Model) -> None:
    it.inv_freq[1] = 1 + 2**-20


def change_the_stride(it: Model) -> None:
    it.embed.weight.data = it.embed.weight.data.t().contiguous().t()


def change_the_dtype(it: Model) -> None:
    it.mean = it.mean.double()


def change_the_shape(it: Model) -> None:
    it.table[0] = torch.zeros(1, 2)


def change_the_kind(it: Model) -> None:
    it._non_persistent_buffers_set.clear()


def leave_out(it: Model) -> None:
    del it.mean


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (untie, {("head.weight", "same_as")}),
        (change_a_bit, {("inv_freq", "digest")}),
        (change_the_stride, {("embed.weight", "stride"), ("head.weight", "stride")}),
        (change_the_dtype, {("mean", "dtype"), ("mean", "digest")}),
        (change_the_shape, {("table.0", "shape"), ("table.0", "stride")}),
        (change_the_kind, {("inv_freq", "kind")}),
        (leave_out, {("mean", "presence")}),
    ],
)
def test_every_property_counts(change: Callable[[Model], None], seen: set[tuple[str, str]]) -> None:
    changed = model()
    change(changed)
    found = parity.disparities(parity.take_census(model()), parity.take_census(changed))
    assert {(each.name, each.what) for each in found} == seen
    assert all(each.name in str(each) for each in found)


CONFIG = CacheConfig(
    model_path="/m",
    model_arch="LlamaForCausalLM",
    checkpoint_digest="d",
    dtype="bfloat16",
    torch_version="2",
    engine="e",
    layout_id="e-2",
)


def test_a_recorded_layout_is_asked_for(tmp_path: Path) -> None:
    assert parity.resident_layout(CONFIG, state=tmp_path / "p") == CONFIG
    parity.record(CONFIG, "e-1", state=tmp_path / "p")
    asked = parity.resident_layout(CONFIG, state=tmp_path / "p")
    assert asked == msgspec.structs.replace(CONFIG, layout_id="e-1")
    assert parity.resident_layout(asked, state=tmp_path / "p") == asked


OF_THE_MODEL = {"model_path", "revision", "checkpoint_digest", "tp_rank", "pp_rank", "ep_rank", "torch_version"}


@pytest.mark.parametrize("field", FIELDS)
def test_it_holds_for_other_checkpoints_but_not_for_another_layout(tmp_path: Path, field: str) -> None:
    parity.record(CONFIG, "e-1", state=tmp_path / "p")
    value = getattr(CONFIG, field)
    other = msgspec.structs.replace(CONFIG, **{field: value + 1 if isinstance(value, int) else "other"})
    expected = "e-1" if field in OF_THE_MODEL else other.layout_id
    assert parity.resident_layout(other, state=tmp_path / "p").layout_id == expected


def test_a_damaged_record_is_as_none(tmp_path: Path) -> None:
    parity.record(CONFIG, "e-1", state=tmp_path / "p")
    (record,) = (tmp_path / "p").iterdir()
    record.write_bytes(b"{")
    assert parity.resident_layout(CONFIG, state=tmp_path / "p") == CONFIG


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The socket of a running weight cache daemon."""
    monkeypatch.setenv("READMIT_STATE", str(tmp_path / "state"))
    with running_daemon(tmp_path / "cache" / "cache.sock") as path:
        yield path


def run(*arguments: object) -> tuple[int, dict[str, object]]:
    app = typer.Typer()
    app.command()(parity_command)
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)


FAIL = dict.fromkeys(MISS_REASONS, "fail")


@pytest.mark.parametrize("make", [checkpoints.plain, checkpoints.tied])
def test_an_upgrade_uses_what_is_resident_once_it_is_proven_equal(
    tmp_path: Path, socket: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path]
) -> None:
    folder = make(tmp_path / "t")
    _, outcome = transformers.from_pretrained(folder, mode="client", socket=socket)
    assert outcome.generation is not None
    code, report = run(folder, "--socket", socket)
    assert (code, report["equal"], report["recorded"]) == (0, True, False)

    monkeypatch.setattr(transformers, "LAYOUT", "transformers-next")
    with pytest.raises(CacheMiss) as caught:
        transformers.from_pretrained(folder, mode="client", socket=socket, policies=FAIL)
    assert (caught.value.reason, caught.value.detail) == ("fingerprint", "layout_id")

    code, report = run(folder, "--socket", socket, "--record")
    assert (code, report["equal"], report["recorded"], report["this_layout"]) == (0, True, True, "transformers-next")
    _, after = transformers.from_pretrained(folder, mode="client", socket=socket, policies=FAIL)
    assert (after.path, after.generation) == ("hit", outcome.generation)


def test_a_version_that_lays_out_otherwise_is_told_and_not_recorded(
    tmp_path: Path, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    transformers.from_pretrained(folder, mode="client", socket=socket)
    monkeypatch.setattr(transformers, "LAYOUT", "transformers-next")
    load = transformers.transformers.AutoModelForCausalLM.from_pretrained

    def otherwise(*arguments: object, **options: object) -> tuple[nn.Module, object]:
        loaded, told = load(*arguments, **options)
        loaded.model.layers[0].mlp.up_proj.weight.data.mul_(2)
        return loaded, told

    monkeypatch.setattr(transformers.transformers.AutoModelForCausalLM, "from_pretrained", otherwise)
    code, report = run(folder, "--socket", socket, "--record")
    assert (code, report["equal"], report["recorded"]) == (1, False, False)
    assert report["disparities"][0]["name"] == "model.layers.0.mlp.up_proj.weight"  # type: ignore[index]
    with pytest.raises(CacheMiss):
        transformers.from_pretrained(folder, mode="client", socket=socket, policies=FAIL)


@pytest.mark.parametrize("make", [checkpoints.plain, checkpoints.tied, checkpoints.fp8])
def test_an_arena_made_here_needs_no_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path]
) -> None:
    monkeypatch.setenv("READMIT_STATE", str(tmp_path / "state"))
    code, report = run(make(tmp_path / "t"))
    assert (code, report["equal"], report["logits_equal"], report["disparities"]) == (0, True, True, [])
    assert report["compared"] == "an arena made here"
    assert report["config"]["quant_method"] == ("fp8" if make is checkpoints.fp8 else "none")  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 3}, "tensor_missing"),
        ({"vocab_size": 511}, "geometry"),
        ({"model_type": "bert"}, "tensor_missing"),
    ],
)
def test_what_is_in_no_file_is_not_equal_to_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], reason: str
) -> None:
    """transformers would go on with random numbers, and an arena would hold them faithfully."""
    monkeypatch.setenv("READMIT_STATE", str(tmp_path / "state"))
    folder = checkpoints.plain(tmp_path / "t", **changes)
    for load in (lambda: run(folder), lambda: transformers_census.report(str(folder), None)):
        with pytest.raises(CheckpointError) as caught:
            load()
        assert caught.value.reason == reason


def test_what_cannot_be_loaded_here_is_an_error_and_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READMIT_STATE", str(tmp_path / "state"))
    folder = checkpoints.plain(tmp_path / "t", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match="optimum"):
        run(folder)


def test_two_versions_are_compared_by_their_own_interpreters(
    tmp_path: Path, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    old, new = version(tmp_path / "old", "1"), version(tmp_path / "new", "2")
    code, report = run(folder, "--old", old, "--new", new)
    assert (code, report["equal"], report["recorded"]) == (0, True, True), report
    assert (report["resident_layout"], report["this_layout"]) == ("transformers-1", "transformers-2")
    monkeypatch.setattr(transformers, "LAYOUT", "transformers-1")
    transformers.from_pretrained(folder, mode="client", socket=socket)
    monkeypatch.setattr(transformers, "LAYOUT", "transformers-2")
    assert transformers.from_pretrained(folder, mode="client", socket=socket, policies=FAIL)[1].path == "hit"


def test_versions_that_differ_are_not_one_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READMIT_STATE", str(tmp_path / "state"))
    folder = checkpoints.plain(tmp_path / "t")
    old, new = (transformers_census.report(str(folder), None) for _ in range(2))
    norm = new.tensors["model.norm.weight"]
    new.tensors["model.norm.weight"] = norm._replace(digest="other")
    new.config["layout_id"] = "transformers-next"
    monkeypatch.setattr("readmit.commands.parity._report", lambda venv, *_: {"old": old, "new": new}[venv.name])
    code, report = run(folder, "--old", "old", "--new", "new")
    assert (code, report["equal"], report["recorded"]) == (1, False, False)
    assert [each["name"] for each in report["disparities"]] == ["model.norm.weight"]  # type: ignore[attr-defined]
    new.tensors["model.norm.weight"] = norm
    new.config["torch_version"] = "3"
    code, report = run(folder, "--old", "old", "--new", "new")
    assert (code, report["recorded"]) == (1, False), "no layout makes up for another torch"
    assert [each["field"] for each in report["differences"]] == ["torch_version"]  # type: ignore[attr-defined]
    assert not (tmp_path / "state" / "parity").exists()


def test_a_coming_version_is_loaded_beside_the_present_one(tmp_path: Path, socket: Path) -> None:
    folder, coming = checkpoints.plain(tmp_path / "t"), version(tmp_path / "new", "99")
    _, present = transformers.from_pretrained(folder, mode="client", socket=socket)
    app = typer.Typer()
    app.command()(prepare)
    words = [str(folder), "--new", str(coming), "--socket", str(socket), "--json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    report = json.loads(done.stdout)
    assert (report["still_resident"], report["evicted"], report["both_fit"]) == ([present.generation], [], True)
    (loaded,) = ask_daemon(socket, messages.Status())["generations"][1:]
    assert [loaded["generation"]] == report["loaded"]
    assert loaded["config"]["layout_id"] == "transformers-99"


def test_what_does_not_fit_beside_is_said_before_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="do not fit at once") as caught:
        require_room({"capacity": 100, "resident_bytes": 60}, 41)
    assert (caught.value.detail, caught.value.data["needed"], caught.value.data["available"]) == ("capacity", 41, 40)
    require_room({"capacity": 100, "resident_bytes": 60}, 40)


def test_an_environment_without_an_engine_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-venv") as caught:
        run(checkpoints.plain(tmp_path / "t"), "--old", tmp_path / "no-such-venv", "--new", tmp_path / "no-such-venv")
    assert caught.value.reason == "venv"


def test_an_engine_that_cannot_be_run_here_is_told_what_to_do_instead(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    with pytest.raises(ConfigError, match="readmit cache load --command") as caught:
        run(folder, "--engine", "sglang", "--old", tmp_path, "--new", tmp_path)
    assert (caught.value.reason, caught.value.found) == ("engine", "sglang")
    app = typer.Typer()
    app.command()(parity_command)
    alone = CliRunner().invoke(app, [str(folder), "--engine", "vllm"])
    assert (alone.exit_code, "give --old and --new" in alone.output) == (2, True)


def test_nothing_resident_is_a_miss_with_its_reason(tmp_path: Path, socket: Path) -> None:
    with pytest.raises(CacheMiss) as caught:
        run(checkpoints.plain(tmp_path / "t"), "--socket", socket)
    assert caught.value.reason == "absent"
