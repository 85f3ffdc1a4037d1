"""vLLM as a load worker: it loads a model through the weight cache and exits, 0 once every rank's weights are resident.

``python -m weightcache.integrations.vllm_worker MODEL``. The engine has no server and a short context, neither of which
decides a tensor; what does, such as ``--dtype``, must be what the engines that are to hit will be told.
"""

import argparse
import os
import sys
from contextlib import closing
from typing import Any, Final

from weightcache import messages, paths
from weightcache.errors import WeightCacheError
from weightcache.process import tree
from weightcache.protocol import Connection
from weightcache.version import VERSION

_IN_THIS_PROCESS: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}


def offline_engine(model: str, dtype: str | None, **options: Any) -> Any:
    """A ``vllm.LLM`` without tokenizer, compilation or a cache to speak of; one rank of it is in this process.

    Args:
        model: a checkpoint's folder.
        dtype: of the weights; what vLLM chooses if None.
        options: further arguments of ``vllm.LLM``.
    """
    os.environ.update(_IN_THIS_PROCESS)
    from vllm import LLM

    return LLM(
        model=model,
        dtype=dtype or "auto",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=1,
        disable_log_stats=True,
        **options,
    )


def main() -> None:
    """Load, and exit with 0 when all is resident."""
    parser = argparse.ArgumentParser(description="Load a model into the weight cache with vLLM, and exit.")
    parser.add_argument("model")
    parser.add_argument("--dtype")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--beside", action="store_true", help="leave other versions of these weights resident")
    arguments = parser.parse_args()
    extra = {"policies": {"fingerprint": "fallback"}} if arguments.beside else {}
    try:
        engine = offline_engine(
            arguments.model,
            arguments.dtype,
            load_format="weightcache",
            model_loader_extra_config=extra,
            tensor_parallel_size=arguments.tp_size,
        )
        held = _held_by(set(tree(os.getpid())))
    except WeightCacheError as error:
        sys.exit(str(error))
    del engine
    if held < arguments.tp_size:
        sys.exit(f"{arguments.model}: {held} of {arguments.tp_size} ranks are resident; vLLM's log above says why")


def _held_by(pids: set[int]) -> int:
    """How many generations these processes lease."""
    with closing(Connection(paths.socket_path(), messages.Hello(version=VERSION))) as connection:
        status, _ = connection.ask(messages.Status(), messages.Done)
    return sum(any(lease["pid"] in pids for lease in each["leases"]) for each in status.data["generations"])


if __name__ == "__main__":
    main()
