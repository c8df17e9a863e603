"""RoBERTa: BERT with one token type, and position tables that start after the row of the padding id."""

from __future__ import annotations

from dataclasses import dataclass

from transformer.config._model import TransformerConfig
from transformer.config._parts import HeadTransform
from transformer.nn.models._encoders import MaskedLM
from transformer.zoo._family import Family, Head, Variant
from transformer.zoo._fields import LARGE, Fields, Fixed, Named
from transformer.zoo.families import _bert as bert
from transformer.zoo.weights._rules import without_first

UNUSED_ROWS = 2
"""Unused rows at the start of a position table: position 0 is row padding id + 1, and the padding id is 1."""


@dataclass(frozen=True)
class LengthWithRows(Named):
    """Number of rows of a position table, of which the first `rows` are unused."""

    rows: int
    default: int

    def read(self, values: Fields, changes: Fields) -> Fields:
        return {"position.max_length": values.get(self.name, self.default) - self.rows}

    def write(self, config: TransformerConfig) -> Fields:
        return {} if config.max_length is None else {self.name: config.max_length + self.rows}


def _variant(name: str, parameters: int, **sizes: int) -> Variant:
    fields = {"vocab_size": 50_265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    # The published parameter counts include the unused rows of the position table.
    parameters -= UNUSED_ROWS * sizes.get("hidden_size", 768)
    return Variant(hub=name, parameters=parameters, fields=fields | sizes)


_MASKED_LM = (r"lm_head\.(bias|(decoder|dense|layer_norm)\.(weight|bias))",)

ROBERTA = Family(
    name="roberta",
    title="RoBERTa",
    citation="Liu et al. 2019, arXiv 1907.11692",
    heads={
        "RobertaForMaskedLM": Head(
            model=MaskedLM,
            constants={"output.bias": True, "output.transform": HeadTransform(activation="gelu_erf", norm=True)},
            rules=bert.masked_lm_rules("lm_head.", "dense", "layer_norm"),
        ),
        "RobertaForSequenceClassification": bert.first_token_head(
            "classifier.dense", "classifier.out_proj", ignored=_MASKED_LM
        ),
        "RobertaModel": bert.base_head("roberta.", (*_MASKED_LM, r"classifier\.(dense|out_proj)\.(weight|bias)")),
    },
    constants=bert.BERT_CONSTANTS,
    fields=(
        *bert.encoder_fields(),
        LengthWithRows("max_position_embeddings", UNUSED_ROWS, 512),
        Fixed("pad_token_id", (UNUSED_ROWS - 1,)),
    ),
    rules=bert.encoder_rules("roberta.", without_first(UNUSED_ROWS)),
    prefix="roberta.",
    ignored=(r"(roberta\.)?embeddings\.position_ids", r"(roberta\.)?pooler\.dense\.(weight|bias)"),
    copies={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    old_names=bert.OLD_NORMS,
    variants={
        "roberta-base": _variant("FacebookAI/roberta-base", 124_697_433),
        "roberta-large": _variant("FacebookAI/roberta-large", 355_412_057, **LARGE),
        "distilroberta-base": _variant("distilbert/distilroberta-base", 82_170_201, num_hidden_layers=6),
    },
)
