"""Tiny models of Blenderbot."""

from golden.case import Family
from golden.cases.bart import SIZES

blenderbot = Family("Blenderbot", SIZES | {"decoder_layers": 3, "scale_embedding": True, "decoder_start_token_id": 1})

CASES = {
    "lm": blenderbot.seq2seq(),
    "unscaled": blenderbot.seq2seq(scale_embedding=False, activation_function="relu", golden=False),
}
