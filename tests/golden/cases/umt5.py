"""Tiny models of umT5."""

from golden.case import Family
from golden.cases.t5 import SIZES

umt5 = Family("UMT5", SIZES)

CASES = {
    "lm": umt5.seq2seq(),
    "encoder": umt5.case("EncoderModel", feed_forward_proj="relu", golden=False),
}
