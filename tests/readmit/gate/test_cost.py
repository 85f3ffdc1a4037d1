"""What an engine costs: memory of its own, and room for tokens as engines tell it."""

import mmap
import os
import subprocess

import pytest

from readmit.gate.cost import gpu_memory_of, kv_tokens, memory_of
from readmit.gate.gpu_memory import Nvml
from readmit.gate.process import Engine

VLLM = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_cpu_blocks="None",num_gpu_blocks="27421"} 1.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
"""
SGLANG = """\
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{model_name="m"} 4.5e+05
"""


@pytest.mark.parametrize(
    ("metrics", "tokens"),
    [
        (VLLM, 27421 * 16),
        (SGLANG, 450_000),
        ("sglang:max_total_num_tokens 1024\n", 1024),
        ('vllm:cache_config_info{block_size="16"} 1.0\n', None),
        ("", None),
    ],
)
def test_engines_say_what_their_cache_has_room_for(metrics: str, tokens: int | None) -> None:
    assert kv_tokens(metrics) == tokens


def test_its_own_memory_is_told_from_weights_that_outlive_it() -> None:
    engine = Engine.of(os.getpid())
    assert engine is not None
    size = 32 << 20
    before = memory_of(engine)
    weights = os.memfd_create("weights")
    os.write(weights, bytes(size))
    mapped = mmap.mmap(weights, size, mmap.MAP_PRIVATE, mmap.PROT_READ)
    assert mapped.find(b"x") == -1, "all of it has been read"
    during = memory_of(engine)
    # Not from the heap, where what earlier tests have freed may lie ready.
    grown = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    grown.write(bytes(size))
    after = memory_of(engine)
    grown.close()
    mapped.close()
    os.close(weights)
    assert before is not None
    assert during is not None
    assert after is not None
    assert during[0] - before[0] < size // 2, "nobody else maps it, and yet it is not this process's"
    assert during[1] - before[1] > size // 2
    assert after[0] - during[0] > size // 2


class Driver:
    def __init__(self, **used: int) -> None:
        self._used = {int(pid.removeprefix("p")): size for pid, size in used.items()}

    def by_process(self) -> dict[int, int]:
        return self._used


def test_gpu_memory_is_that_of_all_its_processes() -> None:
    engine = Engine.of(os.getpid())
    assert engine is not None
    with subprocess.Popen(["sleep", "60"]) as worker:
        used = {f"p{os.getpid()}": 2 << 30, f"p{worker.pid}": 3 << 30, "p1": 1 << 30}
        assert gpu_memory_of(engine, Driver(**used)) == 5 << 30
        assert gpu_memory_of(engine, Driver(p1=1 << 30)) is None, "another's is not its own"
        worker.kill()


def test_where_there_is_no_driver_nothing_is_known() -> None:
    assert not Nvml().by_process()


def test_an_engine_that_is_gone_costs_nothing_that_is_known() -> None:
    assert memory_of(Engine(os.getpid(), 1)) is None
