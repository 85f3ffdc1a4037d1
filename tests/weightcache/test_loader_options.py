"""What an engine's command line says of the weight cache: read whole, or refused with what was probably meant."""

from pathlib import Path
from typing import Any

import pytest

from weightcache.errors import ConfigError
from weightcache.integrations.loader_options import read_options


def test_what_is_not_said_is_left_to_the_loader() -> None:
    assert read_options({}, "it") == ("client", {})
    said = {"mode": "daemon", "socket": "/s", "policies": {"absent": "fail"}, "verify": True, "wait_s": 3}
    assert read_options(said, "it") == (
        "daemon",
        {"socket": Path("/s"), "policies": {"absent": "fail"}, "verify": True, "wait_s": 3},
    )


@pytest.mark.parametrize(
    ("given", "found", "meant"),
    [
        ({"sockets": "/s"}, "sockets", "socket"),
        ({"polices": {}}, "polices", "policies"),
        ({"wait": 3}, "wait", "wait_s"),
        ({"mode": "clinet"}, "clinet", "client"),
        ({"mode": "Off"}, "Off", "off"),
    ],
)
def test_a_typing_error_is_told_what_it_resembles(given: dict[str, Any], found: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_options(given, "it")
    assert refused.value.reason == "loader_option"
    assert repr(found) in str(refused.value)
    assert f"Write {meant!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"something": 1}, "loader_option"),
        ({"mode": ["client"]}, "loader_option"),
        ({"verify": "all"}, "loader_option"),
        ({"wait_s": "10"}, "loader_option"),
        ({"socket": 5}, "loader_option"),
        ({"policies": ["absent"]}, "loader_option"),
        ({"policies": {"absent": "explode"}}, "policy"),
        ({"policies": {"abscent": "fail"}}, "policy"),
        ("client", "loader_option"),
        (None, "loader_option"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_loaded(given: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_options(given, "it")
    assert refused.value.reason == reason
