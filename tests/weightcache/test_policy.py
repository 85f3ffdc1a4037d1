"""Policies: the defaults that are promised, and overrides that name what there is."""

import pytest

from weightcache.errors import ConfigError
from weightcache.policy import PUBLISHES_AFTER, QUARANTINES, USELESS, check_overrides, policy_for
from weightcache.vocabulary import MISS_REASONS, POLICIES

CLIENT = {"daemon_loading": "wait", "fingerprint": "replace", "resource": "fail"}
DAEMON = {"absent": "wait", "device": "wait", "residency_lost": "wait", "daemon_loading": "wait"}


@pytest.mark.parametrize("reason", MISS_REASONS)
def test_the_defaults_of_both_modes(reason: str) -> None:
    assert policy_for(reason, "client") == CLIENT.get(reason, "fallback")
    assert policy_for(reason, "daemon") == DAEMON.get(reason, "fail")


@pytest.mark.parametrize("policy", POLICIES)
def test_an_override_holds_for_its_reason_alone(policy: str) -> None:
    overrides = {"absent": policy}
    check_overrides(overrides)
    assert policy_for("absent", "client", overrides) == policy
    assert policy_for("integrity", "client", overrides) == "fallback"


@pytest.mark.parametrize("overrides", [{"abscent": "fail"}, {"absent": "explode"}])
def test_an_override_of_nothing_is_refused(overrides: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        check_overrides(overrides)
    assert refused.value.reason == "policy"


def test_the_groups_are_of_the_closed_list() -> None:
    assert QUARANTINES < USELESS < PUBLISHES_AFTER < set(MISS_REASONS)
