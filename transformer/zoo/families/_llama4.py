"""Llama 4 (text): chunked attention, layers without rotary positions, and experts in all layers or every second one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformer.config._layer_patterns import fold
from transformer.config._model import TransformerConfig
from transformer.config._options import QKNorm
from transformer.config._parts import LayerKind, MoE, QueryTemperature
from transformer.zoo._family import WITHOUT_BALANCE, variants
from transformer.zoo._fields import Biases, Codec, Field, FieldError, Fields, Unread, read_table, write_table
from transformer.zoo._rotary import Rope
from transformer.zoo.families import _llama as llama
from transformer.zoo.families._deepseek_v3 import interleaved_rules
from transformer.zoo.families._qwen2 import FULL, check_types
from transformer.zoo.families._smollm3 import rotary_layers
from transformer.zoo.weights._rules import SAME, Fused, Rule, layer_kinds, linear, modules

CHUNKED = "chunked_attention"
"""Name in `layer_types` of layers with chunked attention."""


class ScaledRope(Rope):
    """Rotary positions, without scalings that multiply queries and keys by a factor.

    The reference rotates before it normalizes, which removes such a factor. Here the order is the opposite.
    """

    def read(self, values: Fields, changes: Fields) -> Fields:
        read = super().read(values, changes)
        scaling = read["position.scaling"]
        if scaling is not None and scaling.kind in ("yarn", "longrope"):
            raise FieldError(f"rotary scaling is {scaling.kind!r}, which is not supported for this family")
        return read


_TEMPERATURE = {"attn_scale": ("scale", 0.1), "floor_scale": ("length", 8192)}
_EXPERTS = {
    "num_local_experts": ("num_experts", 16),
    "num_experts_per_tok": ("top_k", 1),
    "intermediate_size": ("d_ff", 8192),
}


class ChunkedAndRouted(Codec):
    """The kind of each layer: rotary positions, chunked attention, temperature, and experts.

    In spite of its name, `no_rope_layers` has 1 for layers with rotary positions; without it, every
    `no_rope_layer_interval`-th layer has none. Layers with rotary positions have chunked attention, unless
    `layer_types` differs, and normalized queries and keys; those without have a temperature. `moe_layers` lists the
    layers with experts; without it, these are every `interleave_moe_layer_step`-th layer.
    """

    names = (
        *("no_rope_layers", "no_rope_layer_interval", "layer_types", "attention_chunk_size", "use_qk_norm"),
        *("attn_temperature_tuning", *_TEMPERATURE, "moe_layers", "interleave_moe_layer_step", *_EXPERTS),
    )

    def read(self, values: Fields, changes: Fields) -> Fields:
        layers = changes["num_layers"]
        # Files can have an empty list instead of null.
        rotary = rotary_layers({**values, "no_rope_layers": values.get("no_rope_layers") or None}, layers)
        chunks, routed = _chunks(values, rotary), _routed(values, layers)
        temperature = None
        if values.get("attn_temperature_tuning", True):
            temperature = QueryTemperature(**read_table(values, _TEMPERATURE))
        moe = MoE(
            **read_table(values, _EXPERTS) | WITHOUT_BALANCE,
            shared_experts=1,
            scoring="sigmoid",
            normalize_weights=False,
            scale_inputs=True,
        )
        kinds = [
            LayerKind(
                rotary=rotates,
                qk_norm=rotates,
                chunk=chunk,
                temperature=None if rotates else temperature,
                moe=moe if layer in routed else None,
            )
            for layer, (rotates, chunk) in enumerate(zip(rotary, chunks, strict=True))
        ]
        norms = values.get("use_qk_norm", True) and any(rotary)
        return {"attention.qk_norm": QKNorm(scale=False) if norms else None} | fold(
            kinds if norms else [replace(kind, qk_norm=True) for kind in kinds]
        )

    def write(self, config: TransformerConfig) -> Fields:
        kinds = layer_kinds(config, config.num_layers)
        chunks = {kind.chunk for kind in kinds if kind.chunk is not None}
        temperatures = [kind.temperature for kind in kinds if kind.temperature is not None]
        temperature = temperatures[0] if temperatures else QueryTemperature()
        values = {
            "no_rope_layers": [int(kind.rotary) for kind in kinds],
            "layer_types": [FULL if kind.chunk is None else CHUNKED for kind in kinds],
            "attention_chunk_size": max(chunks, default=8192),
            "use_qk_norm": config.attention.qk_norm is not None,
            "attn_temperature_tuning": bool(temperatures),
            **write_table(temperature, _TEMPERATURE),
            "moe_layers": [layer for layer, kind in enumerate(kinds) if kind.moe is not None],
        }
        moe = next((kind.moe for kind in kinds if kind.moe is not None), None)
        if moe is None:
            return values
        return values | write_table(replace(moe, d_ff=moe.d_ff or config.feed_forward_width), _EXPERTS)


def _chunks(values: Fields, rotary: Sequence[bool]) -> list[int | None]:
    """Return the chunk size of each layer; None: full attention."""
    size, types = values.get("attention_chunk_size", 8192), values.get("layer_types")
    if types is None:
        types = [CHUNKED if rotates else FULL for rotates in rotary]
    check_types(types, len(rotary), CHUNKED, FULL)
    if CHUNKED in types and size is None:
        raise FieldError(f"layer_types has {CHUNKED}, but attention_chunk_size is not set")
    return [size if name == CHUNKED else None for name in types]


def _routed(values: Fields, layers: int) -> set[int]:
    """Return the indices of the layers with experts."""
    step = values.get("interleave_moe_layer_step", 1)
    if type(step) is not int or step < 1:
        raise FieldError(f"interleave_moe_layer_step must be an integer of at least 1, got {step!r:.80}")
    given = values.get("moe_layers")
    given = list(range(step - 1, layers, step)) if given is None else given
    if not isinstance(given, list) or not all(type(one) is int and 0 <= one < layers for one in given):
        raise FieldError(f"moe_layers must list indices of the {layers} layers, got {given!r:.80}")
    return set(given)


def _rules(config: TransformerConfig) -> list[Rule]:
    attention, mlp = "model.layers.{layer}.self_attn.", "model.layers.{layer}.feed_forward."
    heads, feed_forward = "decoder/{layer}/self_attention/", "decoder/{layer}/feed_forward/"
    gate_and_up = (f"{feed_forward}experts/gate/kernel", f"{feed_forward}experts/up/kernel")
    return [
        *llama.attention_rules("value", "out"),
        *interleaved_rules(attention, heads, config.size_of_head),
        *llama.NORM_RULES,
        *modules(mlp, feed_forward, llama.FEED_FORWARD),
        *linear(f"{mlp}router", f"{feed_forward}router"),
        Rule(f"{mlp}experts.gate_up_proj", gate_and_up, Fused(axis=-1, each=SAME)),
        Rule(f"{mlp}experts.down_proj", f"{feed_forward}experts/down/kernel"),
        *modules(f"{mlp}shared_expert.", f"{feed_forward}shared/", llama.FEED_FORWARD),
    ]


_FIELDS = tuple(
    Field("intermediate_size_mlp", "feed_forward.d_ff", 16_384) if "intermediate_size" in field.names else field
    for field in llama.decoder_fields(epsilon=1e-5, kv_heads=8, head_dim=128)
)
_PUBLISHED = {"vocab_size": 202_048, "head_dim": 128, "intermediate_size_mlp": 16_384, "rope_theta": 500_000.0}
_SCOUT = {"max_position_embeddings": 262_144, "rope_scaling": llama.LLAMA3_SCALING}
_MAVERICK = {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False}

_VARIANTS = {
    "llama-4-scout-text": ("Scout-17B-16E", 107_769_861_120, 5120, 8192, 48, 40, 8, _SCOUT),
    "llama-4-maverick-text": ("Maverick-17B-128E", 400_711_848_960, 5120, 8192, 48, 40, 8, _MAVERICK),
}

LLAMA4 = llama.decoder_family(
    "Llama4",
    name="llama4_text",
    title="Llama 4 (text)",
    citation="Meta 2025, https://ai.meta.com/blog/llama-4-multimodal-intelligence",
    heads={"Llama4ForCausalLM": llama.LANGUAGE_MODEL},
    constants=llama.DECODER_CONSTANTS,
    fields=(
        *_FIELDS,
        ScaledRope(default_base=500_000.0),
        Biases("attention_bias"),
        ChunkedAndRouted(),
        Unread(("router_aux_loss_coef", "router_jitter_noise", "for_llm_compressor")),
    ),
    rules=_rules,
    variants=variants("meta-llama/Llama-4-", _VARIANTS, **_PUBLISHED),
)
