"""Promises."""

import pytest

from weightcache.errors import ConfigError
from weightcache.slo import Objectives, bounds_s
from weightcache.vocabulary import PATHS, PHASES


def test_the_defaults_cover_the_closed_lists():
    objectives = Objectives()
    assert set(objectives.thresholds_s) == set(objectives.late_events) == set(PATHS)
    assert set(objectives.phase_limits_s) == set(PHASES)
    assert set(objectives.thresholds_s.values()) <= set(objectives.bounds_s())


def test_single_entries_may_be_given():
    objectives = Objectives.parse(
        '{"thresholds_s": {"hit": 33}, "outage_threshold_s": 7, "ready_ratio": {"slot": 0.9}}'
    )
    assert objectives.thresholds_s == {**Objectives().thresholds_s, "hit": 33}
    assert objectives.ready_ratio == {"slot": 0.9, "service": 0.999}
    assert {33.0, 7.0} <= set(objectives.bounds_s())
    assert 33.0 not in bounds_s()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[]", "the whole"),
        ("{", "the whole"),
        ('{"threshold": 1}', "threshold"),
        ('{"thresholds_s": {"hits": 1}}', "thresholds_s"),
        ('{"thresholds_s": {"hit": 0}}', "thresholds_s.hit"),
        ('{"thresholds_s": {"hit": true}}', "thresholds_s.hit"),
        ('{"thresholds_s": 60}', "thresholds_s"),
        ('{"outage_threshold_s": "60"}', "outage_threshold_s"),
        ('{"ready_ratio": {"slot": 1}}', "ready_ratio.slot"),
    ],
)
def test_what_cannot_be_promised_is_said(text, name):
    with pytest.raises(ConfigError, match=f"the promise {name} cannot") as caught:
        Objectives.parse(text)
    assert "[slo]" in caught.value.remedy


@pytest.mark.parametrize(
    ("path", "last", "seconds"),
    [("unknown", None, 600), ("unknown", "off", 600), ("unknown", "miss", 60), ("miss", "hit", 600)],
)
def test_until_the_path_is_known_a_slot_is_as_fast_as_can_be_expected(path, last, seconds):
    assert Objectives().threshold_s(path, last) == seconds
