"""Tiny models of RoBERTa."""

from golden.case import Family
from golden.sizes import ENCODER

roberta = Family(
    "Roberta",
    ENCODER
    | {"vocab_size": 37, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
    # The first two rows of the position table are unused; the others are as many as the tokens of a row.
    | {"max_position_embeddings": 13},
)

CASES = {
    "masked_lm": roberta.masked_lm(),
    "untied": roberta.masked_lm(tie_word_embeddings=False, type_vocab_size=2, hidden_act="relu", golden=False),
    "classifier": roberta.classifier(),
    "base": roberta.case("Model", options={"add_pooling_layer": False}, golden=False),
    "pooler": roberta.case("Model", golden=False),
}
