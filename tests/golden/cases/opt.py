"""Tiny models of OPT."""

from golden.case import Family

opt = Family(
    "OPT",
    {"vocab_size": 37, "hidden_size": 12, "ffn_dim": 19, "num_hidden_layers": 2, "num_attention_heads": 3}
    | {"max_position_embeddings": 67},
)
POST = {"do_layer_norm_before": False, "enable_bias": False, "activation_function": "gelu"}

CASES = {
    "lm": opt.causal_lm(),
    "post": opt.causal_lm(**POST, tie_word_embeddings=False, golden=False),
    "width": opt.causal_lm(word_embed_proj_dim=8, do_layer_norm_before=False),
    "width_classifier": opt.classifier(word_embed_proj_dim=8, pad_token_id=0, golden=False),
    "classifier": opt.classifier(pad_token_id=0, golden=False),
}
