"""The config of a whole model, and how to compute it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from transformer.config._checks import (
    ConfigError,
    check_choice,
    check_choices,
    check_flags,
    check_positive,
    check_range,
    check_whole,
    nearest,
)
from transformer.config._parts import (
    MLA,
    FeedForwardActivation,
    HeadTransform,
    Layer,
    LayerKind,
    Patches,
    RotaryScaling,
    Series,
)

Norm = Literal["layer_norm", "rms_norm", "zero_centered_rms_norm", "layer_norm_without_bias", "frozen_batch_norm"]
NormPosition = Literal["pre", "post", "pre_without_residual", "sandwich", "reordered", "parallel"]
Position = Literal["sinusoidal", "sinusoidal_halves", "learned", "rotary", "alibi", "t5", "none"]
Projection = Literal["query", "key", "value", "out"]
NormScope = Literal["head", "all"]
Pooling = Literal["mean", "first", "last"]
Dtype = Literal["float32", "bfloat16", "float16"]
Remat = Literal["none", "full", "dots", "names"]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A transformer: its sizes and the kind of each of its parts.

    Raises:
        ConfigError: sizes that don't fit together, or an unknown name; the message says what to change.
    """

    vocab_size: int | None = None
    """V, tokens in the vocabulary; None: as many as the tokenizer has (training fills it in)"""
    source_vocab_size: int | None = None
    """encoder's vocabulary where it is another than the decoder's; None: one vocabulary and one table for both"""
    d_model: int = 512
    """D, width of the residual stream"""
    num_layers: int = 6
    """L, layers of a stack"""
    num_encoder_layers: int | None = None
    """layers of an encoder-decoder's encoder; None: num_layers"""
    num_decoder_layers: int | None = None
    """layers of an encoder-decoder's decoder; None: num_layers"""
    num_heads: int = 8
    """N, query heads"""
    num_kv_heads: int | None = None
    """K, key and value heads, each shared by N / K query heads; None: num_heads"""
    head_dim: int | None = None
    """H, size of a query or key head; None: d_model / num_heads"""
    value_dim: int | None = None
    """size of a value head; None: head_dim"""
    d_ff: int | None = None
    """F, inner width of the feed-forward; None: 4 d_model"""
    activation: FeedForwardActivation = "relu"
    """feed-forward nonlinearity; swiglu_clamped (gpt-oss's) is (up + 1) gate sigmoid(1.702 gate) of gate cut off above
    7 and up beyond 7 either way, with gated alone"""
    gated: bool = False
    """feed-forward multiplies by a second, activated projection (GLU variants: SwiGLU is silu + gated)"""
    use_bias: bool = True
    """biases in attention and feed-forward projections"""
    attention_biases: tuple[Projection, ...] | None = None
    """attention projections that have a bias, of query, key, value and out; None: as use_bias says"""
    norm: Norm = "layer_norm"
    """which normalization"""
    norm_epsilon: float = 1e-6
    """added to the variance before the square root"""
    norm_position: NormPosition = "pre"
    """pre: x + f(norm(x)); post: norm(x + f(x)), the paper's; pre_without_residual: f(norm(x)), an ablation; sandwich:
    x + norm(f(norm(x))); reordered: x + norm(f(x)); parallel: x + attention(norm(x)) + feed_forward(norm(x))"""
    final_norm: bool = True
    """a norm behind the last layer, but with norm_position=post"""
    embedding_norm: bool = False
    """a norm of embeddings plus positions, before their dropout"""
    position: Position = "sinusoidal"
    """position scheme"""
    max_length: int | None = None
    """rows of the learned position table; only for position=learned"""
    source_max_length: int | None = None
    """rows of an encoder-decoder's encoder's learned position table; None: max_length"""
    rotary_base: float = 10_000.0
    """rotary: wavelengths run from 2 pi to 2 pi base"""
    rotary_dim: int | None = None
    """rotary: how many of the first head dimensions turn; None: all"""
    rotary_scaling: RotaryScaling | None = None
    """rotary: stretching for long sequences"""
    relative_buckets: int = 32
    """t5: rows of the relative bias table"""
    relative_max_distance: int = 128
    """t5: distances from here on share a bucket"""
    position_table_per_layer: bool = False
    """t5: each layer learns a bias table of its own; false: one for the stack"""
    scale_embeddings: bool = True
    """multiply token embeddings by sqrt(d_model)"""
    token_types: int | None = None
    """rows of a table of token types that an encoder model adds to its embeddings; None: no such table"""
    tie_embeddings: bool = True
    """logits use the (decoder's) embedding table"""
    head_transform: HeadTransform | None = None
    """a map and a nonlinearity in front of the output map"""
    output_bias: bool | None = None
    """a bias of the output map; None: a classifier has one, others don't"""
    logit_scale: float | None = None
    """factor on what the output map reads"""
    dropout_rate: float = 0.0
    """on each sublayer's output and on embeddings plus positions"""
    attention_dropout_rate: float = 0.0
    """on attention weights"""
    attention_scale: float | None = None
    """factor on the scores; None: 1 / sqrt(head_dim)"""
    attention_softcap: float | None = None
    """scores become c tanh(scores / c)"""
    logit_softcap: float | None = None
    """logits become c tanh(logits / c)"""
    qk_norm: bool = False
    """RMSNorm on queries and keys, the zero-centered one where norm is"""
    qk_norm_scope: NormScope = "head"
    """what qk_norm normalizes: each head, or all heads of a token together"""
    attention_sinks: bool = False
    """one learnt logit a head that takes weight and gives no value"""
    mla: MLA | None = None
    """self-attention through a latent; None: queries, keys and values of x"""
    initializer_range: float | None = None
    """standard deviation of a normal initializer (output projections over sqrt(2 L)); None: Glorot uniform"""
    num_classes: int | None = None
    """classes of a Classifier or VisionClassifier"""
    pooling: Pooling = "mean"
    """how a Classifier or Embedder makes one vector of a sequence"""
    causal: bool = False
    """an encoder model's positions see only those before them, and themselves (a decoder that classifies)"""
    normalize_embeddings: bool = False
    """an Embedder's vectors have length 1"""
    patches: Patches | None = None
    """how a VisionClassifier cuts up its images"""
    mel_bins: int | None = None
    """numbers of each frame that a SpeechToText hears"""
    series: Series | None = None
    """what a Forecaster looks back at and forecasts"""
    dtype: Dtype = "float32"
    """of activations and matrix products"""
    param_dtype: Dtype = "float32"
    """of parameters"""
    prefix: tuple[LayerKind, ...] = ()
    """kinds of the first layers, before the repeated pattern"""
    period: tuple[LayerKind, ...] = (LayerKind(),)
    """pattern of layers that repeats"""
    suffix: tuple[LayerKind, ...] = ()
    """kinds of the last layers"""

    def __post_init__(self):
        check_choices(self, activation=FeedForwardActivation, norm=Norm, norm_position=NormPosition, position=Position)
        check_choices(self, pooling=Pooling, dtype=Dtype, param_dtype=Dtype, qk_norm_scope=NormScope)
        check_flags(self, "gated", "use_bias", "final_norm", "embedding_norm", "scale_embeddings", "tie_embeddings")
        check_flags(self, "output_bias", "qk_norm", "attention_sinks", "causal", "normalize_embeddings")
        check_flags(self, "position_table_per_layer")
        for projection in self.attention_biases or ():
            check_choice("attention_biases", projection, Projection.__args__)
        check_whole(self, "vocab_size", "source_vocab_size", "d_model", "num_layers", "num_encoder_layers")
        check_whole(self, "num_decoder_layers", "num_heads", "num_kv_heads", "head_dim", "value_dim", "d_ff")
        check_whole(self, "max_length", "rotary_dim", "relative_max_distance", "num_classes", "token_types")
        check_whole(self, "source_max_length", "mel_bins")
        check_whole(self, "relative_buckets", least=4)
        check_positive(self, "norm_epsilon", "rotary_base", "attention_scale", "attention_softcap")
        check_positive(self, "logit_softcap", "logit_scale", "initializer_range")
        check_range(self, 0.0, 1.0, "dropout_rate", "attention_dropout_rate")
        if self.mla is None and self.head_dim is None and self.d_model % self.num_heads:
            raise ConfigError(
                f"d_model ({self.d_model}) must be a multiple of num_heads ({self.num_heads}) when head_dim is not "
                f"given. Give head_dim, or change one of them."
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.kv_heads}): each key head "
                f"serves equally many query heads. Change one of them."
            )
        if self.activation == "swiglu_clamped" and not self.gated:
            raise ConfigError(
                "activation='swiglu_clamped' is a function of a gate and what it lets through, but gated is False. "
                "Take gated=True, or another activation."
            )
        self._check_latent()
        self._check_position()
        self._check_norms()
        for stack, layers in self._stack_sizes().items():
            self._check_pattern(stack, layers)

    def _check_position(self):
        self._check_table_rows()
        if self.position == "rotary" and self.mla is None:
            turned = self.size_of_head if self.rotary_dim is None else self.rotary_dim
            if turned % 2 or turned > self.size_of_head:
                raise ConfigError(
                    f"rotary positions turn pairs of dimensions: {turned} of a head of {self.size_of_head} can't be "
                    f"turned. Give an even rotary_dim of at most head_dim, or change head_dim."
                )
        if self.position in ("sinusoidal", "sinusoidal_halves") and self.d_model % 2:
            raise ConfigError(f"sinusoidal positions are sine and cosine pairs: d_model ({self.d_model}) must be even.")
        if self.position == "t5" and self.relative_max_distance <= self.relative_buckets // 2:
            raise ConfigError(
                f"relative_max_distance ({self.relative_max_distance}) must be above relative_buckets / 2 "
                f"({self.relative_buckets // 2}): the first half of the buckets are single distances."
            )
        if self.position_table_per_layer and self.position != "t5":
            raise ConfigError(
                f"position_table_per_layer gives each layer its own table of the t5 bias, but position is "
                f"{self.position!r}. Leave it out, or take position='t5'."
            )

    def _check_table_rows(self):
        """The number of rows of a learned position table: given if there is a table, and as long as the input."""
        if (self.position == "learned") != (self.max_length is not None):
            raise ConfigError(
                f"max_length is the number of rows of a learned position table: position={self.position!r} with "
                f"max_length={self.max_length}. Give max_length with position='learned', and only there."
            )
        if self.source_max_length is not None and self.position != "learned":
            raise ConfigError(
                f"source_max_length is the number of rows of the encoder's learned position table, but position is "
                f"{self.position!r}. Leave it out, or take position='learned'."
            )
        if self.patches is not None and self.max_length not in (None, 1 + self.patches.count):
            raise ConfigError(
                f"max_length ({self.max_length}) must be {1 + self.patches.count}: a class token and "
                f"{self.patches.count} patches. Change it, or patches."
            )
        if self.series is not None and self.max_length not in (None, self.series.positions):
            raise ConfigError(
                f"max_length ({self.max_length}) must be {self.series.positions}, the positions of a channel of the "
                f"series. Change it, or series."
            )

    def _check_latent(self):
        if self.mla is None:
            return
        if self.position != "rotary":
            raise ConfigError(
                f"mla has a part of each head that turns, but position is {self.position!r}. Take position='rotary', "
                f"or leave mla out."
            )
        sizes = ("num_kv_heads", "head_dim", "value_dim", "rotary_dim")
        given = [name for name in sizes if getattr(self, name) is not None]
        given += [name for name in ("qk_norm", "attention_sinks") if getattr(self, name)]
        if given:
            raise ConfigError(
                f"{given[0]} is {getattr(self, given[0])}, but mla makes keys and values of a latent: it says their "
                f"sizes, norms the latent and has no sinks. Leave {given[0]} out, or mla."
            )
        biased = set(self.attention_biases or ())
        if biased and biased != set(Projection.__args__):
            raise ConfigError(
                f"attention_biases is {self.attention_biases}, but mla has a bias in each map out of x and back, or in "
                f"none: name all of {', '.join(Projection.__args__)}, or none."
            )

    def _check_norms(self):
        kinds = self.kinds
        if self.norm_position in ("post", "reordered") and not all(kind.attention_norm for kind in kinds):
            raise ConfigError(
                f"attention_norm=False leaves out the norm before attention, but norm_position={self.norm_position!r} "
                f"has none there. Leave it out, or take norm_position='pre'."
            )

    def _stack_sizes(self) -> dict[str, int]:
        sizes = {"num_layers": self.num_layers}
        for name in ("num_encoder_layers", "num_decoder_layers"):
            if getattr(self, name) is not None:
                sizes[name] = getattr(self, name)
        return sizes

    def _check_pattern(self, name: str, layers: int):
        if not self.period:
            raise ConfigError("period is empty: it needs at least one LayerKind.")
        repeats = self.repeats(layers)
        if repeats < 0 or len(self.prefix) + repeats * len(self.period) + len(self.suffix) != layers:
            raise ConfigError(
                f"{name} ({layers}) must be prefix ({len(self.prefix)}) + suffix ({len(self.suffix)}) + a multiple of "
                f"the period ({len(self.period)}). Change {name} or the pattern."
            )

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers that the pattern has: prefix, period and suffix, each once."""
        return (*self.prefix, *self.period, *self.suffix)

    def repeats(self, num_layers: int | None = None) -> int:
        """How often the period repeats in a stack of `num_layers` layers (None: those of the config)."""
        num_layers = self.num_layers if num_layers is None else num_layers
        return (num_layers - len(self.prefix) - len(self.suffix)) // len(self.period)

    def layers(self, num_layers: int | None = None) -> tuple[Layer, ...]:
        """The layers of a stack of `num_layers` layers (None: those of the config), in order: prefix, repeats of the
        period, suffix.
        """
        prefix = [Layer(kind, f"prefix_{i}") for i, kind in enumerate(self.prefix)]
        repeated = [
            Layer(kind, f"layers/slot_{slot}", repeat)
            for repeat in range(self.repeats(num_layers))
            for slot, kind in enumerate(self.period)
        ]
        suffix = [Layer(kind, f"suffix_{i}") for i, kind in enumerate(self.suffix)]
        return (*prefix, *repeated, *suffix)

    @property
    def kv_heads(self) -> int:
        """K: num_kv_heads, or num_heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def size_of_head(self) -> int:
        """H: that of mla, head_dim, or d_model / num_heads."""
        if self.mla is not None:
            return self.mla.head_dim
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def size_of_value(self) -> int:
        """Size of a value head: that of mla, value_dim, or that of the key head."""
        if self.mla is not None:
            return self.mla.value_dim
        return self.size_of_head if self.value_dim is None else self.value_dim

    @property
    def feed_forward_width(self) -> int:
        """F: d_ff, or 4 d_model."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def encoder_layers(self) -> int:
        """Layers of an encoder-decoder's encoder."""
        return self.num_layers if self.num_encoder_layers is None else self.num_encoder_layers

    @property
    def decoder_layers(self) -> int:
        """Layers of an encoder-decoder's decoder."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def longest_source(self) -> int | None:
        """Rows of the learned table of an encoder-decoder's encoder: source_max_length, or max_length."""
        return self.max_length if self.source_max_length is None else self.source_max_length

    def replace(self, **changes: object) -> TransformerConfig:
        """A copy with some fields changed, validated again; for an unknown one a ConfigError names the right one."""
        names = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in names:
                raise ConfigError(f"TransformerConfig has no field {name!r}.{nearest(name, names)}")
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a model is computed: changes speed and memory, never the result beyond rounding."""

    attention: str = "auto"
    """attention kernel: auto chooses by platform, length and demand"""
    scan: bool = True
    """compile one layer and loop over it; false unrolls the same parameters (faster on CPU, slower to compile)"""
    remat: Remat = "none"
    """what the backward pass recomputes: none, full (all), dots (all but products), names (all but named values)"""
    sow_weights: bool = False
    """sow attention weights into the collection "intermediates" where a call makes it mutable, to inspect them"""

    def __post_init__(self):
        check_choices(self, remat=Remat)
