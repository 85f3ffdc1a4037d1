"""What engines are told of the weight cache in their ``--model-loader-extra-config``."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from weightcache.errors import ConfigError
from weightcache.policy import check_overrides
from weightcache.vocabulary import MODES


class _Options(msgspec.Struct, forbid_unknown_fields=True):
    """See `weightcache.client.attach`, whose arguments they are, and whose defaults hold for what is not given."""

    mode: str = "client"
    socket: str | None = None
    policies: dict[str, str] | None = None
    verify: float | bool | None = None
    wait_s: float | None = None


OPTIONS: Final = _Options.__struct_fields__


def read_options(given: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """The mode, and the other arguments of `weightcache.client.attach`.

    Args:
        given: as the engine's command has it.
        where: what to call it where it cannot be used.

    Raises:
        ConfigError: ``loader_option``: an unknown key or mode, a value of another type, or no object at all;
            ``policy``: an unknown miss reason or policy.
    """
    if isinstance(given, Mapping):
        if unknown := sorted(set(given) - set(OPTIONS)):
            raise _unusable(where, f"keys of {', '.join(OPTIONS)}", unknown[0], OPTIONS)
        if (mode := given.get("mode", "client")) not in MODES:
            raise _unusable(where, f"a mode of {', '.join(MODES)}", mode, MODES)
    try:
        options = msgspec.convert(given, _Options)
    except msgspec.ValidationError as error:
        raise ConfigError("loader_option", f"{where} cannot be used: {error}", found=given) from error
    check_overrides(options.policies)
    values = {name: value for name, value in msgspec.structs.asdict(options).items() if value is not None}
    if "socket" in values:
        values["socket"] = Path(values["socket"])
    return values.pop("mode"), values


def _unusable(where: str, expected: str, found: object, known: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(str(found), known, n=1)
    remedy = f"Write {near[0]!r} if that is what was meant" if near else None
    return ConfigError("loader_option", f"{where} cannot be used", expected=expected, found=repr(found), remedy=remedy)
