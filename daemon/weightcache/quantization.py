"""The quantisation of a checkpoint: what its config and its headers say of it, and whether it may travel.

Only weights that are plain tensors after loading may be shared between processes: unquantised ones, and block-wise FP8
with ``weight_block_size``. Everything else keeps state beside its tensors (packed layouts, kernels' handles, fused
scales), which a mapping does not restore. The announcement has many spellings; all are read, and what is not known to
be good is refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from weightcache import block_scale
from weightcache.checkpoint import Checkpoint, Folder, TensorInfo
from weightcache.checkpoint.refusal import refusal
from weightcache.errors import CheckpointError, UnsupportedQuantForIPCError
from weightcache.fingerprint import stable_hash
from weightcache.skip_list import KEYS as SKIP_LIST_KEYS
from weightcache.skip_list import SkipList, check_skip_list

UNQUANTIZED: Final = "none"
BLOCK_FP8: Final = "fp8"

_CONFIG_KEYS: Final = ("quantization_config", "compression_config")
_TRAVELLING_KEYS: Final = frozenset({"quantization_config", "text_config.quantization_config"})
"""Where engines look for the announcement of a language model; anywhere else, two engines may not agree on it."""

_SIDE_FILES: Final = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files beside config.json that announce a quantisation, and the family that writes them. Any other JSON file whose
name speaks of it (``quanto_qmap.json``, ``quantization_config.json``) announces one too."""

_FLAG_PARTS: Final = frozenset(
    {"quant", "quantize", "quantized", "quantization", "fp4", "mxfp4", "nvfp4", "fp8", "int4", "int8", "4bit", "8bit"}
)
_KNOWN_OPTIONS: Final[Mapping[str, tuple[object, ...]]] = {
    "activation_scheme": ("dynamic",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("float", "ue8m0"),
    "dequantize": (False,),
    "expert_dtype": ("fp8",),
}
"""What a block-wise FP8 config may say beside its block size and skip list, null apart. Anything else may mean state
that does not travel."""
_READ_ELSEWHERE: Final = frozenset({"quant_method", "weight_block_size", *SKIP_LIST_KEYS})
_PLAIN_DTYPES: Final = frozenset(
    {
        "auto", "half", "float", "double", "bfloat16", "bf16", "float16", "fp16", "float32", "fp32", "float64", "fp64",
        "int32", "int64",
    }
)  # fmt: skip
_NO: Final = frozenset({"", "0", "false", "no", "none"})
_PACKED_NAMES: Final = ("qweight", "qzeros", "weight_packed", "weight", "_blocks")
_QUANTIZED_DTYPES: Final = ("F8", "F4")
_INTEGER_DTYPES: Final = frozenset({"U8", "I8", "U16", "I16", "U32", "I32"})
_STATE_NAMES: Final = (
    *(".input_scale", ".weight_scale", ".weight_scale_2", ".k_scale", ".v_scale"),
    *(".absmax", ".quant_map", ".SCB", ".qzeros", ".g_idx"),
)
"""What quantisers store beside weights. Such a tensor announces a quantisation, whatever the config says."""
_SCALE_DTYPES: Final = frozenset({"F32", "BF16", "F16"})


_NOTHING_SKIPPED: Final = SkipList([])


class Verdict(NamedTuple):
    """Why a quantisation may not travel: its family, the key that decided, and what stands there."""

    family: str
    key: str
    found: str


class Quantization(NamedTuple):
    """A checkpoint's quantisation.

    Attributes:
        method: ``none``, or the method as announced.
        config_hash: a hash of everything announced, the skip list normalised; None if nothing is.
        block_size: rows and columns of a block, for block-wise FP8.
        skipped: the layers left unquantised.
        verdict: why it may not travel, or None if it may.
        notes: what is odd but harmless, a sentence each.
    """

    method: str
    config_hash: str | None = None
    block_size: block_scale.Block | None = None
    skipped: SkipList = _NOTHING_SKIPPED
    verdict: Verdict | None = None
    notes: tuple[str, ...] = ()

    def check_allowed(self) -> None:
        """Check that these weights may be shared.

        Raises:
            UnsupportedQuantForIPCError: names the family (``detail``) and the key that decided (``data["key"]``).
        """
        if self.verdict is None:
            return
        family, key, found = self.verdict
        raise UnsupportedQuantForIPCError(
            f"{key} decides that these weights cannot be shared",
            detail=family,
            expected="no quantisation, or block-wise fp8 with weight_block_size, in config and files alike",
            found=found,
            key=key,
            method=self.method,
        )

    def check_asked(self, method: str | None, engine: str) -> None:
        """Check that an engine quantises these weights as their checkpoint says, or not at all.

        Args:
            method: what the engine was told, None if nothing.
            engine: its name, as people write it.

        Raises:
            UnsupportedQuantForIPCError: it was told something else.
        """
        asked = method or UNQUANTIZED
        if asked != self.method:
            raise UnsupportedQuantForIPCError(
                f"{engine} was told to quantise as it loads, and keeps state of that outside the weights",
                detail="other",
                expected=f"{self.method}, as the checkpoint is",
                found=asked,
            )


class _Announcement(NamedTuple):
    key: str
    value: Any


def of(source: Checkpoint | Folder) -> Quantization:
    """The quantisation of a checkpoint.

    From a `Folder` only what the settings announce; from a `Checkpoint` also whether the files' headers bear it out.

    Raises:
        CheckpointError: ``quant_conflict``, where skip list and stored dtypes disagree; ``config_invalid``.
        ConfigError: ``shard_block_mismatch``, where scales do not fit their weights.
    """
    folder = source if isinstance(source, Folder) else source.folder
    announced = _announced(folder)
    if isinstance(source, Folder) or announced.verdict is not None:
        return announced
    verdict = _contradiction(announced, source.tensors)
    if verdict is not None or announced.block_size is None:
        return announced._replace(verdict=verdict)
    _check_fp8_layers(source.tensors)
    block_scale.check_scales(source.tensors, announced.block_size)
    return announced._replace(notes=check_skip_list(announced.skipped, source.tensors))


def _announced(folder: Folder) -> Quantization:
    found = [*_config_announcements(folder.config), *_side_announcements(folder)]
    flags = list(_flags(folder.config))
    if not found and not flags:
        return Quantization(UNQUANTIZED)
    for key, value in found:
        verdict = _judge(key, value)
        if verdict is not None:
            return Quantization(_method(value) or "unknown", stable_hash(found), verdict=verdict)
    if flags:
        method = _method(found[0].value) if found else None
        return Quantization(method or "unknown", stable_hash([found, flags]), verdict=flags[0])
    normalised = [_normalised(key, value) for key, value in found]
    if normalised[0] != normalised[-1]:
        verdict = Verdict("other", found[-1].key, f"another quantisation than in {found[0].key}")
        return Quantization(BLOCK_FP8, stable_hash(found), verdict=verdict)
    key, config = found[0]
    rows, columns = config["weight_block_size"]
    return Quantization(BLOCK_FP8, stable_hash(normalised[0]), (rows, columns), SkipList.of(config, key))


def _config_announcements(section: Mapping[str, Any], prefix: str = "") -> Iterator[_Announcement]:
    for key, value in section.items():
        if key in _CONFIG_KEYS:
            if value is not None:
                yield _Announcement(prefix + key, value)
        else:
            for at, nested in _nested(key, value):
                yield from _config_announcements(nested, f"{prefix}{at}.")


def _nested(key: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sections in a config's value: itself, or those in a list."""
    if isinstance(value, Mapping):
        yield key, value
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _nested(f"{key}.{at}", item)


def _side_announcements(folder: Folder) -> Iterator[_Announcement]:
    for name in folder.settings_names:
        if name in _SIDE_FILES or "quant" in name.lower():
            settings = folder.read_settings(name)
            if settings is not None:
                yield _Announcement(name, settings)


def _flags(section: Mapping[str, Any], prefix: str = "") -> Iterator[Verdict]:
    """Quantisation announced by a plain key, such as ``expert_dtype: fp4``."""
    for key, value in section.items():
        name = key.lower()
        if key in _CONFIG_KEYS or "cache" in name:  # a cache's dtype is not the weights'
            continue
        for at, nested in _nested(key, value):
            yield from _flags(nested, f"{prefix}{at}.")
        if isinstance(value, str | int | float) and str(value).lower() not in _NO:
            odd = name.endswith("dtype") and str(value).lower().removeprefix("torch.") not in _PLAIN_DTYPES
            if odd or _FLAG_PARTS & set(name.split("_")):
                yield Verdict(_family(f"{name} {value}".lower()), prefix + key, repr(value))


def _judge(key: str, value: Any) -> Verdict | None:
    """Why an announcement may not travel; None for block-wise FP8, spelt exactly so, where engines look for it."""
    method = _method(value)
    if key.endswith(".json"):
        return Verdict(_SIDE_FILES.get(key, "other"), key, f"quantisation announced in {key}")
    if method is None:
        return Verdict(_family_by_keys(value), f"{key}.quant_method", "no quant_method")
    if method != BLOCK_FP8:
        return Verdict(_family(method.lower()), f"{key}.quant_method", repr(method))
    block = value.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)):
        found = "no weight_block_size" if block is None else ascii(block)[:200]
        return Verdict("fp8_per_tensor", f"{key}.weight_block_size", found)
    for option in sorted(set(value) - _READ_ELSEWHERE):
        if value[option] is not None and value[option] not in _KNOWN_OPTIONS.get(option, ()):
            family = _family(f"{option} {value[option]}".lower()) if option == "expert_dtype" else "other"
            return Verdict(family, f"{key}.{option}", ascii(value[option])[:200])
    if key not in _TRAVELLING_KEYS:
        return Verdict("other", key, "a quantisation announced where engines do not look for it")
    return None


def _method(value: Any) -> str | None:
    method = value.get("quant_method") if isinstance(value, Mapping) else None
    return method if isinstance(method, str) and method else None


def _family(text: str) -> str:
    """The family of a method's name, or of a key and its value; both in small letters."""
    for part, family in (
        ("marlin", "marlin"),
        ("compressed", "compressed-tensors"),
        ("nvfp4", "nvfp4"),
        ("modelopt_fp4", "nvfp4"),
        ("modelopt", "modelopt"),
        ("awq", "awq"),
        ("gptq", "gptq"),
        ("fp4", "mxfp4"),
        ("bitsandbytes", "bitsandbytes"),
        ("load_in_", "bitsandbytes"),
        ("gguf", "gguf"),
        ("fbgemm_fp8", "fp8_per_tensor"),
        ("ptpc_fp8", "fp8_per_tensor"),
    ):
        if part in text:
            return family
    return "other"


def _family_by_keys(value: Any) -> str:
    """The family of a quantisation config that does not name its method, by keys that only one family writes."""
    keys = set(value) if isinstance(value, Mapping) else set()
    for family, own in (
        ("compressed-tensors", {"config_groups", "quantization_status"}),
        ("modelopt", {"quant_algo", "producer"}),
        ("bitsandbytes", {"load_in_4bit", "load_in_8bit"}),
        ("gptq", {"desc_act", "damp_percent"}),
        ("awq", {"zero_point", "w_bit"}),
    ):
        if keys & own:
            return family
    return "other"


def _normalised(key: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A block-wise FP8 config in the form that is hashed: equal meaning, equal form."""
    rest = {name: item for name, item in value.items() if name not in SKIP_LIST_KEYS and item is not None}
    if "fmt" in rest:
        rest["fmt"] = "e4m3"  # however it is spelt
    return {**rest, "skipped": SkipList.of(value, key).entries}


def _contradiction(announced: Quantization, tensors: Mapping[str, TensorInfo]) -> Verdict | None:
    """What the headers hold that the announcement does not allow."""
    state = _STATE_NAMES if announced.method == BLOCK_FP8 else (*_STATE_NAMES, block_scale.SUFFIX)
    for name, info in tensors.items():
        if name.endswith(state):
            said = "none such" if announced.method == BLOCK_FP8 else "no quantisation"
            key = f"the tensor {name} in {info.file}"
            return Verdict("other", key, f"what belongs to a quantisation; the config announces {said}")
        if info.dtype.startswith(_QUANTIZED_DTYPES):
            fits = announced.method == BLOCK_FP8 and info.dtype == "F8_E4M3"
        else:
            fits = info.dtype not in _INTEGER_DTYPES or len(info.shape) < 2 or not name.endswith(_PACKED_NAMES)
        if not fits:
            said = "no quantisation" if announced.method == UNQUANTIZED else "block-wise fp8"
            key = f"the dtype of {name} in {info.file}"
            return Verdict("other", key, f"{info.dtype}, which contradicts the config: it announces {said}")
    return None


def _check_fp8_layers(tensors: Mapping[str, TensorInfo]) -> None:
    """Check that every FP8 weight has its scales and every scale its weight, and that there is at least one."""
    weights = {name for name, info in tensors.items() if info.dtype == "F8_E4M3"}
    for name, info in tensors.items():
        scale, weight = name + block_scale.SUFFIX, name.removesuffix(block_scale.SUFFIX)
        if name in weights and (scale not in tensors or tensors[scale].dtype not in _SCALE_DTYPES):
            dtypes = ", ".join(sorted(_SCALE_DTYPES))
            raise _without_partner(name, info, "has no usable scales", f"{scale} in {dtypes}", tensors.get(scale))
        if weight != name and weight not in weights:
            raise _without_partner(
                name, info, "is the scale of no FP8 weight", f"{weight} in F8_E4M3", tensors.get(weight)
            )
    if not weights:
        raise refusal(
            "quant_conflict",
            "The config announces block-wise fp8, but no weight is stored so",
            expected="weights in F8_E4M3",
            found=", ".join(sorted({info.dtype for info in tensors.values()})),
            remedy="Remove quantization_config from config.json, or download the weights again",
            file="config.json",
        )


def _without_partner(
    name: str, info: TensorInfo, lacks: str, expected: str, there: TensorInfo | None
) -> CheckpointError:
    return refusal(
        "quant_conflict",
        f"{name} in {info.file} {lacks}",
        expected=expected,
        found="nothing of that name" if there is None else there.dtype,
        remedy="Download config and weights again, of one revision",
        file=info.file,
        tensor=name,
    )
