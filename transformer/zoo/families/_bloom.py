"""BLOOM: decoder, pre-norm, ALiBi, normalized embeddings, one fused map for queries, keys and values per head."""

from __future__ import annotations

from dataclasses import dataclass

from transformer.config._model import TransformerConfig
from transformer.config._positions import ALiBiOptions
from transformer.zoo._family import LAYER_NORM, Family, variants
from transformer.zoo._fields import Codec, Field, FieldError, Fields, Fixed, Unread, training_fields
from transformer.zoo.families._gpt_neox import megatron_layer_rules
from transformer.zoo.families._llama import decoder_heads
from transformer.zoo.weights._rules import Rule, norm


@dataclass(frozen=True)
class OneOf(Codec):
    """A field with several synonymous names, whose values must be equal. The first name is written."""

    names: tuple[str, ...]
    attribute: str

    def read(self, values: Fields, changes: Fields) -> Fields:
        given = {name: values[name] for name in self.names if name in values}
        if not given:
            raise FieldError(f"{self.names[0]} is missing")
        if len(set(given.values())) > 1:
            raise FieldError(" but ".join(f"{name} is {value}" for name, value in given.items()))
        return {self.attribute: next(iter(given.values()))}

    def write(self, config: TransformerConfig) -> Fields:
        return {self.names[0]: getattr(config, self.attribute)}


_RULES = [
    Rule("transformer.word_embeddings.weight", "embedding/embedding"),
    *norm("transformer.word_embeddings_layernorm", "decoder/embedding_norm"),
    *megatron_layer_rules("transformer.h.{layer}.", "self_attention"),
    *norm("transformer.ln_f", "decoder/final_norm"),
]

_VARIANTS = {
    "bloom-560m": (559_214_592, 1024, 24, 16),
    "bloom-1b1": (1_065_314_304, 1536, 24, 16),
    "bloom-1b7": (1_722_408_960, 2048, 24, 16),
    "bloom-3b": (3_002_557_440, 2560, 30, 32),
    "bloom-7b1": (7_069_016_064, 4096, 30, 32),
    "bloom": (176_247_271_424, 14_336, 70, 112),
}

BLOOM = Family(
    name="bloom",
    title="BLOOM",
    citation="BigScience Workshop 2022, arXiv 2211.05100",
    heads=decoder_heads("Bloom"),
    constants=LAYER_NORM
    | {"position": ALiBiOptions(), "embedding.norm": True}
    | {"parameters.use_bias": True, "feed_forward.activation": "gelu_tanh"},
    fields=(
        Field("vocab_size", "vocab_size"),
        OneOf(("hidden_size", "n_embed"), "d_model"),
        OneOf(("n_layer", "num_hidden_layers"), "num_layers"),
        OneOf(("n_head", "num_attention_heads"), "num_heads"),
        Field("layer_norm_epsilon", "norm.epsilon", 1e-5),
        Field("tie_word_embeddings", "embedding.tie", True),
        *training_fields("hidden_dropout", "attention_dropout"),
        Fixed("apply_residual_connection_post_layernorm", (False,)),
        Fixed("slow_but_exact", (False,)),
        # Options of the training program.
        Unread(
            ("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi")
            + ("seq_length", "skip_bias_add", "skip_bias_add_qkv", "n_inner")
        ),
    ),
    rules=_RULES,
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.word_embeddings.weight"},
    variants=variants("bigscience/", _VARIANTS, ("hidden_size", "n_layer", "n_head"), vocab_size=250_880),
)
