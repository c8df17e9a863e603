"""Sections of a model config: attention, feed-forward layers, norms, parameters, embeddings, stacks, output layer; and
the two inputs of sound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from transformer.config._checks import (
    ConfigError,
    check_choice,
    check_choices,
    check_flags,
    check_positive,
    check_range,
    check_whole,
)
from transformer.config._parts import MLA, Activation, FeedForwardActivation, HeadTransform, LayerKind

Norm = Literal["layer_norm", "rms_norm", "zero_centered_rms_norm", "layer_norm_without_bias", "frozen_batch_norm"]
NormPosition = Literal["pre", "post", "pre_without_residual", "sandwich", "reordered", "parallel"]
Dtype = Literal["float32", "bfloat16", "float16"]
Projection = Literal["query", "key", "value", "out"]
Pooling = Literal["mean", "first", "last", "first_and_mean", "attention"]


@dataclass(frozen=True, kw_only=True)
class QKNorm:
    """RMSNorm of queries and keys (Henry et al. 2020, arXiv 2010.04245; as in Qwen 3 and Gemma 3).

    Raises:
        ConfigError: an unknown name.
    """

    scope: Literal["head", "all"] = "head"
    """what is normalized:
    head: each head separately;
    all: all heads of a token together (OLMo Team 2024, arXiv 2501.00656, section 3.2)"""
    kind: Literal["rms_norm", "zero_centered_rms_norm"] = "rms_norm"
    """zero_centered_rms_norm multiplies by 1 + scale (Gemma 3)"""
    scale: bool = True
    """learn a factor for each number; false: the norm has no parameters (Llama 4)"""

    def __post_init__(self):
        check_choices(self, scope=Literal["head", "all"], kind=Literal["rms_norm", "zero_centered_rms_norm"])
        check_flags(self, "scale")


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Options of the attention layers, besides the number of query heads.

    Raises:
        ConfigError: a value out of range, an unknown name, or an option that latent attention does not have.
    """

    section: ClassVar[str] = "attention"
    num_kv_heads: int | None = None
    """K, number of key and value heads, each shared by N / K query heads; None: num_heads"""
    head_dim: int | None = None
    """H, size of a query or key head; None: d_model / num_heads"""
    value_dim: int | None = None
    """size of a value head; None: the size of a key head"""
    biases: tuple[Projection, ...] | None = None
    """projections with a bias, a subset of query, key, value and out; None: all if parameters.use_bias, else none"""
    scale: float | None = None
    """factor on the attention scores; None: 1 / sqrt(head_dim)"""
    softcap: float | None = None
    """c: replace the scores by c tanh(scores / c); None: no cap"""
    sinks: bool = False
    """attention sinks: one learned logit per head in the softmax that receives attention weight but has no value"""
    output_gate: bool = False
    """multiply the attended values by the sigmoid of a projection of x (Qiu et al. 2025, arXiv 2505.06708)"""
    qk_norm: QKNorm | None = None
    """normalize queries and keys; None: no norm"""
    value_norm: bool = False
    """apply RMSNorm without parameters to each value head (Gemma 4)"""
    dropout_rate: float = 0.0
    """dropout rate of the attention weights"""
    causal: bool = False
    """causal self-attention in an encoder model (a decoder used as a classifier or embedder)"""
    mla: MLA | None = None
    """multi-head latent attention; None: queries, keys and values are projections of x"""

    def __post_init__(self):
        check_flags(self, "sinks", "output_gate", "value_norm", "causal")
        check_whole(self, "num_kv_heads", "head_dim", "value_dim")
        check_positive(self, "scale", "softcap")
        check_range(self, 0.0, 1.0, "dropout_rate")
        for projection in self.biases or ():
            check_choice("attention.biases", projection, Projection.__args__)
        if self.mla is not None:
            self._check_latent()

    def _check_latent(self):
        others = ("head_dim", "value_dim", "qk_norm", "value_norm", "sinks", "output_gate")
        for name in others:
            if getattr(self, name) not in (None, False):
                raise ConfigError(
                    f"attention.{name} is {getattr(self, name)}, but attention.mla computes keys and values from a "
                    f"latent vector: it defines its own head sizes, normalizes the latent and has no sinks. Remove "
                    f"attention.{name}, or attention.mla."
                )
        if set(self.biases or ()) not in (set(), set(Projection.__args__)):
            raise ConfigError(
                f"attention.biases is {self.biases}, but with attention.mla either all or none of the projections "
                f"from and to the residual stream have a bias. List all of {', '.join(Projection.__args__)}, or none."
            )


@dataclass(frozen=True, kw_only=True)
class FeedForwardOptions:
    """Options of the dense feed-forward layers; `LayerKind.moe` replaces them by experts.

    Raises:
        ConfigError: a width below 1, an unknown name, or an activation that needs a gate.
    """

    section: ClassVar[str] = "feed_forward"
    d_ff: int | None = None
    """F, inner width; None: 4 d_model"""
    activation: FeedForwardActivation = "relu"
    """activation; swiglu_clamped (gpt-oss) needs gated:
    (up + 1) gate sigmoid(1.702 gate), where gate is at most 7 and up is between -7 and 7"""
    gated: bool = False
    """multiply by a second, activated projection (SwiGLU is silu + gated)"""

    def __post_init__(self):
        check_whole(self, "d_ff")
        check_choices(self, activation=FeedForwardActivation)
        check_flags(self, "gated")
        if self.activation == "swiglu_clamped" and not self.gated:
            raise ConfigError(
                "feed_forward.activation='swiglu_clamped' is a function of two projections (gate and up), but "
                "feed_forward.gated is False. Set feed_forward.gated=True, or use another activation."
            )


@dataclass(frozen=True, kw_only=True)
class NormOptions:
    """Normalization in the stacks.

    Raises:
        ConfigError: an unknown name, or an epsilon that is not above 0.
    """

    section: ClassVar[str] = "norm"
    kind: Norm = "layer_norm"
    """normalization layer:
    zero_centered_rms_norm multiplies by 1 + scale (Gemma);
    frozen_batch_norm is batch normalization with fixed statistics"""
    position: NormPosition = "pre"
    """position of the norms around a sublayer f:
    pre: x + f(norm(x));
    post: norm(x + f(x)), as in Vaswani et al. 2017;
    pre_without_residual: f(norm(x)), an ablation;
    sandwich: x + norm(f(norm(x)));
    reordered: x + norm(f(x)), as in OLMo 2;
    parallel: x + attention(norm(x)) + feed_forward(norm(x))"""
    epsilon: float = 1e-6
    """added to the variance before the square root"""

    def __post_init__(self):
        check_choices(self, kind=Norm, position=NormPosition)
        check_positive(self, "epsilon")


@dataclass(frozen=True, kw_only=True)
class ParameterOptions:
    """Which parameters the layers have, their initial values and their dtype.

    Raises:
        ConfigError: an unknown dtype, or a standard deviation that is not above 0.
    """

    section: ClassVar[str] = "parameters"
    use_bias: bool = True
    """biases in the projections of attention and feed-forward layers"""
    initializer_range: float | None = None
    """standard deviation of normal initialization (output projections: divided by sqrt(2 L)); None: Glorot uniform"""
    dtype: Dtype = "float32"
    """dtype of parameters; those of 16 bits are updated in float32 and rounded stochastically (Zamirai et al. 2020,
    arXiv 2010.06192)"""

    def __post_init__(self):
        check_flags(self, "use_bias")
        check_positive(self, "initializer_range")
        check_choices(self, dtype=Dtype)


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions:
    """Options of the embedding tables.

    Raises:
        ConfigError: a value out of range, or rows of per-layer embeddings without their width.
    """

    section: ClassVar[str] = "embedding"
    scale: bool = True
    """multiply token embeddings by sqrt(d_model)"""
    norm: bool = False
    """normalize the sum of token and position embeddings, before dropout"""
    tie: bool = True
    """the output layer uses the (decoder's) token embedding table"""
    token_types: int | None = None
    """rows of the token type table of an encoder model; None: no token types"""
    width: int | None = None
    """width of the token embeddings and of the input of the output layer, with linear maps to and from d_model (as in
    OPT-350m; not for encoder-decoders); None: d_model, without such maps"""
    per_layer_width: int | None = None
    """P: each layer of a CausalLM adds its own gated projection of P numbers per token, from a second table and
    from the token embedding (per-layer embeddings, Gemma 3n and 4); None: no such embeddings"""
    per_layer_vocab_size: int | None = None
    """rows of the table of the per-layer embeddings; None: vocab_size"""
    source_vocab_size: int | None = None
    """encoder vocabulary size, if different from the decoder's; None: encoder and decoder share one table"""

    def __post_init__(self):
        check_flags(self, "scale", "norm", "tie")
        check_whole(self, "token_types", "width", "source_vocab_size")
        check_whole(self, "per_layer_width", "per_layer_vocab_size")
        if self.per_layer_vocab_size is not None and self.per_layer_width is None:
            raise ConfigError("embedding.per_layer_vocab_size is for per-layer embeddings. Set per_layer_width too.")


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """The layers of a stack: `prefix`, then `period` repeated, then `suffix`, num_layers in total.

    Raises:
        ConfigError: a value out of range, or an empty period.
    """

    section: ClassVar[str] = "stack"
    num_encoder_layers: int | None = None
    """layers of the encoder in an encoder-decoder; None: num_layers"""
    num_decoder_layers: int | None = None
    """layers of the decoder in an encoder-decoder; None: num_layers"""
    encoder_num_heads: int | None = None
    """attention heads of the encoder in an encoder-decoder; None: num_heads"""
    encoder_d_ff: int | None = None
    """inner width of the encoder's feed-forward layers in an encoder-decoder; None: feed_forward.d_ff"""
    prefix: tuple[LayerKind, ...] = ()
    """kinds of the first layers, before the repeated pattern"""
    period: tuple[LayerKind, ...] = (LayerKind(),)
    """kinds of the layers in the repeated pattern"""
    suffix: tuple[LayerKind, ...] = ()
    """kinds of the last layers, after the repeated pattern"""
    final_norm: bool = True
    """normalize after the last layer (not with post-norm)"""
    layer_scalar: bool = False
    """multiply the output of each layer by a learned number (Gemma 4)"""
    layer_scale: float | None = None
    """initial value of a learned factor per feature on the output of each sublayer, before the residual sum
    (LayerScale, Touvron et al. 2021, arXiv 2103.17239, section 2); None: no factor"""

    def __post_init__(self):
        check_whole(self, "num_encoder_layers", "num_decoder_layers", "encoder_num_heads", "encoder_d_ff")
        check_flags(self, "final_norm", "layer_scalar")
        check_positive(self, "layer_scale")
        if not self.period:
            raise ConfigError("stack.period is empty: expected at least one LayerKind. Add one.")


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options of the output layer: logits over the vocabulary, classes, or one vector per sequence.

    Raises:
        ConfigError: a number out of range, or a target_range that is not two increasing numbers.
    """

    section: ClassVar[str] = "output"
    num_classes: int | None = None
    """number of classes of a Classifier, VisionClassifier or SeriesClassifier"""
    num_targets: int | None = None
    """number of targets of a SeriesRegressor"""
    target_range: tuple[float, ...] | None = None
    """(low, high): a sigmoid limits the targets of a SeriesRegressor to this range; None: no limit"""
    pooling: Pooling = "mean"
    """how a classifier or embedder reduces a sequence to one vector:
    mean: of all tokens, for images of all patches;
    first, last: the first or last token, for images the class token;
    first_and_mean: both, concatenated (images only; DINOv2);
    attention: attention of a learned query, then a feed-forward layer (images only; SigLIP)"""
    normalize: bool = False
    """scale the vectors of an Embedder to length 1"""
    transform: HeadTransform | None = None
    """a dense layer with an activation before the output layer; None: no such layer"""
    pooler: HeadTransform | None = None
    """an Embedder's second vector, `pooler_output`: this dense layer on the first token (BERT); None: no such layer"""
    bias: bool | None = None
    """bias of the output layer; None: only classifiers have one"""
    scale: float | None = None
    """factor on the input of the output layer"""
    softcap: float | None = None
    """c: replace the logits by c tanh(logits / c); None: no cap"""

    def __post_init__(self):
        check_choices(self, pooling=Pooling)
        check_flags(self, "normalize", "bias")
        check_whole(self, "num_classes", "num_targets")
        limits = self.target_range
        if limits is not None and (len(limits) != 2 or not limits[0] < limits[1]):
            raise ConfigError(f"target_range must be two increasing numbers, low and high, got {limits}. Change it.")
        check_positive(self, "scale", "softcap")


@dataclass(frozen=True, kw_only=True)
class Speech:
    """Log-mel frames as input of a SpeechToText (Radford et al. 2022, arXiv 2212.04356, section 2.2)."""

    mel_bins: int
    """M, mel frequency bins per frame"""

    def __post_init__(self):
        check_whole(self, "mel_bins")


MAX_CONVOLUTIONS = 32
"""Maximum number of convolutions of a recording."""


@dataclass(frozen=True, kw_only=True)
class Audio:
    """Samples of a recording as input of a SpeechEncoder (wav2vec 2.0, Baevski et al. 2020, arXiv 2006.11477).

    Convolutions without padding reduce the samples to frames, a linear layer maps the frames to d_model features, and
    a grouped convolution over the frames adds their relative positions (section 2; section 4.2 and appendix B).

    Raises:
        ConfigError: a size below 1, lists of unlike length, or more than 32 convolutions.
    """

    features: tuple[int, ...] = (512,) * 7
    """output features of each convolution"""
    kernel_sizes: tuple[int, ...] = (10, 3, 3, 3, 3, 2, 2)
    """kernel size of each convolution"""
    strides: tuple[int, ...] = (5, 2, 2, 2, 2, 2, 2)
    """stride of each convolution"""
    use_bias: bool = False
    """biases of the convolutions"""
    norm: Literal["group", "layer"] = "group"
    """normalization after the convolutions:
    group: of each feature over all frames of the recording, after the first convolution only;
    layer: LayerNorm after each convolution"""
    activation: Activation = "gelu_erf"
    """activation after each convolution, and after the position convolution"""
    projection_norm: bool = True
    """LayerNorm before the linear layer to d_model"""
    position_kernel_size: int = 128
    """kernel size of the convolution of the positions, in frames"""
    position_groups: int = 16
    """groups of features of the convolution of the positions; d_model must be a multiple"""
    position_norm: Literal["weight", "batch"] = "weight"
    """normalization of the positions:
    weight: each position of the kernel has a learned norm (Salimans & Kingma 2016, arXiv 1602.07868);
    batch: batch normalization with fixed statistics of the input"""

    def __post_init__(self):
        check_choices(self, norm=Literal["group", "layer"], activation=Activation)
        check_choices(self, position_norm=Literal["weight", "batch"])
        check_flags(self, "use_bias", "projection_norm")
        check_whole(self, "position_kernel_size", "position_groups")
        lists = (self.features, self.kernel_sizes, self.strides)
        whole = all(type(n) is int and n >= 1 for values in lists if isinstance(values, tuple) for n in values)
        if not whole or not all(isinstance(values, tuple) for values in lists) or len({*map(len, lists)}) != 1:
            raise ConfigError(
                f"features, kernel_sizes and strides must be tuples of integers of at least 1, one per convolution, "
                f"got {self.features!r:.80}, {self.kernel_sizes!r:.80} and {self.strides!r:.80}. Correct them."
            )
        if not 1 <= len(self.features) <= MAX_CONVOLUTIONS:
            raise ConfigError(
                f"features has {len(self.features)} convolutions: expected 1 to {MAX_CONVOLUTIONS}. Correct it."
            )

    def frames(self, samples: Any) -> Any:
        """Return the number of frames of a recording with this number of samples, an integer or an array of them.

        It is below 1 if the recording is shorter than `shortest`.
        """
        for size, stride in zip(self.kernel_sizes, self.strides, strict=True):
            samples = (samples - size) // stride + 1
        return samples

    @property
    def stride(self) -> int:
        """Number of samples from one frame to the next."""
        return math.prod(self.strides)

    @property
    def shortest(self) -> int:
        """Number of samples that one frame depends on, the shortest recording with a frame."""
        samples = 1
        for size, stride in zip(reversed(self.kernel_sizes), reversed(self.strides), strict=True):
            samples = (samples - 1) * stride + size
        return samples
