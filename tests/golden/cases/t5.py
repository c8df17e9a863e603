"""Tiny models of T5."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "d_model": 12,
    "d_kv": 5,
    "d_ff": 19,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,
    "decoder_start_token_id": 2,
}
SECOND = SIZES | {
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "num_layers": 3,
    "num_decoder_layers": 2,
}
OUTPUT = {"lm_head.weight": (37, 12)}

CASES = {
    "lm": Case("T5ForConditionalGeneration", "T5Config", SIZES, left_padding=False),
    "second": Case("T5ForConditionalGeneration", "T5Config", SECOND, left_padding=False, more=OUTPUT),
    "encoder": Case("T5EncoderModel", "T5Config", SIZES | {"feed_forward_proj": "gated-silu"}, golden=False),
    "tied_unscaled": Case("T5ForConditionalGeneration", "T5Config", SECOND, left_padding=False, golden=False),
    "exact_gelu": Case(
        "T5ForConditionalGeneration",
        "T5Config",
        SIZES | {"feed_forward_proj": "gelu"},
        left_padding=False,
        golden=False,
    ),
}
