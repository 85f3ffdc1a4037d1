"""Load format ``weightcache``: vLLM's weights from the weight cache, or from disk as vLLM itself loads them.

What is shared on the CPU is the state after ``load_weights`` and before ``process_weights_after_loading``: that step
packs linear weights into private oneDNN buffers and empties the parameters, so after it there is nothing left to share.
It runs on every start, hit or not. On a GPU the processed weights are shared, and the step is repeated under
``weights_already_processed``, so that it rebuilds what it keeps beside the tensors and leaves these alone.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.distributed import get_world_group
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.utils import weights_already_processed
from vllm.utils.torch_utils import set_default_torch_dtype

from weightcache.attachment import Outcome, Progress, ignore_progress
from weightcache.binding import walk
from weightcache.checkpoint import Checkpoint, Folder
from weightcache.client import attach
from weightcache.errors import CacheMiss, ConfigError
from weightcache.fingerprint import CacheConfig
from weightcache.identity import digest_of
from weightcache.integrations.loader_options import read_options
from weightcache.integrations.model_folder import digest_before, model_folder, require_unchanged
from weightcache.integrations.skeleton import become, build, nbytes
from weightcache.integrations.vllm_identity import barred, cache_config, is_draft
from weightcache.journal import Journal

log = logging.getLogger("weightcache.vllm")


class WeightCacheLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM is not there when types are checked
    """See the top of this module.

    Raises:
        ConfigError: ``loader_option``: an unknown key in ``--model-loader-extra-config``, or an unknown mode.
    """

    outcome: Outcome | None = None
    """How the latest model got its weights; None for one that is never shared."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        given = load_config.model_loader_extra_config or {}
        self.mode, self.options = read_options(given, "--model-loader-extra-config of load format weightcache")

    def download_model(self, model_config: ModelConfig) -> None:
        """Have the files on disk, as vLLM does it."""
        self.disk().download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load into a model that is there already, in place, from disk.

        Raises:
            ConfigError: ``reload``, for weights on a GPU that are mapped read-only.
        """
        mapped = self.outcome is not None and self.outcome.generation is not None
        if mapped and any(parameter.is_cuda for parameter in model.parameters()):
            raise ConfigError(
                "reload",
                "weights that are shared cannot be overwritten in place",
                remedy="Restart the engine on the other checkpoint",
            )
        self.disk().load_weights(model, model_config)

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """A model with its weights, ready to run.

        Raises:
            CacheMiss: the policy for the reason of a miss is to fail.
            CheckpointError: the files are bad, or changed while they were read.
        """
        if is_draft(vllm_config, model_config):
            log.warning(
                "the draft model %s is loaded from disk: only the target's weights are shared", model_config.model
            )
            draft: nn.Module = self.disk().load_model(vllm_config, model_config, prefix)
            return draft
        journal = Journal.from_environment().bound(rank=get_world_group().rank)
        with set_default_torch_dtype(model_config.dtype):
            return _Load(self, vllm_config, model_config, prefix, journal).run().eval()

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        """Bytes of this rank's weights that are resident already, which vLLM counts as its own when it sizes KV caches.

        Asked on a GPU only, before the model is loaded.
        """
        from weightcache import device, messages, paths
        from weightcache.errors import CacheMiss
        from weightcache.protocol import Connection
        from weightcache.version import VERSION

        model_config = vllm_config.model_config
        if self.mode == "off":
            return 0
        folder = self.folder(model_config)
        config = cache_config(vllm_config, model_config, folder, digest_of(folder).digest)
        try:
            connection = Connection(self.options.get("socket") or paths.socket_path(), messages.Hello(version=VERSION))
            with contextlib.closing(connection):
                asked = messages.Explain(config=config.to_dict(), device=device.uuid())
                would, _ = connection.ask(asked, messages.Done)
                status, _ = connection.ask(messages.Status(), messages.Done)
        except CacheMiss:
            return 0  # what loading will say more about: nothing is held for us
        held = {generation["generation"]: generation["bytes"] for generation in status.data["generations"]}
        return int(held.get(would.data["generation"], 0)) if would.data["would_hit"] else 0

    def folder(self, model_config: ModelConfig) -> Folder:
        """Where the model lies, downloaded if need be."""
        name, revision, folder = model_config.model, model_config.revision, self.load_config.download_dir
        return model_folder(name, revision, folder, lambda: self.download_model(model_config))

    def disk(self) -> DefaultModelLoader:
        """The loader that reads the files."""
        plain = dataclasses.replace(self.load_config, load_format="auto", model_loader_extra_config={})
        return DefaultModelLoader(plain)


class Emptied(CacheMiss):
    """Processing has moved weights to where no cache reaches."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(
            "state_unrestorable",
            f"processing left {len(names)} parameters without the bytes they had: {', '.join(names[:10])}",
            remedy="Start without --load-format weightcache",
            tensors=names,
        )


class _Load:
    """One load of one rank's model."""

    def __init__(
        self,
        loader: WeightCacheLoader,
        vllm_config: VllmConfig,
        model_config: ModelConfig,
        prefix: str,
        journal: Journal,
    ) -> None:
        self._loader = loader
        self._vllm_config = vllm_config
        self.model_config = model_config
        self._prefix = prefix
        self._journal = journal
        self._target = torch.device(loader.load_config.device or vllm_config.device_config.device)
        self._shares_processed = self._target.type != "cpu"
        self.model = nn.Module()

    def run(self) -> nn.Module:
        outcome = self._read_privately() if self._loader.mode == "off" else self._attach()
        self._loader.outcome = outcome
        log.info("%s", told(outcome))
        if outcome.path == "hit" and self._shares_processed:
            with weights_already_processed():
                self._process()
        elif not self._shares_processed:
            self._process()
        return self.model

    def _attach(self) -> Outcome:
        if self._shares_processed and not hasattr(BaseModelLoader, "get_external_weight_memory"):
            log.warning(
                "this vLLM does not ask which weights are resident: it counts them as somebody else's, and its KV"
                " caches get smaller by as much. Raise --gpu-memory-utilization by their share"
            )
        folder = self._loader.folder(self.model_config)
        forget = _forgetting(self._vllm_config)
        miss = barred(self._vllm_config, self.model_config, folder)
        try:
            with self._journal.phase("load_weights.skeleton"):
                self.model = build(self._build, self._target, forget)
                _settle(self.model, self._target)
        except CacheMiss as refused:
            miss = refused
        with self._journal.phase("load_weights.match"):
            digest = digest_before(folder, shared=miss is None)

        def load(progress: Progress) -> None:
            forget()
            self._read(progress)
            require_unchanged(folder, digest)

        try:
            return self._attach_or_keep(
                cache_config(self._vllm_config, self.model_config, folder, digest),
                load,
                partial(Checkpoint.open, folder),
                miss,
            )
        except BaseException:
            forget()  # or the next model in this process would get the skeleton's rotary embeddings
            raise

    def _attach_or_keep(
        self,
        config: CacheConfig,
        load: Callable[[Progress], None],
        check: Callable[[], object],
        miss: CacheMiss | None,
    ) -> Outcome:
        try:
            return attach(
                self.model,
                config,
                mode=self._loader.mode,
                load=load,
                check=check,
                load_bytes=nbytes(self.model),
                journal=self._journal,
                device=self._target.index if self._target.type == "cuda" else None,
                barred=miss,
                **self._loader.options,
            )
        except Emptied as emptied:  # the model is loaded, and its claim is given back
            return Outcome(
                "miss", self._loader.mode, emptied.reason, message=str(emptied), private_because=str(emptied)
            )

    def _read_privately(self) -> Outcome:
        self._journal.append("lookup", "off", {"mode": "off"})
        with self._journal.phase("load_weights.read"), contextlib.suppress(Emptied):
            self._read(ignore_progress)
        return Outcome(path="off", mode="off")

    def _read(self, progress: Progress) -> None:
        """Fill the model from disk, as far as it is shared.

        Raises:
            Emptied: it is filled, and what it has now is not all of its weights.
        """
        with self._target:
            loaded = self._build()
        total = nbytes(loaded)
        progress(0, total)
        self._loader.disk().load_weights(loaded, self.model_config)
        progress(total, total)
        if type(self.model) is nn.Module:
            self.model = loaded
        else:
            become(self.model, loaded)
        if self._shares_processed:
            held = {name for name, tensor in self.model.named_parameters() if tensor.numel()}
            self._process()
            if emptied := held - {name for name, tensor in self.model.named_parameters() if tensor.numel()}:
                raise Emptied(sorted(emptied))

    def _build(self) -> nn.Module:
        built: nn.Module = initialize_model(self._vllm_config, model_config=self.model_config, prefix=self._prefix)
        return built

    def _process(self) -> None:
        with self._journal.phase("load_weights.process"):
            process_weights_after_loading(self.model, self.model_config, self._target)


def _forgetting(vllm_config: VllmConfig) -> Callable[[], None]:
    """A function that takes out of vLLM's registries of layers what building a model from now on will add to them.

    A model that is built a second time would find its layers' names taken, and the first one's rotary embeddings in
    place of new ones. These are the registries that vLLM itself clears when it frees a model.
    """
    compilation = vllm_config.compilation_config
    context, experts = compilation.static_forward_context, compilation.static_all_moe_layers
    before = dict(context), list(experts), dict(_ROPE_DICT)

    def forget() -> None:
        context.clear()
        context.update(before[0])
        experts[:] = before[1]
        _ROPE_DICT.clear()
        _ROPE_DICT.update(before[2])

    return forget


def _settle(model: nn.Module, target: torch.device) -> None:
    """Make real what a skeleton holds beside its parameters and buffers and no cache restores."""
    found = walk(model)
    for module in found.modules:
        if "_k_scale_cpu" in module.__dict__:  # constants, which vLLM sets again after loading
            set_default_quant_scales(module, register_buffer=False)
    for stray in found.strays:
        if stray.tensor.is_meta and stray.tensor.numel() == 0:  # such as KV caches that are still to come
            stray.holder[stray.key] = torch.empty_like(stray.tensor, device=target)


def told(outcome: Outcome) -> str:
    """Where the weights came from, in a sentence."""
    if outcome.path == "hit":
        return f"mapped {outcome.bytes / 1e6:.0f} MB of resident weights, generation {outcome.generation}"
    if outcome.path == "off":
        return "loaded weights from disk; the weight cache is off"
    kept = f"published as generation {outcome.generation}" if outcome.generation else "kept private"
    because = f" ({outcome.private_because})" if outcome.private_because else ""
    return f"loaded weights from disk, {kept}{because}. Reason {outcome.reason}: {outcome.message}"
