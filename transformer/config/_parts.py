"""What a model may have several of, or none: rotary scaling, experts, kinds of layers, head, patches, series."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformer.config._checks import ConfigError, check_choices, check_flags, check_positive, check_range, check_whole
from transformer.config._paths import with_paths

Activation = Literal["relu", "gelu_tanh", "gelu_erf", "silu", "tanh", "relu2"]
FeedForwardActivation = Literal[Activation, "swiglu_clamped"]


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How rotary frequencies are stretched to reach beyond the length a model was trained on.

    `linear` divides every frequency by `factor` (Chen et al. 2023, arXiv 2306.15595). `llama3` divides only the low
    ones, with a smooth passage between two wavelengths (Llama 3.1, arXiv 2407.21783). `yarn` does so by the number of
    turns within the original length and sharpens the attention (Peng et al. 2023, arXiv 2309.00071).

    Raises:
        ConfigError: a factor below 1, bounds in the wrong order, or yarn's own fields with another kind.
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
    attention_factor: float | None = None
    """yarn: factor on turned queries and keys; None: 0.1 ln(factor) + 1"""
    truncate: bool = True
    """yarn: the ramp between the two betas begins and ends at whole pairs; false: between them"""

    def __post_init__(self):
        check_choices(self, kind=Literal["linear", "llama3", "yarn"])
        check_range(self, 1.0, float("inf"), "factor")
        check_whole(self, "original_length")
        check_flags(self, "truncate")
        check_positive(self, "low_frequency_factor", "high_frequency_factor", "beta_fast", "beta_slow")
        check_positive(self, "attention_factor")
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ConfigError(
                f"high_frequency_factor ({self.high_frequency_factor}) must be above low_frequency_factor "
                f"({self.low_frequency_factor})."
            )
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(f"beta_fast ({self.beta_fast}) must be above beta_slow ({self.beta_slow}).")
        if self.kind != "yarn" and (self.attention_factor is not None or not self.truncate):
            field = "truncate" if self.attention_factor is None else "attention_factor"
            raise ConfigError(f"{field} belongs to kind='yarn', got kind={self.kind!r}. Leave {field} out.")


@with_paths({"selection_bias": "e_score_correction_bias", "weights_scale": "routed_scaling_factor"})
@dataclass(frozen=True, kw_only=True)
class MoE:
    """A routed feed-forward in place of the dense one: `num_experts` of width `d_ff` (None: the config's), `top_k` of
    them for each token, and `shared_experts` that every token passes through (Shazeer et al. 2017, arXiv 1701.06538).

    `normalize_weights` makes the weights of the chosen sum to 1. `capacity_factor` c: an expert takes at most c times
    its even share of each row, first come first served; None: all. Two terms are added to the training loss, times
    `load_balance_weight` (Fedus et al. 2021, arXiv 2101.03961) and `router_z_weight` (Zoph et al. 2022, arXiv
    2202.08906). Raises ConfigError: a number out of range, more chosen than there are, groups that experts don't fill,
    or weights that are always 1.
    """

    num_experts: int
    top_k: int = 2
    d_ff: int | None = None
    shared_experts: int = 0
    normalize_weights: bool = True
    capacity_factor: float | None = None
    load_balance_weight: float = 0.01
    router_z_weight: float = 0.001
    router_bias: bool = False
    """a bias on the router's logits (gpt-oss)"""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """what makes scores of the logits; sigmoid: each for itself (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)"""
    e_score_correction_bias: bool = False
    """a bias per expert that is added to its score for selection only, not for its weight (DeepSeek-V3); its gradient
    is zero"""
    num_groups: int = 1
    """groups of equally many experts, one after the other"""
    top_groups: int = 1
    """groups that a token may choose from: those whose two best experts have the highest scores together"""
    routed_scaling_factor: float = 1.0
    """factor on the weights of the selected experts"""

    def __post_init__(self):
        check_whole(self, "num_experts", "top_k", "d_ff")
        check_whole(self, "shared_experts", least=0)
        check_positive(self, "capacity_factor")
        check_range(self, 0.0, float("inf"), "load_balance_weight", "router_z_weight")
        check_choices(self, scoring=Literal["softmax", "sigmoid"])
        check_whole(self, "num_groups", "top_groups")
        check_positive(self, "routed_scaling_factor")
        check_flags(self, "normalize_weights", "router_bias", "e_score_correction_bias")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k ({self.top_k}) must be at most num_experts ({self.num_experts}). Change one.")
        if self.top_k == 1 and self.normalize_weights:
            raise ConfigError("top_k=1 with normalize_weights: the weight is always 1, and no router learns. Drop one.")
        self._check_groups()

    def _check_groups(self):
        size, rest = divmod(self.num_experts, self.num_groups)
        if self.num_groups > 1 and (rest or size < 2):
            raise ConfigError(
                f"num_experts ({self.num_experts}) must be num_groups ({self.num_groups}) times at least 2: a group is "
                f"judged by its two best experts. Change one."
            )
        if self.top_groups > self.num_groups:
            raise ConfigError(
                f"top_groups ({self.top_groups}) must be at most num_groups ({self.num_groups}). Change one."
            )
        if self.top_k > self.top_groups * size:
            raise ConfigError(
                f"top_k ({self.top_k}) must be at most the {self.top_groups * size} experts in top_groups "
                f"({self.top_groups}). Change one."
            )


@with_paths(
    {
        "kv_rank": "kv_lora_rank",
        "query_rank": "q_lora_rank",
        "plain_dim": "qk_nope_head_dim",
        "rotary_dim": "qk_rope_head_dim",
        "value_dim": "v_head_dim",
    }
)
@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention: keys and values of all heads are computed from one short vector per token. The KV
    cache stores this vector and one rotated key that all heads share (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).

    Raises:
        ConfigError: a size below 1, or an odd number of rotated dimensions.
    """

    kv_lora_rank: int
    """size of the latent vector of keys and values"""
    qk_nope_head_dim: int
    """dimensions of each query and key head that are not rotated"""
    qk_rope_head_dim: int
    """dimensions of each query and key head that are rotated, stored after the others; all heads share this part of the
    key"""
    v_head_dim: int
    """size of a value head"""
    q_lora_rank: int | None = None
    """size of the latent vector of queries; None: queries are a projection of x"""
    norm_epsilon: float = 1e-6
    """epsilon of the RMSNorm of each latent vector"""

    def __post_init__(self):
        check_whole(self, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
        check_positive(self, "norm_epsilon")
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                f"rotary positions rotate pairs of dimensions: qk_rope_head_dim ({self.qk_rope_head_dim}) must be even."
            )

    @property
    def head_dim(self) -> int:
        """Size of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


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
    attention_norm: bool = True
    """false: no norm before attention, which then reads x as it is (ModernBERT's first layer)"""

    def __post_init__(self):
        check_whole(self, "window")
        check_positive(self, "rotary_base")
        unread = [name for name in ("window", "rotary_base", "rotary_scaling") if getattr(self, name) is not None]
        unread += [] if self.attention_norm else ["attention_norm"]
        if unread and not self.self_attention:
            raise ConfigError(
                f"{unread[0]} says how a layer attends, but self_attention is False. Leave {unread[0]} out, or let "
                f"the layer attend."
            )


@dataclass(frozen=True)
class Layer:
    """One layer of a stack, and where its parameters, cache and intermediates are in the trees of the stack."""

    kind: LayerKind
    path: str
    """inside the stack: "prefix_0", "layers/slot_1", "suffix_0"; components are separated by "/" """
    index: int | None = None
    """on the leading axis of arrays under `path`, where repeats of the period are stacked; None: no such axis"""


@dataclass(frozen=True, kw_only=True)
class HeadTransform:
    """A map (D, D) and a nonlinearity in front of the output map, and perhaps a norm after them.

    With gelu and a norm it is the head of BERT's masked language model, with tanh the pooler of its classifier (Devlin
    et al. 2018, arXiv 1810.04805). Raises ConfigError: an unknown activation.
    """

    activation: Activation
    """after the map"""
    norm: bool
    """a norm of the config's kind after the activation"""
    use_bias: bool = True
    """a bias in the map"""

    def __post_init__(self):
        check_choices(self, activation=Activation)


@dataclass(frozen=True, kw_only=True)
class Patches:
    """How an image becomes a sequence: squares side by side, row by row, each one vector by one linear map (Dosovitskiy
    et al. 2020, arXiv 2010.11929, section 3.1). `image_height`, `image_width` and `patch_size` are in pixels.

    Raises:
        ConfigError: a size below 1, or an image that is no whole number of patches high and wide.
    """

    image_height: int
    image_width: int
    patch_size: int
    """height and width of a patch"""
    channels: int = 3
    """numbers a pixel"""
    use_bias: bool = True
    """a bias in the linear map"""

    def __post_init__(self):
        check_whole(self, "image_height", "image_width", "patch_size", "channels")
        for field in ("image_height", "image_width"):
            size = getattr(self, field)
            if size % self.patch_size:
                raise ConfigError(f"{field} ({size}) must be a multiple of patch_size ({self.patch_size}). Change one.")

    @property
    def count(self) -> int:
        """Patches of an image."""
        return (self.image_height // self.patch_size) * (self.image_width // self.patch_size)


@dataclass(frozen=True, kw_only=True)
class Series:
    """How a time series becomes sequences, one a channel, and what is forecast of it: its last steps are cut into
    patches, the last of which ends with the series (Nie et al. 2022, arXiv 2211.14730, section 3.1).

    Raises:
        ConfigError: a size below 1, a patch longer than what it is cut from, or a pooling beside a class token.
    """

    channels: int
    """numbers a step, each forecast from its own past"""
    context_length: int
    """steps that are looked back at"""
    horizon: int
    """steps that are forecast"""
    patch_length: int
    """steps of a patch"""
    patch_stride: int
    """steps from one patch to the next"""
    scaling: Literal["std", "mean", "none"] = "std"
    """of each channel by its look-back, undone in the forecast: std: less its mean, over its standard deviation; mean:
    over its mean magnitude; none"""
    shared_embedding: bool = True
    """one map of patches for all channels; false: one for each"""
    class_token: bool = False
    """a token in front of the patches, which alone the head reads"""
    pooling: Literal["flatten", "mean", "max"] = "flatten"
    """what the head reads of a channel: its patches side by side, their mean, or the largest of each feature"""

    def __post_init__(self):
        check_choices(self, scaling=Literal["std", "mean", "none"], pooling=Literal["flatten", "mean", "max"])
        check_whole(self, "channels", "context_length", "horizon", "patch_length", "patch_stride")
        if self.patch_length > self.context_length:
            raise ConfigError(
                f"patch_length ({self.patch_length}) must be at most context_length ({self.context_length}): change "
                f"one of them."
            )
        if self.class_token and self.pooling != "flatten":
            raise ConfigError(f"pooling={self.pooling!r} is of patches, but the head reads the class_token. Drop one.")

    @property
    def patches(self) -> int:
        """Patches of a channel."""
        return (self.context_length - self.patch_length) // self.patch_stride + 1

    @property
    def positions(self) -> int:
        """Patches of a channel, and the class token."""
        return self.patches + self.class_token
