"""The reference engine as a process: answers and phases, loaded from disk and mapped, in bf16 and block-wise FP8."""

import copy
import json
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

import torch

from gpu_parts.processes import Talk, call, cuda_context
from gpu_parts.report import Report
from weightcache.block_scale import scale_shape

BLOCK: Final = (128, 128)
PROMPT: Final = list(range(100, 164))
TOKENS: Final = 48
LLAMA_8B: Final = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
TINY: Final = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}


def measure(report: Report, where: torch.device) -> dict[str, Any]:
    """The reference engine, bf16 and FP8: from disk, published, killed and mapped; the same answers each time."""
    folder = Path(tempfile.mkdtemp(prefix="readmit-serving-"))
    kinds = {"bf16": False, "block-wise FP8": True}
    found: dict[str, Any] = {}
    try:
        for kind, fp8 in kinds.items():
            found[kind] = call(make_checkpoint, folder / kind, 6 if where.type == "cuda" else 2, fp8, where)
        # Those of a wave start together, so their starts are slower than one alone would be.
        for wave in (("off", "miss"), ("hit",)):
            engines = {
                (kind, name): Engine(
                    folder / kind,
                    "off" if name == "off" else "client",
                    where,
                    folder / f"{kind}-{name}.sqlite3",
                )
                for kind in kinds
                for name in wave
            }
            try:
                for (kind, name), engine_ in engines.items():
                    found[kind][name] = engine_.answer()
            finally:
                for engine_ in engines.values():
                    engine_.kill()
        for kind in kinds:
            _told(report, kind, found[kind])
        if where.type == "cuda":
            speeds = call(decode_speeds, [folder / kind for kind in kinds], where)
            for kind, speed in zip(kinds, speeds, strict=True):
                found[kind]["speed"] = speed
                work = f"captured decoding step on mapped over ordinary memory, {kind}"
                report.figure(work, [speed["ratio"]], "ratio", must=1.01)
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _told(report: Report, kind: str, answers: dict[str, Any]) -> None:
    """Report what three engines took, and check that they said the same."""
    starts = {name: answers[name] for name in ("off", "miss", "hit")}
    for name, told in starts.items():
        report.figure(f"engine, {kind}, {name}: start to first answer", [told["first_answer_s"]], "s")
        report.figure(f"  a token, HTTP included: {kind}, {name}", [told["s_a_token"]], "s")
        for phase in ("load_weights", "kernel_warmup", "cache_alloc", "graph_capture"):
            if phase in told["phases"]:
                report.figure(f"    {phase}: {kind}, {name}", [told["phases"][phase]], "s")
    results = [told["lookup"]["result"] for told in starts.values()]
    said = {json.dumps([told["tokens"], told["logprobs"]]) for told in starts.values()}
    varied = len(set(starts["hit"]["tokens"]))
    if results != ["off", "miss", "hit"] or len(said) != 1 or varied < 4:
        raise AssertionError(f"{results}, {len(said)} different answers, {varied} different tokens: {starts}")


def make_checkpoint(talk: Talk, folder: Path, layers: int, fp8: bool, where: torch.device) -> dict[str, Any]:
    """A Llama in the shape of the 8B one, with fewer layers and random weights, and a tokenizer of one word a token."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(11)
    sizes = LLAMA_8B if where.type == "cuda" else TINY
    config = LlamaConfig(
        **sizes, num_hidden_layers=layers, tie_word_embeddings=False, initializer_range=0.1, dtype=torch.bfloat16
    )
    with where:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    content: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if fp8 and name.endswith("_proj.weight"):
            content[name], content[name + "_scale_inv"] = _quantize(tensor)
        else:
            content[name] = tensor
    folder.mkdir(parents=True)
    save_file({name: tensor.cpu() for name, tensor in content.items()}, folder / "model.safetensors", {"format": "pt"})
    config.architectures = ["LlamaForCausalLM"]
    described = config.to_dict()
    if fp8:
        described["quantization_config"] = {
            "quant_method": "fp8",
            "weight_block_size": list(BLOCK),
            "activation_scheme": "dynamic",
        }
    (folder / "config.json").write_text(json.dumps(described))
    _write_tokenizer(folder, sizes["vocab_size"])
    time.sleep(2.1)  # younger files could still change unseen, so no digest of theirs is remembered
    return {"bytes": sum(tensor.nbytes for tensor in content.values()), "tensors": len(content)}


def _quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    tiles = weight.float().view(rows // BLOCK[0], BLOCK[0], columns // BLOCK[1], BLOCK[1])
    scale = tiles.abs().amax((1, 3)) / 448
    stored = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(rows, columns)
    assert tuple(scale.shape) == scale_shape((rows, columns), BLOCK)
    return stored, scale


def _write_tokenizer(folder: Path, words: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w2").save_pretrained(folder)


class Engine:
    """``readmit engine`` with a journal of its own."""

    def __init__(self, model: Path, mode: str, where: torch.device, journal: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._journal = journal
        self._log = journal.with_suffix(".log")
        command = [sys.executable, "-m", "readmit.engine", str(model), "--port", str(self.port)]
        command += ["--weight-cache", mode, "--device", str(where), "--log-format", "text", *options]
        self._began = time.perf_counter()
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, "READMIT_JOURNAL": str(journal), "OMP_NUM_THREADS": "4"},
            )

    def answer(self, limit_s: float = 60.0) -> dict[str, Any]:
        """Its first answer, with seconds since its start and a token; then one more, for the speed."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                first = self._ask()
                break
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the engine does not answer: " + self._log.read_text()[-3000:]) from None
                time.sleep(0.05)
        ready = time.perf_counter() - self._began
        began = time.perf_counter()
        again = self._ask()
        return {
            "first_answer_s": ready,
            "tokens": first["logprobs"]["tokens"],
            "logprobs": first["logprobs"]["token_logprobs"],
            "same_again": first["logprobs"]["tokens"] == again["logprobs"]["tokens"],
            "s_a_token": (time.perf_counter() - began) / TOKENS,
            "phases": self._phases(),
            "lookup": self._lookup(),
            "log": self._log.read_text()[-1500:],
        }

    def kill(self) -> float:
        """SIGKILL; seconds until it is gone."""
        began = time.perf_counter()
        pidfd = os.pidfd_open(self._process.pid)
        self._process.send_signal(signal.SIGKILL)
        select.select([pidfd], [], [])
        os.close(pidfd)
        self._process.wait()
        return time.perf_counter() - began

    def _ask(self) -> dict[str, Any]:
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            choice: dict[str, Any] = json.loads(reply.read())["choices"][0]
        return choice

    def _phases(self) -> dict[str, float]:
        from weightcache.journal import Journal

        began: dict[str, int] = {}
        phases: dict[str, float] = {}
        for event in Journal(self._journal).query("WHERE kind IN ('phase_begin', 'phase_end') ORDER BY id"):
            if event.kind == "phase_begin":
                began[event.name] = event.boottime_ns
            else:
                phases[event.name] = phases.get(event.name, 0.0) + (event.boottime_ns - began[event.name]) / 1e9
        return phases

    def _lookup(self) -> dict[str, Any]:
        from weightcache.journal import Journal

        (event,) = Journal(self._journal).query("WHERE kind = 'lookup'")
        return {"result": event.name, **{key: event.attributes.get(key) for key in ("reason", "generation", "bytes")}}


def decode_speeds(talk: Talk, folders: list[Path], where: torch.device) -> list[dict[str, Any]]:
    """For each resident model: seconds a captured decoding step takes on mapped weights and on a private copy."""
    cuda_context(where)
    return [_decode_speed(folder, where) for folder in folders]


def _decode_speed(folder: Path, where: torch.device, rounds: int = 9, steps: int = 30) -> dict[str, Any]:
    from readmit.decoding import StaticDecoder
    from weightcache.integrations.transformers import from_pretrained

    model, outcome = from_pretrained(folder, mode="client", device=where)
    assert outcome.path == "hit", outcome
    decoders = {"mapped": _ready(StaticDecoder(model)), "ordinary": _ready(StaticDecoder(_private_copy(model)))}
    tokens: dict[str, list[int]] = {}
    for name, decoder in decoders.items():
        logits = decoder.prefill(PROMPT)
        tokens[name] = []
        for _ in range(TOKENS):
            tokens[name].append(int(logits.argmax()))
            logits = decoder.step(tokens[name][-1])
    times: dict[str, list[float]] = {"mapped": [], "ordinary": []}
    for _ in range(rounds):  # in turn, so that a drifting clock meets both
        for name, decoder in decoders.items():
            decoder.prefill(PROMPT)
            times[name].append(_replays(decoder, steps))
    ratios = [mapped / ordinary for mapped, ordinary in zip(times["mapped"], times["ordinary"], strict=True)]
    return {
        **{name: statistics.median(values) for name, values in times.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "same_tokens": tokens["mapped"] == tokens["ordinary"],
        "n": rounds * steps,
    }


def _ready(decoder: Any) -> Any:
    decoder.warm_up()
    decoder.allocate()
    decoder.capture()
    return decoder


def _private_copy(model: Any) -> Any:
    """The same model on memory of its own."""
    private = copy.deepcopy(model)
    for mapped, own in zip(model.parameters(), private.parameters(), strict=True):
        assert mapped.data_ptr() != own.data_ptr()
    return private


def _replays(decoder: Any, steps: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        decoder._graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / steps
