"""Qwen 3 Next: linear attention (Gated DeltaNet) in three of four layers, gated attention in the rest, and experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from transformer.config._model import TransformerConfig
from transformer.config._options import QKNorm
from transformer.config._parts import GatedDelta, LayerKind
from transformer.zoo._family import variants
from transformer.zoo._fields import Fields, Fixed, read_table, write_table
from transformer.zoo._rotary import Rope
from transformer.zoo.families import _llama as llama
from transformer.zoo.families._deepseek_v3 import FusedHeads
from transformer.zoo.families._mixtral import expert_rules
from transformer.zoo.families._qwen2 import FULL, check_types
from transformer.zoo.families._qwen3_moe import SomeLayersRouted
from transformer.zoo.weights._rules import Arrays, EachTensor, Relation, Rule, Shapes, layer_kinds, linear, modules

LINEAR = "linear_attention"
"""Name in `layer_types` of layers with linear attention."""

_SIZES = {
    "linear_num_value_heads": ("num_heads", 32),
    "linear_num_key_heads": ("num_key_heads", 16),
    "linear_key_head_dim": ("key_dim", 128),
    "linear_value_head_dim": ("value_dim", 128),
    "linear_conv_kernel_dim": ("conv_width", 4),
}
"""Fields of config.json, and the fields of `GatedDelta` with the defaults."""


class SomeLayersLinear(SomeLayersRouted):
    """Linear attention in the layers that `layer_types` names, by default all but each fourth, and routed layers.

    A routed layer has one shared expert with a gate.
    """

    names = (
        *(name for name in SomeLayersRouted.names if name not in ("use_sliding_window", "sliding_window")),
        *("shared_expert_intermediate_size", "layer_types", "full_attention_interval", *_SIZES),
    )

    def kinds(self, values: Fields, changes: Fields) -> list[LayerKind]:
        """Return the kind of each layer."""
        delta = GatedDelta(**read_table(values, _SIZES))
        types, layers = values.get("layer_types"), changes["num_layers"]
        if types is None:
            interval = values.get("full_attention_interval", 4)
            types = [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)]
        check_types(types, layers, LINEAR, FULL)
        shared = {"shared_d_ff": values.get("shared_expert_intermediate_size", 512)}
        shared |= {"shared_experts": 1, "shared_gate": True}
        defaults = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True}
        kinds = []
        for kind, name in zip(super().kinds(defaults | values, changes), types, strict=True):
            moe = None if kind.moe is None else replace(kind.moe, **shared)
            kinds.append(replace(kind, moe=moe, gated_delta=delta if name == LINEAR else None))
        return kinds

    def write(self, config: TransformerConfig) -> Fields:
        kinds = layer_kinds(config, config.num_layers)
        written = super().write(config)
        values = {name: value for name, value in written.items() if name in self.names}
        values["layer_types"] = [FULL if kind.gated_delta is None else LINEAR for kind in kinds]
        delta = next((kind.gated_delta for kind in kinds if kind.gated_delta is not None), None)
        if delta is not None:
            values |= write_table(delta, _SIZES)
        moe = next((kind.moe for kind in kinds if kind.moe is not None), None)
        if moe is None:
            return values | {"num_experts": 0}
        return values | {"shared_expert_intermediate_size": moe.shared_d_ff or moe.d_ff or config.feed_forward_width}


@dataclass(frozen=True)
class FusedGroups(Relation):
    """Several maps fused to one matrix, in `groups` of heads: group 0 of all maps, group 1 of all maps, and so on.

    Maps are (in, N, H) with any number of heads N that is a multiple of `groups`, or (in, N).
    """

    groups: int

    def _grouped(self, shapes: Shapes) -> Shapes:
        return [(shape[0], self.groups, int(np.prod(shape[1:])) // self.groups) for shape in shapes]

    def tensor_shapes(self, shapes: Shapes) -> Shapes:
        return FusedHeads().tensor_shapes(self._grouped(shapes))

    def load(self, tensors: Arrays, shapes: Shapes) -> list[np.ndarray]:
        parts = FusedHeads().load(tensors, self._grouped(shapes))
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def save(self, parameters: Arrays) -> list[np.ndarray]:
        grouped = self._grouped([one.shape for one in parameters])
        return FusedHeads().save([one.reshape(shape) for one, shape in zip(parameters, grouped, strict=True)])


_DEPTHWISE = EachTensor(
    lambda shape: (shape[1], 1, shape[0]), lambda tensor, shape: tensor[:, 0].T, lambda parameter: parameter.T[:, None]
)
"""A convolution of each channel, (W, C), which the file stores as (C, 1, W)."""


def _linear_rules(config: TransformerConfig) -> list[Rule]:
    """Return the rules of the layers with linear attention."""
    delta = next((kind.gated_delta for kind in config.kinds if kind.gated_delta is not None), None)
    if delta is None:
        return []
    layer, ours = "model.layers.{layer}.linear_attn.", "decoder/{layer}/linear_attention/"
    groups = FusedGroups(delta.num_key_heads)
    maps = tuple(f"{ours}{name}/kernel" for name in ("query", "key", "value", "output_gate"))
    return [
        Rule(f"{layer}in_proj_qkvz.weight", maps, groups),
        Rule(f"{layer}in_proj_ba.weight", (f"{ours}beta/kernel", f"{ours}decay/kernel"), groups),
        Rule(f"{layer}conv1d.weight", f"{ours}convolution", _DEPTHWISE),
        Rule(f"{layer}A_log", f"{ours}a_log"),
        Rule(f"{layer}dt_bias", f"{ours}dt_bias"),
        *modules(layer, ours, {"norm": "norm", "out": "out_proj"}),
    ]


def _rules(config: TransformerConfig) -> list[Rule]:
    attention, mlp = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
    ours, feed_forward = "decoder/{layer}/self_attention/", "decoder/{layer}/feed_forward/"
    return [
        *llama.attention_rules("key", "value", "out"),
        Rule(f"{attention}q_proj.weight", (f"{ours}query/kernel", f"{ours}output_gate/kernel"), FusedHeads()),
        *llama.QK_NORM_RULES,
        *llama.NORM_RULES,
        *llama.FEED_FORWARD_RULES,
        *expert_rules(mlp),
        *modules(f"{mlp}shared_expert.", f"{feed_forward}shared/", llama.FEED_FORWARD),
        *linear(f"{mlp}shared_expert_gate", f"{feed_forward}shared_gate"),
        *_linear_rules(config),
    ]


_PUBLISHED = {"vocab_size": 151_936, "head_dim": 256, "rope_theta": 10_000_000.0, "full_attention_interval": 4}

_VARIANTS = {"qwen3-next-80b-a3b": ("80B-A3B-Instruct", 79_674_391_296, 2048, 5120, 48, 16, 2)}

QWEN3_NEXT = llama.decoder_family(
    "Qwen3Next",
    name="qwen3_next",
    title="Qwen 3 Next",
    citation="Qwen Team 2025; Yang et al. 2024, arXiv 2412.06464",
    constants=llama.DECODER_CONSTANTS
    | {
        "norm.kind": "zero_centered_rms_norm",
        "attention.qk_norm": QKNorm(kind="zero_centered_rms_norm"),
        "attention.output_gate": True,
    },
    fields=(
        *llama.decoder_fields(kv_heads=2, head_dim=256),
        Rope(default_share=0.25),
        Fixed("attention_bias", (False,)),
        SomeLayersLinear(),
    ),
    rules=_rules,
    # Weights that predict several tokens at once, which generation here does not use.
    ignored=(r"mtp\..*",),
    variants=variants("Qwen/Qwen3-Next-", _VARIANTS, **_PUBLISHED),
)
