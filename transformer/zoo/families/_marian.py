"""Marian (OPUS-MT): BART with sinusoidal positions (all sines, then all cosines), without normalized embeddings."""

from __future__ import annotations

from transformer.config._model import TransformerConfig
from transformer.config._positions import LearnedOptions, SinusoidalOptions
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.zoo._family import Family, Head, variants
from transformer.zoo._fields import Codec, FieldError, Fields, Unread
from transformer.zoo.families._bart import BART_COPIES, LOGITS_BIAS, Former, bart_fields, stack_rules, stack_sizes
from transformer.zoo.weights._rules import Rule


class Vocabularies(Codec):
    """Vocabulary sizes: `vocab_size` for the source, `decoder_vocab_size` for the target.

    With `share_encoder_decoder_embeddings`, source and target share one vocabulary and one embedding table.
    """

    names = ("vocab_size", "decoder_vocab_size", "share_encoder_decoder_embeddings")

    def read(self, values: Fields, changes: Fields) -> Fields:
        source = values["vocab_size"]
        target = values.get("decoder_vocab_size") or source
        if not values.get("share_encoder_decoder_embeddings", True):
            return {"vocab_size": target, "embedding.source_vocab_size": source}
        if target != source:
            raise FieldError(f"decoder_vocab_size is {target} and vocab_size is {source}, but they share one table")
        return {"vocab_size": source}

    def write(self, config: TransformerConfig) -> Fields:
        source = config.embedding.source_vocab_size
        return {
            "vocab_size": config.vocab_size if source is None else source,
            "decoder_vocab_size": config.vocab_size,
            "share_encoder_decoder_embeddings": source is None,
        }


class Positions(Codec):
    """Sinusoidal positions, or learned position tables if `static_position_embeddings` is false.

    A sinusoidal encoding consists of all sines, then all cosines. Learned tables have `max_position_embeddings` rows,
    and the file contains one per stack. (The reference loads tables from the file if it has them, and computes them
    otherwise.)
    """

    names = ("static_position_embeddings", "max_position_embeddings")

    def read(self, values: Fields, changes: Fields) -> Fields:
        static = values.get("static_position_embeddings", True)
        if not isinstance(static, bool):
            raise FieldError(f"static_position_embeddings must be true or false, got {static!r:.80}")
        if static:
            return {"position": SinusoidalOptions(halves=True)}
        if "max_position_embeddings" not in values:
            raise FieldError("static_position_embeddings is false, but max_position_embeddings is missing")
        return {"position": LearnedOptions(max_length=values["max_position_embeddings"])}

    def write(self, config: TransformerConfig) -> Fields:
        if config.max_length is not None:
            return {"static_position_embeddings": False, "max_position_embeddings": config.max_length}
        return {"max_position_embeddings": 512}


def _rules(config: TransformerConfig) -> list[Rule]:
    target = (
        "model.shared.weight" if config.embedding.source_vocab_size is None else "model.decoder.embed_tokens.weight"
    )
    return [
        Rule(target, "embedding/embedding"),
        Rule("model.encoder.embed_tokens.weight", "source_embedding/embedding"),
        *(Rule(f"model.{stack}.embed_positions.weight", f"{stack}/position_table") for stack in ("encoder", "decoder")),
        *stack_rules(),
    ]


# The published parameter counts do not include the bias of the logits.
_VARIANTS = {
    "opus-mt-en-de": (73_886_208 + 58_101, 58_101),
    "opus-mt-en-fr": (74_609_664 + 59_514, 59_514),
}
_ALIKE = stack_sizes(512, 6, 8) | {"activation_function": "swish", "scale_embedding": True}

MARIAN = Family(
    name="marian",
    title="Marian",
    citation="Junczys-Dowmunt et al. 2018, arXiv 1804.00344; Tiedemann & Thottingal 2020, OPUS-MT",
    heads={"MarianMTModel": Head(model=Seq2Seq, constants={"output.bias": True}, rules=(LOGITS_BIAS,))},
    constants={"norm.kind": "layer_norm", "norm.epsilon": 1e-5, "norm.position": "post", "parameters.use_bias": True},
    fields=(
        Vocabularies(),
        *bart_fields(),
        Positions(),
        Former("normalize_embedding", (False,)),
        Unread(("extra_pos_embeddings",)),
    ),
    rules=_rules,
    prefix="model.",
    ignored=(r"model\.(encoder|decoder)\.embed_positions\.weight",),
    copies=BART_COPIES,
    variants=variants("Helsinki-NLP/", _VARIANTS, ("vocab_size",), **_ALIKE),
)
