"""Ranks: the processes that together are one engine, each with its part of the model, cut as its own plan says.

Rank 0 leads: it answers requests, and tells the others on a pipe each what to compute with it. What layers exchange
goes through gloo, on the loopback interface alone. The others are forked before anything large is imported, load their
parts at the same time, and end with their leader; it ends when one of them does, so that all are restarted together.
"""

import ctypes
import json
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from readmit.decoding import Decoder

log: Final = logging.getLogger("readmit.engine")

_PR_SET_PDEATHSIG: Final = 1
_EXCHANGE_LIMIT: Final = timedelta(minutes=30)
"""How long a rank waits for another one. It includes that one's load from disk; a rank that died is noticed at once."""


class Ranks:
    """One rank's view of all of them.

    Attributes:
        size: how many there are.
        rank: which of them this process is.
    """

    def __init__(self, size: int, rank: int, pipes: list[TextIO]) -> None:
        self.size = size
        self.rank = rank
        self._pipes = pipes  # to each of the others, or from the leader

    @classmethod
    def fork(cls, size: int) -> "Ranks":
        """Fork the other ranks. Returns in each of them."""
        leader, pipes = os.getpid(), list[TextIO]()
        for rank in range(1, size):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(writing)
                for pipe in pipes:
                    pipe.close()
                _end_with(leader)
                return cls(size, rank, [os.fdopen(reading)])
            os.close(reading)
            pipes.append(os.fdopen(writing, "w", buffering=1))
            threading.Thread(target=_end_after, args=(pid, rank), name=f"rank-{rank}", daemon=True).start()
        return cls(size, 0, pipes)

    def meet(self) -> "DeviceMesh":
        """Connect this rank with the others; all of them must come."""
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with tempfile.TemporaryDirectory(prefix="readmit-ranks-") if self.rank == 0 else nullcontext("") as made:
            folder = self._tell(made) if self.rank == 0 else json.loads(self._pipes[0].readline())
            where = f"file://{folder}/store"
            distributed.init_process_group(
                "gloo", init_method=where, rank=self.rank, world_size=self.size, timeout=_EXCHANGE_LIMIT
            )
            mesh = init_device_mesh("cpu", (self.size,))
            distributed.barrier()
        return mesh

    def wait_for_all(self) -> None:
        """Go on once every rank has come here."""
        from torch import distributed

        distributed.barrier()

    def lead(self, decoder: "Decoder") -> "Decoder":
        """A decoder that has every rank do what it is asked for."""
        return _Leading(self, decoder) if self.size > 1 else decoder

    def follow(self, decoder: "Decoder") -> None:
        """Do what the leader says, until it is gone."""
        for line in self._pipes[0]:
            asked: list[int] | int = json.loads(line)
            if isinstance(asked, list):
                decoder.prefill(asked)
            else:
                decoder.step(asked)

    def _tell(self, what: Any) -> Any:
        for pipe in self._pipes:
            pipe.write(json.dumps(what) + "\n")
        return what


class _Leading:
    """See `Ranks.lead`."""

    def __init__(self, ranks: Ranks, decoder: "Decoder") -> None:
        self.context = decoder.context
        self._ranks = ranks
        self._decoder = decoder

    def prefill(self, prompt: Sequence[int]) -> "torch.Tensor":
        self._ranks._tell(list(prompt))
        return self._decoder.prefill(prompt)

    def step(self, token: int) -> "torch.Tensor":
        self._ranks._tell(token)
        return self._decoder.step(token)


def _end_with(leader: int) -> None:
    """In a fork: end when the leader does, and not before. Signals to a group of processes are the leader's to obey."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != leader:  # it died before it could be said
        os._exit(1)


def _end_after(pid: int, rank: int) -> None:
    """In the leader: end once another rank has ended, for an engine is all of its ranks."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    how = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
    log.error("rank %d (pid %d) ended with %s, and with it this engine", rank, pid, how)
    os._exit(status if status == os.EX_CONFIG else 1)
