"""What the fields of a config.json mean, as data that is read both ways: to a TransformerConfig and back."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformer.config._checks import ConfigError
from transformer.config._model import TransformerConfig
from transformer.config._parts import LayerKind, RotaryScaling
from transformer.config._paths import get_path

REQUIRED = object()
"""default of a field that must be there"""

NEUTRAL = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "auto_map"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "use_bfloat16", "torchscript"),
        *("use_cache", "cache_implementation", "gradient_checkpointing", "return_dict", "output_attentions"),
        *("output_hidden_states", "output_router_logits", "return_dict_in_generate", "output_scores"),
        *("task_specific_params", "prefix", "tokenizer_class", "finetuning_task", "problem_type", "tf_legacy_loss"),
        *("id2label", "label2id", "num_labels", "classifier_dropout", "chunk_size_feed_forward", "pretraining_tp"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id"),
        *("unk_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids"),
        *("begin_suppress_tokens", "suppress_tokens", "max_length", "min_length", "max_new_tokens", "do_sample"),
        *("early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p"),
        *("typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "num_return_sequences"),
        *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "remove_invalid_values"),
    )
)
"""fields of every model that change nothing of what it computes from given tokens: names, generation, special ids"""

FIXED_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "pruned_heads": ({}, None),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "sparse_attention": (None,),
    "quantization_config": (None,),
    "tie_encoder_decoder": (False,),
}
"""fields of every model that are understood with these values alone"""


ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""activations by the reference's names"""


class FieldError(ConfigError):
    """A field of config.json whose value is missing or has no counterpart here."""


class Codec(ABC):
    """Some fields of config.json and what they are in a TransformerConfig."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The fields of config.json that this reads."""

    @abstractmethod
    def read(self, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a TransformerConfig; `changes` holds those that were read before. FieldError: not understood."""

    @abstractmethod
    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """Fields of a config.json. What can't be said there is left out, and found when it is read back."""


_RESOLVED = {
    "d_ff": "feed_forward_width",
    "num_kv_heads": "kv_heads",
    "attention.head_dim": "size_of_head",
    "attention.value_dim": "size_of_value",
    "stack.num_encoder_layers": "encoder_layers",
    "stack.num_decoder_layers": "decoder_layers",
}
"""attributes of a TransformerConfig that may be None, and the property with the value that None stands for"""


@dataclass(frozen=True)
class Field(Codec):
    """One field for one: `name` in config.json, `attribute` of a TransformerConfig, `default` where it is missing."""

    name: str
    attribute: str
    default: Any = REQUIRED
    values: Mapping[Any, Any] | None = None
    """value in config.json -> value here; the first of those that mean the same is written"""
    nullable: bool = False
    """whether null is a value of this field in the reference; the reference rejects null in all others"""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        value = values.get(self.name, self.default)
        if value is REQUIRED:
            raise FieldError(f"{self.name} is missing")
        if self.values is not None:
            if isinstance(value, dict | list) or value not in self.values:
                known = ", ".join(map(str, self.values))
                raise FieldError(f"{self.name} is {value!r}, of which there are {known} here")
            value = self.values[value]
        return {self.attribute: value}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        value = get_path(config, self.attribute)
        if self.values is not None:
            named = [theirs for theirs, ours in self.values.items() if ours == value]
            return {self.name: named[0]} if named else {}
        if value is not None or self.nullable:
            return {self.name: value}
        if self.attribute in _RESOLVED:
            return {self.name: getattr(config, _RESOLVED[self.attribute])}
        if self.attribute == "initializer_range":  # nothing that a trained model computes depends on it
            return {self.name: self.default}
        return {}


def sizes(**fields: tuple[str, int]) -> tuple[Field, ...]:
    """Fields that are sizes of the model: attribute = (name in config.json, default)."""
    return tuple(Field(name, attribute, default) for attribute, (name, default) in fields.items())


def training_fields(
    dropout: str, attention: str, initializer: str = "initializer_range", *, rates: float = 0.0, spread: float = 0.02
) -> tuple[Field, ...]:
    """The fields that change training alone: rates of dropout of the layers and of attention weights, and the spread of
    initial weights, by their names.
    """
    return (
        Field(dropout, "dropout_rate", rates),
        Field(attention, "attention.dropout_rate", rates),
        Field(initializer, "initializer_range", spread),
    )


@dataclass(frozen=True)
class Fixed(Codec):
    """The field `name`, which must have one of the `choices`, the first where it is missing."""

    name: str
    choices: tuple[Any, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        value = values.get(self.name, self.choices[0])
        if value not in self.choices:
            raise FieldError(f"{self.name} is {value!r}, which changes what is computed and is not built here")
        return {}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        return {self.name: self.choices[0]}


@dataclass(frozen=True)
class Unread(Codec):
    """`fields` that change nothing of what a trained model computes: dropout of other places, losses, limits."""

    fields: tuple[str, ...]
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """what is written of them: what other programs want to find"""

    @property
    def names(self) -> tuple[str, ...]:
        return self.fields

    def read(self, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        return dict(self.written)


@dataclass(frozen=True)
class Labels(Codec):
    """Number of classes: `id2label`, or `num_labels`; two where neither is there."""

    names = ("id2label", "label2id", "num_labels")

    def read(self, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        labels = values.get("id2label")
        return {"output.num_classes": values.get("num_labels") or 2 if labels is None else len(labels)}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        names = [f"LABEL_{i}" for i in range(config.output.num_classes or 0)]
        return {
            "id2label": {str(i): name for i, name in enumerate(names)},
            "label2id": {n: i for i, n in enumerate(names)},
        }


@dataclass(frozen=True)
class Biases(Codec):
    """Which maps have a bias: one field for all four of attention, one for the feed-forward (false where missing)."""

    attention: str
    feed_forward: str | None = None
    """None: a family whose feed-forward never has one"""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.attention,) if self.feed_forward is None else (self.attention, self.feed_forward)

    def read(self, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        everywhere = ("query", "key", "value", "out")
        feed_forward = self.feed_forward is not None and values.get(self.feed_forward, False)
        return {"use_bias": feed_forward, "attention.biases": everywhere if values.get(self.attention) else ()}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        biases = config.attention.biases
        attention = config.use_bias if biases is None else bool(biases)
        return {self.attention: attention} | ({self.feed_forward: config.use_bias} if self.feed_forward else {})


SCALINGS = ("linear", "llama3", "yarn")
"""kinds of rotary scaling that are understood"""


_STRETCH = {"factor": "factor", "original_max_position_embeddings": "original_length"}


def read_rotary(
    parameters: Mapping[str, Any], default_base: float, length: int | None
) -> tuple[float, RotaryScaling | None]:
    """Base and scaling of `rope_parameters` (or of older files' `rope_scaling` with `rope_theta` put into it); `length`
    stands in for a missing original length. FieldError: a kind that is not built, or fields that are not understood.
    """
    base = parameters.get("rope_theta")
    base = float(default_base if base is None else base)
    kind = parameters.get("rope_type", parameters.get("type")) or "default"
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if kind == "default":
        fields, needed = {}, set()
    elif kind == "linear":
        fields, needed = {"factor": "factor"}, {"factor"}
    elif kind == "llama3":
        fields = _STRETCH | {"low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor"}
        needed = set(fields)
    elif kind == "yarn":
        fields = _STRETCH | {name: name for name in ("beta_fast", "beta_slow", "attention_factor", "truncate")}
        needed = {"factor"}
    else:
        raise FieldError(f"rotary scaling is {kind!r}, of which there are default, {', '.join(SCALINGS)} here")
    if missing := needed - parameters.keys():
        raise FieldError(f"rotary scaling {kind} lacks {', '.join(sorted(missing))}")
    if strange := parameters.keys() - known - fields.keys() - _IGNORED_BY[kind]:
        raise FieldError(f"rotary scaling {kind} has {', '.join(sorted(strange))}, which is not understood")
    if not fields:
        return base, None
    changes = {ours: parameters[theirs] for theirs, ours in fields.items() if parameters.get(theirs) is not None}
    if kind == "yarn" and "original_length" not in changes and length is not None:
        changes["original_length"] = length
    return base, RotaryScaling(kind=kind, **changes)


_IGNORED_BY = {
    "default": {"factor", "original_max_position_embeddings", "max_position_embeddings"},
    "linear": {"original_max_position_embeddings"},
    "llama3": set(),
    "yarn": set(),
}


def write_rotary(base: float, scaling: RotaryScaling | None) -> dict[str, Any]:
    """`rope_parameters` that `read_rotary` reads as these."""
    parameters: dict[str, Any] = {"rope_theta": base, "rope_type": "default" if scaling is None else scaling.kind}
    if scaling is None:
        return parameters
    parameters["factor"] = scaling.factor
    if scaling.kind == "llama3":
        parameters |= {
            "original_max_position_embeddings": scaling.original_length,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
        }
    if scaling.kind == "yarn":
        parameters |= {
            "original_max_position_embeddings": scaling.original_length,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
        if scaling.attention_factor is not None:
            parameters["attention_factor"] = scaling.attention_factor
    return parameters


@dataclass(frozen=True)
class Rope(Codec):
    """Rotary positions: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    Read after the sizes of heads, of which `partial_rotary_factor` is a share. `share_name` and `base_name` are what a
    family calls that and the base, which is `default_base` where the file doesn't say.
    """

    default_base: float = 10_000.0
    """where the file doesn't say"""
    default_share: float | None = None
    """what part of a head turns where the file doesn't say; None: a family that always turns all of it"""
    share_name: str = "partial_rotary_factor"
    """field of the share, beside `rope_parameters`"""
    base_name: str = "rope_theta"
    """field of the base, beside `rope_parameters`"""

    @property
    def names(self) -> tuple[str, ...]:
        return (
            "rope_parameters",
            "rope_theta",
            "rope_scaling",
            "max_position_embeddings",
            self.share_name,
            self.base_name,
        )

    def read(self, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        given = values.get("rope_scaling") or values.get("rope_parameters") or {}
        parameters = {"rope_theta": values.get(self.base_name)} | given
        whole = 1.0 if self.default_share is None else self.default_share
        share = parameters.get("partial_rotary_factor", values.get(self.share_name, whole))
        if self.default_share is None and share != 1:
            raise FieldError(f"{self.share_name} is {share!r}, but heads of this family turn whole")
        base, scaling = read_rotary(parameters, self.default_base, values.get("max_position_embeddings"))
        head = changes.get("attention.head_dim") or changes["d_model"] // changes["num_heads"]
        turned = int(head * share)
        return {
            "rotary.base": base,
            "rotary.scaling": scaling,
            "rotary.dim": None if turned == head else turned,
        }

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        parameters = write_rotary(config.rotary.base, config.rotary.scaling)
        share = {}
        if self.default_share is not None:
            head = config.size_of_head
            turned = config.rotary.dim or head
            # Rounded down, a share is one dimension too few: 30 / 44 * 44 is less than 30.
            part = turned / head if int(head * (turned / head)) == turned else math.nextafter(turned / head, 1.0)
            share = {"partial_rotary_factor": part}
        scaled = 1.0 if config.rotary.scaling is None else config.rotary.scaling.factor
        trained = 131_072 if config.rotary.scaling is None else config.rotary.scaling.original_length
        return {
            "rope_parameters": parameters | share,
            self.base_name: config.rotary.base,
            "max_position_embeddings": int(trained * scaled),
        } | ({self.share_name: share["partial_rotary_factor"]} if share else {})


def fold(kinds: Sequence[LayerKind]) -> dict[str, tuple[LayerKind, ...]]:
    """prefix, period and suffix that say the same as this list of kinds, as briefly as can be."""
    best: tuple[int, int, int] | None = None
    count = len(kinds)
    for size in range(1, count + 1):
        for first in range(count - size + 1):
            last = first + size
            if best is not None and last > best[0]:  # can't be as brief any more
                break
            while last + size <= count and list(kinds[last : last + size]) == list(kinds[first : first + size]):
                last += size
            cost = (first + size + count - last, first, size)
            best = cost if best is None or cost < best else best
    _, first, size = best
    repeats = 1
    while list(kinds[first + repeats * size : first + (repeats + 1) * size]) == list(kinds[first : first + size]):
        repeats += 1
    return {
        "stack.prefix": tuple(kinds[:first]),
        "stack.period": tuple(kinds[first : first + size]),
        "stack.suffix": tuple(kinds[first + repeats * size :]),
    }
