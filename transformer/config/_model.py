"""The config of a model, and images as its input."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from transformer.config._checks import ConfigError, check_choices, check_range, check_whole
from transformer.config._layer_patterns import check_shared_keys
from transformer.config._options import (
    AttentionOptions,
    Audio,
    Dtype,
    EmbeddingOptions,
    FeedForwardOptions,
    NormOptions,
    OutputOptions,
    ParameterOptions,
    Speech,
    StackOptions,
)
from transformer.config._parts import Layer, LayerKind, Patches, RotaryScaling, Series
from transformer.config._paths import get_path, nearest_path, with_paths
from transformer.config._positions import (
    LearnedOptions,
    Position,
    RotaryGridOptions,
    RotaryOptions,
    SinusoidalOptions,
    check_rotary,
    check_rotary_grid,
    check_table_rows,
)

Projector = Literal["linear", "mlp", "normalized"]
ImageAttention = Literal["causal", "image", "prefix"]


@with_paths
@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Config of a transformer model: its sizes and the variant of each component.

    Fields of a section can be set by dotted path: `TransformerConfig(**{"position.base": 500_000.0})`.

    Raises:
        ConfigError: incompatible sizes or options, or an unknown name; the message names the field to change.
    """

    vocab_size: int | None = None
    """V, vocabulary size; None: the tokenizer's (training fills it in)"""
    d_model: int = 512
    """D, width of the residual stream"""
    num_layers: int = 6
    """L, number of layers in each stack"""
    num_heads: int = 8
    """N, number of query heads"""
    position: Position = SinusoidalOptions()
    """position scheme:
    embeddings (SinusoidalOptions, LearnedOptions),
    rotation of queries and keys (RotaryOptions; RotaryGridOptions: by row and column of patches),
    or a bias on the attention scores (ALiBiOptions, T5BiasOptions); None: no positions"""
    dropout_rate: float = 0.0
    """dropout rate of each sublayer's output and of the sum of token and position embeddings"""
    dtype: Dtype = "float32"
    """dtype of activations and matrix multiplications"""
    parameters: ParameterOptions = ParameterOptions()
    """parameters: whether there are biases, initial values, dtype"""
    attention: AttentionOptions = AttentionOptions()
    """attention layers: key and value heads, head sizes, biases, scaling and capping of scores, latent attention"""
    feed_forward: FeedForwardOptions = FeedForwardOptions()
    """feed-forward layers: width, activation, gate"""
    norm: NormOptions = NormOptions()
    """normalization: its kind, its position around attention and feed-forward layers, and epsilon"""
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
        self._check_parts()
        check_choices(self, dtype=Dtype)
        check_whole(self, "vocab_size", "d_model", "num_layers", "num_heads")
        check_range(self, 0.0, 1.0, "dropout_rate")
        if self.attention.mla is None and self.attention.head_dim is None and self.d_model % self.num_heads:
            raise ConfigError(
                f"d_model ({self.d_model}) must be a multiple of num_heads ({self.num_heads}) when head_dim is not "
                f"set. Set head_dim, or change one of them."
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of attention.num_kv_heads ({self.kv_heads}): all key "
                f"heads are shared by the same number of query heads. Change one of them."
            )
        self._check_encoder_heads()
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

    def _check_parts(self):
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if dataclasses.is_dataclass(kind) and field.name != "position" and not isinstance(value, kind):
                raise ConfigError(f"{field.name} must be {kind.__name__}(...), got {value!r:.80}.")

    def _check_latent(self):
        if self.attention.mla is None:
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
        for name in ("attention.num_kv_heads", "position.dim"):
            if (value := get_path(self, name)) is not None:
                raise ConfigError(
                    f"{name} is {value}, but attention.mla computes keys and values from a latent vector and "
                    f"defines its own sizes. Remove {name}, or attention.mla."
                )

    def _check_position(self):
        position = self.position
        if not isinstance(position, Position):
            raise ConfigError(f"position must be a scheme such as RotaryOptions(), or None, got {position!r:.80}.")
        if isinstance(position, LearnedOptions):
            check_table_rows(self.max_length, self.patches, self.series)
        if isinstance(position, RotaryOptions) and self.attention.mla is None:
            check_rotary(position, self.size_of_head, self.rotary_scalings)
        if isinstance(position, RotaryGridOptions):
            check_rotary_grid(self.patches, self.size_of_head)
        if isinstance(position, SinusoidalOptions) and self.d_model % 2:
            raise ConfigError(f"sinusoidal positions are sine and cosine pairs: d_model ({self.d_model}) must be even.")

    def _check_kinds(self):
        """Check the heads of each kind of layer, and that layers that read keys and values find those of another."""
        for kind in self.kinds:
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
        check_shared_keys(self.kinds, len(self.stack.prefix), self.size_of_head, self.rotary.scaling)

    def _check_encoder_heads(self):
        heads = self.stack.encoder_num_heads
        needs = {} if self.attention.head_dim is not None else {"d_model": self.d_model}
        needs = {name: size % heads for name, size in needs.items()} if heads is not None else {}
        if heads is not None and self.attention.num_kv_heads is not None:
            needs["attention.num_kv_heads"] = heads % self.attention.num_kv_heads
        if wrong := [name for name, rest in needs.items() if rest]:
            raise ConfigError(
                f"stack.encoder_num_heads ({heads}) must divide d_model and be a multiple of attention.num_kv_heads, "
                f"but {wrong[0]} is {get_path(self, wrong[0])}. Change one of them."
            )

    def _check_norms(self):
        kinds = self.kinds
        rotary = isinstance(self.position, RotaryOptions) and self.attention.mla is None
        if not rotary and not all(kind.rotary for kind in kinds):
            raise ConfigError(
                "rotary=False of a LayerKind is for position=RotaryOptions() without attention.mla. Remove it, or "
                "change them."
            )
        if self.norm.position in ("post", "reordered") and not all(kind.attention_norm for kind in kinds):
            raise ConfigError(
                f"attention_norm=False removes the norm before attention, but norm.position={self.norm.position!r} "
                f"has none there. Remove it, or set norm.position='pre'."
            )

    def _stack_sizes(self) -> dict[str, int]:
        names = ("num_layers", "stack.num_encoder_layers", "stack.num_decoder_layers")
        return {name: size for name in names if (size := get_path(self, name)) is not None}

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
        """K, the number of key and value heads: attention.num_kv_heads, or num_heads if that is None."""
        return self.num_heads if self.attention.num_kv_heads is None else self.attention.num_kv_heads

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
        """F, the inner width of the feed-forward layer: feed_forward.d_ff, or 4 d_model if that is None."""
        return 4 * self.d_model if self.feed_forward.d_ff is None else self.feed_forward.d_ff

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
        changes = {
            "position": self.position if rows is None else LearnedOptions(max_length=rows),
            "num_heads": stack.encoder_num_heads or self.num_heads,
            "feed_forward.d_ff": stack.encoder_d_ff or self.feed_forward.d_ff,
        }
        return self.replace(**changes, **{"stack.encoder_num_heads": None, "stack.encoder_d_ff": None})

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
        """The encoder of the images in `input`, with the dropout rates, initialization and dtypes of this config.

        Raises:
            ConfigError: the input is not images in addition to or between tokens.
        """
        if not isinstance(self.input, Images | ImageTokens | DynamicImageTokens):
            raise ConfigError("input is not images: a DualEncoder needs input=Images(encoder=..., features=..., ...).")
        names = ("dropout_rate", "attention.dropout_rate", "parameters.initializer_range", "dtype", "parameters.dtype")
        return self.input.encoder.replace(**{name: get_path(self, name) for name in names})

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
        for name in changes:
            if name.partition(".")[0] not in self.__dataclass_fields__:
                raise ConfigError(f"TransformerConfig has no field {name!r}.{nearest_path(type(self), name)}")
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Images:
    """Images as the second input of a DualEncoder, and the encoder that reads them (CLIP, Radford et al. 2021, arXiv
    2103.00020, section 2.4).

    The other fields of the model config describe the encoder of texts. Both encoders map to vectors of `features`
    numbers that are compared by their angle.

    Raises:
        ConfigError: an encoder without patches, or `features` that differ from its width without a projection of
            images.
    """

    encoder: TransformerConfig
    """encoder of images, with input=Patches(...) and output.pooling=first or attention;
    it takes the dropout rates, the initialization and the dtypes of the whole model"""
    features: int
    """size of the space that both encoders map to"""
    projections: Literal["both", "text"] = "both"
    """linear maps to the common space:
    both: for texts and images, without bias (CLIP);
    text: for texts only, with bias (SigLIP)"""
    similarity: Literal["softmax", "sigmoid"] = "softmax"
    """what the logits are trained for:
    softmax: which text belongs to an image (CLIP);
    sigmoid: whether a text belongs to an image, with a learned bias (SigLIP, Zhai et al. 2023, arXiv 2303.15343)"""

    def __post_init__(self):
        _check_patches(self.encoder)
        check_whole(self, "features")
        check_choices(self, projections=Literal["both", "text"], similarity=Literal["softmax", "sigmoid"])
        if self.projections == "text" and self.features != self.encoder.d_model:
            raise ConfigError(
                f"features ({self.features}) must be d_model of the images ({self.encoder.d_model}) with "
                f"projections='text'. Change one of them, or set projections='both'."
            )

    @property
    def patches(self) -> Patches:
        """Size of the images and of their patches."""
        return self.encoder.patches


@dataclass(frozen=True, kw_only=True)
class ImageTokens:
    """Images as tokens of a VisionLanguageModel, and the encoder that reads them (LLaVA, Liu et al. 2023, arXiv
    2304.08485; Gemma 3, arXiv 2503.19786, section 2.1).

    The other fields of the model config describe the decoder. An image takes the place of `count` tokens with the id
    `token_id`. The class token of the encoder is left out.

    Raises:
        ConfigError: a number out of range, an encoder without patches, or pooling that does not divide their rows and
            columns.
    """

    token_id: int | None = None
    """id of the tokens whose embeddings the features of an image replace; None: training sets it from the tokenizer"""
    encoder: TransformerConfig
    """encoder of images, with input=Patches(...);
    it takes the dropout rates, the initialization and the dtypes of the whole model"""
    unused_layers: int | None = None
    """number of layers after those of the encoder that are not computed; their parameters are kept, and those of the
    final norm, which the encoder then lacks; None: the encoder is complete"""
    pool: int = 1
    """replace each square of pool x pool patches by its mean"""
    projector: Projector = "linear"
    """map to the decoder's width:
    linear: with bias (PaliGemma);
    mlp: two linear layers with bias, GELU between them (LLaVA 1.5);
    normalized: a zero-centered RMSNorm, then a linear layer without bias (Gemma 3)"""
    attention: ImageAttention = "causal"
    """which tokens attend to later ones, too:
    causal: none;
    image: the tokens of an image, to those of the same image (Gemma 3);
    prefix: the tokens of a prompt, to the whole prompt (PaliGemma)"""

    def __post_init__(self):
        _check_patches(self.encoder)
        check_whole(self, "pool")
        check_whole(self, "token_id", "unused_layers", least=0)
        check_choices(self, projector=Projector, attention=ImageAttention)
        if self.encoder.stack.final_norm != (self.unused_layers is None):
            raise ConfigError(
                f"encoder.stack.final_norm is {self.encoder.stack.final_norm}, but unused_layers is "
                f"{self.unused_layers}: the final norm is not computed exactly if layers are unused. Change one."
            )
        rows, columns = self.patches.grid
        if rows % self.pool or columns % self.pool:
            raise ConfigError(
                f"pool ({self.pool}) must divide the {rows} rows and {columns} columns of patches. Change it, or the "
                f"sizes in encoder.input."
            )

    @property
    def patches(self) -> Patches:
        """Size of the images and of their patches."""
        return self.encoder.patches

    @property
    def count(self) -> int:
        """Number of tokens per image."""
        return self.patches.count // self.pool**2


def _check_patches(encoder: TransformerConfig) -> None:
    if encoder.patches is None:
        raise ConfigError("encoder.input is not patches of images. Set encoder.input=Patches(...).")


@dataclass(frozen=True, kw_only=True)
class DynamicImageTokens:
    """Images of any size as tokens of a VisionLanguageModel, and the encoder that reads them (Qwen2-VL, Wang et al.
    2024, arXiv 2409.12191, section 2.1; Qwen2.5-VL, Bai et al. 2025, arXiv 2502.13923, section 2.1).

    The other fields of the model config describe the decoder. An image of R x C patches takes the place of
    R C / `merge`^2 tokens with the id `token_id`. Two linear layers map each square of `merge` x `merge` patches to one
    token.

    Raises:
        ConfigError: a number out of range, an encoder that does not rotate heads by row and column, or a window that
            does not fit.
    """

    token_id: int
    """id of the tokens whose embeddings the features of an image replace"""
    encoder: TransformerConfig
    """encoder of patches, which rotates heads by row and column: position=RotaryOptions(sections=(n, n));
    it takes the dropout rates, the initialization and the dtypes of the whole model"""
    patch_size: int = 14
    """pixels per side of a patch"""
    channels: int = 3
    """channels of the images"""
    frames: int = 2
    """frames that a patch covers: the encoder is trained with videos too, and an image is all frames of one patch"""
    merge: int = 2
    """patches per side of the square that becomes one token"""
    window_size: int | None = None
    """side in pixels of the square windows of patches that attend to one another in the layers of the encoder with
    within_segments=True; None: all patches of an image do"""

    def __post_init__(self):
        check_whole(self, "patch_size", "channels", "frames", "merge", "window_size")
        check_whole(self, "token_id", least=0)
        if len(self.encoder.rotary.sections or ()) != 2 or self.encoder.input is not None:
            raise ConfigError(
                "the encoder of DynamicImageTokens reads patches, whose position is a row and a column. Set "
                "encoder.position=RotaryOptions(sections=(n, n)), and leave encoder.input out."
            )
        if self.window_size is not None and self.window_size < self.multiple:
            raise ConfigError(
                f"window_size ({self.window_size}) must be at least patch_size x merge ({self.multiple}), the side of "
                f"one token. Change it."
            )
        if self.window_size is None and any(kind.within_segments for kind in self.encoder.kinds):
            raise ConfigError("layers of the encoder have within_segments=True, for windows. Set window_size.")

    @property
    def multiple(self) -> int:
        """Pixels per side of a token: height and width of an image are multiples of it."""
        return self.patch_size * self.merge

    def count(self, height: int, width: int) -> int:
        """Return the number of tokens of an image of `height` x `width` pixels."""
        return height // self.multiple * (width // self.multiple)
