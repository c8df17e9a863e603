"""Tiny models of ModernBERT, with a window of two tokens on each side in two of three layers."""

from golden.case import Family
from golden.sizes import ENCODER, YARN

modernbert = Family("ModernBert", ENCODER | {"vocab_size": 37, "num_hidden_layers": 4, "local_attention": 5})
BIASES = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")

CASES = {
    "masked_lm": modernbert.masked_lm(),
    "biases": modernbert.masked_lm(
        **dict.fromkeys(BIASES, True),
        tie_word_embeddings=False,
        hidden_activation="silu",
        classifier_activation="relu",
        layer_types=["sliding_attention", "full_attention"] * 2,
        norm_eps=0.03,
        golden=False,
    ),
    "yarn": modernbert.masked_lm(
        decoder_bias=False,
        local_attention=4,
        rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_theta": 99.0}},
        golden=False,
    ),
    "classifier": modernbert.classifier(classifier_pooling="mean"),
    "classifier_of_first": modernbert.classifier(golden=False),
    "base": modernbert.case("Model", golden=False),
}
