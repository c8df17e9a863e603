"""gpt-oss: decoder, mixture of experts with biases and clamped SwiGLU, attention sinks, alternating sliding windows."""

from __future__ import annotations

import numpy as np

from transformer.config._model import TransformerConfig
from transformer.zoo._family import variants
from transformer.zoo._fields import LAYER_SIZES, Biases, Fields, Fixed, Unread
from transformer.zoo._rotary import Rope
from transformer.zoo.families import _llama as llama
from transformer.zoo.families import _mixtral as mixtral
from transformer.zoo.families._gemma2 import AlternatingWindows
from transformer.zoo.families._qwen2 import local_layers
from transformer.zoo.weights._rules import Arrays, Relation, Rule, Shape, Shapes, linear

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class Alternating(Relation):
    """n parameters interleaved along the last axis of one tensor: element i belongs to parameter i mod n."""

    def tensor_shapes(self, shapes: Shapes) -> list[Shape]:
        return [(*shapes[0][:-1], sum(shape[-1] for shape in shapes))]

    def load(self, tensors: Arrays, shapes: Shapes) -> list[np.ndarray]:
        return [tensors[0][..., i :: len(shapes)] for i in range(len(shapes))]

    def save(self, parameters: Arrays) -> list[np.ndarray]:
        return [np.stack(parameters, axis=-1).reshape(*parameters[0].shape[:-1], -1)]


class ScaledRope(Rope):
    """Rotary positions that default to YaRN scaling if the file specifies no scaling."""

    def read(self, values: Fields, changes: Fields) -> Fields:
        silent = values.get("rope_parameters") is None and values.get("rope_scaling") is None
        return super().read(values | ({"rope_parameters": _YARN} if silent else {}), changes)


class AttentionBiases(Biases):
    """Biases of attention (default: true). The experts always have biases."""

    def read(self, values: Fields, changes: Fields) -> Fields:
        return super().read({self.attention: True} | values, changes) | {"parameters.use_bias": True}


class LocalAndRouted(AlternatingWindows):
    """Routed layers with alternating sliding windows."""

    names = (
        *("layer_types", "sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok"),
        "router_aux_loss_coef",
    )

    def read(self, values: Fields, changes: Fields) -> Fields:
        types, window = self.types(values, changes)
        given = {"num_local_experts": values.get("num_experts", 128), "num_experts_per_tok": 4} | values
        # The reference applies the softmax to the logits of the chosen experts only. That equals the softmax over all
        # experts, normalized so that the weights of the chosen ones sum to 1.
        moe = mixtral.read_experts(given, mixtral.EXPERTS, len(types), normalize_weights=True, router_bias=True)
        return local_layers(types, window, moe=moe)

    def write(self, config: TransformerConfig) -> Fields:
        windows = super().write(config)
        return {"layer_types": windows["layer_types"]} | windows | mixtral.write_all_routed(config)


_THEIRS, _OURS = "model.layers.{layer}.mlp.", "decoder/{layer}/feed_forward/"
_GATE_AND_UP = (f"{_OURS}experts/gate/", f"{_OURS}experts/up/")
_RULES = [
    *llama.attention_rules(),
    Rule("model.layers.{layer}.self_attn.sinks", "decoder/{layer}/self_attention/sinks"),
    *llama.NORM_RULES,
    *linear(f"{_THEIRS}router", f"{_OURS}router"),
    Rule(f"{_THEIRS}experts.gate_up_proj", tuple(f"{path}kernel" for path in _GATE_AND_UP), Alternating()),
    Rule(f"{_THEIRS}experts.gate_up_proj_bias", tuple(f"{path}bias" for path in _GATE_AND_UP), Alternating()),
    Rule(f"{_THEIRS}experts.down_proj", f"{_OURS}experts/down/kernel"),
    Rule(f"{_THEIRS}experts.down_proj_bias", f"{_OURS}experts/down/bias"),
]

_VARIANTS = {
    "gpt-oss-20b": (20_914_757_184, 2880, 2880, 24, 64, 32),
    "gpt-oss-120b": (116_829_156_672, 2880, 2880, 36, 64, 128),
}

GPT_OSS = llama.decoder_family(
    "GptOss",
    name="gpt_oss",
    title="gpt-oss",
    citation="OpenAI 2025, arXiv 2508.10925",
    constants=llama.DECODER_CONSTANTS | {"feed_forward.activation": "swiglu_clamped", "attention.sinks": True},
    fields=(
        # The experts of the reference ignore hidden_act.
        *llama.decoder_fields(epsilon=1e-5, kv_heads=8, head_dim=64, activation=Unread(("hidden_act",))),
        ScaledRope(default_base=150_000.0),
        AttentionBiases("attention_bias"),
        LocalAndRouted(128),
        Fixed("swiglu_alpha", (1.702,)),
        Fixed("swiglu_limit", (7.0,)),
        # In published files: synonyms of num_experts_per_tok and of the original length in rope_scaling.
        Unread(("experts_per_token", "initial_context_length")),
    ),
    rules=_RULES,
    variants=variants("openai/", _VARIANTS, (*LAYER_SIZES[:4], "num_local_experts"), vocab_size=201_088),
)
