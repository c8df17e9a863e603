"""Mixtral: Mistral with a mixture of experts; each token uses two of eight experts, with weights that sum to 1."""

from __future__ import annotations

from dataclasses import replace

from transformer.config._model import TransformerConfig
from transformer.config._parts import MoE
from transformer.zoo._family import variants
from transformer.zoo._fields import Codec, Fields, Table, Unread, read_table, write_table
from transformer.zoo._rotary import Rope
from transformer.zoo.families import _llama as llama
from transformer.zoo.families._mistral import same_window
from transformer.zoo.weights._rules import MATRIX, Rule, layer_kinds

EXPERTS = {"num_local_experts": ("num_experts", 8), "num_experts_per_tok": ("top_k", 2)}
"""Fields of the experts in Mixtral and gpt-oss, with the defaults of Mixtral."""


def read_experts(values: Fields, table: Table, routed_layers: int, **constants: bool) -> MoE:
    """Return the experts that a table describes, with a balance loss that equals that of the reference.

    For perfectly balanced experts, the loss of the reference is k (the number of experts per token), computed over all
    layers together. Here it is 1 per layer, and the layers are summed. Hence the factor k / layers.
    """
    experts = read_table(values, table)
    weight = values.get("router_aux_loss_coef", 0.001) * experts["top_k"] / routed_layers
    return MoE(**experts, **constants, load_balance_weight=weight, router_z_weight=0.0)


def write_experts(moe: MoE, table: Table, routed_layers: int) -> Fields:
    """Return the fields from which `read_experts` reads these experts."""
    # Rounded, so that a coefficient such as 0.001 is written as it was read.
    coefficient = round(moe.load_balance_weight * routed_layers / moe.top_k, 12)
    return write_table(moe, table) | {"router_aux_loss_coef": coefficient}


def write_all_routed(config: TransformerConfig) -> Fields:
    """Return the fields of experts in every layer, whose width is `intermediate_size`; none without experts."""
    moe = layer_kinds(config, config.num_layers)[0].moe
    if moe is None:
        return {}
    width = {"intermediate_size": moe.d_ff or config.feed_forward_width}
    return write_experts(moe, EXPERTS, config.num_layers) | width


def expert_rules(tensors: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> list[Rule]:
    """Return the rules for a router and its experts; `tensors` is the prefix of their tensor names."""
    ours = "decoder/{layer}/feed_forward/"
    names = {"gate": gate, "up": up, "down": down}
    experts = [
        Rule(f"{tensors}experts.{{expert}}.{theirs}.weight", f"{ours}experts/{name}/kernel", MATRIX)
        for name, theirs in names.items()
    ]
    return [Rule(f"{tensors}gate.weight", f"{ours}router/kernel", MATRIX), *experts]


class Experts(Codec):
    """Mixture of experts in every layer, with expert width `intermediate_size`. Read after the sliding window."""

    names = (*EXPERTS, "router_aux_loss_coef")

    def read(self, values: Fields, changes: Fields) -> Fields:
        moe = read_experts(values, EXPERTS, changes["num_layers"])
        return {"stack.period": tuple(replace(kind, moe=moe) for kind in changes["stack.period"])}

    def write(self, config: TransformerConfig) -> Fields:
        return write_all_routed(config)


_LAYER = "model.layers.{layer}.block_sparse_moe."
_RULES = [*llama.attention_rules(), *llama.NORM_RULES, *expert_rules(_LAYER, gate="w1", up="w3", down="w2")]

_ALIKE = {"vocab_size": 32_000, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5}
_ALIKE |= {"num_local_experts": 8, "num_experts_per_tok": 2}

_VARIANTS = {
    "mixtral-8x7b": ("8x7B-v0.1", 46_702_792_704, 4096, 14_336, 32, 32, 8),
    "mixtral-8x22b": ("8x22B-v0.1", 140_620_634_112, 6144, 16_384, 56, 48, 8),
}

MIXTRAL = llama.decoder_family(
    "Mixtral",
    name="mixtral",
    title="Mixtral",
    citation="Jiang et al. 2024, arXiv 2401.04088",
    fields=(
        *llama.decoder_fields(epsilon=1e-5, kv_heads=8),
        Rope(default_base=1_000_000.0),
        same_window(None),
        Experts(),
        Unread(("router_jitter_noise",)),
    ),
    rules=_RULES,
    ignored=(llama.ROTARY_BUFFERS,),
    variants=variants("mistralai/Mixtral-", _VARIANTS, **_ALIKE),
)
