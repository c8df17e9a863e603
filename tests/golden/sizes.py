"""Small config fields shared by the tiny models of several families; the sizes are distinct where possible."""

DECODER = {
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
"""Fields of Llama and families with the same names."""

ENCODER = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 17,
}
"""Fields of BERT and families with the same names."""

SEQ2SEQ = {
    "vocab_size": 37,
    "d_model": 12,
    "encoder_layers": 2,
    "encoder_ffn_dim": 19,
    "encoder_attention_heads": 3,
    "decoder_layers": 2,
    "decoder_ffn_dim": 19,
    "decoder_attention_heads": 3,
}
"""Fields of BART and families with the same names."""

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
"""A rotary scaling whose original context is longer than the rows of the tests."""
