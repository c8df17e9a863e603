"""Serialize frozen dataclasses to JSON and back. A missing, unknown or mistyped field is an error.

Every dataclass becomes a JSON object with its tag under the key `class` (a Python keyword, so never a field): the class
attribute `kind` if there is one, otherwise the class name. Decoding follows the type hints.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union

from transformer.config._checks import ConfigError, nearest
from transformer.config._parts import Patches, Series
from transformer.config._paths import former_names_accepted

TAG = "class"

FORMER_DEFAULTS: dict[str, dict[str, Any]] = {"labeled_text": {"hold_out": "end"}}
"""values of newer fields with which a recipe of an earlier version means the same as when it was written"""

LATER = {
    "EmbeddingOptions": ("width", "per_layer_width", "per_layer_vocab_size"),
    "EvaluationConfig": ("beam_size", "beam_alpha"),
    "Execution": ("sow_weights", "experts", "quantization", "quantization_paths"),
    "json_lines": ("packing",),
    "labeled_text": ("hold_out",),
    "ImageProcessor": ("multiple", "min_pixels", "max_pixels", "max_patches"),
    "AttentionOptions": ("output_gate", "qk_norm_scale", "value_norm"),
    "LayerKind": (
        *("self_attention", "moe", "attention_norm", "rotary", "gated_delta", "chunk", "temperature", "qk_norm"),
        *("head_dim", "num_kv_heads", "keys_as_values", "stores_kv", "reads_kv", "d_ff", "within_segments"),
    ),
    "LoggingConfig": ("writers", "project"),
    "LoRA": ("rslora", "dora", "base"),
    "MoE": (
        *("router_bias", "scoring", "e_score_correction_bias", "num_groups", "top_groups", "routed_scaling_factor"),
        *("shared_d_ff", "shared_gate", "router_norm", "expert_scale", "beside_dense", "scale_inputs"),
    ),
    "OptimizerConfig": ("decay_fraction",),
    "OutputOptions": ("pooler", "num_targets", "target_range"),
    "Patches": ("class_token", "distillation_token", "registers", "drop_remainder", "resize_positions"),
    "StackOptions": ("layer_scale", "layer_scalar", "encoder_num_heads", "encoder_d_ff"),
    "ParallelConfig": (
        *("coordinator", "num_processes", "process_id", "patience", "dcn", "optimizer_memory_host_offload"),
    ),
    **dict.fromkeys(("number_words", "parallel_text"), ("batch_tokens", "buckets", "row_multiple", "packed_length")),
    "Recipe": ("parallel", "lora", "dpo", "grpo", "distill", "origin"),
    "RotaryOptions": ("sections", "restart_frequencies"),
    "RotaryScaling": ("attention_factor", "truncate", "short_factors", "long_factors", "share"),
    "TrainingConfig": ("z_loss", "loss_tokens", "spike_policy", "spike_deviations", "embedding_gradient_dtype"),
    "TransformerConfig": (
        *("attention_biases", "embedding_norm", "source_max_length", "position_table_per_layer", "token_types"),
        *("head_transform", "output_bias", "logit_scale", "qk_norm_scope", "causal", "normalize_embeddings", "patches"),
        *("mel_bins", "mla", "series", "final_norm", "input"),
    ),
}
"""fields that were added to a class later, so that older files lack them; they then have their default"""

FORMER_TYPES = {"patches": Patches | None, "series": Series | None, "mel_bins": int | None}
"""former fields whose type differs from the field that replaces them"""


def tag_of(cls: type) -> str:
    """Return the tag of a dataclass in JSON."""
    kind = getattr(cls, "kind", None)
    is_field = any(field.name == "kind" for field in dataclasses.fields(cls))
    return kind if isinstance(kind, str) and not is_field else cls.__name__


def encode(value: Any) -> Any:
    """Convert a tree of dataclasses, tuples, lists and plain values to JSON values.

    Raises:
        TypeError: a value of any other type.
    """
    if dataclasses.is_dataclass(value):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {TAG: tag_of(type(value))} | fields
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} can't be written to JSON: {value!r}")


def decode(hint: Any, value: Any, where: str) -> Any:
    """Convert the JSON value `value` of `encode` back to a value of type `hint`.

    Args:
        hint: type of the result.
        value: JSON value.
        where: path of the value, for error messages.

    Raises:
        ConfigError: unknown, missing or mistyped fields; the message has the path and suggests the nearest name.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{where} must be one of {', '.join(map(str, arguments))}, got {value!r:.80}.")
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, value, where)
    if origin in (tuple, list):
        return _decode_sequence(origin, arguments, value, where)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(_choose({tag_of(hint): hint}, value, where), value, where)
    # JSON writers may drop ".0". 2**1023 is the largest power of 2 in a float; float() of 2**1024 would overflow.
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1023:
        return float(value)
    if hint is type(None) and value is None:
        return None
    if not isinstance(hint, type) or not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} must be of type {getattr(hint, '__name__', hint)}, got {value!r:.80}.")
    return value


def _choose(choices: Mapping[str, type], value: Any, where: str) -> type:
    if not isinstance(value, dict) or TAG not in value:
        raise ConfigError(f"{where} must be an object with a {TAG!r} ({', '.join(choices)}), got {value!r:.80}.")
    if not isinstance(value[TAG], str) or value[TAG] not in choices:
        hint = nearest(value[TAG], choices) if isinstance(value[TAG], str) else ""
        raise ConfigError(f"{where} has class {value[TAG]!r:.80}, which is not one of {', '.join(choices)}.{hint}")
    return choices[value[TAG]]


def _decode_dataclass(cls: type, value: dict, where: str) -> Any:
    names = [field.name for field in dataclasses.fields(cls)]
    former: dict[str, str] = getattr(cls, "former_names", {})
    for name in value:
        if name not in names and name not in former and name != TAG:
            raise ConfigError(f"{where} has an unknown field {name!r:.80}.{nearest(name, names)}")
    later = [name for name in LATER.get(tag_of(cls), ()) if name not in value]
    missing = [name for name in names if name not in value and name not in later]
    missing = [name for name in missing if not _has_former(former, name, value, later)]
    if missing:
        raise ConfigError(
            f"{where} lacks {', '.join(missing)}: it was written by a different version, or is incomplete."
        )
    value = FORMER_DEFAULTS.get(tag_of(cls), {}) | value
    decoded = {name: decode(_hint(cls, name), value[name], f"{where}.{name}") for name in value if name != TAG}
    with former_names_accepted():
        return cls(**decoded)


def _has_former(former: Mapping[str, str], name: str, value: Mapping[str, Any], later: Sequence[str]) -> bool:
    """Return whether `value` has the former fields that the field `name` replaces."""
    replaced = [old for old, path in former.items() if path.partition(".")[0] == name]
    return bool(replaced) and all(old in value or old in later for old in replaced)


def _hint(cls: type, name: str) -> Any:
    """Return the type of a field, given its current or a former name."""
    if name in FORMER_TYPES and name in getattr(cls, "former_names", {}):
        return FORMER_TYPES[name]
    for part in getattr(cls, "former_names", {}).get(name, name).split("."):
        cls = _hints(cls)[part]
    return cls


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


def _decode_union(arguments: tuple, value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    if isinstance(value, dict):
        choices = {tag_of(kind): kind for kind in arguments if dataclasses.is_dataclass(kind)}
        return _decode_dataclass(_choose(choices, value, where), value, where)
    errors = []
    for argument in arguments:
        if argument is not type(None):
            try:
                return decode(argument, value, where)
            except ConfigError as error:
                errors.append(error)
    raise errors[0]


def _decode_sequence(origin: type, arguments: tuple, value: Any, where: str) -> Any:
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list, got {value!r:.80}.")
    if origin is list or (len(arguments) == 2 and arguments[1] is Ellipsis):
        hints = [arguments[0]] * len(value)
    elif len(arguments) == len(value):
        hints = list(arguments)
    else:
        raise ConfigError(f"{where} must have {len(arguments)} items, got {len(value)}.")
    return origin(decode(hints[index], item, f"{where}[{index}]") for index, item in enumerate(value))


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the plain values by dotted field name, which `difference` compares and the command line can override."""
    if dataclasses.is_dataclass(value):
        flat = {}
        for field in dataclasses.fields(value):
            flat |= flatten(getattr(value, field.name), f"{prefix}.{field.name}" if prefix else field.name)
        return flat
    if isinstance(value, tuple) and any(dataclasses.is_dataclass(item) for item in value):
        flat = {}
        for index, item in enumerate(value):
            flat |= flatten(item, f"{prefix}.{index}")
        return flat
    return {prefix: value}
