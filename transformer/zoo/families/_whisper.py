"""Whisper: speech to text from log-mel frames; two convolutions halve the number of frames; keys have no bias."""

from __future__ import annotations

from transformer.config._model import TransformerConfig
from transformer.config._options import Speech
from transformer.config._positions import LearnedOptions
from transformer.nn.models._speech import SpeechToText
from transformer.zoo._family import Family, Head, variants
from transformer.zoo._fields import ACTIVATIONS, Codec, Field, Fields, Fixed, Unread, training_fields
from transformer.zoo.families._bart import BothStacks, StackLayers, stack_rules, stack_sizes
from transformer.zoo.families._vit import CONVOLUTION
from transformer.zoo.weights._rules import MATRIX, Rule, linear, norm

_RULES = [
    *linear("model.encoder.conv1", "conv_0", CONVOLUTION),
    *linear("model.encoder.conv2", "conv_1", CONVOLUTION),
    Rule("model.encoder.embed_positions.weight", "encoder/position_table"),
    Rule("model.decoder.embed_tokens.weight", "embedding/embedding"),
    Rule("model.decoder.embed_positions.weight", "decoder/position_table"),
    *stack_rules(),
    *norm("model.encoder.layer_norm", "encoder/final_norm"),
    *norm("model.decoder.layer_norm", "decoder/final_norm"),
    Rule("proj_out.weight", "output/kernel", MATRIX),
]


class MelBins(Codec):
    """Number of mel frequency bins of the input."""

    names = ("num_mel_bins",)

    def read(self, values: Fields, changes: Fields) -> Fields:
        return {"input": Speech(mel_bins=values.get("num_mel_bins", 80))}

    def write(self, config: TransformerConfig) -> Fields:
        return {} if config.speech is None else {"num_mel_bins": config.speech.mel_bins}


_ENGLISH = {"vocab_size": 51_864}
_LARGE_3 = {"vocab_size": 51_866, "num_mel_bins": 128}
_VARIANTS = {
    "whisper-tiny": (37_760_640, stack_sizes(384, 4, 6)),
    "whisper-tiny.en": (37_760_256, stack_sizes(384, 4, 6) | _ENGLISH),
    "whisper-base": (72_593_920, stack_sizes(512, 6, 8)),
    "whisper-base.en": (72_593_408, stack_sizes(512, 6, 8) | _ENGLISH),
    "whisper-small": (241_734_912, stack_sizes(768, 12, 12)),
    "whisper-small.en": (241_734_144, stack_sizes(768, 12, 12) | _ENGLISH),
    "whisper-medium": (763_857_920, stack_sizes(1024, 24, 16)),
    "whisper-medium.en": (763_856_896, stack_sizes(1024, 24, 16) | _ENGLISH),
    "whisper-large": (1_543_304_960, stack_sizes(1280, 32, 20)),
    "whisper-large-v2": (1_543_304_960, stack_sizes(1280, 32, 20)),
    "whisper-large-v3": (1_543_490_560, stack_sizes(1280, 32, 20) | _LARGE_3),
    "whisper-large-v3-turbo": (808_878_080, stack_sizes(1280, 32, 20) | _LARGE_3 | {"decoder_layers": 4}),
}

WHISPER = Family(
    name="whisper",
    title="Whisper",
    citation="Radford et al. 2022, arXiv 2212.04356",
    heads={"WhisperForConditionalGeneration": Head(model=SpeechToText)},
    constants={"norm.kind": "layer_norm", "norm.epsilon": 1e-5, "position": LearnedOptions(), "embedding.scale": False}
    | {"parameters.use_bias": True, "attention.biases": ("query", "value", "out")},
    fields=(
        Field("vocab_size", "vocab_size", 51_865),
        MelBins(),
        Field("max_source_positions", "position.source_max_length", 1500),
        Field("max_target_positions", "position.max_length", 448),
        Field("d_model", "d_model", 384),
        StackLayers(),
        BothStacks("ffn_dim", "feed_forward.d_ff"),
        BothStacks("attention_heads", "num_heads"),
        Field("activation_function", "feed_forward.activation", "gelu", ACTIVATIONS),
        Field("tie_word_embeddings", "embedding.tie", True),
        *training_fields("dropout", "attention_dropout", "init_std"),
        Fixed("is_encoder_decoder", (True,)),
        Unread(
            # The reference stores this field but never applies it.
            ("scale_embedding",)
            # Training options: LayerDrop and SpecAugment masking.
            + ("activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "apply_spec_augment", "mask_time_prob")
            + ("mask_time_length", "mask_time_min_masks", "mask_feature_prob", "mask_feature_length")
            + ("mask_feature_min_masks", "initializer_range")
            # Options for audio classification, timestamps and forced decoder tokens.
            + ("use_weighted_layer_sum", "classifier_proj_size", "median_filter_width", "forced_decoder_ids")
        ),
    ),
    rules=_RULES,
    prefix="model.",
    copies={"proj_out.weight": "model.decoder.embed_tokens.weight"},
    variants=variants("openai/", _VARIANTS, vocab_size=51_865),
)
