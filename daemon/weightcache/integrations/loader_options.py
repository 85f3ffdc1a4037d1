"""What engines are told of the weight cache in their ``--model-loader-extra-config``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from weightcache.errors import ConfigError
from weightcache.vocabulary import MODES

OPTIONS: Final = ("mode", "socket", "policies", "verify", "wait_s")
"""The keys; see `weightcache.client.attach`. The mode is ``client`` if not given."""


def read_options(given: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """The mode, and the other arguments of `weightcache.client.attach`.

    Args:
        given: as the engine's command has it.
        where: what to call it where it cannot be used.

    Raises:
        ConfigError: ``loader_option``: an unknown key or mode.
    """
    options = dict(given)
    mode = options.pop("mode", "client")
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown or mode not in MODES:
        raise ConfigError(
            "loader_option",
            f"{where} cannot be used",
            expected=f"keys of {', '.join(OPTIONS)}; mode one of {', '.join(MODES)}",
            found=", ".join(unknown) or f"mode {mode!r}",
        )
    if "socket" in options:
        options["socket"] = Path(options["socket"])
    return mode, options
