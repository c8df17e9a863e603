"""Tiny models of umT5."""

from golden.case import Case
from golden.cases.t5 import SIZES

CASES = {
    "lm": Case("UMT5ForConditionalGeneration", "UMT5Config", SIZES, left_padding=False),
    "encoder": Case("UMT5EncoderModel", "UMT5Config", SIZES | {"feed_forward_proj": "relu"}, golden=False),
}
