"""Tiny mixture-of-experts models of Qwen 3."""

from golden.case import Family
from golden.sizes import DECODER

EXPERTS = {"moe_intermediate_size": 8, "num_experts": 5, "num_experts_per_tok": 3}

qwen3_moe = Family("Qwen3Moe", DECODER | EXPERTS | {"head_dim": 4})

CASES = {
    # A dense layer, then a layer with experts.
    "lm": qwen3_moe.causal_lm(decoder_sparse_step=2),
    "some_dense": qwen3_moe.causal_lm(
        num_hidden_layers=3,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=4,
        tie_word_embeddings=True,
        golden=False,
    ),
    "classifier": qwen3_moe.classifier(pad_token_id=0, golden=False),
}
