"""Gemma 3 (text): Gemma 2 with query and key norms, five local layers per global layer, and two rotary bases."""

from __future__ import annotations

from transformer.config._layer_patterns import fold
from transformer.config._model import TransformerConfig
from transformer.config._options import QKNorm
from transformer.config._parts import LayerKind
from transformer.zoo._family import variants
from transformer.zoo._fields import Biases, Codec, Field, FieldError, Fields, Fixed, Unread
from transformer.zoo._rotary import read_rotary, write_rotary
from transformer.zoo.families import _llama as llama
from transformer.zoo.families._gemma2 import GELU, GEMMA_CONSTANTS, GEMMA_RULES, QUERY_SCALE
from transformer.zoo.families._qwen2 import FULL, SLIDING, check_layer_types, layer_types, layer_windows
from transformer.zoo.weights._rules import layer_kinds

_BASES = {FULL: 1_000_000.0, SLIDING: 10_000.0}
_KINDS = ", ".join(_BASES)


class LocalAndGlobal(Codec):
    """Local layers (sliding window and a separate rotary base) and global layers.

    `layer_types` lists the kind of each layer; if it is missing, every `sliding_window_pattern`-th layer is global.
    `rope_parameters` holds the rotary parameters per kind (transformers 5). Older files have `rope_theta` and
    `rope_scaling` for global layers and `rope_local_base_freq` for local layers.
    """

    names = (
        *("sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"),
        *("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "max_position_embeddings"),
    )

    def read(self, values: Fields, changes: Fields) -> Fields:
        layers, window = changes["num_layers"], values.get("sliding_window", 4096)
        every = values.get("sliding_window_pattern", 6)
        types = values.get("layer_types") or [SLIDING if (i + 1) % every else FULL for i in range(layers)]
        check_layer_types(types, layers, window)
        given = values.get("rope_parameters") or {}
        if strange := sorted(given.keys() - _BASES.keys()):
            raise FieldError(
                f"rope_parameters has {', '.join(strange)}, but expected one entry per layer type: {_KINDS}"
            )
        old = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
        scaling = {FULL: values.get("rope_scaling") or {}, SLIDING: {}}
        parameters = {
            name: {"rope_theta": values.get(old[name])} | (given.get(name) or {}) | scaling[name] for name in _BASES
        }
        length = values.get("max_position_embeddings")
        (base, scaled), (local_base, local_scaled) = (
            read_rotary(parameters[name], _BASES[name], length) for name in _BASES
        )
        if any(each.get("partial_rotary_factor", 1.0) != 1 for each in parameters.values()):
            raise FieldError("partial_rotary_factor is given, but this family always rotates whole heads")
        kinds = {
            FULL: LayerKind(rotary_scaling=scaled),
            SLIDING: LayerKind(window=window, rotary_base=local_base, rotary_scaling=local_scaled),
        }
        return {"position.base": base} | fold([kinds[name] for name in types])

    def write(self, config: TransformerConfig) -> Fields:
        windows = layer_windows(config)
        types = layer_types(windows)
        parameters = {name: write_rotary(base, None) for name, base in _BASES.items()}
        for name, kind in zip(types, layer_kinds(config, config.num_layers), strict=True):
            parameters[name] = write_rotary(
                kind.rotary_base or config.rotary.base, kind.rotary_scaling or config.rotary.scaling
            )
        return {
            "sliding_window": max(filter(None, windows), default=4096),
            "layer_types": types,
            "rope_parameters": parameters,
            "max_position_embeddings": 131_072,
        }


_VARIANTS = {
    "gemma-3-270m": (268_098_176, 640, 2048, 18, 4, 1),
    "gemma-3-1b": ("gemma-3-1b-pt", 999_885_952, 1152, 6912, 26, 4, 1),
}

GEMMA3 = llama.decoder_family(
    "Gemma3",
    name="gemma3_text",
    title="Gemma 3 (text)",
    citation="Gemma Team 2025, arXiv 2503.19786",
    heads={"Gemma3ForCausalLM": llama.LANGUAGE_MODEL, "Gemma3TextForSequenceClassification": llama.LAST_TOKEN},
    constants=GEMMA_CONSTANTS | {"attention.qk_norm": QKNorm(kind="zero_centered_rms_norm")},
    fields=(
        *llama.decoder_fields(tied=True, kv_heads=4, head_dim=256, activation=GELU),
        Biases("attention_bias"),
        QUERY_SCALE,
        # The reference defines this field but never applies soft-capping to scores.
        Fixed("attn_logit_softcapping", (None,)),
        Field("final_logit_softcapping", "output.softcap", None, nullable=True),
        LocalAndGlobal(),
        Fixed("use_bidirectional_attention", (False, None)),
        Unread(("hidden_act",)),
    ),
    rules=[*GEMMA_RULES, *llama.QK_NORM_RULES],
    variants=variants("google/", _VARIANTS, vocab_size=262_144, head_dim=256, sliding_window=512),
)
