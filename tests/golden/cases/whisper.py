"""Tiny models of Whisper."""

from golden.case import Family
from golden.sizes import SEQ2SEQ

whisper = Family(
    "Whisper",
    SEQ2SEQ
    | {"num_mel_bins": 5, "max_source_positions": 7, "max_target_positions": 61}
    | {"decoder_start_token_id": 2, "begin_suppress_tokens": None},
)
OTHER = {"decoder_layers": 1, "activation_function": "relu", "tie_word_embeddings": False, "scale_embedding": True}

CASES = {
    "lm": whisper.seq2seq(left_padding=True),
    "other": whisper.seq2seq(**OTHER, left_padding=True, golden=False),
}
