"""ModernBERT: encoder, pre-norm without biases, gated GELU; most layers have a window and a separate rotary base."""

from __future__ import annotations

from dataclasses import replace

from transformer.config._layer_patterns import fold
from transformer.config._model import TransformerConfig
from transformer.config._parts import HeadTransform, LayerKind, RotaryScaling
from transformer.config._positions import RotaryOptions
from transformer.nn.models._encoders import Classifier, Embedder, MaskedLM
from transformer.zoo._family import Family, Head, variants
from transformer.zoo._fields import (
    ACTIVATIONS,
    Biases,
    Codec,
    Field,
    FieldError,
    Fields,
    Fixed,
    Labels,
    Unread,
    sizes,
    training_fields,
    written_as,
)
from transformer.zoo._rotary import read_rotary, write_rotary
from transformer.zoo.families._qwen2 import FULL, SLIDING
from transformer.zoo.weights._rules import MATRIX, MERGED, VECTOR, Fused, Rule, fused, layer_kinds, linear, norm

_BASES = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
"""Kinds of layers as in `layer_types`, with the field for the rotary base in older files and its default."""


class GlobalAndLocal(Codec):
    """Global layers (full attention) and local layers (sliding window), with rotary parameters per kind.

    Files of transformers 5 have `layer_types` and `rope_parameters` per kind. Older files make every n-th layer global
    and have one rotary base per kind. The first layer has no norm before attention.
    """

    names = (
        *("layer_types", "global_attn_every_n_layers", "local_attention", "rope_parameters"),
        *("global_rope_theta", "local_rope_theta"),
    )

    def read(self, values: Fields, changes: Fields) -> Fields:
        every = values.get("global_attn_every_n_layers", 3)
        types = values.get("layer_types") or [SLIDING if i % every else FULL for i in range(changes["num_layers"])]
        if set(types) - _BASES.keys() or len(types) != changes["num_layers"]:
            raise FieldError(f"layer_types must be {FULL} or {SLIDING} for each of {changes['num_layers']} layers")
        (base, scaling), (local_base, local_scaling) = (_rotary_of(values, name) for name in _BASES)
        # local_attention counts both sides: a token attends to half of it on the left and half on the right. Here a
        # window counts one side and the token itself.
        window = values.get("local_attention", 128) // 2 + 1
        local = LayerKind(window=window, rotary_base=local_base, rotary_scaling=local_scaling)
        kinds = [local if name == SLIDING else LayerKind(rotary_scaling=scaling) for name in types]
        kinds[0] = replace(kinds[0], attention_norm=False)
        return {"position.base": base, **fold(kinds)}

    def write(self, config: TransformerConfig) -> Fields:
        kinds = layer_kinds(config, config.num_layers)
        windows = [kind.window for kind in kinds if kind.window is not None]
        values: Fields = {
            "layer_types": [FULL if kind.window is None else SLIDING for kind in kinds],
            "local_attention": 2 * (windows[0] - 1) if windows else 128,
            "rope_parameters": {},
        }
        for name, (old, _) in _BASES.items():
            kind = next((kind for kind in kinds if (kind.window is None) == (name == FULL)), LayerKind())
            base = kind.rotary_base or config.rotary.base
            values["rope_parameters"][name] = write_rotary(base, kind.rotary_scaling or config.rotary.scaling)
            values[old] = base
        return values


def _rotary_of(values: Fields, name: str) -> tuple[float, RotaryScaling | None]:
    """Return the rotary base and scaling of the layers of one kind."""
    old, default = _BASES[name]
    parameters = (values.get("rope_parameters") or {}).get(name) or {}
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise FieldError(
            f"partial_rotary_factor of {name} is {parameters['partial_rotary_factor']}, which is not supported"
        )
    # If local_rope_theta is null, local layers use the base of the global layers.
    base = values.get(old, default) or values.get(*_BASES[FULL])
    return read_rotary(parameters, base, values.get("max_position_embeddings"))


class PredictionHead(Codec):
    """Dense layer, activation and norm before the output map of the head."""

    names = ("classifier_activation", "classifier_bias")

    def read(self, values: Fields, changes: Fields) -> Fields:
        activation = Field("classifier_activation", "activation", "gelu", ACTIVATIONS).read(values, changes)
        return {
            "output.transform": HeadTransform(norm=True, use_bias=values.get("classifier_bias", False), **activation)
        }

    def write(self, config: TransformerConfig) -> Fields:
        if config.output.transform is None:
            return {}
        transform = config.output.transform
        return written_as("classifier_activation", transform.activation) | {"classifier_bias": transform.use_bias}


def _rules(config: TransformerConfig) -> list[Rule]:
    layer, ours = "model.layers.{layer}.", "encoder/{layer}/"
    heads = tuple(f"{ours}self_attention/{name}" for name in ("query", "key", "value"))
    halves = tuple(f"{ours}feed_forward/{name}" for name in ("gate", "up"))
    joined = (Fused(0, MATRIX), Fused(0, VECTOR))
    return [
        Rule("model.embeddings.tok_embeddings.weight", "embedding/embedding"),
        *norm("model.embeddings.norm", "encoder/embedding_norm"),
        *norm(f"{layer}attn_norm", f"{ours}attention_norm"),
        *fused(f"{layer}attn.Wqkv", heads, *joined),
        *linear(f"{layer}attn.Wo", f"{ours}self_attention/out", MERGED),
        *norm(f"{layer}mlp_norm", f"{ours}feed_forward_norm"),
        *fused(f"{layer}mlp.Wi", halves, *joined),
        *linear(f"{layer}mlp.Wo", f"{ours}feed_forward/down"),
        *norm("model.final_norm", "encoder/final_norm"),
    ]


_TRANSFORM = (*linear("head.dense", "head_transform/dense"), *norm("head.norm", "head_transform/norm"))

_VARIANTS = {
    "modernbert-base": ("ModernBERT-base", 149_655_232),
    "modernbert-large": ("ModernBERT-large", 395_881_664, 1024, 2624, 28, 16),
}

MODERNBERT = Family(
    name="modernbert",
    title="ModernBERT",
    citation="Warner et al. 2024, arXiv 2412.13663",
    heads={
        "ModernBertForMaskedLM": Head(
            model=MaskedLM,
            fields=(PredictionHead(), Field("decoder_bias", "output.bias", True)),
            rules=(*_TRANSFORM, *linear("decoder", "output"), Rule("decoder.bias", "output_bias")),
        ),
        "ModernBertForSequenceClassification": Head(
            model=Classifier,
            fields=(
                PredictionHead(),
                Field("classifier_pooling", "output.pooling", "cls", {"cls": "first", "mean": "mean"}),
                Labels(),
            ),
            rules=(*_TRANSFORM, *linear("classifier", "output")),
            ignored=(r"decoder\.(weight|bias)",),
        ),
        "ModernBertModel": Head(
            model=Embedder, base=True, ignored=(r"(head\.(dense|norm)|decoder|classifier)\.(weight|bias)",)
        ),
    },
    constants={
        "position": RotaryOptions(),
        "feed_forward.gated": True,
        "embedding.norm": True,
        "embedding.scale": False,
    },
    fields=(
        *sizes(vocab_size=("vocab_size", 50_368), d_model=("hidden_size", 768)),
        Field("intermediate_size", "feed_forward.d_ff", 1152),
        *sizes(num_layers=("num_hidden_layers", 22), num_heads=("num_attention_heads", 12)),
        Field("hidden_activation", "feed_forward.activation", "gelu", ACTIVATIONS),
        Field("norm_eps", "norm.epsilon", 1e-5),
        Field("norm_bias", "norm.kind", False, {False: "layer_norm_without_bias", True: "layer_norm"}),
        Biases(attention="attention_bias", feed_forward="mlp_bias"),
        GlobalAndLocal(),
        Field("tie_word_embeddings", "embedding.tie", True),
        *training_fields("embedding_dropout", "attention_dropout"),
        Fixed("rope_scaling", (None,)),
        Unread(
            # First fields of other heads, then fields that affect only speed or losses, finally unused fields.
            ("classifier_activation", "classifier_bias", "classifier_pooling", "decoder_bias", "mlp_dropout")
            + ("deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index", "reference_compile")
            + ("repad_logits_with_grad", "initializer_cutoff_factor", "max_position_embeddings", "layer_norm_eps")
            + ("position_embedding_type",),
            {"max_position_embeddings": 8192},
        ),
    ),
    rules=_rules,
    prefix="model.",
    copies={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    variants=variants("answerdotai/", _VARIANTS),
)
