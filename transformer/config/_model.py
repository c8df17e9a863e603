"""The config of a model, and its execution options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from transformer.config._checks import (
    ConfigError,
    check_choices,
    check_flags,
    check_positive,
    check_range,
    check_whole,
    nearest,
)
from transformer.config._image_encoders import encoder_fields
from transformer.config._image_tokens import DynamicImageTokens, ImageTokens
from transformer.config._options import (
    AttentionOptions,
    Audio,
    EmbeddingOptions,
    OutputOptions,
    Speech,
    StackOptions,
)
from transformer.config._parts import FeedForwardActivation, Images, Layer, LayerKind, Patches, RotaryScaling, Series
from transformer.config._paths import with_paths
from transformer.config._positions import LearnedOptions, Position, RotaryGridOptions, RotaryOptions, SinusoidalOptions

Norm = Literal["layer_norm", "rms_norm", "zero_centered_rms_norm", "layer_norm_without_bias", "frozen_batch_norm"]
NormPosition = Literal["pre", "post", "pre_without_residual", "sandwich", "reordered", "parallel"]
Dtype = Literal["float32", "bfloat16", "float16"]
Remat = Literal["none", "full", "dots", "names", "offload"]
Experts = Literal["auto", "blockwise", "ragged", "megablox"]
QuantizedProducts = Literal["none", "int8", "int8_full", "fp8", "fp8_full"]


@with_paths
@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Config of a transformer model: its sizes and the variant of each component.

    Fields of a section can be set by dotted path: `TransformerConfig(**{"position.base": 500_000.0})`.

    Raises:
        ConfigError: incompatible sizes or options, or an unknown name; the message says what to change.
    """

    vocab_size: int | None = None
    """V, vocabulary size; None: the tokenizer's (training fills it in)"""
    d_model: int = 512
    """D, width of the residual stream"""
    num_layers: int = 6
    """L, number of layers in each stack"""
    num_heads: int = 8
    """N, number of query heads"""
    num_kv_heads: int | None = None
    """K, number of key and value heads, each shared by N / K query heads; None: num_heads"""
    d_ff: int | None = None
    """F, inner width of the feed-forward layer; None: 4 d_model"""
    activation: FeedForwardActivation = "relu"
    """activation of the feed-forward layer; swiglu_clamped (gpt-oss) needs gated:
    (up + 1) gate sigmoid(1.702 gate), where gate is at most 7 and up is between -7 and 7"""
    gated: bool = False
    """gated feed-forward layer: multiply by a second, activated projection (SwiGLU is silu + gated)"""
    use_bias: bool = True
    """biases in the projections of attention and feed-forward layers"""
    norm: Norm = "layer_norm"
    """normalization layer:
    zero_centered_rms_norm multiplies by 1 + scale (Gemma);
    frozen_batch_norm is batch normalization with fixed statistics"""
    norm_position: NormPosition = "pre"
    """position of the norms around a sublayer f:
    pre: x + f(norm(x));
    post: norm(x + f(x)), as in Vaswani et al. 2017;
    pre_without_residual: f(norm(x)), an ablation;
    sandwich: x + norm(f(norm(x)));
    reordered: x + norm(f(x)), as in OLMo 2;
    parallel: x + attention(norm(x)) + feed_forward(norm(x))"""
    norm_epsilon: float = 1e-6
    """added to the variance before the square root"""
    position: Position = SinusoidalOptions()
    """position scheme:
    embeddings (SinusoidalOptions, LearnedOptions),
    rotation of queries and keys (RotaryOptions; RotaryGridOptions: by row and column of patches),
    or a bias on the attention scores (ALiBiOptions, T5BiasOptions); None: no positions"""
    dropout_rate: float = 0.0
    """dropout rate of each sublayer's output and of the sum of token and position embeddings"""
    initializer_range: float | None = None
    """standard deviation of normal initialization (output projections: divided by sqrt(2 L)); None: Glorot uniform"""
    dtype: Dtype = "float32"
    """dtype of activations and matrix multiplications"""
    param_dtype: Dtype = "float32"
    """dtype of parameters; those of 16 bits are updated in float32 and rounded stochastically (Zamirai et al. 2020,
    arXiv 2010.06192)"""
    attention: AttentionOptions = AttentionOptions()
    """attention layers: head sizes, biases, scaling and capping of scores, latent attention"""
    embedding: EmbeddingOptions = EmbeddingOptions()
    """embedding tables: scaling, tying, token types, separate sizes for the encoder"""
    stack: StackOptions = StackOptions()
    """layer counts of encoder and decoder, and different kinds of layers in one stack"""
    output: OutputOptions = OutputOptions()
    """output layer: classes, pooling, transform, bias, scaling and capping of logits"""
    input: Patches | Series | Speech | Audio | Images | ImageTokens | DynamicImageTokens | None = None
    """what the model reads instead of tokens: image patches, a time series, frames of speech or samples of a recording;
    Images: images in addition to tokens; ImageTokens: images between tokens; DynamicImageTokens: images of any size
    between tokens; None: tokens"""

    def __post_init__(self):
        check_choices(self, activation=FeedForwardActivation, norm=Norm, norm_position=NormPosition)
        check_choices(self, dtype=Dtype, param_dtype=Dtype)
        check_flags(self, "gated", "use_bias")
        check_whole(self, "vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "d_ff")
        check_positive(self, "norm_epsilon", "initializer_range")
        check_range(self, 0.0, 1.0, "dropout_rate")
        if self.attention.mla is None and self.attention.head_dim is None and self.d_model % self.num_heads:
            raise ConfigError(
                f"d_model ({self.d_model}) must be a multiple of num_heads ({self.num_heads}) when head_dim is not "
                f"set. Set head_dim, or change one of them."
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.kv_heads}): all key heads are "
                f"shared by the same number of query heads. Change one of them."
            )
        self._check_encoder_heads()
        if self.activation == "swiglu_clamped" and not self.gated:
            raise ConfigError(
                "activation='swiglu_clamped' is a function of two projections (gate and up), but gated is False. "
                "Set gated=True, or use another activation."
            )
        self._check_latent()
        self._check_position()
        self._check_norms()
        if self.audio is not None and self.d_model % self.audio.position_groups:
            raise ConfigError(
                f"d_model ({self.d_model}) must be a multiple of input.position_groups ({self.audio.position_groups}). "
                f"Change one of them."
            )
        for stack, layers in self._stack_sizes().items():
            self._check_pattern(stack, layers)
        self._check_kinds()

    def _check_kinds(self):
        """Check the heads of each kind of layer, and that layers that read keys and values find those of another."""
        stored: dict[str, LayerKind] = {}
        for index, kind in enumerate(self.kinds):
            own = [kind.head_dim, kind.num_kv_heads, kind.stores_kv, kind.reads_kv]
            if self.attention.mla is not None and (kind.keys_as_values or any(one is not None for one in own)):
                raise ConfigError("attention.mla defines heads and keys of all layers. Remove those of LayerKind.")
            if self.num_heads % self.kv_heads_of(kind):
                raise ConfigError(
                    f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads of each LayerKind "
                    f"({self.kv_heads_of(kind)}). Change one of them."
                )
            rotated = isinstance(self.position, RotaryOptions) and kind.rotary
            if rotated and kind.head_dim is not None and kind.head_dim % 2:
                raise ConfigError(f"rotary positions rotate pairs: head_dim ({kind.head_dim}) must be even. Change it.")
            self._check_stored(kind, stored, index < len(self.stack.prefix))

    def _check_stored(self, kind: LayerKind, stored: dict[str, LayerKind], in_prefix: bool):
        if kind.stores_kv is not None:
            if not in_prefix or kind.stores_kv in stored:
                raise ConfigError(
                    f"stores_kv={kind.stores_kv!r} must be the name of one layer, in stack.prefix: others can't read "
                    f"the keys and values of repeated layers. Move the layer, or rename it."
                )
            stored[kind.stores_kv] = kind
        if kind.reads_kv is None:
            return
        if kind.reads_kv not in stored:
            raise ConfigError(
                f"reads_kv={kind.reads_kv!r}, but no earlier layer has stores_kv={kind.reads_kv!r}. Name one of "
                f"{', '.join(stored) or 'the layers in stack.prefix, with stores_kv'}."
            )
        other = stored[kind.reads_kv]
        if self.head_dim_of(kind) != self.head_dim_of(other):
            raise ConfigError(
                f"a layer reads keys of head_dim {self.head_dim_of(other)} by reads_kv={kind.reads_kv!r}, but its own "
                f"is {self.head_dim_of(kind)}. Change one of them."
            )
        if any(one is not None and one.by_length for one in (self.rotary.scaling, other.rotary_scaling)):
            raise ConfigError("reads_kv does not support rotary scaling by the length of the text. Remove one of them.")

    def _check_encoder_heads(self):
        heads = self.stack.encoder_num_heads
        needs = {} if self.attention.head_dim is not None else {"d_model": self.d_model}
        needs = {name: size % heads for name, size in needs.items()} if heads is not None else {}
        if heads is not None and self.num_kv_heads is not None:
            needs["num_kv_heads"] = heads % self.num_kv_heads
        if wrong := [name for name, rest in needs.items() if rest]:
            raise ConfigError(
                f"stack.encoder_num_heads ({heads}) must divide d_model and be a multiple of num_kv_heads, but "
                f"{wrong[0]} is {getattr(self, wrong[0])}. Change one of them."
            )

    def _check_position(self):
        if not isinstance(self.position, Position):
            raise ConfigError(f"position must be a scheme such as RotaryOptions(), or None, got {self.position!r:.80}.")
        self._check_table_rows()
        if isinstance(self.position, RotaryOptions) and self.attention.mla is None:
            rotated = self.size_of_head if self.rotary.dim is None else self.rotary.dim
            if rotated % 2 or rotated > self.size_of_head:
                raise ConfigError(
                    f"rotary positions rotate pairs of dimensions: {rotated} dimensions of a head of size "
                    f"{self.size_of_head} can't be rotated. Set position.dim to an even number of at most "
                    f"attention.head_dim, or change attention.head_dim."
                )
            self._check_rotary_length(rotated)
            self._check_sections(rotated)
        if isinstance(self.position, RotaryGridOptions):
            self._check_grid()
        if isinstance(self.position, SinusoidalOptions) and self.d_model % 2:
            raise ConfigError(f"sinusoidal positions are sine and cosine pairs: d_model ({self.d_model}) must be even.")

    def _check_sections(self, rotated: int):
        """Check that the sections of positions with several coordinates are all pairs of rotated dimensions."""
        sections = self.rotary.sections
        if sections is None:
            return
        if sum(sections) != rotated // 2:
            raise ConfigError(
                f"position.sections ({', '.join(map(str, sections))}) must sum to the {rotated // 2} pairs of rotated "
                f"dimensions, but their sum is {sum(sections)}. Correct them."
            )
        scalings = [one for one in (self.rotary.scaling, *(kind.rotary_scaling for kind in self.kinds)) if one]
        if any(one.by_length for one in scalings) or (scalings and self.rotary.restart_frequencies):
            raise ConfigError(
                "position.sections supports no scaling by the length of the text, and with restart_frequencies none at "
                "all. Remove one of them."
            )

    def _check_rotary_length(self, rotated: int):
        """Check that scalings that depend on the length of a text fit the number of rotated dimensions."""
        for scaling in (self.rotary.scaling, *(kind.rotary_scaling for kind in self.kinds)):
            if scaling is None or not scaling.by_length:
                continue
            if scaling.kind == "longrope" and len(scaling.short_factors) != rotated // 2:
                raise ConfigError(
                    f"rotary scaling longrope has one factor per pair of rotated dimensions: expected {rotated // 2} "
                    f"short_factors and long_factors, got {len(scaling.short_factors)}. Correct them."
                )
            if rotated < 4:
                raise ConfigError(
                    f"rotary scaling {scaling.kind} needs at least 4 rotated dimensions, got {rotated}. Change "
                    f"position.dim or the size of a head."
                )

    def _check_grid(self):
        """Check that there are patches whose row and column can rotate heads."""
        if self.patches is None:
            raise ConfigError(
                "RotaryGridOptions rotate by the row and column of patches, but input is not Patches(...). Set it, or "
                "choose another position."
            )
        if self.size_of_head % 4:
            raise ConfigError(
                f"RotaryGridOptions rotate pairs of dimensions, half of them by the row and half by the column: the "
                f"size of a head ({self.size_of_head}) must be a multiple of 4. Change attention.head_dim."
            )

    def _check_table_rows(self):
        """Check that a learned position table has a number of rows, which fits an input of fixed length."""
        if not isinstance(self.position, LearnedOptions):
            return
        if self.max_length is None:
            raise ConfigError("LearnedOptions need the number of rows of the table of tokens. Set max_length.")
        if self.patches is not None and self.max_length != self.patches.positions:
            raise ConfigError(
                f"max_length ({self.max_length}) must be {self.patches.positions}, the number of learned tokens "
                f"({self.patches.extra_tokens}) and patches ({self.patches.count}). Remove it, or change the sizes in "
                f"input."
            )
        if self.series is not None and self.max_length != self.series.positions:
            raise ConfigError(
                f"max_length ({self.max_length}) must be {self.series.positions}, the number of positions per "
                f"channel of the series. Remove it, or change the sizes in input."
            )

    def _check_latent(self):
        attention = self.attention
        if attention.mla is None:
            return
        if not isinstance(self.position, RotaryOptions):
            raise ConfigError(
                f"attention.mla rotates a part of each query and key head, but position is {self.position}. Set "
                f"position=RotaryOptions(), or remove attention.mla."
            )
        if self.rotary.scaling is not None and self.rotary.scaling.by_length:
            raise ConfigError(
                f"rotary scaling {self.rotary.scaling.kind} depends on the length of the text, which attention.mla "
                f"does not support: its cache stores rotated keys. Choose linear, llama3 or yarn."
            )
        for name, value in {"num_kv_heads": self.num_kv_heads, "position.dim": self.rotary.dim}.items():
            if value is not None:
                raise ConfigError(
                    f"{name} is {value}, but attention.mla computes keys and values from a latent vector and "
                    f"defines its own sizes. Remove {name}, or attention.mla."
                )

    def _check_norms(self):
        kinds = self.kinds
        rotary = isinstance(self.position, RotaryOptions) and self.attention.mla is None
        if not rotary and not all(kind.rotary for kind in kinds):
            raise ConfigError(
                "rotary=False of a LayerKind is for position=RotaryOptions() without attention.mla. Remove it, or "
                "change them."
            )
        if self.norm_position in ("post", "reordered") and not all(kind.attention_norm for kind in kinds):
            raise ConfigError(
                f"attention_norm=False removes the norm before attention, but norm_position={self.norm_position!r} "
                f"has none there. Remove it, or set norm_position='pre'."
            )

    def _stack_sizes(self) -> dict[str, int]:
        sizes = {"num_layers": self.num_layers}
        for name in ("num_encoder_layers", "num_decoder_layers"):
            if getattr(self.stack, name) is not None:
                sizes[f"stack.{name}"] = getattr(self.stack, name)
        return sizes

    def _check_pattern(self, name: str, layers: int):
        repeats = self.repeats(layers)
        if repeats < 0 or len(self.stack.prefix) + repeats * len(self.stack.period) + len(self.stack.suffix) != layers:
            raise ConfigError(
                f"{name} ({layers}) must be prefix ({len(self.stack.prefix)}) + suffix ({len(self.stack.suffix)}) + a "
                f"multiple of the period ({len(self.stack.period)}). Change {name}, or the kinds in stack."
            )

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of the layers in prefix, period and suffix, in order, without repeats of the period."""
        return (*self.stack.prefix, *self.stack.period, *self.stack.suffix)

    @property
    def has_linear_attention(self) -> bool:
        """Whether a layer has linear attention. Its state can't go back to fewer tokens."""
        return any(kind.gated_delta is not None for kind in self.kinds)

    @property
    def reads_lengths(self) -> bool:
        """Whether padding after a prompt must be masked, even if no token attends to it: linear attention, and rotary
        scaling that depends on the length of the text.
        """
        return self.has_linear_attention or self.unscaled_length is not None

    @property
    def unscaled_length(self) -> int | None:
        """Maximum number of tokens of a text in which no rotary scaling depends on the length; None: unlimited."""
        return min((one.original_length for one in self.rotary_scalings if one.by_length), default=None)

    @property
    def rotary_scalings(self) -> tuple[RotaryScaling, ...]:
        """The rotary scaling of the config, and those of its kinds of layers."""
        scalings = (self.rotary.scaling, *(kind.rotary_scaling for kind in self.kinds))
        return tuple(one for one in scalings if one is not None)

    def repeats(self, num_layers: int | None = None) -> int:
        """Return how often the period repeats in a stack of `num_layers` layers (None: `num_layers` of the config)."""
        num_layers = self.num_layers if num_layers is None else num_layers
        return (num_layers - len(self.stack.prefix) - len(self.stack.suffix)) // len(self.stack.period)

    def layers(self, num_layers: int | None = None) -> tuple[Layer, ...]:
        """Return the layers of a stack of `num_layers` layers (None: `num_layers` of the config), in order: prefix,
        repeats of the period, suffix.
        """
        prefix = [Layer(kind, f"prefix_{i}") for i, kind in enumerate(self.stack.prefix)]
        repeated = [
            Layer(kind, f"layers/slot_{slot}", repeat)
            for repeat in range(self.repeats(num_layers))
            for slot, kind in enumerate(self.stack.period)
        ]
        suffix = [Layer(kind, f"suffix_{i}") for i, kind in enumerate(self.stack.suffix)]
        return (*prefix, *repeated, *suffix)

    @property
    def kv_heads(self) -> int:
        """K, the number of key and value heads: num_kv_heads, or num_heads if that is None."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def kv_heads_of(self, kind: LayerKind) -> int:
        """Return the number of key and value heads of a kind of layer."""
        return self.kv_heads if kind.num_kv_heads is None else kind.num_kv_heads

    def head_dim_of(self, kind: LayerKind) -> int:
        """Return the size of a query or key head of a kind of layer."""
        return self.size_of_head if kind.head_dim is None else kind.head_dim

    @property
    def size_of_head(self) -> int:
        """H, the size of a query or key head: from attention.mla, attention.head_dim, or d_model / num_heads."""
        if self.attention.mla is not None:
            return self.attention.mla.head_dim
        return self.d_model // self.num_heads if self.attention.head_dim is None else self.attention.head_dim

    @property
    def size_of_value(self) -> int:
        """Size of a value head: from attention.mla, attention.value_dim, or the size of a key head."""
        if self.attention.mla is not None:
            return self.attention.mla.v_head_dim
        return self.size_of_head if self.attention.value_dim is None else self.attention.value_dim

    @property
    def feed_forward_width(self) -> int:
        """F, the inner width of the feed-forward layer: d_ff, or 4 d_model if that is None."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def encoder_layers(self) -> int:
        """Number of encoder layers of an encoder-decoder."""
        return self.num_layers if self.stack.num_encoder_layers is None else self.stack.num_encoder_layers

    @property
    def decoder_layers(self) -> int:
        """Number of decoder layers of an encoder-decoder."""
        return self.num_layers if self.stack.num_decoder_layers is None else self.stack.num_decoder_layers

    @property
    def rotary(self) -> RotaryOptions:
        """The rotary positions; their defaults if the model has other positions."""
        return self.position if isinstance(self.position, RotaryOptions) else RotaryOptions()

    @property
    def max_length(self) -> int | None:
        """Rows of the learned position table, of the decoder in an encoder-decoder; None: there is no such table."""
        if not isinstance(self.position, LearnedOptions):
            return None
        sized = self.patches or self.series
        return sized.positions if self.position.max_length is None and sized else self.position.max_length

    @property
    def longest_source(self) -> int | None:
        """Rows of the encoder's learned position table in an encoder-decoder: source_max_length, or max_length."""
        if isinstance(self.position, LearnedOptions) and self.position.source_max_length is not None:
            return self.position.source_max_length
        return self.max_length

    @property
    def source_encoder(self) -> TransformerConfig:
        """Config of the encoder of an encoder-decoder, with its own number of heads, width and position table."""
        stack, rows = self.stack, self.longest_source
        return self.replace(
            position=self.position if rows is None else LearnedOptions(max_length=rows),
            num_heads=stack.encoder_num_heads or self.num_heads,
            d_ff=stack.encoder_d_ff or self.d_ff,
            **{"stack.encoder_num_heads": None, "stack.encoder_d_ff": None},
        )

    @property
    def patches(self) -> Patches | None:
        """The image patches that the model reads; None for other inputs."""
        return self.input if isinstance(self.input, Patches) else None

    @property
    def images(self) -> Images | None:
        """The images that a DualEncoder reads, and their encoder; None for other inputs."""
        return self.input if isinstance(self.input, Images) else None

    @property
    def image_tokens(self) -> ImageTokens | None:
        """The images that a VisionLanguageModel reads, and their encoder; None for other inputs."""
        return self.input if isinstance(self.input, ImageTokens) else None

    @property
    def dynamic_images(self) -> DynamicImageTokens | None:
        """The images of any size that a VisionLanguageModel reads, and their encoder; None for other inputs."""
        return self.input if isinstance(self.input, DynamicImageTokens) else None

    @property
    def image_encoder(self) -> TransformerConfig:
        """Config of the image encoder of a DualEncoder or a VisionLanguageModel.

        Raises:
            ConfigError: the input is not images in addition to or between tokens.
        """
        images = self.images or self.image_tokens or self.dynamic_images
        if images is None:
            raise ConfigError("input is not images: a DualEncoder needs input=Images(patches=..., features=..., ...).")
        shared = ("dropout_rate", "initializer_range", "dtype", "param_dtype")
        return TransformerConfig(
            **{name: getattr(self, name) for name in shared},
            **{"attention.dropout_rate": self.attention.dropout_rate},
            **encoder_fields(images, self.norm),
        )

    @property
    def series(self) -> Series | None:
        """The time series that the model reads; None for other inputs."""
        return self.input if isinstance(self.input, Series) else None

    @property
    def audio(self) -> Audio | None:
        """The samples of a recording that the model reads; None for other inputs."""
        return self.input if isinstance(self.input, Audio) else None

    @property
    def speech(self) -> Speech | None:
        """The speech frames that the model reads; None for other inputs."""
        return self.input if isinstance(self.input, Speech) else None

    def replace(self, **changes: Any) -> TransformerConfig:
        """Return a validated copy with changed fields.

        Fields of a section are set by dotted path, and its other fields keep their values:
        `config.replace(**{"position.base": 500_000.0})`.

        Raises:
            ConfigError: an unknown field (the message suggests the most similar name), or an invalid model.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name.partition(".")[0] not in names:
                raise ConfigError(f"TransformerConfig has no field {name!r}.{nearest(name, names)}")
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Execution options of a model: they change speed and memory, and the result only by rounding errors.

    Raises:
        ConfigError: an unknown name, or `quantization_paths` that are a string or without `quantization`.
    """

    attention: str = "auto"
    """attention kernel; auto: select one by platform, sequence length and the features that the model needs"""
    experts: Experts = "auto"
    """matrix multiplications of the experts of MoE layers:
    blockwise: a loop over blocks of tokens, on any device;
    ragged: jax.lax.ragged_dot, a kernel of the TPU compiler (elsewhere it computes all experts for all tokens);
    megablox: a Pallas kernel for TPUs;
    auto: ragged on TPU, otherwise blockwise"""
    scan: bool = True
    """compile one layer and loop over it (jax.lax.scan);
    false: unroll the loop, with the same parameters (faster on CPU, slower to compile)"""
    remat: Remat = "none"
    """rematerialization, what the backward pass recomputes to save memory:
    none: nothing;
    full: everything;
    dots: everything but the results of matrix multiplications, of splash attention and of ring attention;
    names: everything but the attention outputs and the hidden layers of the feed-forward layers;
    offload: as names, but these and the inputs of the layers are stored in host memory"""
    sow_weights: bool = False
    """sow attention weights into the collection "intermediates" if a call makes it mutable, to inspect them"""
    quantization: QuantizedProducts = "none"
    """8-bit matrix multiplications in attention projections, feed-forward layers and experts (needs qwix):
    none: in the model's dtype;
    int8: integers, gradients in the model's dtype;
    int8_full: integers, gradients too;
    fp8: float8_e4m3fn, gradients in the model's dtype;
    fp8_full: float8_e4m3fn, gradients in float8_e5m2;
    the results change by the rounding to 8 bits, about 1 % of a product"""
    quantization_paths: tuple[str, ...] = ()
    """quantize only the multiplications by kernels whose path contains one of these parts, such as feed_forward or
    self_attention/out;
    empty: those of all kernels of the layers"""

    def __post_init__(self):
        check_choices(self, experts=Experts, remat=Remat, quantization=QuantizedProducts)
        if isinstance(self.quantization_paths, str):  # each of its letters would be a path that selects nothing
            raise ConfigError(
                f"quantization_paths must be a tuple of strings, got the string {self.quantization_paths!r}. Pass "
                f"({self.quantization_paths!r},)."
            )
        if self.quantization_paths and self.quantization == "none":
            raise ConfigError(
                f"quantization_paths selects the matrix multiplications that are quantized, got "
                f"{', '.join(self.quantization_paths)}, but quantization is 'none'. Set quantization, or remove it."
            )
