"""The GPU arena on recorded answers of a real driver, and on memory files where the driver's answers do not matter."""

import contextlib
import faulthandler
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.weightcache.gpu import scenarios
from tests.weightcache.gpu.drivers import HostDriver, ReplayDriver

from weightcache.arena import cuda_views
from weightcache.arena.cuda_driver import DriverError
from weightcache.arena.cuda_vmm import CudaVmmMapping, CudaVmmWriter, require_export
from weightcache.errors import CacheMiss, ImportRejected
from weightcache.manifest import Manifest, decode

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.json"))
CPU = torch.device("cpu")


def recorded() -> Iterator[Any]:
    for path in RECORDINGS:
        recording = json.loads(path.read_text())
        for name, scenario in recording["scenarios"].items():
            yield pytest.param(name, scenario, id=f"{name} on {recording['machine']['gpu']}")


@pytest.mark.parametrize(("name", "scenario"), list(recorded()))
def test_the_code_makes_the_calls_that_were_made_on_a_gpu(name: str, scenario: dict[str, Any]) -> None:
    driver = ReplayDriver(scenario["calls"])
    assert scenarios.SCENARIOS[name](driver, CPU) == scenario["outcome"]
    driver.finish()


def test_what_must_be_refused_was_refused_on_a_gpu() -> None:
    refused = {"foreign_descriptor": "manifest_invalid", "short_chunk": "manifest_invalid", "full_gpu": "resource"}
    for path in RECORDINGS:
        outcomes = {name: it["outcome"] for name, it in json.loads(path.read_text())["scenarios"].items()}
        works = ("publish_and_attach", "mapped_in_steps", "read_in_place", "export_is_possible")
        assert outcomes == {**dict.fromkeys(works), **refused}


def test_every_scenario_was_recorded_with_its_machine() -> None:
    for path in RECORDINGS:
        recording = json.loads(path.read_text())
        assert recording["scenarios"].keys() == scenarios.SCENARIOS.keys()
        assert {"gpu", "kernel_driver", "cuda_driver", "torch", "run", "recorded_at"} <= recording["machine"].keys()
    assert RECORDINGS


@pytest.fixture
def resident() -> Iterator[tuple[HostDriver, Manifest, list[int]]]:
    driver = HostDriver()
    manifest, descriptors = scenarios.publish(driver, CPU)
    yield driver, manifest, descriptors
    scenarios.close(descriptors)


def test_the_manifest_of_a_gpu_arena_is_valid(resident: tuple[HostDriver, Manifest, list[int]]) -> None:
    _, manifest, descriptors = resident
    assert decode(manifest.encode()) == manifest
    assert len(descriptors) == len(manifest.chunks) == 2


def test_a_write_into_mapped_weights_kills_the_writer_and_leaves_the_bytes(
    resident: tuple[HostDriver, Manifest, list[int]],
) -> None:
    driver, manifest, descriptors = resident
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            faulthandler.disable()
            # One element: filling many takes torch's threads, which a forked child does not have.
            next(CudaVmmMapping(descriptors, manifest, 0, driver).views(manifest))[0, 0] = 0
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    mapping = CudaVmmMapping(descriptors, manifest, 0, driver)
    assert mapping.digests(manifest, range(len(manifest)))() == manifest.digests


def test_two_mappings_share_the_bytes_of_a_rogue_writer(resident: tuple[HostDriver, Manifest, list[int]]) -> None:
    driver, manifest, descriptors = resident
    os.pwrite(descriptors[0], b"\xff", manifest.offsets[0] + 3)
    mapping = CudaVmmMapping(descriptors, manifest, 0, driver)
    found = mapping.digests(manifest, range(len(manifest)))()
    wrong = [row for row in range(len(manifest)) if found[row * 8 : row * 8 + 8] != manifest.digest(row)]
    assert wrong == [0]
    assert mapping.digests(manifest, [1, 3])() == manifest.digest(1) + manifest.digest(3)


def test_on_another_gpu_the_miss_names_both(resident: tuple[HostDriver, Manifest, list[int]]) -> None:
    _, manifest, descriptors = resident
    with pytest.raises(CacheMiss) as caught:
        CudaVmmMapping(descriptors, manifest, 0, HostDriver("GPU-other"))
    assert caught.value.reason == "device"
    assert (caught.value.expected, caught.value.found) == ("GPU-other", "GPU-host")


def test_a_publisher_moves_onto_its_arena_chunk_by_chunk() -> None:
    driver = HostDriver()
    page = driver.page
    writer = CudaVmmWriter(5 * page, 0, chunk_bytes=2 * page, driver=driver)
    assert writer.chunks() == [2 * page, 2 * page, page]
    source = torch.arange(page // 8)
    writer.write(page, source)
    assert len(driver._files) == 0  # handles are given up as soon as the memory is mapped and exported
    assert len(writer._descriptors) == 1
    writer.write(2 * page + 8, source)
    assert len(writer._descriptors) == 2
    view = writer.view(2 * page + 8, source)
    assert view is not None
    assert torch.equal(view, source)
    descriptors = writer.seal()
    assert len(descriptors) == 3
    writer.close()
    assert torch.equal(view, source)
    scenarios.close(descriptors)


def test_an_abandoned_writer_closes_what_it_exported() -> None:
    writer = CudaVmmWriter(1, 0, driver=HostDriver())
    writer.write(0, torch.zeros(4))
    (descriptor,) = writer._descriptors
    inode = os.fstat(descriptor).st_ino
    writer.close()
    held = [path for path in Path("/proc/self/fd").iterdir() if path.exists() and path.stat().st_ino == inode]
    assert held == []


def test_small_tensors_share_storages_and_large_ones_have_their_own(
    resident: tuple[HostDriver, Manifest, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, manifest, descriptors = resident
    monkeypatch.setattr(cuda_views, "STORAGE_BYTES", 4096)
    views = list(CudaVmmMapping(descriptors, manifest, 0, driver).views(manifest))
    sizes = {name: view.untyped_storage().nbytes() for name, view in zip(manifest.names, views, strict=True)}
    assert sizes["embed.weight"] == 3 << 20
    assert sizes["a.weight"] == 2 << 20
    assert sizes["b.odd"] <= 4096
    assert sizes["b.count"] <= 4096
    for view, expected in zip(views, scenarios.tensors().values(), strict=True):
        scenarios.assert_same(view, expected)


class RefusingDriver(HostDriver):
    """Refuses one call. Not recorded: the H200 refuses none of these."""

    def __init__(self, call: str, reason: str) -> None:
        super().__init__()
        self._refused = (call, reason)

    def _refuse(self, call: str) -> None:
        if self._refused[0] == call:
            raise DriverError(self._refused[1], "as the test wants it", call)

    def can_export(self, device: int) -> bool:
        return self._refused[0] != "can_export"

    def create(self, size: int, device: int) -> int:
        self._refuse("create")
        return super().create(size, device)

    def export(self, handle: int) -> int:
        self._refuse("export")
        return super().export(handle)

    def import_(self, descriptor: int) -> int:
        self._refuse("import_")
        return super().import_(descriptor)

    def map(self, address: int, size: int, handle: int) -> None:
        self._refuse("map")
        super().map(address, size, handle)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("can_export", "CUDA_ERROR_NOT_SUPPORTED"),
        ("create", "CUDA_ERROR_NOT_SUPPORTED"),
        ("export", "CUDA_ERROR_NOT_PERMITTED"),
    ],
)
def test_where_memory_cannot_be_exported_the_miss_gives_the_drivers_reason(call: str, reason: str) -> None:
    driver = RefusingDriver(call, reason)
    with pytest.raises(CacheMiss) as caught:
        require_export(0, driver)
    assert caught.value.reason == "ipc_unavailable"
    assert caught.value.found == reason
    assert not driver._files


def test_a_full_gpu_can_still_map_what_is_resident() -> None:
    require_export(0, RefusingDriver("create", "CUDA_ERROR_OUT_OF_MEMORY"))


@pytest.mark.parametrize(
    ("call", "answer", "reason", "detail"),
    [
        ("import_", "CUDA_ERROR_UNKNOWN", "manifest_invalid", None),
        ("map", "CUDA_ERROR_INVALID_VALUE", "manifest_invalid", None),
        ("map", "CUDA_ERROR_OUT_OF_MEMORY", "resource", "memory"),
        ("map", "CUDA_ERROR_NO_DEVICE", "residency_lost", "gpu_lost"),
        ("map", "CUDA_ERROR_ECC_UNCORRECTABLE", "residency_lost", "driver_fault"),
        ("map", "CUDA_ERROR_NOT_SUPPORTED", "manifest_invalid", None),
        ("import_", "CUDA_ERROR_NOT_SUPPORTED", "ipc_unavailable", None),
    ],
)
def test_what_the_driver_refuses_while_mapping_is_a_miss_and_leaves_nothing(
    resident: tuple[HostDriver, Manifest, list[int]], call: str, answer: str, reason: str, detail: str | None
) -> None:
    _, manifest, descriptors = resident
    driver = RefusingDriver(call, answer)
    with pytest.raises(CacheMiss) as caught:
        CudaVmmMapping(descriptors, manifest, 0, driver)
    assert (caught.value.reason, caught.value.detail) == (reason, detail)
    assert isinstance(caught.value, ImportRejected) == (reason == "manifest_invalid")
    assert not driver._files
    assert answer in str(caught.value)


def test_a_publisher_that_finds_the_gpu_full_says_how_much_it_needed() -> None:
    writer = CudaVmmWriter(3 << 20, 0, driver=RefusingDriver("create", "CUDA_ERROR_OUT_OF_MEMORY"))
    with pytest.raises(CacheMiss) as caught:
        writer.write(0, torch.zeros(1))
    assert caught.value.reason == "resource"
    assert caught.value.data["needed"] == 4 << 20
