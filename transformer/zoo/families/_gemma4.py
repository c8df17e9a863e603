"""Gemma 4 (text): per-layer embeddings, keys and values that later layers share, and larger heads in global layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformer.config._layer_patterns import fold
from transformer.config._model import TransformerConfig
from transformer.config._options import QKNorm
from transformer.config._parts import LayerKind, MoE, RotaryScaling
from transformer.zoo._family import WITHOUT_BALANCE, variants
from transformer.zoo._fields import Biases, Codec, Field, FieldError, Fields, Fixed, read_table, write_table
from transformer.zoo._rotary import read_rotary, write_rotary
from transformer.zoo.families import _llama as llama
from transformer.zoo.families._gemma2 import GELU, GEMMA_RULES
from transformer.zoo.families._qwen2 import FULL, SLIDING, check_layer_types, layer_types
from transformer.zoo.weights._rules import EachTensor, Fused, Rule, layer_kinds, linear, modules, norm

_DEFAULTS = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
_EXPERTS = {
    "num_experts": ("num_experts", None),
    "top_k_experts": ("top_k", None),
    "moe_intermediate_size": ("d_ff", None),
}
_OVERRIDES = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
"""Fields of config.json that `per_layer_config` may override, and those of LayerKind."""

SWAPPED = EachTensor(
    lambda shape: (*shape[:-2], shape[-1], shape[-2]),
    lambda tensor, shape: tensor.swapaxes(-1, -2),
    lambda parameter: parameter.swapaxes(-1, -2),
)
"""The kernels of all experts, (E, in, out), which the file stores as (E, out, in)."""


class SharedAndGlobal(Codec):
    """The kind of each layer: window, rotary positions, heads, and its own keys and values or an earlier layer's.

    The last `num_kv_shared_layers` layers read the keys and values of the last earlier layer of their type; with
    `use_double_wide_mlp` their feed-forward layers are twice as wide. Global layers have their own head size, in
    `per_layer_config` or, in published files, in `global_head_dim` and `num_global_key_value_heads`. With
    `attention_k_eq_v` their values are their keys. The last layer is always global.
    """

    names = (
        *("layer_types", "sliding_window", "rope_parameters", "max_position_embeddings", "per_layer_config"),
        *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "enable_moe_block", *_EXPERTS),
        *("num_kv_shared_layers", "use_double_wide_mlp"),
    )

    def read(self, values: Fields, changes: Fields) -> Fields:
        layers, window = changes["num_layers"], values.get("sliding_window", 512)
        types = values.get("layer_types") or [SLIDING if (layer + 1) % 6 else FULL for layer in range(layers)]
        check_layer_types(types, layers, window)
        types = [*types[:-1], FULL]
        rotary = _read_rotary(values)
        moe = _read_experts(values)
        same = bool(values.get("attention_k_eq_v", False))
        kinds = [
            LayerKind(
                window=window if name == SLIDING else None,
                rotary_base=rotary[name][0],
                rotary_scaling=rotary[name][1],
                keys_as_values=same and name == FULL,
                moe=moe,
                **own,
            )
            for name, own in zip(types, self._heads(values, changes, types), strict=True)
        ]
        shared = values.get("num_kv_shared_layers", 0)
        if type(shared) is not int or not 0 <= shared < layers:
            raise FieldError(f"num_kv_shared_layers must be from 0 to {layers - 1}, got {shared!r:.80}")
        base = {"position.base": rotary[FULL][0]}
        if not shared:
            return base | fold(kinds)
        wide = 2 * changes["feed_forward.d_ff"] if values.get("use_double_wide_mlp", False) else None
        own, readers = kinds[: layers - shared], kinds[layers - shared :]
        for name in sorted(set(types[layers - shared :])):
            if name not in types[: layers - shared]:
                raise FieldError(f"num_kv_shared_layers is {shared}, but no layer before those has the type {name}")
            last = max(layer for layer in range(layers - shared) if types[layer] == name)
            own[last] = replace(own[last], stores_kv=name)
        readers = [
            replace(kind, reads_kv=name, keys_as_values=False, d_ff=wide)
            for kind, name in zip(readers, types[layers - shared :], strict=True)
        ]
        folded = fold(readers)
        return base | folded | {"stack.prefix": (*own, *folded["stack.prefix"])}

    def _heads(self, values: Fields, changes: Fields, types: Sequence[str]) -> list[dict[str, int]]:
        """Return the fields of each LayerKind that its heads set: those that differ from the whole model."""
        width, heads = changes["d_model"], changes["num_heads"]
        usual = {"head_dim": changes["attention.head_dim"] or width // heads}
        usual |= {"num_kv_heads": changes["attention.num_kv_heads"] or heads}
        return [{name: size for name, size in own.items() if size != usual[name]} for own in _own_heads(values, types)]

    def write(self, config: TransformerConfig) -> Fields:
        kinds = layer_kinds(config, config.num_layers)
        windows = [kind.window for kind in kinds]
        parameters: Fields = dict(_DEFAULTS)
        for name, kind in zip(layer_types(windows), kinds, strict=True):
            base = kind.rotary_base or config.rotary.base
            parameters[name] = _write_rotary(base, kind.rotary_scaling or config.rotary.scaling)
        heads = {
            str(layer): {"head_dim": config.head_dim_of(kind), "num_key_value_heads": config.kv_heads_of(kind)}
            for layer, kind in enumerate(kinds)
            if kind.window is None
        }
        moe = kinds[0].moe
        experts = {}
        if moe is not None:
            experts = write_table(moe, _EXPERTS)
            experts["moe_intermediate_size"] = moe.d_ff or config.feed_forward_width
        return experts | {
            "enable_moe_block": moe is not None,
            "layer_types": layer_types(windows),
            "sliding_window": max(filter(None, windows), default=512),
            "rope_parameters": parameters,
            "max_position_embeddings": 131_072,
            "per_layer_config": heads,
            "attention_k_eq_v": any(kind.keys_as_values for kind in kinds),
            "num_kv_shared_layers": sum(kind.reads_kv is not None for kind in kinds),
            "use_double_wide_mlp": any(kind.d_ff is not None for kind in kinds),
        }


def _read_experts(values: Fields) -> MoE | None:
    """Return the experts that all layers have in addition to their dense feed-forward layer, if any."""
    if not values.get("enable_moe_block", False):
        return None
    if missing := [name for name in _EXPERTS if values.get(name) is None]:
        raise FieldError(f"enable_moe_block is True, but {', '.join(missing)} is not set")
    experts = read_table(values, _EXPERTS) | WITHOUT_BALANCE
    return MoE(**experts, router_norm=True, expert_scale=True, beside_dense=True)


def _own_heads(values: Fields, types: Sequence[str]) -> list[dict[str, int]]:
    """Return the sizes of heads that config.json gives for each layer, as fields of LayerKind."""
    given = values.get("per_layer_config")
    if given is None:
        own = {"head_dim": values.get("global_head_dim", 512)}
        heads = values.get("num_global_key_value_heads") if values.get("attention_k_eq_v", False) else None
        own |= {} if heads is None else {"num_kv_heads": heads}
        return [dict(own) if name == FULL else {} for name in types]
    _check_overrides(given, len(types))
    by_layer = {str(layer): one for layer, one in given.items()}
    return [
        {_OVERRIDES[name]: size for name, size in by_layer.get(str(layer), {}).items()} for layer in range(len(types))
    ]


def _check_overrides(given: object, layers: int) -> None:
    """Raise FieldError for a `per_layer_config` of other layers, or of other fields than those of heads."""
    if not isinstance(given, dict) or not all(isinstance(one, dict) for one in given.values()):
        raise FieldError(f"per_layer_config must be an object with an object for some layers, got {given!r:.80}")
    if strange := sorted({str(layer) for layer in given} - {str(layer) for layer in range(layers)}):
        raise FieldError(f"per_layer_config has the layers {', '.join(strange)}, but the model has {layers} layers")
    if strange := sorted({name for one in given.values() for name in one} - _OVERRIDES.keys()):
        raise FieldError(f"per_layer_config sets {', '.join(strange)}, but only {', '.join(_OVERRIDES)} are supported")


def _read_rotary(values: Fields) -> dict[str, tuple[float, RotaryScaling | None]]:
    """Return the base and the scaling of the rotary positions of each type of layer."""
    given = values.get("rope_parameters") or _DEFAULTS
    if not isinstance(given, dict) or (strange := sorted(given.keys() - _DEFAULTS.keys())):
        shown = ", ".join(strange) if isinstance(given, dict) else repr(given)
        raise FieldError(f"rope_parameters has {shown:.80}, but expected an entry for each of {', '.join(_DEFAULTS)}")
    rotary = {}
    for name, default in _DEFAULTS.items():
        parameters = given.get(name) or default
        if parameters.get("rope_type") != "proportional":
            if parameters.get("partial_rotary_factor", 1.0) != 1:
                raise FieldError(f"partial_rotary_factor of {name} needs the rope_type proportional")
            rotary[name] = read_rotary(parameters, default["rope_theta"], values.get("max_position_embeddings"))
            if (scaling := rotary[name][1]) is not None and scaling.by_length:
                raise FieldError(f"rotary scaling is {scaling.kind!r}, which is not supported for this family")
            continue
        share, factor = parameters.get("partial_rotary_factor", 1.0), parameters.get("factor", 1.0)
        if strange := sorted(parameters.keys() - {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}):
            raise FieldError(f"rope_parameters of {name} has unknown fields: {', '.join(strange)}")
        scaling = None
        if share != 1 or factor != 1:
            scaling = RotaryScaling(kind="proportional", factor=float(factor), share=float(share))
        rotary[name] = (float(parameters.get("rope_theta", default["rope_theta"])), scaling)
    return rotary


def _write_rotary(base: float, scaling: RotaryScaling | None) -> Fields:
    if scaling is None or scaling.kind != "proportional":
        return write_rotary(base, scaling)
    factor = {} if scaling.factor == 1.0 else {"factor": scaling.factor}
    return {"rope_type": scaling.kind, "rope_theta": base, "partial_rotary_factor": scaling.share} | factor


class PerLayerEmbeddings(Codec):
    """`hidden_size_per_layer_input`, 0 for none, and `vocab_size_per_layer_input`. Read after `vocab_size`."""

    names = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")

    def read(self, values: Fields, changes: Fields) -> Fields:
        width, rows = values.get("hidden_size_per_layer_input", 256), values.get("vocab_size_per_layer_input", 262_144)
        if not width:
            return {}
        return {
            "embedding.per_layer_width": width,
            "embedding.per_layer_vocab_size": None if rows == changes["vocab_size"] else rows,
        }

    def write(self, config: TransformerConfig) -> Fields:
        width, rows = config.embedding.per_layer_width, config.embedding.per_layer_vocab_size
        return {"hidden_size_per_layer_input": width or 0, "vocab_size_per_layer_input": rows or config.vocab_size}


def _rules(config: TransformerConfig) -> list[Rule]:
    theirs, ours = "model.layers.{layer}.", "decoder/{layer}/"
    names = {
        "layer_gate": "per_layer_input_gate",
        "layer_projection": "per_layer_projection",
        "layer_embedding_norm": "post_per_layer_input_norm",
        "dense_post_norm": "post_feedforward_layernorm_1",
        "experts_norm": "pre_feedforward_layernorm_2",
        "experts_post_norm": "post_feedforward_layernorm_2",
    }
    experts = f"{ours}experts_beside/"
    gate_and_up = (f"{experts}experts/gate/kernel", f"{experts}experts/up/kernel")
    return [
        *GEMMA_RULES,
        *llama.QK_NORM_RULES,
        *modules(theirs, ours, names),
        Rule(f"{theirs}layer_scalar", f"{ours}layer_scalar"),
        *linear(f"{theirs}router.proj", f"{experts}router"),
        Rule(f"{theirs}router.scale", f"{experts}router/input_scale"),
        Rule(f"{theirs}router.per_expert_scale", f"{experts}router/expert_scale"),
        Rule(f"{theirs}experts.gate_up_proj", gate_and_up, Fused(axis=1, each=SWAPPED)),
        Rule(f"{theirs}experts.down_proj", f"{experts}experts/down/kernel", SWAPPED),
        Rule("model.embed_tokens_per_layer.weight", "layer_embedding/embedding"),
        *linear("model.per_layer_model_projection", "layer_embedding_projection"),
        *norm("model.per_layer_projection_norm", "layer_embedding_norm"),
    ]


_E2B = {"num_kv_shared_layers": 20, "use_double_wide_mlp": True}
_E2B |= {"layer_types": [FULL if layer % 5 == 4 else SLIDING for layer in range(35)]}
_LARGE = {"sliding_window": 1024, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
_31B = _LARGE | {"num_global_key_value_heads": 4}
_26B = _LARGE | {"num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8}
_26B |= {"moe_intermediate_size": 704}

_VARIANTS = {
    "gemma-4-e2b-text": ("E2B", 4_628_569_379, 1536, 6144, 35, 8, 1, _E2B),
    "gemma-4-e4b-text": ("E4B", 7_463_013_418, 2560, 10_240, 42, 8, 2, {"num_kv_shared_layers": 18}),
    "gemma-4-31b-text": ("31B", 30_697_345_340, 5376, 21_504, 60, 32, 16, _31B),
    "gemma-4-26b-a4b-text": ("26B-A4B", 25_233_141_790, 2816, 2112, 30, 16, 8, _26B),
}

GEMMA4 = llama.decoder_family(
    "Gemma4",
    name="gemma4_text",
    title="Gemma 4 (text)",
    citation="Gemma Team 2026, https://ai.google.dev/gemma/docs/core/model_card_4",
    heads={"Gemma4ForCausalLM": llama.LANGUAGE_MODEL},
    constants=llama.DECODER_CONSTANTS
    | {
        "norm.position": "sandwich",
        "embedding.scale": True,
        "attention.qk_norm": QKNorm(),
        "attention.value_norm": True,
        "attention.scale": 1.0,
        "stack.layer_scalar": True,
    },
    fields=(
        *llama.decoder_fields(tied=True, kv_heads=4, head_dim=256, activation=GELU),
        Biases("attention_bias"),
        Field("final_logit_softcapping", "output.softcap", None, nullable=True),
        PerLayerEmbeddings(),
        SharedAndGlobal(),
        # For images: text alone is causal in both cases.
        Fixed("use_bidirectional_attention", (None, "vision")),
    ),
    rules=_rules,
    variants=variants("google/gemma-4-", _VARIANTS, vocab_size=262_144, head_dim=256, final_logit_softcapping=30.0),
    # Unused projections of layers that read the keys and values of others.
    ignored=(r"model\.layers\.\d+\.self_attn\.[kv]_(proj|norm)\.weight",),
)
