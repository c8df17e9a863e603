"""Tiny models of Llama."""

from dataclasses import replace

from golden.case import Family
from golden.sizes import DECODER, YARN

llama = Family("Llama", DECODER | {"num_attention_heads": 3, "rms_norm_eps": 1e-5})
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# The reference takes the longest row for all rows, and keeps the rotation of keys in its cache when a text grows.
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 99.0, "factor": 2.5}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}

CASES = {
    "lm": llama.causal_lm(),
    "grouped_llama3": llama.causal_lm(**GROUPED, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "biases_yarn": llama.causal_lm(attention_bias=True, mlp_bias=True, head_dim=16, rope_parameters=YARN),
    "linear": llama.causal_lm(rope_parameters={"rope_type": "linear", "rope_theta": 99.0, "factor": 3.0}),
    "dynamic": replace(llama.causal_lm(max_position_embeddings=6, rope_parameters=DYNAMIC, golden=False), new_tokens=1),
    "classifier": llama.classifier(pad_token_id=0),
}
