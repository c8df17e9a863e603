"""Tiny models of LLaVA 1.5."""

from golden.case import MARKER, Family
from golden.sizes import DECODER, TOWER

vision = TOWER | {"image_size": 6, "model_type": "clip_vision_model"}
llava = Family(
    "Llava",
    {
        "text_config": DECODER | {"model_type": "llama"},
        "vision_config": vision,
        "image_token_index": MARKER,
        "image_seq_length": 4,
    },
)

CASES = {
    "lm": llava.seq2seq(left_padding=True),
    "last_layer": llava.seq2seq(left_padding=True, vision_feature_layer=-1, golden=False),
    "first_layer": llava.seq2seq(
        left_padding=True,
        golden=False,
        vision_feature_layer=1,
        tie_word_embeddings=True,
        vision_config=vision | {"num_hidden_layers": 3, "hidden_act": "gelu", "num_channels": 1},
    ),
}
