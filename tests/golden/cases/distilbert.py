"""Tiny models of DistilBERT."""

from golden.case import Family

distilbert = Family(
    "DistilBert",
    {"vocab_size": 37, "dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 17, "max_position_embeddings": 13},
)
OTHER = {"activation": "relu", "sinusoidal_pos_embds": True}

CASES = {
    "masked_lm": distilbert.masked_lm(),
    "untied": distilbert.masked_lm(tie_word_embeddings=False, **OTHER, golden=False),
    "classifier": distilbert.classifier(),
    "base": distilbert.case("Model", golden=False),
}
