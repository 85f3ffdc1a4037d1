"""What knowing a checkpoint costs, at the size of a model of 1,000 billion parameters: 161 files, 30,000 tensors.

The files are sparse: index, headers and file sizes are those of a real checkpoint, the weights take no disk. Times are
medians of several runs with warm caches. The digest's speed is measured on a file of real bytes.

    python benchmarks/preflight.py [--json OUT]
"""

import argparse
import json
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightcache import identity, quantization
from weightcache.checkpoint import Checkpoint, Folder
from weightcache.checkpoint.reader import hash_files
from weightcache.fingerprint import CacheConfig

FILES, TENSORS = 161, 30_000
EXPERT = (2048, 7168)
BLOCK = 128
HASHED_BYTES = 1 << 30
LIMITS_MS = {"preflight": 300.0, "identity of unchanged files": 10.0, "match of two fingerprints": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="preflight-") as scratch:
        rows = measure(Path(scratch))
    print(f"{FILES} files, {TENSORS:,} tensors, {os.cpu_count()} cores\n")
    for row in rows:
        limit = f"   limit {row['limit']:g}" if row["limit"] else ""
        print(f"{row['what']:36} {row['value']:10.3f} {row['unit']} (n={row['n']}){limit}")
    if arguments.json:
        figures = {"files": FILES, "tensors": TENSORS, "cores": os.cpu_count(), "results": rows}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(scratch: Path) -> list[dict[str, Any]]:
    folder = write_large(scratch / "large")
    checkpoint = Checkpoint.open(folder)
    state = scratch / "identities"
    if not identity.remember(checkpoint, "0" * 64, state=state):
        raise SystemExit("this file system's clock is too coarse to remember a digest")

    def unchanged() -> None:
        if identity.digest_of(Folder.open(folder), state=state).status != "remembered":
            raise SystemExit("the files changed during the measurement")

    config = fingerprint(checkpoint)
    other = CacheConfig.from_dict({**config.to_dict(), "model_path": "/elsewhere"})
    rows = [
        row("preflight", lambda: Checkpoint.open(folder)),
        row("quantisation, with headers", lambda: quantization.of(checkpoint)),
        row("identity of unchanged files", unchanged),
        row("match of two fingerprints", lambda: config.differences(other), 100),
    ]
    small = Checkpoint.open(write_real(scratch / "real"))
    rows.append(rate("digest alone, from the page cache", small, lambda: hash_files(small)))
    rows.append(rate("read with digest on the way", small, lambda: sum(1 for _ in small.read())))
    return rows


def row(what: str, work: Callable[[], object], runs: int = 7) -> dict[str, Any]:
    return {"what": what, "value": median(work, runs) * 1e3, "unit": "ms", "limit": LIMITS_MS.get(what), "n": runs}


def rate(what: str, checkpoint: Checkpoint, work: Callable[[], object], runs: int = 3) -> dict[str, Any]:
    speed = checkpoint.total_bytes / median(work, runs) / 1e9
    return {"what": what, "value": speed, "unit": "GB/s", "limit": None, "n": runs}


def median(work: Callable[[], object], runs: int) -> float:
    """The median of several runs, in seconds."""
    took = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def fingerprint(checkpoint: Checkpoint) -> CacheConfig:
    own = {"engine": "e", "layout_id": "e-1", "dtype": "bfloat16", "torch_version": "2"}
    return CacheConfig.from_dict({**identity.fields_of(checkpoint, "0" * 64), **own})


def write_large(folder: Path) -> Path:
    """A block-wise FP8 mixture of experts: weights and scales alternate; every file is a hole behind its header."""
    folder.mkdir()
    scale = tuple(-(-side // BLOCK) for side in EXPERT)
    weight_map: dict[str, str] = {}
    for number in range(FILES):
        name = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor in range(number * TENSORS // FILES, (number + 1) * TENSORS // FILES):
            expert, is_scale = divmod(tensor, 2)
            stem = f"model.layers.{expert // 256}.mlp.experts.{expert % 256}.gate_proj.weight"
            dtype, shape, size = ("F32", scale, 4) if is_scale else ("F8_E4M3", EXPERT, 1)
            end = at + shape[0] * shape[1] * size
            key = f"{stem}_scale_inv" if is_scale else stem
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            weight_map[key] = name
            at = end
        raw = json.dumps(header).encode()
        with open(folder / name, "wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.truncate(8 + len(raw) + at)
    quantized = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "ignored_layers": ["lm_head"]}
    write_settings(folder, quantization_config=quantized)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_real(folder: Path) -> Path:
    """Tensors of real bytes, 64 MiB each."""
    folder.mkdir()
    size = 64 << 20
    names = [f"model.layers.{number}.weight" for number in range(HASHED_BYTES // size)]
    header = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [at * size, (at + 1) * size]}
        for at, name in enumerate(names)
    }
    raw = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for _ in names:
            file.write(os.urandom(size))
    write_settings(folder)
    return folder


def write_settings(folder: Path, **settings: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["BailingMoeV2ForCausalLM"], **settings}))


if __name__ == "__main__":
    main()
