"""Qwen 3 mixture-of-experts models: Qwen 3 with many small experts in all or some layers."""

from __future__ import annotations

from dataclasses import replace

from transformer.config._layer_patterns import fold
from transformer.config._model import TransformerConfig
from transformer.config._options import QKNorm
from transformer.config._parts import LayerKind
from transformer.zoo._family import variants
from transformer.zoo._fields import LAYER_SIZES, Biases, Codec, Fields, Unread
from transformer.zoo._rotary import Rope
from transformer.zoo.families import _llama as llama
from transformer.zoo.families import _mixtral as mixtral
from transformer.zoo.weights._rules import layer_kinds

_EXPERTS = {
    "num_experts": ("num_experts", 128),
    "num_experts_per_tok": ("top_k", 8),
    "moe_intermediate_size": ("d_ff", 768),
    "norm_topk_prob": ("normalize_weights", False),
}


class SomeLayersRouted(Codec):
    """Mixture of experts in some layers, and one sliding window for all layers.

    The layers with (index + 1) divisible by `decoder_sparse_step` have experts, except those in `mlp_only_layers`.
    `write` lists all dense layers in `mlp_only_layers`. `use_sliding_window` enables `sliding_window` in all layers.
    """

    names = (
        *(*_EXPERTS, "num_local_experts", "router_aux_loss_coef", "decoder_sparse_step", "mlp_only_layers"),
        *("use_sliding_window", "sliding_window"),
    )

    def kinds(self, values: Fields, changes: Fields) -> list[LayerKind]:
        """Return the kind of each layer."""
        values = {"num_experts": values.get("num_local_experts", 128)} | values
        step, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers") or ()
        window = values.get("sliding_window", 4096) if values.get("use_sliding_window") else None
        layers, some = range(changes["num_layers"]), values["num_experts"]
        routed = [layer for layer in layers if some and layer not in dense and (layer + 1) % step == 0]
        kinds = dict.fromkeys(layers, LayerKind(window=window))
        if routed:
            moe = mixtral.read_experts(values, _EXPERTS, len(routed))
            kinds |= dict.fromkeys(routed, LayerKind(window=window, moe=moe))
        return list(kinds.values())

    def read(self, values: Fields, changes: Fields) -> Fields:
        return fold(self.kinds(values, changes))

    def write(self, config: TransformerConfig) -> Fields:
        kinds = layer_kinds(config, config.num_layers)
        routed = [kind.moe for kind in kinds if kind.moe is not None]
        values = {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer, kind in enumerate(kinds) if kind.moe is None],
            "use_sliding_window": kinds[0].window is not None,
            "sliding_window": kinds[0].window,
        }
        if not routed:
            return values
        moe = replace(routed[0], d_ff=routed[0].d_ff or config.feed_forward_width)
        return values | mixtral.write_experts(moe, _EXPERTS, len(routed))


_RULES = [*llama.DECODER_RULES, *llama.QK_NORM_RULES, *mixtral.expert_rules("model.layers.{layer}.mlp.")]
_ALIKE = {"vocab_size": 151_936, "head_dim": 128, "rope_theta": 1_000_000.0}
_ALIKE |= {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}

_VARIANTS = {
    "qwen3-30b-a3b": ("30B-A3B", 30_532_122_624, 2048, 6144, 48, 32, 4, 768),
    "qwen3-235b-a22b": ("235B-A22B", 235_093_634_560, 4096, 12_288, 94, 64, 4, 1536),
}

QWEN3_MOE = llama.decoder_family(
    "Qwen3Moe",
    name="qwen3_moe",
    title="Qwen 3 (routed)",
    citation="Qwen Team 2025, arXiv 2505.09388",
    constants=llama.DECODER_CONSTANTS | {"attention.qk_norm": QKNorm()},
    fields=(
        *llama.decoder_fields(kv_heads=4),
        Rope(),
        Biases("attention_bias"),
        SomeLayersRouted(),
        # In published files; the reference applies the window to all layers or to none.
        Unread(("max_window_layers",)),
    ),
    rules=_RULES,
    variants=variants("Qwen/Qwen3-", _VARIANTS, (*LAYER_SIZES, "moe_intermediate_size"), **_ALIKE),
)
