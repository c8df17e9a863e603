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

AUDIO = ENCODER | {
    "vocab_size": 7,
    "conv_dim": [8, 5, 9],
    "conv_kernel": [5, 3, 2],
    "conv_stride": [3, 2, 1],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 3,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}
"""Fields of wav2vec 2.0 and HuBERT."""

TOWER = {
    "hidden_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 17,
    "patch_size": 3,
}
"""Fields of the encoder of images in a vision-language model."""

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
