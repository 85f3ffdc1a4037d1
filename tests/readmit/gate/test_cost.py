"""What an engine costs: memory of its own, and room for tokens as engines tell it."""

import mmap
import os

import pytest

from readmit.gate.cost import kv_tokens, memory_of
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


def test_an_engine_that_is_gone_costs_nothing_that_is_known() -> None:
    assert memory_of(Engine(os.getpid(), 1)) is None
