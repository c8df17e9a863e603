"""Blenderbot: BART with pre-norm layers and without normalized embeddings."""

from __future__ import annotations

from transformer.config._positions import LearnedOptions
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.zoo._family import Family, Head
from transformer.zoo._fields import Field, Unread
from transformer.zoo.families._bart import BART_COPIES, LOGITS_BIAS, Former, bart_fields, stack_rules
from transformer.zoo.weights._rules import Rule, norm

_STACKS = ("encoder", "decoder")

_RULES = [
    Rule("model.shared.weight", "embedding/embedding"),
    *(Rule(f"model.{stack}.embed_positions.weight", f"{stack}/position_table") for stack in _STACKS),
    *(rule for stack in _STACKS for rule in norm(f"model.{stack}.layer_norm", f"{stack}/final_norm")),
    *stack_rules(),
]

BLENDERBOT = Family(
    name="blenderbot",
    title="Blenderbot",
    citation="Roller et al. 2020, arXiv 2004.13637",
    heads={
        "BlenderbotForConditionalGeneration": Head(model=Seq2Seq, constants={"output.bias": True}, rules=(LOGITS_BIAS,))
    },
    constants={"norm.kind": "layer_norm", "norm.epsilon": 1e-5, "position": LearnedOptions()}
    | {"parameters.use_bias": True},
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "position.max_length", 128),
        *bart_fields(pre_norm=True),
        Former("normalize_embedding", (False,)),
        Former("static_position_embeddings", (False,)),
        Former("extra_pos_embeddings", (0,)),
        Former("layernorm_variant", ("prelayernorm",)),
        Unread(
            ("do_blenderbot_90_layernorm", "encoder_no_repeat_ngram_size"),
            # Written as 0, because the default of the reference (3) bans generated trigrams that occur in the source.
            {"encoder_no_repeat_ngram_size": 0},
        ),
    ),
    rules=_RULES,
    prefix="model.",
    copies=BART_COPIES,
)
