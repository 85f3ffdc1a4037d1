"""A checkpoint read into an arena and published from there, on memory files in the place of GPU memory."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.weightcache.gpu.drivers import HostDriver
from torch import nn

from weightcache.arena import cuda_checkpoint
from weightcache.arena.cuda_checkpoint import Resident
from weightcache.arena.cuda_vmm import CudaVmmMapping
from weightcache.binding import Binding
from weightcache.checkpoint import Checkpoint
from weightcache.errors import CheckpointError, ResourceError
from weightcache.fingerprint import CacheConfig
from weightcache.publish import Packed, pack

CONFIG = CacheConfig(
    model_path="/models/m", model_arch="M", dtype="bfloat16", torch_version="2", engine="e", layout_id="l"
)
NAMES = ("a.weight", "b.weight", "scale", "nothing")


class Model(nn.Module):
    """Weights that are in a checkpoint, one of them in FP8, and a buffer and a parameter that are not."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Module(), nn.Module()
        for name, module in (("a.weight", self.a), ("b.weight", self.b), ("scale", self), ("nothing", self)):
            setattr(module, name.rpartition(".")[2], nn.Parameter(tensors[name], requires_grad=False))
        self.extra = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.register_buffer("inv_freq", torch.arange(7.0), persistent=False)


def contents() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "a.weight": torch.randn((300, 1000), generator=generator).to(torch.bfloat16),
        "b.weight": torch.randint(0, 120, (129, 65), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn),
        "scale": torch.randn((3,), generator=generator),
        "nothing": torch.empty((0, 4), dtype=torch.float32),
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    (tmp_path / "config.json").write_text("{}")
    save_file(contents(), tmp_path / "model.safetensors")
    return Checkpoint.open(tmp_path)


@pytest.fixture
def driver() -> HostDriver:
    return HostDriver()


@pytest.fixture
def resident(checkpoint: Checkpoint, driver: HostDriver) -> Iterator[Resident]:
    found = cuda_checkpoint.load(checkpoint, 0, NAMES[:2], driver=driver)
    yield found
    found.arena.close()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(*flat)


def test_tensors_lie_where_they_were_asked_for(resident: Resident, checkpoint: Checkpoint) -> None:
    for name, expected in contents().items():
        assert same(resident.tensors[name], expected), name
        inside = resident.arena.offset_of(resident.tensors[name].data_ptr()) is not None
        assert inside == (name in NAMES[:2])
    told = Checkpoint.open(checkpoint.folder)
    list(told.read())
    assert checkpoint.digest == told.digest  # the content's, as the other reader gives it
    assert resident.tensors["a.weight"].untyped_storage().nbytes() == 600_000


def test_what_was_read_into_an_arena_is_published_where_it_lies(resident: Resident, driver: HostDriver) -> None:
    model = Model(resident.tensors)
    places = {name: it.data_ptr() for name, it in model.named_parameters()}
    packed = pack(model, CONFIG, origin="test", filled=resident.arena)
    assert {name: it.data_ptr() for name, it in model.named_parameters() if name in NAMES[:2]} == {
        name: places[name] for name in NAMES[:2]
    }
    attached = attach(packed, driver)
    for name, expected in contents().items():
        assert same(attached.get_parameter(name), expected), name
    assert torch.equal(attached.extra, torch.arange(5.0))
    assert torch.equal(attached.get_buffer("inv_freq"), torch.arange(7.0))
    packed.close()


def attach(packed: Packed, driver: HostDriver) -> Model:
    """Another process's model, verified and bound."""
    mapping = CudaVmmMapping(packed.descriptors[1:], packed.manifest, 0, driver, range(len(packed.manifest)))
    assert mapping.digests(packed.manifest, range(len(packed.manifest)))() == packed.manifest.digests
    with torch.device("meta"):
        model = Model({name: torch.empty_like(tensor, device="meta") for name, tensor in contents().items()})
    binding = Binding(model, packed.manifest, mapping.views(packed.manifest))
    binding.copy_buffers()
    binding.place_parameters()
    binding.place_buffers()
    return model


def test_without_being_published_the_weights_stay_as_long_as_the_model(resident: Resident) -> None:
    model = Model(resident.tensors)
    resident.arena.close()
    assert same(model.get_parameter("a.weight"), contents()["a.weight"])


def test_an_arena_grows_only_by_what_was_spared(resident: Resident) -> None:
    with pytest.raises(ResourceError) as caught:
        resident.arena.grow(1 << 50)
    assert caught.value.data["needed"] == 1 << 50


def test_progress_ends_at_the_whole(checkpoint: Checkpoint, driver: HostDriver) -> None:
    told: list[tuple[int, int]] = []
    found = cuda_checkpoint.load(checkpoint, 0, None, lambda done, total: told.append((done, total)), driver)
    found.arena.close()
    assert told[-1] == (checkpoint.total_bytes, checkpoint.total_bytes)
    assert sorted(told) == told


def test_files_that_change_are_refused(checkpoint: Checkpoint, driver: HostDriver) -> None:
    file = checkpoint.folder.locate("model.safetensors")
    os.utime(file, ns=(1, 1))
    with pytest.raises(CheckpointError) as caught:
        cuda_checkpoint.load(checkpoint, 0, driver=driver)
    assert caught.value.reason == "changed"
