"""Sizes of a model of any architecture that transformers knows, small enough to be made and loaded in a moment."""

from typing import Final

SIZES: Final = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
