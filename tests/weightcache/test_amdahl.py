"""Amdahl's account, against the published figures."""

import math

import pytest

from weightcache.amdahl import account, limit, speedup

# Ling-2.6-1T FP8 on 8 x H20-3e, tensor parallel over 8: seconds as published.
REST = {
    "import": 1,
    "tokenizer_init": 13,
    "distributed_init": 5,
    "cache_alloc": 1,
    "graph_capture": 7.7,
    "server_ready": 4,
}
COLD = {**REST, "load_weights": 495}
RESIDENT = {**REST, "load_weights": 0.63}


def test_published_speedup_and_its_limit():
    assert speedup(495 / 527, 785) == pytest.approx(16.15, abs=0.005)
    assert limit(495 / 527) == pytest.approx(16.47, abs=0.005)


@pytest.mark.parametrize(("fraction", "expected"), [(0.07, 1.08), (0.10, 1.11)])
def test_a_small_model_gains_next_to_nothing(fraction, expected):
    assert limit(fraction) == pytest.approx(expected, abs=0.005)


def test_account_of_the_published_phases():
    result = account(COLD, RESIDENT)
    assert result.cold_s == pytest.approx(527, abs=0.5)
    assert result.resident_s == pytest.approx(32, abs=0.5)
    assert result.fraction == pytest.approx(0.939, abs=0.001)
    assert result.factor == pytest.approx(785, abs=1)
    assert result.measured == pytest.approx(result.predicted), "the other phases did not change"
    assert (result.next_phase, result.next_phase_s) == ("tokenizer_init", 13)


def test_change_in_other_phases_parts_measured_from_predicted():
    result = account(COLD, {**RESIDENT, "graph_capture": 70})
    assert result.measured < result.predicted < result.limit
    assert result.next_phase == "graph_capture"


def test_without_a_load_there_is_no_account():
    with pytest.raises(ValueError, match="resident recovery has no time in load_weights"):
        account(COLD, REST)


def test_nothing_but_weights():
    assert limit(1.0) == math.inf
    assert account({"load_weights": 10}, {"load_weights": 2}).next_phase is None
