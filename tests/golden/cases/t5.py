"""Tiny models of T5."""

from golden.case import Family

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
SECOND = {
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "num_layers": 3,
    "num_decoder_layers": 2,
}

t5 = Family("T5", SIZES)

CASES = {
    "lm": t5.seq2seq(),
    "second": t5.seq2seq(**SECOND, more={"lm_head.weight": (37, 12)}),
    "encoder": t5.case("EncoderModel", feed_forward_proj="gated-silu", golden=False),
    "tied_unscaled": t5.seq2seq(**SECOND, golden=False),
    "exact_gelu": t5.seq2seq(feed_forward_proj="gelu", golden=False),
}
