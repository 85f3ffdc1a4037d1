"""The third gate, with faults put in at the NVML seam."""

import threading
from collections.abc import Callable

import pytest

from weightcache.gpu_watch import FATAL_XIDS, Finding, GpuWatch, Health, NvmlError, Xid
from weightcache.vocabulary import RESIDENCY_DETAILS

ONE, TWO = "GPU-1", "GPU-2"
WELL = Health(uncorrected=0, remapping_failed=False)


class ScriptedNvml:
    """Two GPUs that are well until a test says otherwise."""

    def __init__(self) -> None:
        self.faults: list[Xid | NvmlError] = []
        self.state: dict[str, Health | NvmlError] = {ONE: WELL, TWO: WELL}
        self.version: str | NvmlError = "580.1"
        self.closed = False

    def open(self) -> list[str]:
        return list(self.state)

    def wait(self, timeout_s: float) -> Xid | None:
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, NvmlError):
            raise fault
        return fault

    def health(self, uuid: str) -> Health:
        state = self.state[uuid]
        if isinstance(state, NvmlError):
            raise state
        return state

    def driver_version(self) -> str:
        if isinstance(self.version, NvmlError):
            raise self.version
        return self.version

    def close(self) -> None:
        self.closed = True


class Bench:
    def __init__(self) -> None:
        self.nvml = ScriptedNvml()
        self.found: list[Finding] = []
        self.now = 0.0
        self.watch = GpuWatch(self.found.append, self.nvml, clock=lambda: self.now)
        assert self.watch.start() == [ONE, TWO]

    def look(self) -> bool:
        """A step at which the counters are due."""
        self.now += 11.0
        return self.watch.step()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_while_all_is_well_nothing_is_lost(bench: Bench) -> None:
    assert all(bench.look() for _ in range(3))
    assert bench.found == []


@pytest.mark.parametrize("number", [13, 31, 43, 45])
def test_a_programs_own_fault_is_no_loss(bench: Bench, number: int) -> None:
    bench.nvml.faults = [Xid(ONE, number)]
    assert bench.watch.step()
    assert bench.found == []


@pytest.mark.parametrize("number", sorted(FATAL_XIDS))
def test_a_fault_of_the_gpu_loses_what_is_resident_on_it_once(bench: Bench, number: int) -> None:
    bench.nvml.faults = [Xid(ONE, number), Xid(ONE, number), Xid(ONE, 48)]
    for _ in range(3):
        assert bench.watch.step()
    (finding,) = bench.found
    assert (finding.uuid, finding.xid) == (ONE, number)
    assert finding.detail == ("gpu_lost" if number == 79 else "driver_fault")
    assert finding.detail in RESIDENCY_DETAILS
    assert str(number) in finding.message


def test_uncorrected_memory_errors_since_the_last_look_are_a_loss(bench: Bench) -> None:
    bench.nvml.state[TWO] = Health(uncorrected=2, remapping_failed=False)
    assert bench.look()
    (finding,) = bench.found
    assert (finding.uuid, finding.detail) == (TWO, "driver_fault")
    assert "2 uncorrected" in finding.message


def test_errors_from_before_the_watch_are_not_held_against_what_was_published_since() -> None:
    bench = Bench()
    bench.nvml.state = {ONE: Health(uncorrected=5, remapping_failed=True)}
    found: list[Finding] = []
    watch = GpuWatch(found.append, bench.nvml, clock=lambda: bench.now)
    watch.start()
    bench.now += 60
    assert watch.step()
    assert found == []


def test_a_row_that_could_not_be_remapped_is_a_loss(bench: Bench) -> None:
    bench.nvml.state[ONE] = Health(uncorrected=0, remapping_failed=True)
    bench.look()
    assert [(finding.uuid, finding.detail) for finding in bench.found] == [(ONE, "driver_fault")]


def test_a_gpu_that_answers_no_more_is_lost_and_the_other_is_watched_on(bench: Bench) -> None:
    bench.nvml.state[ONE] = NvmlError("lost", "GPU is lost")
    assert bench.look()
    assert [(finding.uuid, finding.detail) for finding in bench.found] == [(ONE, "gpu_lost")]
    bench.nvml.faults = [Xid(TWO, 79)]
    assert not bench.watch.step()
    assert [finding.uuid for finding in bench.found] == [ONE, TWO]


def test_counters_that_a_gpu_does_not_have_are_no_fault(bench: Bench) -> None:
    bench.nvml.state[ONE] = NvmlError("unsupported", "no ECC")
    assert bench.look()
    assert bench.found == []


def _version(bench: Bench) -> None:
    bench.nvml.version = "580.2"


def _gone(bench: Bench) -> None:
    bench.nvml.version = NvmlError("driver", "driver not loaded")


def _waiting(bench: Bench) -> None:
    bench.nvml.faults = [NvmlError("driver", "library and driver differ")]


@pytest.mark.parametrize("happen", [_version, _gone, _waiting])
def test_a_driver_that_was_reloaded_or_is_gone_loses_everything_once(
    bench: Bench, happen: Callable[[Bench], None]
) -> None:
    happen(bench)
    assert not bench.look()
    assert [(finding.uuid, finding.detail) for finding in bench.found] == [(ONE, "driver_fault"), (TWO, "driver_fault")]
    assert not bench.look()
    assert len(bench.found) == 2


def test_a_wait_that_fails_for_one_gpu_blames_that_one(bench: Bench) -> None:
    bench.nvml.faults = [NvmlError("lost", "GPU is lost")]
    bench.nvml.state[TWO] = NvmlError("lost", "GPU is lost")
    assert bench.watch.step()
    assert [(finding.uuid, finding.detail) for finding in bench.found] == [(TWO, "gpu_lost")]


def test_a_watch_ends_by_itself_when_nothing_is_left_and_closes_the_library(bench: Bench) -> None:
    bench.nvml.faults = [Xid(ONE, 79), Xid(TWO, 79)]
    bench.watch.run(threading.Event())
    assert bench.nvml.closed
    assert len(bench.found) == 2


def test_a_watch_that_is_told_to_stop_closes_the_library(bench: Bench) -> None:
    stop = threading.Event()
    stop.set()
    bench.watch.run(stop)
    assert bench.nvml.closed
