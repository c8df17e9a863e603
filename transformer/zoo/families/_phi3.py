"""Phi-3 and Phi-4: Llama with fused maps, one for queries, keys and values, and one for gate and up."""

from __future__ import annotations

from transformer.config._model import TransformerConfig
from transformer.zoo._family import variants
from transformer.zoo._fields import Field, FieldError, Fields, Fixed, Unread
from transformer.zoo._rotary import Rope
from transformer.zoo.families._llama import NORM_RULES, decoder_family, decoder_fields
from transformer.zoo.families._mistral import same_window
from transformer.zoo.weights._rules import MERGED, Fused, Rule, linear, norm


class LongRope(Rope):
    """Rotary positions without scaling, or with longrope (one factor per frequency, for short and for long texts).

    The length that the model was trained on is outside `rope_parameters`, and applies even if it is inside, too.
    """

    @property
    def names(self) -> tuple[str, ...]:
        return (*super().names, "original_max_position_embeddings")

    def read(self, values: Fields, changes: Fields) -> Fields:
        given = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
        kind = given.pop("rope_type", given.pop("type", None)) or "default"
        given.pop("type", None)
        if kind in _LONGROPE:
            original = values.get("original_max_position_embeddings", 4096)
            given |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        elif kind != "default":
            raise FieldError(
                f"rotary scaling is {kind!r}, but this family supports only default and longrope (also named su)"
            )
        length = values.get("max_position_embeddings", 4096)
        known = {"rope_scaling": None, "rope_parameters": given, "max_position_embeddings": length}
        return super().read(values | known, changes)

    def write(self, config: TransformerConfig) -> Fields:
        values, scaling = super().write(config), config.rotary.scaling
        if scaling is None:
            return values
        return values | {"original_max_position_embeddings": scaling.original_length}


_LONGROPE = ("longrope", "su", "yarn")
"""Names of longrope in this family: older files name it su or yarn."""


def fused_feed_forward_rules() -> list[Rule]:
    """Return the rules for a gated feed-forward layer whose first two maps are one tensor."""
    layer, ours = "model.layers.{layer}.mlp.", "decoder/{layer}/feed_forward/"
    joined = Rule(f"{layer}gate_up_proj.weight", (f"{ours}gate/kernel", f"{ours}up/kernel"), Fused())
    return [joined, *linear(f"{layer}down_proj", f"{ours}down")]


_LAYER, _OURS = "model.layers.{layer}.", "decoder/{layer}/"
_ATTENTION = tuple(f"{_OURS}self_attention/{name}/kernel" for name in ("query", "key", "value"))
_RULES = [
    Rule("model.embed_tokens.weight", "embedding/embedding"),
    *NORM_RULES,
    Rule(f"{_LAYER}self_attn.qkv_proj.weight", _ATTENTION, Fused()),
    *linear(f"{_LAYER}self_attn.o_proj", f"{_OURS}self_attention/out", MERGED),
    *fused_feed_forward_rules(),
    *norm("model.norm", "decoder/final_norm"),
]

_THREE = {"vocab_size": 32_064, "sliding_window": 2047}
_FOUR = {"vocab_size": 100_352, "rope_theta": 250_000.0}

_VARIANTS = {
    "phi-3-mini-4k": ("Phi-3-mini-4k-instruct", 3_821_079_552, 3072, 8192, 32, 32, 32, _THREE),
    "phi-3-medium-4k": ("Phi-3-medium-4k-instruct", 13_960_238_080, 5120, 17_920, 40, 40, 10, _THREE),
    "phi-4": (14_659_507_200, 5120, 17_920, 40, 40, 10, _FOUR),
}

PHI3 = decoder_family(
    "Phi3",
    name="phi3",
    title="Phi-3 and Phi-4",
    citation="Abdin et al. 2024, arXiv 2404.14219 and 2412.08905",
    fields=(
        *decoder_fields(epsilon=1e-5),
        LongRope(default_share=1.0),
        same_window(None),
        Field("resid_pdrop", "dropout_rate", 0.0),
        Fixed("attention_bias", (False,)),
        # The reference does not apply dropout to embeddings.
        Unread(("embd_pdrop",)),
    ),
    rules=_RULES,
    variants=variants("microsoft/", _VARIANTS),
)
