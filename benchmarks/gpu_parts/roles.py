"""What the processes of the benchmark do: publish a model, attach to it, hold it, check it."""

import gc
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpu_parts import models, sparse
from gpu_parts.processes import Talk, cuda_context
from weightcache import client, device, messages
from weightcache.arena import kinds
from weightcache.attachment import Loaded, Verification
from weightcache.checkpoint import Checkpoint
from weightcache.manifest import read
from weightcache.protocol import Connection
from weightcache.vocabulary import MISS_REASONS

NO_FALLBACK = dict.fromkeys(MISS_REASONS, "fail")


def publish(talk: Talk, shape: models.Shape, where: torch.device, then: str = "end") -> dict[str, Any]:
    """Load a model as after a miss, publish it, and check what it ended up on.

    ``then``: ``end``, ``hold`` until told anything, or ``stop`` before the filled arena is handed over, until told.
    """
    context = cuda_context(where)
    model = models.skeleton(shape)
    loaded: dict[str, Any] = {}
    if then == "stop":
        _stop_before_seal(talk)

    def load(progress: object) -> None:
        began = time.perf_counter()
        models.fill(model, where)
        if where.type == "cuda":
            torch.cuda.synchronize()
            loaded["torch_bytes"] = torch.cuda.memory_reserved()
        loaded["fill_s"] = time.perf_counter() - began

    began = time.perf_counter()
    outcome = client.attach(model, models.config(shape, where), load=load, load_bytes=1, device=where.index)
    result = {
        "seconds": time.perf_counter() - began,
        "context_s": context,
        "path": outcome.path,
        "reason": outcome.reason,
        "generation": outcome.generation,
        "private_because": outcome.private_because,
        "phases": outcome.phases,
        "bytes": outcome.bytes,
        "tensors": models.count(model),
        "model_bytes": models.size(model),
        "differing": models.differing(model),
        **loaded,
    }
    if where.type == "cuda":
        torch.cuda.empty_cache()
        result["torch_bytes_after"] = torch.cuda.memory_reserved()
    if then == "hold":
        talk.send(result)
        talk.recv()
    return result


def publish_from_files(talk: Talk, shape: models.Shape, where: torch.device, folder: Path) -> dict[str, Any]:
    """Read a checkpoint straight into an arena as after a miss, publish it, and check what it ended up on."""
    from weightcache.arena import cuda_checkpoint

    cuda_context(where)
    model = models.skeleton(shape)
    read: dict[str, Any] = {}

    def load(progress: Any) -> Loaded:
        began = time.perf_counter()
        checkpoint = Checkpoint.open(folder)
        read["preflight_s"] = time.perf_counter() - began
        resident = cuda_checkpoint.load(checkpoint, where.index, None, progress)
        read["read_s"] = time.perf_counter() - began - read["preflight_s"]
        sparse.place(model, resident.tensors, where)
        return Loaded(None, resident.arena)

    began = time.perf_counter()
    outcome = client.attach(model, models.config(shape, where), load=load, load_bytes=1, device=where.index)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "path": outcome.path,
        "reason": outcome.reason,
        "generation": outcome.generation,
        "private_because": outcome.private_because,
        "phases": outcome.phases,
        "bytes": outcome.bytes,
        "tensors": models.count(model),
        "model_bytes": models.size(model),
        "torch_bytes": torch.cuda.memory_reserved() if where.type == "cuda" else 0,
        **read,
    }


def _stop_before_seal(talk: Talk) -> None:
    from weightcache import publish as publishing

    manifest = publishing._manifest

    def stopped(*arguments: Any) -> Any:
        talk.send("filled")
        talk.recv()
        return manifest(*arguments)

    publishing._manifest = stopped


def attach(
    talk: Talk | None,
    shape: models.Shape,
    where: torch.device,
    then: str = "end",
    verify: float | None = None,
    first_chunks: int | None = None,
) -> dict[str, Any]:
    """Attach as a fresh engine would, after its imports and its CUDA context.

    ``then``: ``end``; ``hold`` until told anything; ``check`` every byte and end; ``check sparse`` likewise.
    ``first_chunks``: mapped before the GPU begins to verify, in place of the usual number.
    """
    context = cuda_context(where)
    marks = _Marks(first_chunks) if where.type == "cuda" else None
    gc.collect()
    began = time.perf_counter()
    model = models.skeleton(shape)
    config = models.config(shape, where)
    built = time.perf_counter()
    outcome = client.attach(model, config, policies=NO_FALLBACK, device=where.index, verify=verify)
    if where.type == "cuda":
        torch.cuda.synchronize()
    done = time.perf_counter()
    result = {
        "attach_s": done - built,
        "load_weights_s": done - began,
        "skeleton_s": built - began,
        "context_s": context,
        "phases": outcome.phases,
        "generation": outcome.generation,
        "bytes": outcome.bytes,
        "marks": marks.since(built) if marks else {},
    }
    if then.startswith("check"):
        result["differing"] = models.differing(model) if then == "check" else sparse.differing(model)
    if then == "hold":
        assert talk is not None
        talk.send(result)
        talk.recv()
        result["differing"] = models.differing(model)
    return result


class _Marks:
    """When, in an attach, the GPU was given something to verify, and from when its process did nothing but wait."""

    def __init__(self, first_chunks: int | None) -> None:
        from weightcache.arena import cuda_digest, cuda_vmm

        if first_chunks is not None:
            cuda_vmm.FIRST_CHUNKS = first_chunks  # type: ignore[misc]
        self._times: dict[str, list[float]] = {"launch": [], "wait": [], "verified": []}
        launch, collect = cuda_digest.Kernel.launch, cuda_digest.Sums.collect

        def marked_launch(*arguments: Any) -> None:
            self._times["launch"].append(time.perf_counter())
            launch(*arguments)

        def marked_collect(*arguments: Any) -> bytes:
            self._times["wait"].append(time.perf_counter())
            found = collect(*arguments)
            self._times["verified"].append(time.perf_counter())
            return found

        cuda_digest.Kernel.launch = marked_launch  # type: ignore[method-assign]
        cuda_digest.Sums.collect = marked_collect  # type: ignore[method-assign]

    def since(self, start: float) -> dict[str, list[float]]:
        return {name: [moment - start for moment in moments] for name, moments in self._times.items()}


def verify_again(talk: Talk, shape: models.Shape, where: torch.device, socket: Path, times: int = 7) -> dict[str, Any]:
    """Map once and verify several times in one process: the digest without what comes with a first time."""
    cuda_context(where)
    manifest, mapped = mapping(shape, where, socket)
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        Verification(manifest, mapped).finish()
        seconds.append(time.perf_counter() - began)
    return {"first_s": seconds[0], "again_s": seconds[1:]}


def mapping(shape: models.Shape, where: torch.device, socket: Path) -> tuple[Any, Any]:
    """The manifest and the mapped arena of a resident model, without a model to bind them to."""
    connection = Connection(socket, messages.Hello(version="benchmark"))
    request = messages.Attach(config=models.config(shape, where).to_dict(), device=device.uuid(where.index))
    attached, descriptors = connection.ask(request, messages.Attached)
    _, manifest = read(descriptors[0], attached.generation)
    mapped = kinds.mapping(manifest, descriptors[1:], where.index)
    mapping.lease = connection  # type: ignore[attr-defined] - held until this process ends
    return manifest, mapped


def attach_and_compute(talk: Talk, shape: models.Shape, where: torch.device) -> dict[str, Any]:
    """Attach, then compare computing on the mapping with computing on ordinary memory."""
    from gpu_parts import speed

    cuda_context(where)
    model = models.skeleton(shape)
    client.attach(model, models.config(shape, where), policies=NO_FALLBACK, device=where.index)
    return speed.compare(model)


def write_into(talk: Talk, shape: models.Shape, where: torch.device) -> dict[str, Any]:
    """Attach, then write into the weights as a careless engine would; the error it gets."""
    from weightcache.device import fault_of
    from weightcache.journal import Journal

    cuda_context(where)
    model = models.skeleton(shape)
    client.attach(model, models.config(shape, where), policies=NO_FALLBACK, device=where.index)
    victim = next(parameter for parameter in model.parameters() if parameter.dim() == 2)
    try:
        victim.data.fill_(0)
        torch.cuda.synchronize()
    except RuntimeError as error:
        fault = fault_of(error)
        if fault is None:
            raise
        Journal.from_environment().append("attempt_end", "crashed", {"error": fault.to_dict()})
        return {"raised": type(error).__name__, "fault": fault.to_dict()}
    return {"raised": None}


def rogue_writer(talk: Talk, shape: models.Shape, where: torch.device, socket: Path) -> dict[str, Any]:
    """Map a resident arena writable, as only somebody with ill intent would, and flip one byte of it."""
    from weightcache.arena.cuda_driver import nvidia

    cuda_context(where)
    manifest, mapped = mapping(shape, where, socket)
    row = len(manifest) // 2
    offset = manifest.offsets[row] + 5
    arena = mapped._range
    nvidia().set_access(arena._address, arena.size, arena.device, writable=True)
    before = int(mapped._bytes[offset])
    mapped._bytes[offset] = before ^ 0x10
    torch.cuda.synchronize()
    return {"tensor": manifest.names[row], "before": before, "after": int(mapped._bytes[offset])}


def stop_at(talk: Talk, shape: models.Shape, where: torch.device, part: str) -> dict[str, Any]:
    """Attach, and stop in the middle of ``map``, ``verify`` or ``bind``, waiting to be killed."""
    from weightcache.binding import Binding

    def stop(*_: object, **__: object) -> Any:
        talk.send(f"in {part}")
        talk.recv()

    cuda_context(where)
    if part == "map":
        from weightcache.arena import cuda_vmm, memfd

        cuda_vmm.CudaVmmMapping.views = memfd.MemfdMapping.views = stop  # type: ignore[method-assign]
    elif part == "verify":
        from weightcache import attachment

        attachment.Verification.finish = stop  # type: ignore[method-assign]
    else:
        place = Binding.place_parameters

        def half(self: Binding) -> int:
            del self._parameters[len(self._parameters) // 2 :]
            place(self)
            return int(stop())

        Binding.place_parameters = half  # type: ignore[method-assign]
    model: nn.Module = models.skeleton(shape)
    client.attach(model, models.config(shape, where), policies=NO_FALLBACK, device=where.index, verify=1.0)
    return {"stopped": False}


def miss(talk: Talk, shape: models.Shape, where: torch.device) -> dict[str, Any]:
    """An attach that is expected to miss: its reason and data."""
    from weightcache.errors import CacheMiss

    cuda_context(where)
    model = models.skeleton(shape)
    try:
        client.attach(model, models.config(shape, where), policies=NO_FALLBACK, device=where.index)
    except CacheMiss as found:
        return found.to_dict()
    return {"reason": None}
