"""What a model is: frozen, typed, validated at birth. No JAX here, so that a recipe or a tool can read it cheaply."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Activation = Literal["relu", "gelu_tanh", "gelu_erf", "silu"]
Norm = Literal["layer_norm", "rms_norm"]
NormPosition = Literal["pre", "post", "pre_without_residual"]
Position = Literal["sinusoidal", "learned", "rotary", "alibi", "t5", "none"]
Pooling = Literal["mean", "first", "last"]
Dtype = Literal["float32", "bfloat16", "float16"]
Remat = Literal["none", "full", "dots", "names"]


class ConfigError(ValueError):
    """A model, recipe or command that can't be: the message says what, what was expected, what was got, what to do."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the choice most like `name`, or an empty string when none is close."""
    close = difflib.get_close_matches(str(name), list(choices), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_choice(field: str, value: object, choices: Iterable[str]) -> None:
    """Raises ConfigError, naming the nearest right one, unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        raise ConfigError(f"{field} must be one of {', '.join(choices)}, got {value!r}.{nearest(str(value), choices)}")


def _check_choices(config: object, **kinds: object) -> None:
    for field, kind in kinds.items():
        check_choice(field, getattr(config, field), kind.__args__)


def _check_whole(config: object, *fields: str, least: int = 1) -> None:
    """Each field is None (where its default is) or a whole number of at least `least`."""
    for field in fields:
        value = getattr(config, field)
        if value is None and type(config).__dataclass_fields__[field].default is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{field} must be a whole number of at least {least}, got {value!r}.")


def _check_range(config: object, low: float, high: float, *fields: str) -> None:
    """Each field is None (where its default is) or a number with low <= value < high."""
    for field in fields:
        value = getattr(config, field)
        if value is None and type(config).__dataclass_fields__[field].default is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value < high:
            expected = f"at least {low}" if high == float("inf") else f"at least {low} and below {high}"
            raise ConfigError(f"{field} must be a number of {expected}, got {value!r}.")


def _check_positive(config: object, *fields: str) -> None:
    _check_range(config, 5e-324, float("inf"), *fields)


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How rotary frequencies are stretched to reach beyond the length a model was trained on.

    `linear` divides every frequency by `factor` (Chen et al. 2023, arXiv 2306.15595). `llama3` divides only the low
    ones, with a smooth passage between two wavelengths (Llama 3.1, arXiv 2407.21783). `yarn` does so by the number of
    turns within the original length and sharpens the attention (Peng et al. 2023, arXiv 2309.00071).

    Raises:
        ConfigError: a factor below 1, or bounds in the wrong order.
    """

    kind: Literal["linear", "llama3", "yarn"]
    """which rule stretches the frequencies"""
    factor: float
    """new length / original length, at least 1"""
    original_length: int = 8192
    """positions the model was trained on; llama3 and yarn"""
    low_frequency_factor: float = 1.0
    """llama3: wavelengths longer than original_length / this are divided by factor"""
    high_frequency_factor: float = 4.0
    """llama3: wavelengths shorter than original_length / this stay"""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this within original_length stay"""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are divided by factor"""

    def __post_init__(self):
        _check_choices(self, kind=Literal["linear", "llama3", "yarn"])
        _check_range(self, 1.0, float("inf"), "factor")
        _check_whole(self, "original_length")
        _check_positive(self, "low_frequency_factor", "high_frequency_factor", "beta_fast", "beta_slow")
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ConfigError(
                f"high_frequency_factor ({self.high_frequency_factor}) must be above low_frequency_factor "
                f"({self.low_frequency_factor})."
            )
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(f"beta_fast ({self.beta_fast}) must be above beta_slow ({self.beta_slow}).")


@dataclass(frozen=True, kw_only=True)
class MoE:
    """A routed feed-forward in place of the dense one: `num_experts` of width `d_ff` (None: the config's), `top_k` of
    them for each token, and `shared_experts` that every token passes through (Shazeer et al. 2017, arXiv 1701.06538).

    `normalize_weights` makes the weights of the chosen sum to 1. `capacity_factor` c: an expert takes at most c times
    its even share of each row, first come first served; None: all. Two terms are added to the training loss, times
    `load_balance_weight` (Fedus et al. 2021, arXiv 2101.03961) and `router_z_weight` (Zoph et al. 2022, arXiv
    2202.08906). Raises ConfigError: a number out of range, more chosen than there are, or weights that are always 1.
    """

    num_experts: int
    top_k: int = 2
    d_ff: int | None = None
    shared_experts: int = 0
    normalize_weights: bool = True
    capacity_factor: float | None = None
    load_balance_weight: float = 0.01
    router_z_weight: float = 0.001

    def __post_init__(self):
        _check_whole(self, "num_experts", "top_k", "d_ff")
        _check_whole(self, "shared_experts", least=0)
        _check_positive(self, "capacity_factor")
        _check_range(self, 0.0, float("inf"), "load_balance_weight", "router_z_weight")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k ({self.top_k}) must be at most num_experts ({self.num_experts}). Change one.")
        if self.top_k == 1 and self.normalize_weights:
            raise ConfigError("top_k=1 with normalize_weights: the weight is always 1, and no router learns. Drop one.")


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What differs between the layers of one stack. Everything else is the config's.

    Raises:
        ConfigError: a number out of range, or a field about attention in a layer without any.
    """

    self_attention: bool = True
    """false: no self-attention, so that no position sees another (an ablation: what is left without it)"""
    window: int | None = None
    """attend only keys closer than this many positions; None: all"""
    rotary_base: float | None = None
    """rotary base of these layers; None: the config's"""
    rotary_scaling: RotaryScaling | None = None
    """rotary scaling of these layers; None: the config's"""
    moe: MoE | None = None
    """a routed feed-forward; None: the dense one"""

    def __post_init__(self):
        _check_whole(self, "window")
        _check_positive(self, "rotary_base")
        unread = [name for name in ("window", "rotary_base", "rotary_scaling") if getattr(self, name) is not None]
        if unread and not self.self_attention:
            raise ConfigError(
                f"{unread[0]} says how a layer attends, but self_attention is False. Leave {unread[0]} out, or let "
                f"the layer attend."
            )


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
    activation: Activation = "relu"
    """feed-forward nonlinearity"""
    gated: bool = False
    """feed-forward multiplies by a second, activated projection (GLU variants: SwiGLU is silu + gated)"""
    use_bias: bool = True
    """biases in attention and feed-forward projections"""
    norm: Norm = "layer_norm"
    """which normalization"""
    norm_epsilon: float = 1e-6
    """added to the variance before the square root"""
    norm_position: NormPosition = "pre"
    """pre: x + f(norm(x)); post: norm(x + f(x)), the paper's; pre_without_residual: f(norm(x)), an ablation"""
    position: Position = "sinusoidal"
    """position scheme"""
    max_length: int | None = None
    """rows of the learned position table; only for position=learned"""
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
    scale_embeddings: bool = True
    """multiply token embeddings by sqrt(d_model)"""
    tie_embeddings: bool = True
    """logits use the (decoder's) embedding table"""
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
    """RMSNorm on each query and key head"""
    attention_sinks: bool = False
    """one learnt logit a head that takes weight and gives no value"""
    initializer_range: float | None = None
    """standard deviation of a normal initializer (output projections over sqrt(2 L)); None: Glorot uniform"""
    num_classes: int | None = None
    """classes of a Classifier"""
    pooling: Pooling = "mean"
    """how a Classifier makes one vector of a sequence"""
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
        _check_choices(self, activation=Activation, norm=Norm, norm_position=NormPosition, position=Position)
        _check_choices(self, pooling=Pooling, dtype=Dtype, param_dtype=Dtype)
        _check_whole(self, "vocab_size", "source_vocab_size", "d_model", "num_layers", "num_encoder_layers")
        _check_whole(self, "num_decoder_layers", "num_heads", "num_kv_heads", "head_dim", "value_dim", "d_ff")
        _check_whole(self, "max_length", "rotary_dim", "relative_max_distance", "num_classes")
        _check_whole(self, "relative_buckets", least=4)
        _check_positive(self, "norm_epsilon", "rotary_base", "attention_scale", "attention_softcap")
        _check_positive(self, "logit_softcap", "initializer_range")
        _check_range(self, 0.0, 1.0, "dropout_rate", "attention_dropout_rate")
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ConfigError(
                f"d_model ({self.d_model}) must be a multiple of num_heads ({self.num_heads}) when head_dim is not "
                f"given. Give head_dim, or change one of them."
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.kv_heads}): each key head "
                f"serves equally many query heads. Change one of them."
            )
        self._check_position()
        for stack, layers in self._stack_sizes().items():
            self._check_pattern(stack, layers)

    def _check_position(self):
        if (self.position == "learned") != (self.max_length is not None):
            raise ConfigError(
                f"max_length is the number of rows of a learned position table: position={self.position!r} with "
                f"max_length={self.max_length}. Give max_length with position='learned', and only there."
            )
        if self.position == "rotary":
            turned = self.size_of_head if self.rotary_dim is None else self.rotary_dim
            if turned % 2 or turned > self.size_of_head:
                raise ConfigError(
                    f"rotary positions turn pairs of dimensions: {turned} of a head of {self.size_of_head} can't be "
                    f"turned. Give an even rotary_dim of at most head_dim, or change head_dim."
                )
        if self.position == "sinusoidal" and self.d_model % 2:
            raise ConfigError(f"sinusoidal positions are sine and cosine pairs: d_model ({self.d_model}) must be even.")
        if self.position == "t5" and self.relative_max_distance <= self.relative_buckets // 2:
            raise ConfigError(
                f"relative_max_distance ({self.relative_max_distance}) must be above relative_buckets / 2 "
                f"({self.relative_buckets // 2}): the first half of the buckets are single distances."
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
        ends = len(self.prefix) + len(self.suffix)
        if layers < ends or (layers - ends) % len(self.period):
            raise ConfigError(
                f"{name} ({layers}) must be prefix ({len(self.prefix)}) + suffix ({len(self.suffix)}) + a multiple of "
                f"the period ({len(self.period)}). Change {name} or the pattern."
            )

    @property
    def kv_heads(self) -> int:
        """K: num_kv_heads, or num_heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def size_of_head(self) -> int:
        """H: head_dim, or d_model / num_heads."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def size_of_value(self) -> int:
        """Size of a value head: value_dim, or that of the key head."""
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

    def __post_init__(self):
        _check_choices(self, remat=Remat)


def transformer_base(**changes: object) -> TransformerConfig:
    """The base model of Vaswani et al. 2017 (arXiv 1706.03762, table 3): N = 6, 512 / 8 / 2048, dropout 0.1."""
    return _PAPER.replace(**changes)


def transformer_big(**changes: object) -> TransformerConfig:
    """The big model of Vaswani et al. 2017 (arXiv 1706.03762, table 3): N = 6, 1024 / 16 / 4096, dropout 0.3."""
    return _PAPER.replace(**{"d_model": 1024, "num_heads": 16, "d_ff": 4096, "dropout_rate": 0.3} | changes)


_PAPER = TransformerConfig(
    d_model=512,
    num_layers=6,
    num_heads=8,
    d_ff=2048,
    activation="relu",
    norm="layer_norm",
    norm_position="post",
    position="sinusoidal",
    scale_embeddings=True,
    tie_embeddings=True,
    dropout_rate=0.1,
)
