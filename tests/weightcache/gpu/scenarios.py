"""What is recorded on a GPU and replayed without one: small arenas through the whole life of their descriptors.

``python tests/weightcache/gpu/scenarios.py OUT.json RUN`` records them on the machine's first GPU; RUN says what run
that was.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Final

import torch

from weightcache.arena import align, cuda_digest, cuda_vmm
from weightcache.arena.cuda_driver import Driver
from weightcache.arena.cuda_vmm import KIND, CudaVmmMapping, CudaVmmWriter, require_export
from weightcache.errors import CacheMiss
from weightcache.fingerprint import CacheConfig
from weightcache.manifest import Manifest, Publisher

CHUNK: Final = 4 << 20
CONFIG: Final = CacheConfig(
    model_path="/models/m", model_arch="M", dtype="bfloat16", torch_version="2", engine="e", layout_id="l"
)


def tensors() -> dict[str, torch.Tensor]:
    """Several dtypes, an odd size, a transposed weight, an empty one, and one across the end of a chunk."""
    generator = torch.Generator().manual_seed(7)

    def bytes_(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)

    return {
        "embed.weight": bytes_(3 << 20).view(torch.bfloat16).view(1536, 1024),
        "a.weight": bytes_(2 << 20).view(torch.float8_e4m3fn).view(1024, 2048).t(),
        "a.weight_scale_inv": bytes_(8 * 16 * 4).view(torch.float32).view(8, 16),
        "b.odd": bytes_(1021),
        "b.empty": torch.empty((0, 4), dtype=torch.float32),
        "b.count": torch.tensor(41, dtype=torch.int64),
    }


def publish(driver: Driver, device: torch.device) -> tuple[Manifest, list[int]]:
    """Move the tensors into an arena."""
    parts = {name: tensor.to(device) for name, tensor in tensors().items()}
    offsets, end = {}, 0
    for name, tensor in parts.items():
        offsets[name] = end
        end = align(end + tensor.untyped_storage().nbytes())
    writer = CudaVmmWriter(end, 0, chunk_bytes=CHUNK, driver=driver)
    views = {}
    for name, tensor in parts.items():
        flat = tensor.t() if tensor.is_contiguous() is False else tensor
        writer.write(offsets[name], flat)
        views[name] = writer.view(offsets[name], tensor)
    digests = writer.digests([(offsets[name], tensor) for name, tensor in parts.items()])
    manifest = Manifest(
        config=CONFIG,
        publisher=Publisher(1, "scenario", "memory", None, 0),
        arena=KIND,
        device=writer.device,
        chunks=writer.chunks(),
        names=list(parts),
        dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in parts.values()],
        dtype=list(range(len(parts))),
        shapes=[tuple(tensor.shape) for tensor in parts.values()],
        strides=[None if tensor.is_contiguous() else tensor.stride() for tensor in parts.values()],
        offsets=list(offsets.values()),
        kinds=bytes(len(parts)),
        digest_algorithm=cuda_digest.ALGORITHM,
        digest_size=cuda_digest.SIZE,
        digests=digests,
    )
    descriptors = writer.seal()
    writer.close()
    for name, tensor in parts.items():
        if tensor.numel():
            assert_same(views[name], tensor)
    return manifest, descriptors


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in dtype, shape, strides and every byte."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.stride() == expected.stride()
    if expected.numel():
        flat = [tensor.cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
        assert torch.equal(*flat)


def publish_and_attach(driver: Driver, device: torch.device) -> str | None:
    """The bytes come back through a mapping of the descriptors, all of them verified; dropping it unmaps it."""
    manifest, descriptors = publish(driver, device)
    mapping = CudaVmmMapping(descriptors, manifest, 0, driver)
    views = list(mapping.views(manifest))
    for found, expected in zip(views, tensors().values(), strict=True):
        assert_same(found, expected)
    rows = range(len(manifest))
    assert mapping.digests(manifest, rows)() == manifest.digests
    last = views[-1]
    del mapping, views, found
    assert int(last) == 41  # one tensor keeps the arena mapped
    del last
    close(descriptors)
    return None


def mapped_in_steps(driver: Driver, device: torch.device) -> str | None:
    """What is mapped becomes readable, and is verified, while the rest is mapped."""
    manifest, descriptors = publish(driver, device)
    rows = range(len(manifest))
    usual, cuda_vmm.FIRST_CHUNKS = cuda_vmm.FIRST_CHUNKS, 1  # type: ignore[misc]
    try:
        mapping = CudaVmmMapping(descriptors, manifest, 0, driver, rows)
    finally:
        cuda_vmm.FIRST_CHUNKS = usual  # type: ignore[misc]
    assert mapping.digests(manifest, rows)() == manifest.digests
    assert mapping.digests(manifest, [2, 3])() == manifest.digest(2) + manifest.digest(3)
    for found, expected in zip(mapping.views(manifest), tensors().values(), strict=True):
        assert_same(found, expected)
    del mapping, found
    close(descriptors)
    return None


def read_in_place(driver: Driver, device: torch.device) -> str | None:
    """An arena that a loader reads into as a whole, and that grows by what else a model has."""
    writer = CudaVmmWriter(3 << 20, 0, chunk_bytes=CHUNK, spare=8 << 20, driver=driver)
    room = writer.room()
    room[: 3 << 20] = 7
    assert writer.offset_of(room.data_ptr() + 100) == 100
    assert writer.offset_of(room.data_ptr() + writer.size) is None
    start = writer.size
    writer.grow(start + (5 << 20))
    rest = torch.arange(5 << 17, dtype=torch.int64, device=device)
    writer.write(start, rest)
    assert writer.chunks() == [4 << 20, 4 << 20, 2 << 20]
    found = writer.view(start, rest)
    descriptors = writer.seal()
    writer.close()
    assert found is not None
    assert_same(found, rest)
    assert int(room[(3 << 20) - 1]) == 7
    del found, room, rest
    close(descriptors)
    return None


def foreign_descriptor(driver: Driver, device: torch.device) -> str | None:
    """A descriptor of something else is refused."""
    manifest, descriptors = publish(driver, device)
    stranger = os.open("/dev/null", os.O_RDONLY)
    outcome = refused(lambda: CudaVmmMapping([descriptors[0], stranger], manifest, 0, driver))
    close([*descriptors, stranger])
    return outcome


def short_chunk(driver: Driver, device: torch.device) -> str | None:
    """An allocation smaller than the manifest says is refused, not mapped beyond its end."""
    manifest, descriptors = publish(driver, device)
    swapped = [descriptors[1], descriptors[1]]
    outcome = refused(lambda: CudaVmmMapping(swapped, manifest, 0, driver))
    close(descriptors)
    return outcome


def full_gpu(driver: Driver, device: torch.device) -> str | None:
    """A chunk that does not fit is a miss; nothing is left behind."""
    writer = CudaVmmWriter(1 << 40, 0, chunk_bytes=1 << 40, driver=driver)
    return refused(lambda: writer.write(0, torch.zeros(8, device=device)))


def export_is_possible(driver: Driver, device: torch.device) -> str | None:
    """The check that comes before anything is loaded."""
    return refused(lambda: require_export(0, driver))


SCENARIOS: Final[dict[str, Callable[[Driver, torch.device], str | None]]] = {
    scenario.__name__: scenario
    for scenario in (
        publish_and_attach,
        mapped_in_steps,
        read_in_place,
        foreign_descriptor,
        short_chunk,
        full_gpu,
        export_is_possible,
    )
}


def refused(call: Callable[[], object]) -> str | None:
    """The reason of the miss that a call raises. The error itself is let go: its traceback keeps mappings alive."""
    try:
        call()
    except CacheMiss as miss:
        return miss.reason
    return None


def close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def main() -> None:
    from tests.weightcache.gpu.drivers import RecordingDriver

    from weightcache.arena.cuda_driver import nvidia

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    recorded = {}
    for name, scenario in SCENARIOS.items():
        driver = RecordingDriver(nvidia())
        outcome = scenario(driver, torch.device("cuda", 0))
        recorded[name] = {"outcome": outcome, "calls": driver.calls}
        print(name, outcome, driver.calls[-1])
    version = nvidia().version
    machine = {
        "gpu": torch.cuda.get_device_name(0),
        "cuda_driver": f"{version // 1000}.{version % 1000 // 10}",
        "kernel_driver": kernel_driver(),
        "torch": torch.__version__,
        "run": sys.argv[2],
        "recorded_at": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    with open(sys.argv[1], "w") as file:
        json.dump({"machine": machine, "scenarios": recorded}, file, indent=1)


def kernel_driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


if __name__ == "__main__":
    main()
