"""The node's configuration: one TOML file, any key of which the environment may override.

``READMIT__SECTION__KEY`` overrides ``key`` of ``[section]``, ``READMIT__SLOT__NAME__KEY`` a key of the ``[[slot]]`` of
that name (its ``-`` written ``_``); lists and tables are given as JSON. Paths are relative to the file's folder, which
is also where commands run. An unknown key is an error that names it: a typo must not become a default.
"""

import dataclasses
import difflib
import itertools
import json
import os
import re
import shlex
import socket as sockets
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from readmit.gate.settings import GateSettings, SlotSettings
from weightcache import paths, sizes
from weightcache.errors import ConfigError
from weightcache.keeper.spec import BACKOFF_S, LIMIT, STOP_S, WINDOW_S, checked_name
from weightcache.slo import KEPT_DAYS, Objectives

ENV_PREFIX: Final = "READMIT__"
DEFAULT_FILE: Final = Path("readmit.toml")
_URL: Final = re.compile(r"http://([^/:\[\]]+|\[[0-9a-fA-F:]+\]):\d+/?")
_PLACEHOLDERS: Final = {"{model}": "model", "{host}": "url", "{port}": "url"}
"""What stands for something in a command, and the slot's key that says for what."""


def parse_size(value: object) -> object:
    """Bytes from ``"120GiB"``, ``"4GB"`` or a number; raises ValueError for other text."""
    return sizes.parse_size(value) if isinstance(value, str) else value


def parse_address(value: object) -> object:
    """``HOST:PORT`` checked: ``127.0.0.1:8000``, ``[::1]:8000``, ``:8000`` for every interface."""
    if not isinstance(value, str):
        return value
    host, colon, port = value.rpartition(":")
    bare = host.startswith("[") and host.endswith("]")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in host and not bare):
        raise ValueError(f"{value!r} is not an address: write HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000")
    return value


def split_address(address: str) -> tuple[str, int]:
    """Host (empty for every interface) and port of an address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _command(value: object) -> object:
    return tuple(shlex.split(value)) if isinstance(value, str) else value


def _slot_name(value: str) -> str:
    if value in ("daemon", "gate", "keeper"):
        raise ValueError(f"the name {value!r} belongs to another process of the node")
    return checked_name(value)


class LogFormat(StrEnum):
    """Logs for people, or for machines."""

    TEXT = "text"
    JSON = "json"


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
Address = Annotated[str, BeforeValidator(parse_address)]
Seconds = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """A table of the file; keys it does not know are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Node(Section):
    """``[node]``: who this is, and where it keeps its things."""

    name: str = Field(default_factory=sockets.gethostname, min_length=1)
    runtime_dir: Path = Field(default_factory=lambda: paths.runtime_dir(create=False))
    state_dir: Path = Field(default_factory=lambda: paths.state_dir(create=False))


class Cache(Section):
    """``[cache]``: the weight cache daemon. Without ``capacity`` nothing limits the resident bytes but memory."""

    enabled: bool = True
    socket: Path | None = None
    capacity: Size | None = None
    metrics: Address = "127.0.0.1:9464"
    allow_uid: tuple[int, ...] = ()


class Gate(Section):
    """``[gate]``: the keys are those of `readmit.gate.settings.GateSettings`, which says what each means."""

    enabled: bool = True
    listen: Address = GateSettings.listen
    probes: Path | None = None


if not TYPE_CHECKING:
    # What the gate's own settings have, the file has, except what the node knows anyway.
    _KNOWN = {"slots", "node", "journal", "runtime_dir", "cache_socket", *Gate.model_fields}
    _KEYS = {
        field.name: (field.type, {} if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(GateSettings)
        if field.name not in _KNOWN
    }
    Gate = create_model("Gate", __base__=Gate, **_KEYS)


class Telemetry(Section):
    """``[telemetry]``: where spans go, and how all processes log; ``READMIT_LOG_FORMAT`` says it if this does not.

    ``journal_days`` is how long events stay in the journal. Counters do not depend on it.
    """

    spans: Path | None = None
    journal_days: Annotated[float, Field(ge=1)] = KEPT_DAYS
    log_format: LogFormat | None = None


def _promises(given: dict[str, Any]) -> dict[str, Any]:
    try:
        Objectives.of(given)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return given


Slo = Annotated[dict[str, Any], AfterValidator(_promises)]
"""``[slo]``: what is promised, where it differs from the defaults of `weightcache.slo.Objectives`."""


class Slot(Section):
    """``[[slot]]``: a place where one engine runs.

    In ``command``, ``{model}``, ``{host}`` and ``{port}`` stand for the slot's model and its URL's host and port.
    """

    name: Annotated[str, BeforeValidator(_slot_name)]
    command: Annotated[tuple[str, ...], BeforeValidator(_command), Field(min_length=1)]
    url: str | None = None
    model: str | None = None
    env: dict[str, str] = {}
    cwd: Path | None = None
    backoff_s: Annotated[tuple[Seconds, ...], Field(min_length=1)] = BACKOFF_S
    limit: Annotated[int, Field(ge=0)] = LIMIT
    window_s: Seconds = WINDOW_S
    stop_s: Seconds = STOP_S
    preload: str | None = None
    """The module that the command runs (``python -m MODULE``), to be held imported for restarts."""

    @property
    def address(self) -> str | None:
        """``HOST:PORT`` of the URL."""
        return self.url.rpartition("//")[2].rstrip("/") if self.url else None

    @property
    def argv(self) -> tuple[str, ...]:
        """The command with its placeholders filled in."""
        host, port = split_address(self.address) if self.address else ("", 0)
        values = {"{model}": self.model or "", "{host}": host, "{port}": str(port)}
        # Not str.format: engines take JSON as arguments.
        return tuple(_replaced(word, values) for word in self.command)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.url is not None and not _URL.fullmatch(self.url):
            raise ValueError(f"url {self.url!r} is not an engine's base URL: write http://HOST:PORT")
        for placeholder in re.findall(r"\{\w+\}", " ".join(self.command)):
            key = _PLACEHOLDERS.get(placeholder)
            if key is not None and getattr(self, key) is None:
                raise ValueError(f"the command uses {placeholder}, but the slot has no {key}")
            # What resembles none is the engine's own affair.
            if key is None and (near := difflib.get_close_matches(placeholder, _PLACEHOLDERS, 1)):
                raise ValueError(f"in the command {placeholder} stands for nothing (did you mean {near[0]}?)")
        if self.preload is not None and ("-m", self.preload) not in itertools.pairwise(self.command):
            raise ValueError(f"preload needs a command that runs python -m {self.preload}")
        return self


class Config(BaseSettings):
    """A node's configuration; `load` reads it."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix=ENV_PREFIX, env_nested_delimiter="__", env_ignore_empty=True
    )

    node: Node = Field(default_factory=Node)
    cache: Cache = Cache()
    gate: Gate = Gate()
    telemetry: Telemetry = Telemetry()
    slo: Slo = {}
    slot: tuple[Slot, ...] = ()

    _file: Path | None = PrivateAttr(default=None)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # A slot's own variables cannot address an entry of a list; `_with_slots_from` sees to them.
        if isinstance(env_settings, EnvSettingsSource):
            slot_variables = f"{ENV_PREFIX}slot__".lower()
            variables = env_settings.env_vars.items()
            env_settings.env_vars = {name: value for name, value in variables if not name.startswith(slot_variables)}
        return env_settings, init_settings

    @property
    def file(self) -> Path | None:
        """The file it was read from; None where the environment alone was."""
        return self._file

    @property
    def socket(self) -> Path:
        """The weight cache's socket."""
        return self.cache.socket or self.node.runtime_dir / "cache.sock"

    @property
    def journal(self) -> Path:
        """The node's journal."""
        return self.node.state_dir / "journal.sqlite3"

    @property
    def objectives(self) -> Objectives:
        """What this node promises."""
        return Objectives.of(self.slo)

    def gate_settings(self) -> GateSettings:
        """What the gate of this node needs to know.

        Raises:
            ConfigError: the slots, or the limits of ejection, cannot work.
        """
        return GateSettings(
            slots=tuple(SlotSettings(slot.name, slot.url) for slot in self.slot if slot.url),
            node=self.node.name,
            journal=self.journal,
            runtime_dir=self.node.runtime_dir,
            cache_socket=self.socket if self.cache.enabled else None,
            **self.gate.model_dump(exclude={"enabled"}),
        )


def load(file: Path | None = None) -> Config:
    """Read the configuration: a file, ``readmit.toml`` here if there is one, or the environment alone.

    Raises:
        ConfigError: ``config_file``, when the file cannot be read; ``config``, when it or the environment says
            something unknown or impossible; ``path_too_long``, for the sockets that would be made.
    """
    if file is None and os.path.exists(DEFAULT_FILE):  # not its own exists(): one may stand where one may not look
        file = DEFAULT_FILE
    data = _read(file) if file else {}
    what = f"the configuration {file}" if file else "the configuration in the environment"
    try:
        config = Config(**_with_slots_from(os.environ, data))
    except ValidationError as error:
        raise unusable(what, error) from error
    except ValueError as error:  # a slot's variable
        raise _unusable(what, [str(error)]) from error
    if file is not None:
        config = _anchored(config, file.resolve())
    names = [slot.name for slot in config.slot]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise _unusable(what, [f"slot: the name {twice[0]} is there twice"])
    if blind := [slot.name for slot in config.slot if config.gate.enabled and slot.url is None]:
        raise _unusable(what, [f"slot {blind[0]}: has no url, which the gate needs (or set enabled = false in [gate])"])
    for path in (config.socket, config.node.runtime_dir / "keeper.sock"):
        paths.checked_socket_path(path)
    return config


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        what_to_do = "Name the file (readmit up FILE)" if isinstance(error, OSError) else "Correct it"
        raise ConfigError(
            "config_file",
            f"the configuration {file} cannot be read: {getattr(error, 'strerror', None) or error}",
            remedy=f"{what_to_do}; deploy/readmit.toml is an example",
            path=str(file),
        ) from error


def _with_slots_from(environ: Mapping[str, str], data: dict[str, Any]) -> dict[str, Any]:
    """The file's data with what the environment says of single slots."""
    prefix = f"{ENV_PREFIX}SLOT__"
    entries = data.get("slot", [])
    if not isinstance(entries, list):
        raise ValueError("slot: write [[slot]], with two brackets, above each slot")
    slots = [dict(slot) if isinstance(slot, dict) else slot for slot in entries]
    named = {str(slot.get("name")): slot for slot in slots if isinstance(slot, dict)}
    by_variable = {name.upper().replace("-", "_"): slot for name, slot in named.items()}
    for variable, value in environ.items():
        if not variable.upper().startswith(prefix):
            if variable.upper().startswith(ENV_PREFIX):
                section = variable[len(ENV_PREFIX) :].partition("__")[0].lower()
                if section not in Config.model_fields:
                    raise ValueError(f"{variable}: there is no section {section}")
            continue
        name, _, key = variable[len(prefix) :].upper().partition("__")
        if name not in by_variable:
            raise ValueError(f"{variable}: there is no slot {name.lower()}; there are {', '.join(named) or 'none'}")
        by_variable[name][key.lower()] = json.loads(value) if value[:1] in "[{" else value
    return {**data, "slot": slots} if "slot" in data else data


def _anchored(config: Config, file: Path) -> Config:
    """The configuration with its relative paths made relative to the file's folder."""
    folder = file.parent

    def below(section: Section, *keys: str) -> dict[str, Path]:
        given = {key: getattr(section, key) for key in keys}
        return {key: folder / path for key, path in given.items() if path is not None}

    anchored = config.model_copy(
        update={
            "node": config.node.model_copy(update=below(config.node, "runtime_dir", "state_dir")),
            "cache": config.cache.model_copy(update=below(config.cache, "socket")),
            "gate": config.gate.model_copy(update=below(config.gate, "probes", "token_file", "tls_cert", "tls_key")),
            "telemetry": config.telemetry.model_copy(update=below(config.telemetry, "spans")),
            "slot": tuple(slot.model_copy(update={"cwd": folder / (slot.cwd or "")}) for slot in config.slot),
        }
    )
    anchored._file = file
    return anchored


def _told(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"]) or "configuration"
    if error["type"] == "extra_forbidden":
        return f"{key}: there is no such key{_meant(error['loc'])}"
    if error["type"] == "missing":
        return f"{key}: is missing"
    return f"{key}: {error['msg'].removeprefix('Value error, ')}"


def _meant(loc: tuple[str | int, ...]) -> str:
    """The nearest key, in brackets, if one is near."""
    tables: dict[str | int, type[BaseModel]] = {"node": Node, "cache": Cache, "gate": Gate, "telemetry": Telemetry}
    known = Config if len(loc) == 1 else tables.get(loc[0], Slot)
    near = difflib.get_close_matches(str(loc[-1]), known.model_fields, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def unusable(what: str, error: ValidationError) -> ConfigError:
    """The error for people that says every problem pydantic found in something."""
    return _unusable(what, [_told(item) for item in error.errors()])


def _unusable(what: str, problems: list[str]) -> ConfigError:
    return ConfigError(
        "config",
        f"{what} cannot be used: {'; '.join(problems)}",
        remedy="deploy/readmit.toml shows every key; readmit config show prints what is in force",
        problems=problems,
    )


def _replaced(word: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        word = word.replace(placeholder, value)
    return word
