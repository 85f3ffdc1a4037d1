"""A GPU's identity, and its faults in words."""

import pytest
from tests.weightcache.gpu.drivers import HostDriver

from weightcache import device


class Sm90(HostDriver):
    version = 13000

    def capability(self, device: int) -> tuple[int, int]:
        return (9, 0)

    def free_memory(self, device: int) -> tuple[int, int]:
        return (5 << 30, 139 << 30)


def test_a_gpu_is_known_by_its_uuid_and_capability() -> None:
    assert device.describe(1, Sm90("GPU-7")) == device.Device(1, "GPU-7", "sm_90", 13000)


def test_free_memory_names_the_limit() -> None:
    there = device.available(1, Sm90())
    assert there == (5 << 30, "CUDA device 1")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        # As torch 2.11 raised it on an H200 after a write into read-only weights.
        ("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be", "illegal_access"),
        ("CUDA error: uncorrectable ECC error encountered", "ecc"),
        ("CUDA error: unspecified launch failure", "launch_failed"),
        ("CUDA error: no CUDA-capable device is detected", "gpu_lost"),
        (
            "cuCtxSynchronize answered CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)",
            "illegal_access",
        ),
    ],
)
def test_a_fault_is_recognised_by_what_cuda_says(text: str, reason: str) -> None:
    fault = device.fault_of(RuntimeError(text))
    assert fault is not None
    assert fault.reason == reason
    assert fault.remedy
    assert text.splitlines()[0] in str(fault)
    assert fault.to_dict()["kind"] == "device"


def test_another_error_is_no_fault() -> None:
    assert device.fault_of(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")) is None
