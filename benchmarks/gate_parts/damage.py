"""A model's weights overwritten in the memory of a running engine: it lives, answers, and answers wrongly."""

from pathlib import Path

import torch
from safetensors import safe_open


class Damage:
    """Bytes of a tensor overwritten in a process's memory; lifting it writes them back.

    Args:
        pid: the process.
        tensor: its bytes as the process should hold them. Looked for at once: that takes longer than a takeover.
    """

    def __init__(self, pid: int, tensor: bytes) -> None:
        self._pid = pid
        self._tensor = tensor
        self._places = self._find()
        if not self._places:
            raise RuntimeError(f"the tensor is not in the memory of process {pid}")

    def set(self) -> None:
        """Do it: zeros in its place."""
        self._write(bytes(len(self._tensor)))

    def lift(self) -> None:
        """Undo it."""
        self._write(self._tensor)

    def _write(self, data: bytes) -> None:
        with open(f"/proc/{self._pid}/mem", "r+b", buffering=0) as memory:
            for place in self._places:
                memory.seek(place)
                if memory.write(data) != len(data):
                    raise RuntimeError(f"the memory of process {self._pid} took only a part")

    def _find(self) -> list[int]:
        places = []
        with open(f"/proc/{self._pid}/maps") as maps, open(f"/proc/{self._pid}/mem", "rb", buffering=0) as memory:
            for line in maps:
                span, access, *_ = line.split()
                start, end = (int(text, 16) for text in span.split("-"))
                if not access.startswith("rw"):
                    continue
                memory.seek(start)
                try:
                    data = memory.read(end - start)
                except OSError:
                    continue  # not memory that can be read
                at = data.find(self._tensor)
                while at >= 0:
                    places.append(start + at)
                    at = data.find(self._tensor, at + 1)
        return places


def last_norm(model: Path) -> bytes:
    """The bytes of the tensor without which every answer is wrong."""
    for shard in model.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            if "model.norm.weight" in set(file.keys()):
                return bytes(file.get_tensor("model.norm.weight").view(torch.uint8).numpy().tobytes())
    raise RuntimeError(f"{model} has no last norm")
