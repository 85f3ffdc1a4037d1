"""The phases of a start of vLLM, from the tracing spans that vLLM opens anyway, its log, and the start of each process.

vLLM decorates the steps of its start with OpenTelemetry spans. They go to whatever tracer provider a process has; where
it has none, `install` gives it one whose only consumer writes phases to the journal. Where vLLM sends its spans
somewhere (``--otlp-traces-endpoint``), its own provider stays and gets a second consumer.

API server, engine core and workers write on one timeline: the first two as no rank in particular, each worker as its
rank. The span of a step that another process carries out covers it; the step's own phase begins later and has the time.
"""

import functools
import importlib
import logging
import multiprocessing
import os
import re
import sys
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider

from weightcache.journal import Journal
from weightcache.process import Stat

SPANS: Final = {
    "Loading (CPU)": "load_weights",
    "Loading (GPU)": "load_weights",
    "Compile graph": "compile",
    "Warmup (CPU)": "compile",  # what it warms is the compiled model: it does nothing where none is compiled
    "Prepare model": "kv_profile",
    "Warmup (GPU)": "kernel_warmup",
    "Allocate KV cache": "cache_alloc",
    "Capture model": "graph_capture",
}
"""Spans that are a phase, from their beginning to their end."""

BEGIN_DISTRIBUTED: Final = "Worker init"
"""The span in which a worker joins its groups, and then loads."""
CREATE_CLIENT: Final = "Overall Loading"
"""The span in which an API server starts the engine core and waits until that can serve."""
CORE: Final = "EngineCoreProc init"

PREPARED: Final = "Prepare model"
"""The span after which an engine core has model and caches; it makes its scheduler then, and tells the API server."""
TOKENIZER: Final = "renderer_from_config"
"""The function with which an API server makes its tokenizer, for which vLLM opens no span."""
MAKES_TOKENIZERS: Final = ("vllm.renderers", "vllm.v1.engine.async_llm", "vllm.v1.engine.llm_engine")
"""Modules that have it, the latter two as far as they are imported already."""

SERVING: Final = "Application startup complete."
"""What uvicorn says once it takes requests."""
JOINS: Final = "world_size=%d rank=%d"
"""How a worker's line begins that it joins the others; what it has done before is to look at cores and memory nodes."""
JOINED: Final = "rank %s in world size %s is assigned"
"""How its line begins that it has joined all groups. Only the first worker of a node says it."""
SPEAKERS: Final = ("uvicorn.error", "vllm.distributed.parallel_state")
"""Loggers that say these."""

_WORKER: Final = re.compile(r"VllmWorker-(\d+)")


class Marks(SpanProcessor):
    """Writes the phases of this process, and of those forked from it."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._start()

    def _start(self) -> None:
        self._journal = Journal.from_environment()
        self._rank: int | None = None
        self._began_ns = process_start_ns()
        self._open = []
        self._imported = False

    def after_fork(self) -> None:
        """Begin anew, as another process."""
        self._start()

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        name = span.name
        if name in (CREATE_CLIENT, CORE, BEGIN_DISTRIBUTED):
            self.imported()
        if (phase := SPANS.get(name)) is not None:
            if phase == "load_weights":
                self.end("distributed_init.rendezvous")
                self.end("distributed_init")
            self.begin(phase)

    def on_end(self, span: ReadableSpan) -> None:
        if (phase := SPANS.get(span.name)) is not None:
            self.end(phase)
        if span.name in (PREPARED, CREATE_CLIENT):
            self.begin("server_ready")
        elif span.name == CORE:
            self.end("server_ready")

    def imported(self) -> None:
        """This process has its modules and settings; what it is for begins."""
        if self._imported:
            return
        self._imported = True
        name = multiprocessing.current_process().name
        if worker := _WORKER.fullmatch(name):
            self._rank = int(worker[1])
            self._journal = self._journal.bound(rank=self._rank)
        with self._journal.phase("import", began_ns=self._began_ns):
            pass
        if worker:
            self.begin("distributed_init")
            self.begin("distributed_init.topology")

    def said(self, format_: str) -> None:
        """A line of the log, before its values are put in."""
        if format_.startswith(JOINS):
            self.end("distributed_init.topology")
            self.begin("distributed_init.rendezvous")
        elif format_.startswith(JOINED):
            self.end("distributed_init.rendezvous")
        elif format_ == SERVING:
            self.end("server_ready")

    def begin(self, phase: str) -> None:
        """A phase begins, unless it has."""
        if phase not in self._open:
            self._open.append(phase)
            self._journal.append("phase_begin", phase)

    def end(self, phase: str) -> None:
        """A phase ends, if it had begun."""
        if phase in self._open:
            self._open.remove(phase)
            self._journal.append("phase_end", phase)


def listen(marks: Marks) -> None:
    """Read along in the log. By a filter, because vLLM and uvicorn set up their loggers anew and take handlers off."""

    def hear(record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str):
            marks.said(record.msg)
        return True

    for speaker in SPEAKERS:
        logging.getLogger(speaker).addFilter(hear)


def _time_tokenizer(marks: Marks) -> None:
    """Time the function that makes the tokenizer, wherever it is looked up from."""
    try:
        make = getattr(importlib.import_module(MAKES_TOKENIZERS[0]), TOKENIZER)
    except (ImportError, AttributeError):
        return  # another release: the phase is absent, and nothing else is different

    @functools.wraps(make)
    def timed(*arguments: Any, **options: Any) -> Any:
        marks.imported()
        marks.begin("tokenizer_init")
        try:
            return make(*arguments, **options)
        finally:
            marks.end("tokenizer_init")

    for name in MAKES_TOKENIZERS:
        if getattr(sys.modules.get(name), TOKENIZER, None) is make:
            setattr(sys.modules[name], TOKENIZER, timed)


@functools.cache
def install() -> None:
    """Write this process's phases from now on; the import that got here is one of them."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        if any(argument.startswith("--otlp-traces-endpoint") for argument in sys.argv):
            return  # vLLM is about to set one, and there can be one only; the other processes find it set
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    marks = Marks()
    provider.add_span_processor(marks)
    os.register_at_fork(after_in_child=marks.after_fork)
    listen(marks)
    if multiprocessing.current_process().name != "MainProcess":
        marks.imported()  # the span that says so in an API server has begun before plug-ins are asked
    else:
        _time_tokenizer(marks)


def process_start_ns() -> int:
    """When the kernel started this process: boottime in nanoseconds, to a clock tick (10 ms)."""
    stat = Stat.read(os.getpid())
    assert stat is not None, "a process cannot look at itself and be gone"
    return stat.start_ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
