"""The configuration: what it accepts, what the environment changes, and what it says when it cannot be used."""

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest

from readmit.config import Config, load, parse_size, split_address
from readmit.gate.settings import GateSettings
from weightcache.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "deploy" / "readmit.toml"
NODE = """
[node]
name = "n1"
runtime_dir = "run"

[cache]
capacity = "4GiB"

[gate]
listen = "127.0.0.1:8123"
probes = "golden.json"

[[slot]]
name = "a"
model = "models/small"
url = "http://127.0.0.1:8101"
command = ["engine", "{model}", "--host", "{host}", "--port", "{port}", "--json", '{"level": 3}']

[[slot]]
name = "b-2"
url = "http://[::1]:8102"
command = "engine 'two words'"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "readmit.toml"
    file.write_text(NODE)
    return file


def refused(file: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_file_is_read_with_its_paths_relative_to_its_folder(file: Path) -> None:
    config = load(file)
    assert config.node.name == "n1"
    assert config.node.runtime_dir == file.parent / "run"
    assert config.socket == file.parent / "run" / "cache.sock"
    assert config.gate.probes == file.parent / "golden.json"
    assert config.cache.capacity == 4 << 30
    assert [slot.cwd for slot in config.slot] == [file.parent, file.parent]


def test_placeholders_are_filled_in_and_json_is_left_alone(file: Path) -> None:
    first, second = load(file).slot
    assert first.argv == (
        *("engine", "models/small", "--host", "127.0.0.1", "--port", "8101"),
        *("--json", '{"level": 3}'),
    )
    assert second.argv == ("engine", "two words")


def test_a_placeholder_that_is_none_is_refused_if_it_looks_like_one(file: Path) -> None:
    text = file.read_text()
    file.write_text(text.replace("{model}", "{modle}"))
    assert "{modle} stands for nothing (did you mean {model}?)" in str(refused(file))
    file.write_text(text.replace("{model}", "{level}"))
    assert "{level}" in load(file).slot[0].argv


def test_defaults_need_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("READMIT_RUNTIME", "/run/elsewhere")
    config = load()
    assert config.slot == ()
    assert config.socket == Path("/run/elsewhere/cache.sock")
    assert config.cache.metrics == "127.0.0.1:9464"


@pytest.mark.parametrize(
    ("variable", "value", "section", "key", "expected"),
    [
        ("READMIT__NODE__NAME", "n2", "node", "name", "n2"),
        ("READMIT__NODE__STATE_DIR", "/var/lib/x", "node", "state_dir", Path("/var/lib/x")),
        ("READMIT__CACHE__ENABLED", "false", "cache", "enabled", False),
        ("READMIT__CACHE__CAPACITY", "1.5GB", "cache", "capacity", 1_500_000_000),
        ("READMIT__CACHE__ALLOW_UID", "[7, 8]", "cache", "allow_uid", (7, 8)),
        ("READMIT__GATE__LISTEN", "[::1]:80", "gate", "listen", "[::1]:80"),
        ("READMIT__GATE__HANG_LIMIT_S", "3.5", "gate", "hang_limit_s", 3.5),
        ("READMIT__GATE__PROBE_HEADERS", '{"Authorization": "x"}', "gate", "probe_headers", {"Authorization": "x"}),
        ("readmit__telemetry__log_format", "json", "telemetry", "log_format", "json"),
    ],
)
def test_the_environment_overrides_any_key(
    file: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, section: str, key: str, expected: object
) -> None:
    monkeypatch.setenv(variable, value)
    assert getattr(getattr(load(file), section), key) == expected


def test_the_environment_overrides_keys_of_slots_by_their_names(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READMIT__SLOT__A__LIMIT", "9")
    monkeypatch.setenv("READMIT__SLOT__B_2__COMMAND", '["other", "engine"]')
    monkeypatch.setenv("READMIT__SLOT__B_2__ENV", '{"A": "1"}')
    first, second = load(file).slot
    assert (first.limit, second.limit) == (9, 5)
    assert second.argv == ("other", "engine")
    assert second.env == {"A": "1"}


def test_slots_can_come_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("READMIT__SLOT", json.dumps([{"name": "a", "url": "http://x:1", "command": ["engine"]}]))
    assert [slot.name for slot in load().slot] == ["a"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("listen =", "listten ="), "gate.listten: there is no such key"),
        (("[gate]", "[gaet]"), "gaet: there is no such key"),
        (('model = "models', 'modle = "models'), "slot.0.modle: there is no such key"),
        (('"4GiB"', '"4 gigs"'), "'4 gigs' is not a size: write 120GiB, 4GB or a number of bytes"),
        (('"4GiB"', "-1"), "cache.capacity: Input should be greater than 0"),
        (("127.0.0.1:8123", "8123"), "'8123' is not an address"),
        (("127.0.0.1:8123", "127.0.0.1:81234"), "'127.0.0.1:81234' is not an address"),
        (("127.0.0.1:8123", "::1:80"), "'::1:80' is not an address"),
        (('url = "http://127.0.0.1:8101"', ""), "the command uses {host}, but the slot has no url"),
        (("http://127.0.0.1:8101", "http://127.0.0.1:8101/v1"), "is not an engine's base URL"),
        (('name = "b-2"', 'name = "a"'), "the name a is there twice"),
        (('name = "b-2"', 'name = "Big One"'), "the name 'Big One' is not 1 to 32 of a-z"),
        (('name = "b-2"', 'name = "gate"'), "the name 'gate' belongs to another process"),
        (('name = "b-2"', ""), "slot.1.name: is missing"),
        (('url = "http://[::1]:8102"', ""), "slot b-2: has no url, which the gate needs"),
        (("\"engine 'two words'\"", "[]"), "slot.1.command"),
    ],
)
def test_what_cannot_be_used_is_named(file: Path, change: tuple[str, str], problem: str) -> None:
    file.write_text(NODE.replace(*change))
    error = refused(file)
    assert (error.kind, error.reason) == ("config", "config")
    assert problem in str(error)
    assert str(file) in str(error)


@pytest.mark.parametrize(
    ("variable", "problem"),
    [
        ("READMIT__GATE__LISTTEN", "gate.listten: there is no such key"),
        ("READMIT__GAET__LISTEN", "READMIT__GAET__LISTEN: there is no section gaet"),
        ("READMIT__SLOT__C__LIMIT", "READMIT__SLOT__C__LIMIT: there is no slot c; there are a, b-2"),
        ("READMIT__SLOT__A__LIMITS", "slot.0.limits: there is no such key"),
    ],
)
def test_a_variable_nobody_reads_is_an_error(
    file: Path, monkeypatch: pytest.MonkeyPatch, variable: str, problem: str
) -> None:
    monkeypatch.setenv(variable, "1")
    assert problem in str(refused(file))


def test_a_slot_in_single_brackets_is_told_what_to_write(file: Path) -> None:
    file.write_text('[slot]\nname = "a"\n')
    assert "write [[slot]], with two brackets" in str(refused(file))


def test_all_problems_are_told_at_once(file: Path) -> None:
    file.write_text(NODE.replace("listen =", "listten =").replace('"4GiB"', '"x"'))
    assert len(refused(file).data["problems"]) == 2


def test_a_file_that_is_not_there_or_not_toml_is_named(file: Path) -> None:
    file.write_text("[node\n")
    assert refused(file).reason == "config_file"
    assert "Correct it" in str(refused(file))
    file.unlink()
    error = refused(file)
    assert error.reason == "config_file"
    assert "No such file" in str(error)
    assert "Name the file" in str(error)


def test_a_socket_path_too_long_for_the_kernel_is_told_with_both_numbers(file: Path) -> None:
    folder = "x" * 200
    file.write_text(NODE.replace('"run"', f'"/{folder}"'))
    error = refused(file)
    assert error.reason == "path_too_long"
    assert error.data["limit"] == 107
    assert error.data["length"] == len(f"/{folder}/cache.sock")
    assert "expected at most 107 bytes, found 212 bytes" in str(error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("1048576", 1 << 20), ("1KiB", 1024), ("120GiB", 120 << 30), ("1.5 TB", 1_500_000_000_000), (7, 7)],
)
def test_sizes(text: object, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "1 gib", "-1GB", "1EB", "1e9", "4Gi"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("127.0.0.1:1", ("127.0.0.1", 1)), ("[::1]:2", ("::1", 2)), (":3", ("", 3))]
)
def test_addresses_are_split(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text) == expected


def test_the_file_has_a_key_for_every_setting_of_the_gate(file: Path) -> None:
    keys = set(type(Config().gate).model_fields)
    known = {"slots", "node", "journal", "runtime_dir", "cache_socket"}
    assert keys - {"enabled"} == {field.name for field in dataclasses.fields(GateSettings)} - known
    settings = load(file).gate_settings()
    assert settings.listen == "127.0.0.1:8123"
    assert [(slot.name, slot.url) for slot in settings.slots] == [
        ("a", "http://127.0.0.1:8101"),
        ("b-2", "http://[::1]:8102"),
    ]
    assert settings.cache_socket == file.parent / "run" / "cache.sock"


def test_the_example_names_every_key_with_its_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    text = EXAMPLE.read_text()
    example = load(EXAMPLE)
    assert example.slot
    # Uncommented, every line of the example is a key that exists.
    plain = "\n".join(
        line.removeprefix("# ") if line.startswith("# ") and " = " in line else line for line in text.splitlines()
    )
    data = tomllib.loads(plain)
    for section in ("node", "cache", "gate", "telemetry"):
        model = type(getattr(example, section))
        assert set(data[section]) == set(model.model_fields), section
    assert set(data["slot"][0]) == set(type(example.slot[0]).model_fields)
