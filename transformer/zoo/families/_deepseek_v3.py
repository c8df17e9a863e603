"""DeepSeek-V3: multi-head latent attention (MLA); a few dense layers, then experts with group-limited routing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from transformer.config._layer_patterns import fold
from transformer.config._model import TransformerConfig
from transformer.config._parts import MLA, LayerKind, MoE
from transformer.zoo._family import WITHOUT_BALANCE, variants
from transformer.zoo._fields import Biases, Codec, FieldError, Fields, Fixed, Unread, read_table, write_table
from transformer.zoo._rotary import Rope
from transformer.zoo.families import _llama as llama
from transformer.zoo.families._mixtral import expert_rules
from transformer.zoo.weights._rules import (
    MATRIX,
    MERGED,
    VECTOR,
    Arrays,
    Fused,
    Relation,
    Rule,
    Shape,
    Shapes,
    fused,
    layer_kinds,
    linear,
    modules,
    norm,
)


@dataclass(frozen=True)
class Interleaved(Relation):
    """Wrap the relation `each`, and reorder the rotated dimensions of the last parameter.

    Rotary positions rotate pairs of dimensions. The file pairs (2i, 2i + 1), this library pairs (i, i + size / 2), as
    in the other families. Queries and keys are permuted alike, so their dot products do not change.
    """

    each: Relation
    size: int
    """Number of rotated dimensions of the parameter (of each head)."""
    first: bool = False
    """Whether these are the first dimensions instead of the last ones."""

    def tensor_shapes(self, shapes: Shapes) -> list[Shape]:
        return self.each.tensor_shapes(shapes)

    def load(self, tensors: Arrays, shapes: Shapes) -> list[np.ndarray]:
        *others, last = self.each.load(tensors, shapes)
        # For size 6: [[0, 1], [2, 3], [4, 5]].T = [[0, 2, 4], [1, 3, 5]], first all even dimensions, then all odd ones.
        return [*others, self._ordered(last, np.arange(self.size).reshape(-1, 2).T)]

    def save(self, parameters: Arrays) -> list[np.ndarray]:
        *others, last = parameters
        # The inverse. For size 6: [[0, 1, 2], [3, 4, 5]].T, which reads 0, 3, 1, 4, 2, 5.
        return self.each.save([*others, self._ordered(last, np.arange(self.size).reshape(2, -1).T)])

    def _ordered(self, parameter: np.ndarray, order: np.ndarray) -> np.ndarray:
        # Keep the other dimensions, permute the first or the last `size` ones.
        whole = parameter.shape[-1]
        if self.first:
            return parameter[..., [*order.ravel(), *range(self.size, whole)]]
        return parameter[..., [*range(whole - self.size), *(whole - self.size + order.ravel())]]


class FusedHeads(Relation):
    """Several maps (in, N, H1), (in, N, H2), ... fused per head into one matrix (N (H1 + H2 + ...), in).

    The rows of the matrix are: head 0 of all maps, head 1 of all maps, and so on.
    """

    def tensor_shapes(self, shapes: Shapes) -> list[Shape]:
        return MATRIX.tensor_shapes([self._joined(shapes)])

    def _joined(self, shapes: Shapes) -> Shape:
        return (*shapes[0][:2], sum(shape[2] for shape in shapes))

    def load(self, tensors: Arrays, shapes: Shapes) -> list[np.ndarray]:
        whole = MATRIX.load(tensors, [self._joined(shapes)])[0]  # (in, N, H1 + H2 + ...)
        return np.split(whole, np.cumsum([shape[2] for shape in shapes])[:-1], axis=2)

    def save(self, parameters: Arrays) -> list[np.ndarray]:
        return MATRIX.save([np.concatenate(parameters, axis=2)])


def interleaved_rules(tensors: str, parameters: str, size: int, *, first: bool = False) -> list[Rule]:
    """Return the rules for the maps of queries and keys, whose rotated dimensions are `Interleaved`."""
    weight, bias = Interleaved(MATRIX, size, first), Interleaved(VECTOR, size, first)
    queries = fused(f"{tensors}q_proj", [f"{parameters}query"], weight, bias)
    return queries + fused(f"{tensors}k_proj", [f"{parameters}key"], weight, bias)


_SIZES = {
    "q_lora_rank": ("q_lora_rank", 1536),
    "kv_lora_rank": ("kv_lora_rank", 512),
    "qk_nope_head_dim": ("qk_nope_head_dim", 128),
    "qk_rope_head_dim": ("qk_rope_head_dim", 64),
    "v_head_dim": ("v_head_dim", 128),
}
_EXPERTS = {
    "n_routed_experts": ("num_experts", 256),
    "num_experts_per_tok": ("top_k", 8),
    "moe_intermediate_size": ("d_ff", 2048),
    "n_shared_experts": ("shared_experts", 1),
    "norm_topk_prob": ("normalize_weights", True),
    "n_group": ("num_groups", 8),
    "topk_group": ("top_groups", 4),
    "routed_scaling_factor": ("routed_scaling_factor", 2.5),
}
"""Fields of config.json, and the fields of `MLA` and `MoE` with the defaults."""


class LatentSizes(Codec):
    """Sizes of latents and heads of MLA. Read after `num_attention_heads`.

    `head_dim` and `qk_head_dim` follow from the other sizes.
    """

    names = (*_SIZES, "qk_head_dim", "head_dim", "num_key_value_heads")

    def read(self, values: Fields, changes: Fields) -> Fields:
        heads = changes["num_heads"]
        if values.get("num_key_value_heads") not in (None, heads):
            raise FieldError(
                f"num_key_value_heads is {values['num_key_value_heads']}, but latent attention has one key for each of "
                f"the {heads} heads"
            )
        mla = MLA(**read_table(values, _SIZES))
        return {"attention.mla": mla, "attention.num_kv_heads": None, "attention.head_dim": None}

    def write(self, config: TransformerConfig) -> Fields:
        mla = config.attention.mla
        if mla is None:
            return {}
        return write_table(mla, _SIZES) | {"qk_head_dim": mla.head_dim, "head_dim": mla.qk_rope_head_dim}


def _sharpening(factor: float, weight: float) -> float:
    """Return YaRN's temperature correction for a context extended by `factor` (Peng et al. 2023, section 3.4)."""
    return 1.0 + 0.1 * weight * math.log(factor)


class LatentRope(Rope):
    """Rotary positions with two weights for YaRN's temperature correction. Read after the head sizes.

    `mscale_all_dim` applies to all scores, for any kind of scaling. `mscale` applies to the rotated dimensions of
    queries and keys; the factor on them is relative to the one on all scores.
    """

    def read(self, values: Fields, changes: Fields) -> Fields:
        given = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
        rotated, everywhere = given.pop("mscale", None), given.pop("mscale_all_dim", None)
        read = super().read(values | {"rope_scaling": None, "rope_parameters": given}, changes)
        scaling = read["position.scaling"]
        if scaling is None or not everywhere:
            return read
        # m(s) = 1 + 0.1 s ln(factor). Scores are multiplied by m(mscale_all_dim)^2, once for the query and once for the
        # key. cos and sin of the rotated dimensions are multiplied by m(mscale) / m(mscale_all_dim).
        sharper = _sharpening(scaling.factor, everywhere)
        if scaling.kind == "yarn" and scaling.attention_factor is None and rotated:
            factor = _sharpening(scaling.factor, rotated) / sharper
            read["position.scaling"] = replace(scaling, attention_factor=factor)
        return read | {"attention.scale": changes["attention.mla"].head_dim ** -0.5 * sharper * sharper}

    def write(self, config: TransformerConfig) -> Fields:
        written, scaling = super().write(config), config.rotary.scaling
        if scaling is not None and scaling.factor > 1 and config.attention.scale is not None:
            # Solve scale = head_dim^-0.5 m(s)^2 for s. Rounded, so that 1.0 is written as it was read.
            sharper = math.sqrt(config.attention.scale * config.size_of_head**0.5)
            written["rope_parameters"]["mscale_all_dim"] = round((sharper - 1) / math.log(scaling.factor) * 10, 12)
        return written


class RoutedBehindDense(Codec):
    """Dense first layers (`first_k_dense_replace`), then layers with experts. Read after `num_hidden_layers`."""

    names = (*_EXPERTS, "num_local_experts", "first_k_dense_replace")

    def read(self, values: Fields, changes: Fields) -> Fields:
        layers, dense = changes["num_layers"], values.get("first_k_dense_replace", 3) or 0
        if dense >= layers:
            return {"stack.period": (LayerKind(),)}
        experts = read_table({"n_routed_experts": values.get("num_local_experts", 256)} | values, _EXPERTS)
        if not (shared := experts["shared_experts"]):
            raise FieldError(f"n_shared_experts is {shared!r}, but this family requires at least one shared expert")
        moe = MoE(**experts, **WITHOUT_BALANCE, scoring="sigmoid", e_score_correction_bias=True)
        return fold([LayerKind()] * dense + [LayerKind(moe=moe)] * (layers - dense))

    def write(self, config: TransformerConfig) -> Fields:
        kinds = layer_kinds(config, config.num_layers)
        moe = kinds[-1].moe
        if moe is None:
            return {"first_k_dense_replace": len(kinds)}
        width = {"moe_intermediate_size": moe.d_ff or config.feed_forward_width}
        dense = sum(kind.moe is None for kind in kinds)
        return write_table(moe, _EXPERTS) | width | {"first_k_dense_replace": dense}


def _rules(config: TransformerConfig) -> list[Rule]:
    theirs, ours = "model.layers.{layer}.self_attn.", "decoder/{layer}/self_attention/"
    mlp, feed_forward = "model.layers.{layer}.mlp.", "decoder/{layer}/feed_forward/"
    rotated = config.attention.mla.qk_rope_head_dim
    query = "q_proj" if config.attention.mla.q_lora_rank is None else "q_b_proj"
    return [
        Rule("model.embed_tokens.weight", "embedding/embedding"),
        *linear(f"{theirs}q_a_proj", f"{ours}query_latent"),
        *norm(f"{theirs}q_a_layernorm", f"{ours}query_norm"),
        # Queries: only the rotated dimensions of each head need reordering.
        Rule(f"{theirs}{query}.weight", f"{ours}query/kernel", Interleaved(MATRIX, rotated)),
        # The latent c_kv and the rotated key k_R, which all heads share, are one map (eqs. 1 and 3 of the paper).
        *fused(
            f"{theirs}kv_a_proj_with_mqa",
            (f"{ours}latent", f"{ours}rotary_key"),
            Interleaved(Fused(), rotated),
            Interleaved(Fused(each=VECTOR), rotated),
        ),
        *norm(f"{theirs}kv_a_layernorm", f"{ours}latent_norm"),
        # Up-projections of the latent to unrotated keys and to values, fused per head (eqs. 2 and 5).
        Rule(f"{theirs}kv_b_proj.weight", (f"{ours}key/kernel", f"{ours}value/kernel"), FusedHeads()),
        *linear(f"{theirs}o_proj", f"{ours}out", MERGED),
        *llama.NORM_RULES,
        *llama.FEED_FORWARD_RULES,
        *expert_rules(mlp),
        Rule(f"{mlp}gate.e_score_correction_bias", f"{feed_forward}router/selection_bias"),
        *modules(f"{mlp}shared_experts.", f"{feed_forward}shared/", llama.FEED_FORWARD),
        *norm("model.norm", "decoder/final_norm"),
    ]


_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}

_V3 = {"vocab_size": 129_280, "rope_theta": 10_000.0, "rope_scaling": _YARN, "max_position_embeddings": 163_840}
_MOONLIGHT = {"vocab_size": 163_840, "moe_intermediate_size": 1408, "q_lora_rank": None, "n_routed_experts": 64}
_MOONLIGHT |= {"num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}
_MOONLIGHT |= {"routed_scaling_factor": 2.446, "first_k_dense_replace": 1}
_MOONLIGHT |= {"rope_theta": 50_000.0, "max_position_embeddings": 8192}

_VARIANTS = {
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3", 671_026_419_200, 7168, 18_432, 61, 128, _V3),
    "moonlight-16b-a3b": ("moonshotai/Moonlight-16B-A3B", 15_960_110_208, 2048, 11_264, 27, 16, _MOONLIGHT),
}

DEEPSEEK_V3 = llama.decoder_family(
    "DeepseekV3",
    name="deepseek_v3",
    title="DeepSeek-V3",
    citation="DeepSeek-AI 2024, arXiv 2412.19437",
    fields=(
        *llama.decoder_fields(),
        LatentSizes(),
        LatentRope(),
        Biases("attention_bias"),
        RoutedBehindDense(),
        Fixed("rope_interleave", (True,)),
        Fixed("scoring_func", ("sigmoid",)),
        Fixed("topk_method", ("noaux_tc",)),
        Fixed("moe_layer_freq", (1,)),
        # Layers for multi-token prediction serve training and speculative decoding. They are not loaded.
        Unread(("num_nextn_predict_layers", "num_mtp_layers"), written={"num_nextn_predict_layers": 0}),
        Unread(("aux_loss_alpha", "seq_aux", "ep_size")),
    ),
    rules=_rules,
    # In the published model, the 61 layers are followed by one for multi-token prediction.
    ignored=(llama.ROTARY_BUFFERS, r"model\.layers\.61\..*"),
    variants=variants("", _VARIANTS),
)
