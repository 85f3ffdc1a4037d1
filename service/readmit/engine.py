"""The reference engine: transformers behind an OpenAI-compatible API, and the example of how to plug in an engine.

``readmit engine MODEL --port 8000 --weight-cache client`` serves one model from one process, or with ``--tp-size`` from
as many as share it (`readmit.ranks`). What makes it an engine
that readmit can account for is in this file: every phase of its start is marked in the journal, and its weights come
through `weightcache.integrations.transformers`.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from readmit.ranks import Ranks
from weightcache import paths
from weightcache.checkpoint import Folder
from weightcache.errors import CheckpointError, ConfigError, WeightCacheError
from weightcache.identity import know_digest
from weightcache.journal import Journal, boottime_ns
from weightcache.log_line import FORMATS
from weightcache.logs import complain, configure
from weightcache.process import Stat
from weightcache.vocabulary import MODES

if TYPE_CHECKING:
    from readmit.decoding import StaticDecoder
    from readmit.generation import Generator
    from weightcache.attachment import Outcome

log: Final = logging.getLogger("readmit.engine")

_WARM_UP_TOKENS: Final = 4


def main(argv: Sequence[str] | None = None) -> None:
    """Load a model and serve it until a signal ends the process.

    Exits with 78 (EX_CONFIG: trying again will not help) where settings, host or model files cannot work, and with 1
    where the weight cache was required and missed.
    """
    # OpenMP reads it when torch is imported. Its threads otherwise spin while they wait for each other, and on cores
    # that a standby or another engine shares, a token then takes ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        journal = Journal.from_environment()
        with journal.phase("spawn", began_ns=_process_start_ns()):
            pass  # it ended when the interpreter reached this line
        began_ns = boottime_ns()
        arguments = _parser().parse_args(argv)
        configure(arguments.log_format)
        run(arguments, journal, began_ns)
    except WeightCacheError as error:
        complain("readmit engine", error)
        sys.exit(os.EX_CONFIG if isinstance(error, CheckpointError | ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def run(arguments: argparse.Namespace, journal: Journal, began_ns: int) -> None:
    """One start of the engine, phase by phase.

    Raises:
        ConfigError: the address is taken, the architecture unknown, or there is no tokenizer.
        CheckpointError: the model's files are missing or damaged.
        CacheMiss: the weight cache was required and missed.
    """
    from readmit.server import bind, serve

    # Before the slow part, so that a wrong path or a taken port is said at once.
    folder = Folder.open(arguments.model)
    if arguments.weight_cache != "off":
        paths.checked_socket_path(arguments.socket or paths.socket_path())
    check_ranks(arguments)
    listener = bind(arguments.host, arguments.port)
    ranks = Ranks.fork(arguments.tp_size)
    if ranks.rank > 0:
        listener.close()
        journal, began_ns = journal.bound(rank=ranks.rank), boottime_ns()
    with journal.phase("import", began_ns=began_ns):
        from transformers.utils import logging as transformers_logging

        from readmit.completions import CompletionsAPI
        from readmit.decoding import GrowingDecoder
        from readmit.generation import Generator
        from weightcache.integrations.transformers import from_pretrained, import_architecture

        import_architecture(folder)
        if ranks.size > 1:
            from weightcache.integrations.transformers_ranks import connect_ranks
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if ranks.rank == 0:
        with journal.phase("tokenizer_init"):
            tokenizer = read_tokenizer(folder)
    if ranks.size > 1:
        with journal.phase("distributed_init"):
            mesh = ranks.meet()
    own = journal.bound(rank=ranks.rank) if ranks.size > 1 else journal
    with own.phase("load_weights"):
        if ranks.size > 1 and arguments.weight_cache != "off":
            if ranks.rank == 0:
                with own.phase("load_weights.match"):
                    know_digest(folder)
            ranks.wait_for_all()
        model, outcome = from_pretrained(
            folder,
            mode=arguments.weight_cache,
            socket=arguments.socket,
            dtype=arguments.dtype,
            device=arguments.device,
            tp_size=ranks.size,
            tp_rank=ranks.rank,
            journal=own,
        )
    log.info("%s%s", f"rank {ranks.rank}: " if ranks.size > 1 else "", _told(outcome))
    if model.device.type == "cuda":
        generator = Generator(model, tokenizer, on_gpu(model, journal, capture=not arguments.eager))
    else:
        decoder = GrowingDecoder(model)
        if ranks.size > 1:
            connect_ranks(model, mesh)
        if ranks.rank > 0:
            ranks.follow(decoder)
            return
        generator = Generator(model, tokenizer, ranks.lead(decoder))
        with journal.phase("kernel_warmup"):
            warm_up(generator)
    api = CompletionsAPI(generator, arguments.served_model_name or os.path.basename(folder.path))
    serve(api.app(), listener, journal)


def check_ranks(arguments: argparse.Namespace) -> None:
    """Check that this engine can be so many ranks.

    Raises:
        ConfigError: ``tp_size``.
    """
    if arguments.tp_size < 1 or (arguments.tp_size > 1 and arguments.device != "cpu"):
        raise ConfigError(
            "tp_size",
            f"this engine cannot be {arguments.tp_size} ranks on {arguments.device}",
            expected="at least 1 on the CPU, and 1 on a GPU",
            found=arguments.tp_size,
            remedy="For tensor parallelism on GPUs, run vLLM or SGLang with the weight cache",
        )


def read_tokenizer(folder: Folder) -> Any:
    """The model's tokenizer.

    Raises:
        ConfigError: ``tokenizer``, where transformers finds none that it can read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder.root, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "tokenizer",
            f"the tokenizer in {folder.path} cannot be read",
            expected="tokenizer.json, or the files of a tokenizer that transformers knows",
            found=str(error),
            remedy="Download the model's tokenizer files too",
            path=folder.path,
        ) from error


def on_gpu(model: Any, journal: Journal, *, capture: bool) -> "StaticDecoder":
    """A model on a GPU made ready to decode, phase by phase. The weights are mapped for good by now, and buffers
    private: a graph keeps the addresses that it was captured with.

    Raises:
        ConfigError: ``graph_capture``.
    """
    from readmit.decoding import StaticDecoder

    decoder = StaticDecoder(model)
    with journal.phase("kernel_warmup"):
        decoder.warm_up()
    with journal.phase("cache_alloc"):
        decoder.allocate()
    if capture:
        with journal.phase("graph_capture"):
            decoder.capture()
    return decoder


def warm_up(generator: "Generator") -> None:
    """One short generation, so that the first request does not pay for what torch sets up on first use."""
    from readmit.generation import Sampling

    for _ in generator.stream(generator.encode("The"), Sampling(_WARM_UP_TOKENS)):
        pass


def _told(outcome: "Outcome") -> str:
    """Where the weights came from, in a sentence."""
    mapped = f"mapped {outcome.bytes / 1e6:.0f} MB of resident weights, generation {outcome.generation}"
    if outcome.path == "hit":
        return mapped
    if outcome.path == "off":
        return "loaded weights from disk; the weight cache is off"
    if outcome.generation is None:
        because = f" ({outcome.private_because})" if outcome.private_because else ""
        done = f"loaded weights from disk and kept them private{because}"
    elif "publish" in outcome.phases:
        done = f"loaded weights from disk and published them as generation {outcome.generation}"
    else:
        done = f"waited for a load, then {mapped}"
    return f"{done}. Reason {outcome.reason}: {outcome.message}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="readmit engine", description="Serve one model over the OpenAI completions API, from one process."
    )
    parser.add_argument("model", help="folder of a checkpoint: config, tokenizer and safetensors files")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="TCP port, 0 for a free one (default: %(default)s)")
    parser.add_argument("--served-model-name", help="the model's name in the API (default: the folder's name)")
    parser.add_argument("--dtype", help="torch dtype of the weights, such as bfloat16 (default: the checkpoint's own)")
    parser.add_argument("--device", default="cpu", help="cpu, or a CUDA device such as cuda:0 (default: %(default)s)")
    parser.add_argument(
        "--tp-size", type=int, default=1, help="ranks that share the model, a process each (default: %(default)s)"
    )
    parser.add_argument("--eager", action="store_true", help="on a GPU: capture no CUDA graph of a decoding step")
    parser.add_argument(
        "--weight-cache",
        choices=MODES,
        default="off",
        help="client: map weights from a running daemon, else load from disk; daemon: start the daemon where none runs "
        "and insist on it; off: load from disk (default: %(default)s)",
    )
    parser.add_argument("--socket", type=Path, help="the weight cache daemon's socket (default: $WEIGHTCACHE_SOCKET)")
    parser.add_argument("--log-format", choices=FORMATS, help="of the log (default: $READMIT_LOG_FORMAT, or text)")
    return parser


def _process_start_ns() -> int:
    """When the kernel started this process: boottime in nanoseconds, to a clock tick (10 ms)."""
    stat: Any = Stat.read(os.getpid())
    return int(stat.start_ticks) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
