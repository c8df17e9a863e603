"""OPT: decoder, pre-norm or post-norm, learned positions, ReLU."""

from __future__ import annotations

from transformer.config._positions import LearnedOptions
from transformer.zoo._family import LAYER_NORM, Family, Variant
from transformer.zoo._fields import ACTIVATIONS, Converted, Field, Fixed, Json, Unread
from transformer.zoo.families._bart import FEED_FORWARD, UNUSED_ROWS, attention_rules
from transformer.zoo.families._llama import decoder_heads
from transformer.zoo.weights._rules import MATRIX, Rule, modules, norm, without_first

_EMBEDDING_WIDTH = Converted(
    "word_embed_proj_dim",
    None,
    lambda width, changes: {"embedding.width": None if width == changes["d_model"] else width},
    lambda config: config.embedding.width or config.d_model,
)
"""The width of the embeddings, with maps to and from the layers if theirs differs."""

_LAYER, _OURS = "model.decoder.layers.{layer}.", "decoder/{layer}/"
_RULES = [
    Rule("model.decoder.embed_tokens.weight", "embedding/embedding"),
    Rule("model.decoder.project_in.weight", "embedding_in/kernel", MATRIX),
    Rule("model.decoder.project_out.weight", "embedding_out/kernel", MATRIX),
    Rule("model.decoder.embed_positions.weight", "decoder/position_table", without_first(UNUSED_ROWS)),
    *attention_rules(f"{_LAYER}self_attn", f"{_OURS}self_attention"),
    *norm(f"{_LAYER}self_attn_layer_norm", f"{_OURS}attention_norm"),
    *modules(_LAYER, _OURS, FEED_FORWARD),
    *norm("model.decoder.final_layer_norm", "decoder/final_norm"),
]


def _variant(size: str, parameters: int, width: int, layers: int, heads: int, **fields: Json) -> Variant:
    sizes = {"vocab_size": 50_272, "hidden_size": width, "ffn_dim": 4 * width, "num_hidden_layers": layers}
    # The published parameter counts include the unused rows of the position table.
    return Variant(
        hub=f"facebook/opt-{size}",
        parameters=parameters - UNUSED_ROWS * width,
        fields=sizes | {"num_attention_heads": heads} | fields,
    )


OPT = Family(
    name="opt",
    title="OPT",
    citation="Zhang et al. 2022, arXiv 2205.01068",
    heads=decoder_heads("OPT"),
    constants=LAYER_NORM | {"norm.epsilon": 1e-5, "position": LearnedOptions()},
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "d_model"),
        _EMBEDDING_WIDTH,
        Field("ffn_dim", "feed_forward.d_ff"),
        Field("num_hidden_layers", "num_layers"),
        Field("num_attention_heads", "num_heads"),
        Field("max_position_embeddings", "position.max_length", 2048),
        Field("do_layer_norm_before", "norm.position", True, {True: "pre", False: "post"}),
        Field("enable_bias", "parameters.use_bias", True),
        Field("activation_function", "feed_forward.activation", "relu", ACTIVATIONS),
        Field("tie_word_embeddings", "embedding.tie", True),
        Field("dropout", "dropout_rate", 0.1),
        Field("attention_dropout", "attention.dropout_rate", 0.0),
        Field("init_std", "parameters.initializer_range", 0.02),
        Fixed("_remove_final_layer_norm", (False,)),
        Fixed("layer_norm_elementwise_affine", (True,)),
        Unread(("layerdrop", "activation_dropout", "initializer_range")),
    ),
    rules=_RULES,
    prefix="model.",
    copies={"lm_head.weight": "model.decoder.embed_tokens.weight"},
    variants={
        "opt-125m": _variant("125m", 125_239_296, 768, 12, 12),
        "opt-350m": _variant("350m", 331_196_416, 1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
        "opt-1.3b": _variant("1.3b", 1_315_758_080, 2048, 24, 32),
        "opt-2.7b": _variant("2.7b", 2_651_596_800, 2560, 32, 32),
        "opt-6.7b": _variant("6.7b", 6_658_473_984, 4096, 32, 32),
        "opt-13b": _variant("13b", 12_853_473_280, 5120, 40, 40),
        "opt-30b": _variant("30b", 29_974_540_288, 7168, 48, 56),
        "opt-66b": _variant("66b", 65_719_701_504, 9216, 64, 72),
    },
)
