"""torch's allocator is told to grow its segments while a model loads, and what was configured afterwards."""

import pytest
import torch

from weightcache.arena.cuda_segments import growing


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's allocator was told."""
    said: list[str] = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append, raising=False)
    return said


def test_segments_grow_during_a_load_and_not_after_it(told: list[str]) -> None:
    with growing():
        assert told == ["expandable_segments:True"]
    assert told[1:] == ["expandable_segments:False"]


def test_a_load_that_fails_changes_nothing_for_good(told: list[str]) -> None:
    with pytest.raises(ValueError, match="unreadable"), growing():
        raise ValueError("unreadable")
    assert told[-1] == "expandable_segments:False"


def test_what_is_configured_stays_configured(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    with growing():
        pass
    assert told == [f"max_split_size_mb:64,expandable_segments:{state}" for state in (True, False)]


@pytest.mark.parametrize("state", ["True", "False"])
def test_who_has_chosen_is_left_alone(told: list[str], monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{state}")
    with growing():
        pass
    assert told == []


def test_torch_without_an_accelerator_takes_the_settings() -> None:
    with growing():
        pass
