"""From a checkpoint on disk to an arena, beside what the disk and `safetensors` give in the same run."""

import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from gpu_parts.processes import Failed, Talk, call, cuda_context
from gpu_parts.report import Report
from weightcache.arena import cuda_checkpoint
from weightcache.arena.cuda_driver import nvidia
from weightcache.arena.cuda_fill import BLOCK_BYTES, THREADS
from weightcache.checkpoint import Checkpoint
from weightcache.starting_state import page_cache_fraction


def measure(report: Report, quick: bool) -> dict[str, Any]:
    """Disk to arena, cold and warm, beside what the disk gives and what other loaders do."""
    folder = Path(tempfile.mkdtemp(prefix="readmit-disk-")) / "checkpoint"
    try:
        found = {"written": call(write_checkpoint, folder, 4.0 if quick else 6.0)}
        reads, cold, cached, files = [], [], [], []
        for turn in range(1 if quick else 3):
            found[f"left_in_cache_{turn}"] = drop(folder)
            reads.append(call(direct_reads, folder))
            drop(folder)
            cold.append(call(into_arena, folder, None, turn == 0))
        others: dict[str, Any] = {}
        for _ in range(2 if quick else 3):
            found["in_cache"] = warm(folder)
            cached.append(call(into_arena, folder, False, False))
            files.append(call(load_file, folder))
            for loader in (fastsafetensors, runai_streamer):
                try:
                    result = call(loader, folder)
                    others.setdefault(loader.__name__, []).append(result)
                except Failed as failed:  # not installed, or not for this machine: said so
                    others[f"{loader.__name__} failed"] = str(failed)[-800:]
        found["others"] = others
        for name, results in others.items():
            if isinstance(results, list):
                rates = [result["bytes_per_s"] / 2**30 for result in results]
                report.figure(f"page cache to GPU by {name}, unhashed", rates, "GiB/s")
        found |= {"cold": cold, "warm": cached, "load_file": files, "direct_reads": reads}
        rates = [result["bytes_per_s"] / 2**30 for result in cold]
        report.figure("parallel O_DIRECT reads", [rate / 2**30 for rate in reads], "GiB/s")
        report.figure("disk to arena, cold", rates, "GiB/s")
        ratio = statistics.median(rates) / (statistics.median(reads) / 2**30)
        report.figure("disk to arena over O_DIRECT reads", [ratio], "ratio", at_least=0.9)
        rates = [result["bytes_per_s"] / 2**30 for result in cached]
        plain = [result["bytes_per_s"] / 2**30 for result in files]
        report.figure("page cache to arena, hashed", rates, "GiB/s")
        report.figure("safetensors load_file to GPU", plain, "GiB/s")
        ratio = statistics.median(rates) / statistics.median(plain)
        report.figure("page cache to arena over load_file", [ratio], "ratio", at_least=1.5, aim=3)
        return found
    finally:
        remove(folder.parent)


def write_checkpoint(talk: Talk, folder: Path, gib: float, shards: int = 8) -> dict[str, Any]:
    """Random bf16 matrices in ``shards`` files."""
    import json

    from safetensors.torch import save_file

    began = time.perf_counter()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Benchmark"], "model_type": "benchmark"}))
    rows = int(gib * 2**30 / shards / 8 / 2 / 4096)
    index = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        content = {}
        for number in range(8):
            tensor = torch.empty(rows, 4096, dtype=torch.bfloat16, device="cuda")
            tensor.view(torch.int32).random_()
            content[f"layers.{shard}.{number}.weight"] = tensor.cpu()
        save_file(content, folder / name)
        index |= dict.fromkeys(content, name)
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    os.sync()
    return {"bytes": total, "seconds": time.perf_counter() - began}


def drop(folder: Path) -> float:
    """Push the files out of the page cache; the fraction that stayed."""
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return float(page_cache_fraction(files))


def warm(folder: Path) -> float:
    """Read the files into the page cache; the fraction that is there."""
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            while stream.read(BLOCK_BYTES):
                pass
    return float(page_cache_fraction(files))


def direct_reads(talk: Talk, folder: Path) -> float:
    """Bytes a second of parallel O_DIRECT reads into memory, as many threads and as long blocks as the loader's."""
    files = sorted(folder.glob("*.safetensors"))
    work = [(file, start) for file in files for start in range(0, file.stat().st_size, BLOCK_BYTES)]
    total = sum(file.stat().st_size for file in files)
    lock = threading.Lock()

    def run() -> None:
        import mmap

        buffer = mmap.mmap(-1, BLOCK_BYTES)
        while True:
            with lock:
                if not work:
                    return
                file, start = work.pop(0)
            descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
            os.preadv(descriptor, [buffer], start)
            os.close(descriptor)

    began = time.perf_counter()
    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return total / (time.perf_counter() - began)


def into_arena(talk: Talk, folder: Path, direct: bool | None, check: bool) -> dict[str, Any]:
    """Bytes a second from files to a sealed arena, hashed; with ``check``, compared with what `safetensors` reads."""
    cuda_context(torch.device("cuda", 0))
    nvidia()
    began = time.perf_counter()
    checkpoint = Checkpoint.open(folder)
    opened = time.perf_counter()
    resident = cuda_checkpoint.load(checkpoint, 0, direct=direct)
    filled = time.perf_counter()
    descriptors = resident.arena.seal()
    done = time.perf_counter()
    wrong = []
    if check:
        from safetensors.torch import load_file

        for file in sorted(folder.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                found = resident.tensors[name].cpu()
                if not torch.equal(found.view(torch.int16), tensor.view(torch.int16)):  # random bits, many of them NaN
                    wrong.append(name)
    if wrong:
        raise AssertionError(f"{len(wrong)} tensors are not what the files hold, first {wrong[0]}")
    for descriptor in descriptors:
        os.close(descriptor)
    total = checkpoint.total_bytes
    return {
        "bytes": total,
        "read_bytes": resident.read,
        "prepare_s": opened - began,
        "fill_s": filled - opened,
        "total_s": done - began,
        "bytes_per_s": total / (done - began),
        "page_cache_after": float(page_cache_fraction(sorted(folder.glob("*.safetensors")))),
    }


def fastsafetensors(talk: Talk, folder: Path, threads: int = THREADS) -> dict[str, Any]:
    """Bytes a second of fastsafetensors (no GPUDirect Storage here), to torch's memory, unhashed."""
    from fastsafetensors import SafeTensorsFileLoader

    where = torch.device("cuda", 0)
    cuda_context(where)
    files = [str(file) for file in sorted(folder.glob("*.safetensors"))]
    began = time.perf_counter()
    loader = SafeTensorsFileLoader(None, "cuda:0", nogds=True, max_threads=threads)
    loader.add_filenames({0: files})
    buffers = loader.copy_files_to_device()
    tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    torch.cuda.synchronize()
    return _other(tensors, began)


def runai_streamer(talk: Talk, folder: Path, threads: int = THREADS) -> dict[str, Any]:
    """Bytes a second of runai-model-streamer, to torch's memory, unhashed."""
    os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(threads)
    from runai_model_streamer import SafetensorsStreamer

    where = torch.device("cuda", 0)
    cuda_context(where)
    files = [str(file) for file in sorted(folder.glob("*.safetensors"))]
    began = time.perf_counter()
    tensors = {}
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files)
        for name, tensor in streamer.get_tensors():
            tensors[name] = tensor.to(where)
    torch.cuda.synchronize()
    return _other(tensors, began)


def _other(tensors: dict[str, torch.Tensor], began: float) -> dict[str, Any]:
    seconds = time.perf_counter() - began
    total = sum(tensor.nbytes for tensor in tensors.values())
    return {"bytes": total, "seconds": seconds, "bytes_per_s": total / seconds}


def load_file(talk: Talk, folder: Path) -> dict[str, Any]:
    """Bytes a second of ``safetensors.torch.load_file(device="cuda")``."""
    from safetensors.torch import load_file as load

    cuda_context(torch.device("cuda", 0))
    began = time.perf_counter()
    total = 0
    kept = []
    for file in sorted(folder.glob("*.safetensors")):
        kept.append(load(file, device="cuda:0"))
        total += file.stat().st_size
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {"bytes": total, "seconds": seconds, "bytes_per_s": total / seconds}


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
