"""wav2vec 2.0: convolutions of the waveform, a convolution as positions, and an encoder; recognition with CTC."""

from __future__ import annotations

from dataclasses import dataclass

from transformer.config._model import TransformerConfig
from transformer.config._options import Audio
from transformer.nn.models._audio import SpeechEncoder, SpeechRecognizer
from transformer.zoo._family import Family, Head, variants
from transformer.zoo._fields import (
    ACTIVATIONS,
    LARGE,
    Codec,
    Field,
    FieldError,
    Fields,
    Fixed,
    Unread,
    training_fields,
    written_as,
)
from transformer.zoo.families._bart import ATTENTION
from transformer.zoo.families._bert import LAYER_FIELDS
from transformer.zoo.families._patchtst import batch_norm
from transformer.zoo.families._vit import CONVOLUTION
from transformer.zoo.weights._rules import Rule, linear, modules, norm, row

_LISTS = {"conv_dim": "features", "conv_kernel": "kernel_sizes", "conv_stride": "strides"}
_PLAIN = {
    "conv_bias": "use_bias",
    "feat_extract_norm": "norm",
    "num_conv_pos_embeddings": "position_kernel_size",
    "num_conv_pos_embedding_groups": "position_groups",
}


@dataclass(frozen=True)
class AudioInput(Codec):
    """The convolutions that read the waveform, and the convolution of the positions."""

    optional: bool = False
    """Whether the norm of the projection and batch normalization of the positions can be chosen, as in HuBERT."""

    @property
    def names(self) -> tuple[str, ...]:
        more = ("feat_proj_layer_norm", "conv_pos_batch_norm") if self.optional else ()
        return (*_LISTS, *_PLAIN, "feat_extract_activation", "num_feat_extract_layers", *more)

    def read(self, values: Fields, changes: Fields) -> Fields:
        given = {ours: values[theirs] for theirs, ours in _PLAIN.items() if theirs in values}
        for theirs, ours in _LISTS.items():
            if theirs in values:
                value = values[theirs]
                given[ours] = tuple(value) if isinstance(value, list | tuple) else value
        activation = values.get("feat_extract_activation", "gelu")
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise FieldError(f"feat_extract_activation is {activation!r:.80}, which is not supported")
        if self.optional:
            given["projection_norm"] = values.get("feat_proj_layer_norm", True)
            given["position_norm"] = "batch" if values.get("conv_pos_batch_norm", False) else "weight"
        audio = Audio(**given, activation=ACTIVATIONS[activation])
        if values.get("num_feat_extract_layers", len(audio.features)) != len(audio.features):
            raise FieldError(
                f"num_feat_extract_layers is {values['num_feat_extract_layers']!r:.80}, but conv_dim has "
                f"{len(audio.features)} layers"
            )
        return {"input": audio}

    def write(self, config: TransformerConfig) -> Fields:
        audio = config.audio
        if audio is None:
            return {}
        values = {theirs: getattr(audio, ours) for theirs, ours in _PLAIN.items()}
        values |= {theirs: list(getattr(audio, ours)) for theirs, ours in _LISTS.items()}
        values |= written_as("feat_extract_activation", audio.activation)
        if self.optional:
            batch = audio.position_norm == "batch"
            values |= {"feat_proj_layer_norm": audio.projection_norm, "conv_pos_batch_norm": batch}
        return values | {"num_feat_extract_layers": len(audio.features)}


class StableNorm(Codec):
    """`do_stable_layer_norm`: pre-norm. Otherwise post-norm, with a norm before the first layer."""

    names = ("do_stable_layer_norm",)

    def read(self, values: Fields, changes: Fields) -> Fields:
        stable = values.get("do_stable_layer_norm", False)
        if not isinstance(stable, bool):
            raise FieldError(f"do_stable_layer_norm must be true or false, got {stable!r:.80}")
        return {"norm.position": "pre" if stable else "post", "embedding.norm": not stable}

    def write(self, config: TransformerConfig) -> Fields:
        return {"do_stable_layer_norm": config.norm.position == "pre"}


_LAYER = {
    "attention_norm": "layer_norm",
    **{f"self_attention/{name}": f"attention.{theirs}" for name, theirs in ATTENTION.items()},
    "feed_forward_norm": "final_layer_norm",
    "feed_forward/up": "feed_forward.intermediate_dense",
    "feed_forward/down": "feed_forward.output_dense",
}


def speech_rules(config: TransformerConfig, prefix: str) -> list[Rule]:
    """Return the rules of wav2vec 2.0 and HuBERT, without a head; `prefix` is that of all tensor names."""
    encoder, positions = f"{prefix}encoder.", "position_convolution"
    table = f"{encoder}pos_conv_embed."
    rules = [
        *norm(f"{prefix}feature_projection.layer_norm", "feature_encoder/projection_norm"),
        *linear(f"{prefix}feature_projection.projection", "feature_encoder/projection"),
        Rule(f"{table}conv.bias", f"{positions}/bias"),
        *modules(f"{encoder}layers.{{layer}}.", "encoder/{layer}/", _LAYER),
        # The norm before the first layer with post-norm, the one after the last layer with pre-norm.
        *norm(f"{encoder}layer_norm", "encoder/embedding_norm" if config.embedding.norm else "encoder/final_norm"),
    ]
    for i in range(0 if config.audio is None else len(config.audio.features)):
        layer = f"{prefix}feature_extractor.conv_layers.{i}."
        rules += linear(f"{layer}conv", f"feature_encoder/conv_{i}", CONVOLUTION)
        rules += norm(f"{layer}layer_norm", f"feature_encoder/norm_{i}")
    if config.audio is not None and config.audio.position_norm == "batch":
        return [
            *rules,
            Rule(f"{table}conv.weight", f"{positions}/kernel", CONVOLUTION),
            *batch_norm(f"{table}batch_norm", f"{positions}/norm"),
        ]
    weight = f"{table}conv.parametrizations.weight"
    return [
        *rules,
        Rule(f"{weight}.original0", f"{positions}/scale", row(2)),
        Rule(f"{weight}.original1", f"{positions}/kernel", CONVOLUTION),
    ]


OLD_WEIGHT_NORM = {
    "conv.parametrizations.weight.original0": "conv.weight_g",
    "conv.parametrizations.weight.original1": "conv.weight_v",
}
"""Names of the weight normalization -> their names in files written with PyTorch before 2.0."""

SPEECH_CONSTANTS = {"norm.kind": "layer_norm", "position": None, "embedding.scale": False, "embedding.tie": False}
"""Constants of wav2vec 2.0 and HuBERT."""


def speech_fields(*, optional: bool = False) -> tuple[Codec, ...]:
    """Return the fields of wav2vec 2.0 and HuBERT; `optional` is that of `AudioInput`."""
    return (
        *(field for field in LAYER_FIELDS if "layer_norm_eps" not in field.names),
        Field("layer_norm_eps", "norm.epsilon", 1e-5),
        Field("vocab_size", "vocab_size", 32),
        AudioInput(optional),
        StableNorm(),
        *training_fields("hidden_dropout", "attention_dropout", rates=0.1),
        Unread(
            # Other dropout rates, LayerDrop, and the reduction of the loss.
            ("activation_dropout", "feat_proj_dropout", "feat_quantizer_dropout", "final_dropout", "layerdrop")
            + ("feat_extract_dropout", "hidden_dropout_prob", "gradient_checkpointing")
            + ("ctc_loss_reduction", "ctc_zero_infinity")
            # SpecAugment, which masks frames in training.
            + ("apply_spec_augment", "mask_time_prob", "mask_time_length", "mask_time_min_masks", "mask_feature_prob")
            + ("mask_feature_length", "mask_feature_min_masks", "mask_channel_length", "mask_channel_min_space")
            + ("mask_channel_other", "mask_channel_prob", "mask_channel_selection", "mask_time_min_space")
            + ("mask_time_other", "mask_time_selection")
            # Pretraining, classification of recordings and of speakers.
            + ("num_codevectors_per_group", "num_codevector_groups", "contrastive_logits_temperature")
            + ("num_negatives", "codevector_dim", "proj_codevector_dim", "diversity_loss_weight")
            + ("use_weighted_layer_sum", "classifier_proj_size", "tdnn_dim", "tdnn_kernel", "tdnn_dilation")
            + ("xvector_output_dim",),
            # Without SpecAugment the reference expects no vector that replaces masked frames.
            {"mask_time_prob": 0.0, "mask_feature_prob": 0.0},
        ),
    )


MASK_VECTOR = r"(\w+\.)?masked_spec_embed"
"""Tensor that replaces masked frames in training."""


def speech_heads(name: str) -> dict[str, Head]:
    """Return the heads of a family whose class names start with `name`."""
    recognizer = Head(model=SpeechRecognizer, rules=tuple(linear("lm_head", "output")), ignored=(MASK_VECTOR,))
    others = (r"lm_head\.(weight|bias)", r"quantizer\..*", r"project_(q|hid)\..*")
    encoder = Head(model=SpeechEncoder, base=True, ignored=(MASK_VECTOR, *others))
    return {f"{name}ForCTC": recognizer, f"{name}Model": encoder}


STABLE = {"feat_extract_norm": "layer", "conv_bias": True, "do_stable_layer_norm": True}
"""Options of the models trained on Libri-Light."""

_VARIANTS = {
    "wav2vec2-base-960h": (94_395_552,),
    "wav2vec2-large-960h": (315_460_768, LARGE),
    "wav2vec2-large-960h-lv60-self": (315_470_496, LARGE | STABLE),
}

WAV2VEC2 = Family(
    name="wav2vec2",
    title="wav2vec 2.0",
    citation="Baevski et al. 2020, arXiv 2006.11477",
    heads=speech_heads("Wav2Vec2"),
    constants=SPEECH_CONSTANTS,
    fields=(
        *speech_fields(),
        Fixed("add_adapter", (False,)),
        Fixed("adapter_attn_dim", (None,)),
        Unread(("adapter_kernel_size", "adapter_stride", "num_adapter_layers", "output_hidden_size")),
    ),
    rules=lambda config: speech_rules(config, "wav2vec2."),
    prefix="wav2vec2.",
    old_names=OLD_WEIGHT_NORM,
    variants={
        **variants("facebook/", _VARIANTS, ()),
        **variants("facebook/", {"wav2vec2-base": (94_370_944,)}, (), architecture="Wav2Vec2Model"),
    },
)
