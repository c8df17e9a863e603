"""Bidirectional mappings between the fields of a Hugging Face config.json and the fields of a TransformerConfig.

A `Codec` converts one or several fields in both directions. A family lists its codecs, in the order in which they are
read. "The reference" is the implementation of the same model in the Hugging Face transformers library.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformer.config._checks import ConfigError
from transformer.config._model import TransformerConfig
from transformer.config._paths import get_path

Fields = dict[str, Any]
"""Fields of config.json, or of a TransformerConfig by path."""
Json = str | float | bool | list | dict | None
"""A value in a config.json."""

REQUIRED = object()
"""Default value that marks a field as required."""

NEUTRAL = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map"),
        *("attn_implementation", "use_bfloat16", "torchscript"),
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
        *("mask_type", "random_mask_ratio", "num_forecast_mask_patches", "channel_consistent_masking"),
        "unmasked_channel_indices",
    )
)
"""Fields of all families that do not affect the logits for given inputs: names, generation options, special ids, and
the choice of the patches that pretraining on time series masks."""

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
"""Fields of all families that are supported only with these values; the first is the default."""

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""Names of activation functions in config.json, and their names in a TransformerConfig."""


def written_as(field: str, value: object, names: Mapping[Any, Any] = ACTIVATIONS) -> Fields:
    """Return the field with the first of the names in config.json for a value, or nothing if there is none."""
    return next(({field: theirs} for theirs, ours in names.items() if ours == value), {})


Table = Mapping[str, tuple[str, Json]]
"""Field of config.json -> attribute of a part of a TransformerConfig, and the default."""


def read_table(values: Fields, table: Table) -> Fields:
    """Return the attributes of a part of a TransformerConfig."""
    return {ours: values.get(name, default) for name, (ours, default) in table.items()}


def write_table(part: object, table: Table) -> Fields:
    """Return the fields of config.json for a part of a TransformerConfig."""
    return {name: getattr(part, ours) for name, (ours, _) in table.items()}


class FieldError(ConfigError):
    """Raised if a field of config.json is missing or has a value that is not supported."""


class Codec(ABC):
    """A two-way mapping between one or several fields of config.json and fields of a TransformerConfig."""

    names: tuple[str, ...]
    """Names of the config.json fields that `read` uses."""

    @abstractmethod
    def read(self, values: Fields, changes: Fields) -> Fields:
        """Return fields of a TransformerConfig, after the `changes` of earlier codecs. FieldError if not supported."""

    @abstractmethod
    def write(self, config: TransformerConfig) -> Fields:
        """Convert a TransformerConfig to fields of config.json.

        Values that config.json cannot represent are left out. `Family.write` detects them by reading the result back.
        """


@dataclass(frozen=True)
class Named(Codec):
    """A codec of the single field `name`."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class Converted(Named):
    """A field whose value `load` converts to fields of a TransformerConfig, and `save` back."""

    default: Json
    load: Callable[[Any, Fields], Fields]
    """Function of the value and the fields that earlier codecs have read."""
    save: Callable[[TransformerConfig], Json]

    def read(self, values: Fields, changes: Fields) -> Fields:
        return self.load(values.get(self.name, self.default), changes)

    def write(self, config: TransformerConfig) -> Fields:
        return {self.name: self.save(config)}


_RESOLVED = {
    "feed_forward.d_ff": "feed_forward_width",
    "attention.num_kv_heads": "kv_heads",
    "attention.head_dim": "size_of_head",
    "attention.value_dim": "size_of_value",
    "stack.num_encoder_layers": "encoder_layers",
    "stack.num_decoder_layers": "decoder_layers",
}
"""Attributes of a TransformerConfig that may be None, and the property that holds the resolved value."""


@dataclass(frozen=True)
class Field(Named):
    """A one-to-one mapping: field `name` of config.json (by default `default`), `attribute` of a TransformerConfig."""

    attribute: str
    default: Json | object = REQUIRED
    values: Mapping[Any, Any] | None = None
    """Value in config.json -> value in the TransformerConfig. Of several synonyms, `write` uses the first."""
    nullable: bool = False
    """Whether the reference accepts null for this field; it rejects null for all other fields."""

    def read(self, values: Fields, changes: Fields) -> Fields:
        value = values.get(self.name, self.default)
        if value is REQUIRED:
            raise FieldError(f"{self.name} is missing")
        if self.values is not None:
            if isinstance(value, dict | list) or value not in self.values:
                known = ", ".join(map(str, self.values))
                raise FieldError(f"{self.name} is {value!r}, which is not supported (supported: {known})")
            value = self.values[value]
        return {self.attribute: value}

    def write(self, config: TransformerConfig) -> Fields:
        try:
            value = get_path(config, self.attribute)
        except AttributeError:  # a field of another position scheme
            return {}
        if self.values is not None:
            return written_as(self.name, value, self.values)
        if value is not None or self.nullable:
            return {self.name: value}
        if self.attribute in _RESOLVED:
            return {self.name: getattr(config, _RESOLVED[self.attribute])}
        if self.attribute == "parameters.initializer_range":  # does not affect a trained model's outputs
            return {self.name: self.default}
        return {}


def activation_field(name: str, default: str) -> Field:
    """Return the field of the activation, written as its default: the reference rounds synonyms differently."""
    return Field(name, "feed_forward.activation", default, {default: ACTIVATIONS[default]} | ACTIVATIONS)


def sizes(**fields: tuple[str, int]) -> tuple[Field, ...]:
    """Return fields for model sizes, given as attribute=(name in config.json, default)."""
    return tuple(Field(name, attribute, default) for attribute, (name, default) in fields.items())


LAYER_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
"""Usual names of sizes in config.json."""


def layer_sizes(*sizes: int, **fields: Json) -> Fields:
    """Return sizes under `LAYER_SIZES`, the last of which may be missing, with further fields."""
    return dict(zip(LAYER_SIZES, sizes, strict=False)) | fields


LARGE = layer_sizes(1024, 4096, 24, 16)
"""Sizes of the large models of BERT, ViT, and families derived from them."""


def training_fields(
    dropout: str, attention: str, initializer: str = "initializer_range", *, rates: float = 0.0, spread: float = 0.02
) -> tuple[Field, ...]:
    """Return the dropout fields of layers and attention (default `rates`), and that of initial weights (`spread`)."""
    return (
        Field(dropout, "dropout_rate", rates),
        Field(attention, "attention.dropout_rate", rates),
        Field(initializer, "parameters.initializer_range", spread),
    )


@dataclass(frozen=True)
class Fixed(Named):
    """The field `name`, which must have one of the values `choices`. The first is the default and is written."""

    choices: tuple[Any, ...]

    def read(self, values: Fields, changes: Fields) -> Fields:
        value = values.get(self.name, self.choices[0])
        if value not in self.choices:
            raise FieldError(f"{self.name} is {value!r}, which changes the computation and is not supported")
        return {}

    def write(self, config: TransformerConfig) -> Fields:
        return {self.name: self.choices[0]}


@dataclass(frozen=True)
class Unread(Codec):
    """Ignored fields, which do not affect a trained model's outputs: other dropout rates, losses, limits."""

    names: tuple[str, ...]
    written: Fields = dataclasses.field(default_factory=dict)
    """Fields and values that are written because other programs expect them."""

    def read(self, values: Fields, changes: Fields) -> Fields:
        return {}

    def write(self, config: TransformerConfig) -> Fields:
        return dict(self.written)


class Labels(Codec):
    """Number of classes, from `id2label` or `num_labels`; two if both are missing."""

    names = ("id2label", "label2id", "num_labels")

    def read(self, values: Fields, changes: Fields) -> Fields:
        labels = values.get("id2label")
        return {"output.num_classes": values.get("num_labels") or 2 if labels is None else len(labels)}

    def write(self, config: TransformerConfig) -> Fields:
        names = [f"LABEL_{i}" for i in range(config.output.num_classes or 0)]
        return {
            "id2label": {str(i): name for i, name in enumerate(names)},
            "label2id": {n: i for i, n in enumerate(names)},
        }


@dataclass(frozen=True)
class Biases(Codec):
    """Which linear maps have a bias: a field for all maps of attention, one for the feed-forward layers, both false."""

    attention: str
    feed_forward: str | None = None
    """None: the feed-forward layers of this family never have a bias."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.attention,) if self.feed_forward is None else (self.attention, self.feed_forward)

    def read(self, values: Fields, changes: Fields) -> Fields:
        everywhere = ("query", "key", "value", "out")
        feed_forward = self.feed_forward is not None and values.get(self.feed_forward, False)
        attention = everywhere if values.get(self.attention) else ()
        return {"parameters.use_bias": feed_forward, "attention.biases": attention}

    def write(self, config: TransformerConfig) -> Fields:
        # attention.biases = None means that attention follows parameters.use_bias.
        biases = config.attention.biases
        attention = config.parameters.use_bias if biases is None else bool(biases)
        return {self.attention: attention} | (
            {self.feed_forward: config.parameters.use_bias} if self.feed_forward else {}
        )
