"""What one version of transformers makes of a checkpoint, as data, to be compared with what another makes of it.

``python -m weightcache.integrations.transformers_census MODEL``, run by each version's own interpreter, prints JSON:
the model's identity, every tensor, and a digest of its logits. Neither a daemon nor an engine takes part.
"""

from typing import Any

import torch
import transformers

from weightcache.checkpoint import Checkpoint, Folder
from weightcache.digest import tensor_digest
from weightcache.identity import know_digest
from weightcache.integrations import census_command
from weightcache.integrations.transformers import cache_config, from_pretrained, skeleton
from weightcache.integrations.transformers_form import Form
from weightcache.integrations.transformers_loading import require_complete, telling
from weightcache.parity import Report, take_census


def load_plainly(folder: Folder, dtype: torch.dtype) -> Any:
    """The model as it is without a cache: loaded by transformers itself, where that needs no GPU.

    Raises:
        CheckpointError: ``tensor_missing`` or ``geometry``, where the files are not what the architecture needs.
        ConfigError: ``architecture``: it cannot be loaded here.
    """
    if not Form.of(folder).is_whole_and_plain:
        return from_pretrained(folder, dtype=dtype)[0]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with telling(folder):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder.root, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True
        )
    model, told = loaded
    require_complete(Checkpoint.open(folder), told)
    return model


def logits_of(model: Any) -> torch.Tensor:
    """What a model says to a few tokens: ``1 x 8 x vocabulary``."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.arange(8)[None] % model.config.get_text_config().vocab_size).logits
    return logits


def report(model: str, dtype: str | None) -> Report:
    """Load a model and describe it.

    Raises:
        CheckpointError: its files are bad.
        ConfigError: this version cannot build it.
    """
    checkpoint = Checkpoint.open(model)
    like = skeleton(checkpoint.folder, dtype)
    config = cache_config(checkpoint.folder, like, know_digest(checkpoint.folder), torch.device("cpu"))
    loaded = load_plainly(checkpoint.folder, like.dtype)
    return Report(config.to_dict(), dict(take_census(loaded)), tensor_digest(logits_of(loaded)).hex())


if __name__ == "__main__":
    census_command.main(report, "Describe what this version of transformers makes of a checkpoint.")
