"""T5 1.0, 1.1 and FLAN-T5: encoder-decoder, pre-norm, RMSNorm, relative position bias shared within a stack."""

from __future__ import annotations

from dataclasses import dataclass

from transformer.config._model import TransformerConfig
from transformer.config._positions import T5BiasOptions
from transformer.nn.models._encoders import Embedder
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.zoo._family import Family, Head, variants
from transformer.zoo._fields import ACTIVATIONS, Codec, Field, FieldError, Fields, Fixed, Unread
from transformer.zoo.weights._rules import MATRIX, Rule, linear, modules, norm

T5_CONSTANTS = {
    "norm.kind": "rms_norm",
    "position": T5BiasOptions(),
    "parameters.use_bias": False,
    "embedding.scale": False,
    "attention.scale": 1.0,
}
"""Constants of all versions of T5."""

T5_COPIES = dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight") | {
    "lm_head.weight": "shared.weight"
}
"""Copies of the embedding table; lm_head only if the output map is tied."""

T5_IGNORED = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)
"""An unused table in early files: cross-attention has no position bias."""


def t5_rules(config: TransformerConfig) -> list[Rule]:
    """Return the rules of T5 and umT5."""
    table = "layer.0.SelfAttention.relative_attention_bias.weight"
    rules = [Rule("shared.weight", "embedding/embedding")]
    for stack, feed_forward in {"encoder": 1, "decoder": 2}.items():
        layer, ours = f"{stack}.block.{{layer}}.", f"{stack}/{{layer}}/"
        dense = f"{layer}layer.{feed_forward}.DenseReluDense."
        rules += [
            Rule(f"{stack}.block.0.{table}", f"{stack}/position_table"),
            Rule(f"{layer}{table}", f"{ours}position_table"),
            *norm(f"{layer}layer.0.layer_norm", f"{ours}attention_norm"),
            *_attention(f"{layer}layer.0.SelfAttention", f"{ours}self_attention"),
            *norm(f"{layer}layer.1.layer_norm", f"{ours}cross_attention_norm"),
            *_attention(f"{layer}layer.1.EncDecAttention", f"{ours}cross_attention"),
            *norm(f"{layer}layer.{feed_forward}.layer_norm", f"{ours}feed_forward_norm"),
            *linear(f"{dense}wi_0", f"{ours}feed_forward/gate"),
            *linear(f"{dense}wi_1" if config.feed_forward.gated else f"{dense}wi", f"{ours}feed_forward/up"),
            *linear(f"{dense}wo", f"{ours}feed_forward/down"),
            *norm(f"{stack}.final_layer_norm", f"{stack}/final_norm"),
        ]
    return rules


def _attention(tensor: str, parameter: str) -> list[Rule]:
    return modules(f"{tensor}.", f"{parameter}/", {"query": "q", "key": "k", "value": "v", "out": "o"})


@dataclass(frozen=True)
class FeedForwardKind(Codec):
    """Activation and gate of the feed-forward layers.

    `feed_forward_proj` (with the default `default`) specifies both, for example "gated-gelu". `dense_act_fn` and
    `is_gated_act` override it.
    """

    default: str

    names = ("feed_forward_proj", "dense_act_fn", "is_gated_act")

    def read(self, values: Fields, changes: Fields) -> Fields:
        kind = values.get("feed_forward_proj", self.default)
        # For compatibility with early files, "gated-gelu" means the tanh approximation, gelu_new.
        activation = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
        activation = values.get("dense_act_fn", activation)
        if activation not in ACTIVATIONS:
            raise FieldError(
                f"feed_forward_proj is {kind!r}, but the supported activations are {', '.join(ACTIVATIONS)}"
            )
        return {
            "feed_forward.activation": ACTIVATIONS[activation],
            "feed_forward.gated": values.get("is_gated_act", kind.startswith("gated-")),
        }

    def write(self, config: TransformerConfig) -> Fields:
        name = next((theirs for theirs, ours in ACTIVATIONS.items() if ours == config.feed_forward.activation), None)
        if name is None:
            return {}
        kind = f"gated-{name}" if config.feed_forward.gated else name
        return {
            "feed_forward_proj": "gated-gelu" if kind == "gated-gelu_new" else kind,
            "dense_act_fn": name,
            "is_gated_act": config.feed_forward.gated,
        }


@dataclass(frozen=True)
class DecoderOutputs(Codec):
    """Weight tying and scaling of the output map.

    With `tie_word_embeddings`, the output map is the embedding table, and its inputs are divided by sqrt(d_model)
    (Raffel et al. 2019, section 2.1). The field `scale_field` overrides the scaling. If the files have an output map of
    their own, `tie_word_embeddings` is false here, regardless of config.json (`_pretrained._is_untied`).
    """

    scale_field: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return ("tie_word_embeddings",) if self.scale_field is None else ("tie_word_embeddings", self.scale_field)

    def read(self, values: Fields, changes: Fields) -> Fields:
        tied = values.get("tie_word_embeddings") is not False
        scaled = values.get(self.scale_field, tied)
        return {"embedding.tie": tied, "output.scale": changes["d_model"] ** -0.5 if scaled else None}

    def write(self, config: TransformerConfig) -> Fields:
        scaled = {} if self.scale_field is None else {self.scale_field: config.output.scale is not None}
        return {"tie_word_embeddings": config.embedding.tie} | scaled


def t5_fields(*, feed_forward: str, scale_field: str | None) -> tuple[Codec, ...]:
    """Return the fields of T5 and umT5; the arguments are the defaults that differ."""
    return (
        Field("vocab_size", "vocab_size"),
        Field("d_model", "d_model", 512),
        Field("d_kv", "attention.head_dim", 64),
        Field("d_ff", "feed_forward.d_ff"),
        Field("num_layers", "num_layers"),
        Field("num_decoder_layers", "stack.num_decoder_layers", None, nullable=True),
        Field("num_heads", "num_heads"),
        Field("relative_attention_num_buckets", "position.buckets", 32),
        Field("relative_attention_max_distance", "position.max_distance", 128),
        Field("layer_norm_epsilon", "norm.epsilon", 1e-6),
        Field("dropout_rate", "dropout_rate", 0.1),
        FeedForwardKind(feed_forward),
        DecoderOutputs(scale_field),
        Unread(("initializer_factor", "initializer_range", "n_positions", "output_past")),
    )


def t5_heads(name: str) -> dict[str, Head]:
    """Return the encoder-decoder model and the encoder alone, with the class names of the reference."""
    return {
        f"{name}ForConditionalGeneration": Head(
            model=Seq2Seq,
            fields=(Fixed("is_encoder_decoder", (True,)),),
            rules=(Rule("lm_head.weight", "output/kernel", MATRIX),),
            untied_by="lm_head.weight",
        ),
        f"{name}EncoderModel": Head(
            model=Embedder,
            # The encoder may also be loaded from files of the whole model, which say true.
            fields=(Fixed("is_encoder_decoder", (False, True)),),
            ignored=(r"decoder\..*", r"lm_head\.weight"),
        ),
    }


T5_SIZES = ("d_model", "d_kv", "d_ff", "num_layers", "num_heads")
"""Names of sizes in config.json."""

_FIRST = {
    "t5-small": (60_506_624, 512, 64, 2048, 6, 8),
    "t5-base": (222_903_552, 768, 64, 3072, 12, 12),
    "t5-large": (737_668_096, 1024, 64, 4096, 24, 16),
    "t5-3b": (2_851_598_336, 1024, 128, 16_384, 24, 32),
    "t5-11b": (11_307_321_344, 1024, 128, 65_536, 24, 128),
}
_SECOND = {
    "small": (76_961_152, 512, 64, 1024, 8, 6),
    "base": (247_577_856, 768, 64, 2048, 12, 12),
    "large": (783_150_080, 1024, 64, 2816, 24, 16),
    "xl": (2_849_757_184, 2048, 64, 5120, 24, 32),
    "xxl": (11_135_332_352, 4096, 64, 10_240, 24, 64),
}
_OTHERS = {f"{name}-{size}": row for name in ("t5-v1_1", "flan-t5") for size, row in _SECOND.items()}
_KIND = {"vocab_size": 32_128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

T5 = Family(
    name="t5",
    title="T5",
    citation="Raffel et al. 2019, arXiv 1910.10683; Chung et al. 2022, arXiv 2210.11416",
    heads=t5_heads("T5"),
    constants=T5_CONSTANTS,
    fields=t5_fields(feed_forward="relu", scale_field="scale_decoder_outputs"),
    rules=t5_rules,
    ignored=T5_IGNORED,
    copies=T5_COPIES,
    variants=variants("google-t5/", _FIRST, T5_SIZES, vocab_size=32_128)
    | variants("google/", _OTHERS, T5_SIZES, **_KIND),
)
