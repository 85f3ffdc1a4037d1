"""One of two ranks that run together on what they map: ``python -m tests.weightcache.rank MODEL SOCKET RANK MEETING``.

Prints how it came by its weights and the logits, as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Final

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from weightcache.integrations.transformers import from_pretrained
from weightcache.integrations.transformers_ranks import connect_ranks
from weightcache.vocabulary import MISS_REASONS

IDS: Final = torch.arange(8)[None]


def main() -> None:
    folder, socket, rank, meeting = sys.argv[1:]
    model, outcome = from_pretrained(
        folder,
        mode="client",
        socket=Path(socket),
        dtype="float32",
        tp_size=2,
        tp_rank=int(rank),
        policies=dict.fromkeys(MISS_REASONS, "fail"),
    )
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2)
    connect_ranks(model, init_device_mesh("cpu", (2,)))
    with torch.inference_mode():
        logits = model(IDS).logits
    print(json.dumps([outcome.path, logits.tolist()]))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
