"""Optional or repeated parts of a model config: rotary scaling, experts, latent attention, kinds of layers, output
transform, image patches, and time series.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformer.config._checks import ConfigError, check_choices, check_flags, check_positive, check_range, check_whole

Activation = Literal["relu", "gelu_tanh", "gelu_erf", "quick_gelu", "silu", "tanh", "relu2"]
FeedForwardActivation = Literal[Activation, "swiglu_clamped"]


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Scaling of rotary frequencies, for sequences longer than those the model was trained on.

    `linear` divides all frequencies by `factor` (position interpolation, Chen et al. 2023, arXiv 2306.15595). `llama3`
    divides only the low frequencies, and interpolates between two wavelengths (Llama 3.1, arXiv 2407.21783). `yarn`
    selects the frequencies by their number of rotations within the original length, and also scales the attention
    scores (Peng et al. 2023, arXiv 2309.00071).

    With two kinds, the frequencies depend on the length of the text, the largest position of its row plus 1. Up to
    original_length, `dynamic` leaves them unchanged; for a longer text it raises the base with the length (dynamic
    NTK-aware scaling, Peng et al. 2023, section 3.3). `longrope` divides each frequency by its own factor, from
    `short_factors` up to original_length and from `long_factors` above, and scales the attention scores (Ding et al.
    2024, arXiv 2402.13753).

    `proportional` rotates only the pairs with the highest frequencies, the fraction `share` of all pairs of a head, and
    divides their frequencies by `factor` (Gemma 4).

    Raises:
        ConfigError: a factor below 1, bounds in the wrong order, or a field of one kind with another kind.
    """

    kind: Literal["linear", "llama3", "yarn", "dynamic", "longrope", "proportional"]
    """scaling rule"""
    factor: float
    """new length / original length, at least 1"""
    original_length: int = 8192
    """length in positions that the model was trained on; not for linear"""
    low_frequency_factor: float = 1.0
    """llama3: frequencies with wavelengths above original_length / low_frequency_factor are divided by factor"""
    high_frequency_factor: float = 4.0
    """llama3: frequencies with wavelengths below original_length / high_frequency_factor are unchanged"""
    beta_fast: float = 32.0
    """yarn: frequencies with more than this many rotations within original_length are unchanged"""
    beta_slow: float = 1.0
    """yarn: frequencies with fewer than this many rotations within original_length are divided by factor"""
    attention_factor: float | None = None
    """yarn and longrope: factor on rotated queries and keys; None: 0.1 ln(factor) + 1 for yarn, and
    sqrt(1 + ln(factor) / ln(original_length)) for longrope"""
    truncate: bool = True
    """yarn: round the ends of the ramp between beta_fast and beta_slow to whole dimension pairs"""
    short_factors: tuple[float, ...] = ()
    """longrope: divisor of each frequency in texts of at most original_length positions"""
    long_factors: tuple[float, ...] = ()
    """longrope: divisor of each frequency in longer texts"""
    share: float = 1.0
    """proportional: fraction of the pairs that are rotated, rounded down to whole pairs"""

    def __post_init__(self):
        check_choices(self, kind=Literal["linear", "llama3", "yarn", "dynamic", "longrope", "proportional"])
        check_range(self, 1.0, float("inf"), "factor")
        check_whole(self, "original_length")
        check_flags(self, "truncate")
        check_positive(self, "low_frequency_factor", "high_frequency_factor", "beta_fast", "beta_slow")
        check_positive(self, "attention_factor", "share")
        if self.high_frequency_factor < self.low_frequency_factor:
            raise ConfigError(
                f"high_frequency_factor ({self.high_frequency_factor}) must be at least low_frequency_factor "
                f"({self.low_frequency_factor})."
            )
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(f"beta_fast ({self.beta_fast}) must be above beta_slow ({self.beta_slow}).")
        if self.attention_factor is not None and self.kind not in ("yarn", "longrope"):
            raise ConfigError(
                f"attention_factor applies only to kind='yarn' or 'longrope', got kind={self.kind!r}. Remove "
                f"attention_factor."
            )
        if self.share > 1.0:
            raise ConfigError(f"share is a fraction of the pairs: expected at most 1.0, got {self.share}. Correct it.")
        if self.share != 1.0 and self.kind != "proportional":
            raise ConfigError(f"share applies only to kind='proportional', got kind={self.kind!r}. Remove share.")
        if not self.truncate and self.kind != "yarn":
            raise ConfigError(f"truncate applies only to kind='yarn', got kind={self.kind!r}. Remove truncate.")
        self._check_factors()

    def _check_factors(self):
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if (self.kind == "longrope") != bool(factors):
                raise ConfigError(
                    f"{name} has one factor per frequency for kind='longrope', and is empty for other kinds, got "
                    f"{len(factors)} factors for kind={self.kind!r}. Change one of them."
                )
            if not all(isinstance(one, int | float) and 0 < one < float("inf") for one in factors):
                raise ConfigError(f"{name} must be numbers above 0, got {factors!r:.80}. Correct them.")
        if len(self.short_factors) != len(self.long_factors):
            raise ConfigError(
                f"short_factors ({len(self.short_factors)}) and long_factors ({len(self.long_factors)}) must have the "
                f"same number of factors, one per frequency. Correct them."
            )

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the length of the text."""
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class MoE:
    """Mixture of experts: a feed-forward layer whose router selects `top_k` of `num_experts` experts for each token
    (Shazeer et al. 2017, arXiv 1701.06538).

    Raises:
        ConfigError: a number out of range, top_k above the number of selectable experts, groups of unequal size, or
            normalized weights with top_k=1, which are always 1.
    """

    num_experts: int
    """E, number of experts that the router selects from"""
    top_k: int = 2
    """number of experts selected for each token"""
    d_ff: int | None = None
    """F, inner width of an expert; None: d_ff of the model config"""
    shared_experts: int = 0
    """number of additional experts that process every token"""
    normalize_weights: bool = True
    """divide the weights of the selected experts by their sum"""
    capacity_factor: float | None = None
    """c: in training, an expert processes at most c times its even share of the tokens of a sequence, first come,
    first served, and drops the rest. A sequence is a row, or a segment of a packed row, without padding. Evaluation and
    decoding drop nothing; None: no limit"""
    load_balance_weight: float = 0.01
    """weight of the load-balancing term in the training loss (Fedus et al. 2021, arXiv 2101.03961)"""
    router_z_weight: float = 0.001
    """weight of the router z-loss in the training loss (Zoph et al. 2022, arXiv 2202.08906)"""
    router_bias: bool = False
    """bias on the router logits (gpt-oss)"""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """function from router logits to scores: softmax over all experts, or sigmoid of each logit
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)"""
    e_score_correction_bias: bool = False
    """bias per expert that is added to its score to select experts, but not to compute weights (DeepSeek-V3);
    its gradient is zero"""
    num_groups: int = 1
    """number of groups of consecutive experts, all of the same size"""
    top_groups: int = 1
    """number of groups to select experts from: those with the highest sum of their two best scores"""
    routed_scaling_factor: float = 1.0
    """factor on the weights of the selected experts"""
    shared_d_ff: int | None = None
    """inner width of a shared expert; None: d_ff"""
    router_norm: bool = False
    """normalize the input of the router by its root mean square, and multiply it by a learned vector over sqrt(d_model)
    (Gemma 4)"""
    expert_scale: bool = False
    """multiply the weight of each expert by a learned number (Gemma 4)"""
    beside_dense: bool = False
    """add the experts to the dense feed-forward layer instead of replacing it: norm(dense(norm(x))) +
    norm(experts(norm(x))), where the router reads x (Gemma 4)"""
    scale_inputs: bool = False
    """multiply the input of an expert by its weight, instead of its output (Llama 4)"""
    shared_gate: bool = False
    """multiply the output of the shared experts by the sigmoid of a projection of the token (Qwen Team 2024, arXiv
    2407.10671, section 2.2.2)"""

    def __post_init__(self):
        check_whole(self, "num_experts", "top_k", "d_ff", "shared_d_ff")
        check_whole(self, "shared_experts", least=0)
        check_positive(self, "capacity_factor")
        check_range(self, 0.0, float("inf"), "load_balance_weight", "router_z_weight")
        check_choices(self, scoring=Literal["softmax", "sigmoid"])
        check_whole(self, "num_groups", "top_groups")
        check_positive(self, "routed_scaling_factor")
        check_flags(self, "normalize_weights", "router_bias", "e_score_correction_bias")
        check_flags(self, "scale_inputs", "shared_gate", "router_norm", "expert_scale", "beside_dense")
        if not self.shared_experts and (self.shared_gate or self.shared_d_ff is not None):
            raise ConfigError("shared_d_ff and shared_gate are for shared experts, but shared_experts is 0. Set it.")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k ({self.top_k}) must be at most num_experts ({self.num_experts}). Change one.")
        if self.top_k == 1 and self.normalize_weights:
            raise ConfigError(
                "top_k=1 with normalize_weights: the weight is always 1, so the router gets no gradient. Change one."
            )
        self._check_groups()

    def _check_groups(self):
        size, rest = divmod(self.num_experts, self.num_groups)
        if self.num_groups > 1 and (rest or size < 2):
            raise ConfigError(
                f"num_experts ({self.num_experts}) must be num_groups ({self.num_groups}) times at least 2: the score "
                f"of a group is the sum of its two best experts' scores. Change one."
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


@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).

    Keys and values of all heads are projections of one short latent vector per token. The KV cache stores this vector
    and one rotated key that all heads share.

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
class GatedDelta:
    """Linear attention by the gated delta rule (Gated DeltaNet, Yang et al. 2024, arXiv 2412.06464).

    The state of a layer has a fixed size: decoding takes the same time and memory for each token of a text.

    Raises:
        ConfigError: a size below 1, or a number of heads that is not a multiple of the number of key heads.
    """

    num_heads: int
    """number of value heads"""
    num_key_heads: int
    """number of query and key heads, each for num_heads / num_key_heads value heads"""
    key_dim: int
    """size of a query or key head"""
    value_dim: int
    """size of a value head"""
    conv_width: int = 4
    """tokens that the convolution of queries, keys and values reads: the token itself and those before it"""

    def __post_init__(self):
        check_whole(self, "num_heads", "num_key_heads", "key_dim", "value_dim", "conv_width")
        if self.num_heads % self.num_key_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of num_key_heads ({self.num_key_heads}): all keys "
                f"serve the same number of values. Change one of them."
            )


@dataclass(frozen=True, kw_only=True)
class QueryTemperature:
    """Factor on the queries of a layer that grows with their position p: 1 + scale ln(1 + floor((p + 1) / length)).

    In a long text the softmax of attention has more terms, and larger scores keep it from becoming flat (Nakanishi
    2025, arXiv 2501.19399; this form is that of Llama 4).

    Raises:
        ConfigError: a number that is not above 0.
    """

    scale: float = 0.1
    """factor on the logarithm"""
    length: int = 8192
    """positions after which the factor grows"""

    def __post_init__(self):
        check_positive(self, "scale")
        check_whole(self, "length")


_ATTENTION_OPTIONS = ("window", "chunk", "rotary_base", "rotary_scaling", "temperature")
_ATTENTION_OPTIONS += ("head_dim", "num_kv_heads", "stores_kv", "reads_kv")


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Options that can differ between the layers of one stack; all other options come from the model config.

    Raises:
        ConfigError: a number out of range, or an attention option in a layer without self-attention.
    """

    self_attention: bool = True
    """false: no self-attention, so positions can't exchange information (an ablation)"""
    window: int | None = None
    """sliding-window attention: attend only to keys closer than this many positions; None: to all keys"""
    chunk: int | None = None
    """chunked attention: attend only to keys of the same chunk of this many positions; None: to all keys"""
    within_segments: bool = False
    """attend only to the keys of the same segment, where a call gives `segments`, such as windows of image patches"""
    rotary_base: float | None = None
    """rotary base of these layers; None: the base of the model config"""
    rotary_scaling: RotaryScaling | None = None
    """rotary scaling of these layers; None: the scaling of the model config"""
    rotary: bool = True
    """false: rotary positions are not applied in these layers (NoPE, Yang et al. 2025, arXiv 2501.18795)"""
    temperature: QueryTemperature | None = None
    """factor on the queries that grows with their position; None: no factor"""
    qk_norm: bool = True
    """false: attention.qk_norm is not applied in these layers"""
    head_dim: int | None = None
    """size of a query or key head in these layers; None: head_dim of the model config"""
    num_kv_heads: int | None = None
    """number of key and value heads of these layers; None: num_kv_heads of the model config"""
    keys_as_values: bool = False
    """values are the projected keys, before their norm and rotation: there is no projection of values (Gemma 4)"""
    stores_kv: str | None = None
    """name under which later layers find the keys and values of this layer, which must be in stack.prefix"""
    reads_kv: str | None = None
    """attend to the keys and values of an earlier layer, by its name in stores_kv, instead of own ones (Brandon et al.
    2024, arXiv 2405.12981)"""
    d_ff: int | None = None
    """inner width of the dense feed-forward layer of these layers; None: d_ff of the model config"""
    moe: MoE | None = None
    """mixture of experts instead of the dense feed-forward layer; None: dense"""
    attention_norm: bool = True
    """normalize before attention; false: attention reads the residual stream directly (first layer of ModernBERT)"""
    gated_delta: GatedDelta | None = None
    """linear attention instead of self-attention, in a causal stack; None: self-attention"""

    def __post_init__(self):
        check_whole(self, "window", "chunk", "head_dim", "num_kv_heads", "d_ff")
        check_positive(self, "rotary_base")
        check_flags(self, "rotary", "qk_norm", "keys_as_values", "within_segments")
        options = [name for name in _ATTENTION_OPTIONS if getattr(self, name) is not None]
        options += [name for name in ("keys_as_values", "within_segments") if getattr(self, name)]
        options += [name for name in ("rotary", "qk_norm") if not getattr(self, name)]
        unread = options + ([] if self.attention_norm else ["attention_norm"])
        if unread and not self.self_attention:
            raise ConfigError(
                f"{unread[0]} is an option of self-attention, but self_attention is False. Remove {unread[0]}, or set "
                f"self_attention=True."
            )
        unread = options + ([] if self.self_attention else ["self_attention"])
        if unread and self.gated_delta is not None:
            raise ConfigError(
                f"{unread[0]} is an option of self-attention, but gated_delta replaces self-attention. Remove one of "
                f"them."
            )
        if self.reads_kv is not None and (self.stores_kv is not None or self.keys_as_values):
            unread = "stores_kv" if self.stores_kv is not None else "keys_as_values"
            raise ConfigError(f"a layer with reads_kv computes no keys and values. Remove reads_kv, or {unread}.")
        if self.d_ff is not None and self.moe is not None and not self.moe.beside_dense:
            raise ConfigError("d_ff of a LayerKind is for dense layers: set d_ff of its moe instead.")


@dataclass(frozen=True)
class Layer:
    """One layer of a stack, and the path of its parameters, cache and intermediates in the pytrees of the stack."""

    kind: LayerKind
    path: str
    """path within the stack, components separated by "/": "prefix_0", "layers/slot_1", "suffix_0" """
    index: int | None = None
    """index into the leading axis of the arrays at `path`, which stacks the repeats of the period; None: not stacked"""


@dataclass(frozen=True, kw_only=True)
class HeadTransform:
    """A dense layer (D, D) with an activation, and optionally a norm, before the output layer.

    With gelu and a norm, this is the head of BERT's masked language model; with tanh, it is the pooler of BERT's
    classifier (Devlin et al. 2018, arXiv 1810.04805).

    Raises:
        ConfigError: an unknown activation.
    """

    activation: Activation
    """activation after the dense layer"""
    norm: bool
    """normalize after the activation, with the norm of the model config"""
    use_bias: bool = True
    """bias of the dense layer"""

    def __post_init__(self):
        check_choices(self, activation=Activation)


@dataclass(frozen=True, kw_only=True)
class Patches:
    """Image patches as input tokens: non-overlapping squares in row-major order, each embedded by one shared linear
    projection (ViT, Dosovitskiy et al. 2020, arXiv 2010.11929, section 3.1).

    Raises:
        ConfigError: a size below 1, or a height or width that is not a multiple of the patch size.
    """

    image_height: int
    """image height in pixels"""
    image_width: int
    """image width in pixels"""
    patch_size: int
    """height and width of a patch in pixels"""
    channels: int = 3
    """channels per pixel"""
    use_bias: bool = True
    """bias of the linear projection"""
    class_token: bool = True
    """a learned token before the patches"""
    distillation_token: bool = False
    """a second learned token, after the class token, whose output is trained on the labels of a teacher
    (DeiT, Touvron et al. 2020, arXiv 2012.12877, section 4)"""
    registers: int = 0
    """learned tokens without a position, before the patches (Darcet et al. 2023, arXiv 2309.16588)"""
    drop_remainder: bool = False
    """if height or width is not a multiple of the patch size, ignore the last rows or columns of pixels"""
    resize_positions: bool = False
    """read images of any number of rows and columns of patches: learned positions are stored for an image of
    image_height x image_width pixels and interpolated for each image (NaFlex in SigLIP 2, Tschannen et al. 2025, arXiv
    2502.14786, section 2.4); needs position=none and no learned tokens"""

    def __post_init__(self):
        check_whole(self, "image_height", "image_width", "patch_size", "channels")
        check_whole(self, "registers", least=0)
        check_flags(self, "use_bias", "class_token", "distillation_token", "drop_remainder", "resize_positions")
        if self.resize_positions and (self.extra_tokens or self.drop_remainder):
            raise ConfigError(
                "resize_positions=True is for patches alone: it needs class_token=False, registers=0 and "
                "drop_remainder=False. Change them."
            )
        if self.distillation_token and not self.class_token:
            raise ConfigError("distillation_token=True needs class_token=True. Change one of them.")
        for field in ("image_height", "image_width"):
            size = getattr(self, field)
            if size % self.patch_size and (not self.drop_remainder or size < self.patch_size):
                raise ConfigError(f"{field} ({size}) must be a multiple of patch_size ({self.patch_size}). Change one.")

    @property
    def grid(self) -> tuple[int, int]:
        """Number of rows and columns of patches."""
        return self.image_height // self.patch_size, self.image_width // self.patch_size

    @property
    def count(self) -> int:
        """Number of patches per image."""
        rows, columns = self.grid
        return rows * columns

    @property
    def extra_tokens(self) -> int:
        """Number of learned tokens before the patches."""
        return self.class_token + self.distillation_token + self.registers

    @property
    def positions(self) -> int:
        """Number of positions per image: learned tokens and patches."""
        return self.extra_tokens + self.count


@dataclass(frozen=True, kw_only=True)
class Series:
    """Time series input of a Forecaster and the other models of time series (PatchTST, Nie et al. 2022, section 3.1).

    The paper is arXiv 2211.14730.

    Each channel is a separate sequence. Its input window is cut into patches, which are the input tokens; the last
    patch ends at the end of the window.

    Raises:
        ConfigError: a size below 1, a patch longer than the input window, or pooling together with a class token.
    """

    channels: int
    """number of channels; each is forecast from its own past"""
    context_length: int
    """number of input steps (look-back window)"""
    horizon: int | None = None
    """number of steps that a Forecaster forecasts; other models of time series don't read it"""
    patch_length: int
    """steps per patch"""
    patch_stride: int
    """steps between the starts of consecutive patches"""
    scaling: Literal["std", "mean", "none"] = "std"
    """normalization of each channel by its input window, inverted in the forecast:
    std: subtract the mean, divide by the standard deviation;
    mean: divide by the mean absolute value;
    none: no normalization"""
    shared_embedding: bool = True
    """all channels share one patch embedding; false: one per channel"""
    class_token: bool = False
    """prepend a class token to the patches; the head then reads only this token"""
    pooling: Literal["flatten", "mean", "max"] = "flatten"
    """how the patches of a channel are combined for the head:
    concatenated (flatten), averaged (mean), or the maximum of each feature (max)"""

    def __post_init__(self):
        check_choices(self, scaling=Literal["std", "mean", "none"], pooling=Literal["flatten", "mean", "max"])
        check_whole(self, "channels", "context_length", "horizon", "patch_length", "patch_stride")
        if self.patch_length > self.context_length:
            raise ConfigError(
                f"patch_length ({self.patch_length}) must be at most context_length ({self.context_length}). Change "
                f"one of them."
            )
        if self.class_token and self.pooling != "flatten":
            raise ConfigError(
                f"pooling={self.pooling!r} combines patches, but the head reads only the class_token. Remove one."
            )

    @property
    def patches(self) -> int:
        """Number of patches per channel."""
        return (self.context_length - self.patch_length) // self.patch_stride + 1

    @property
    def positions(self) -> int:
        """Number of positions per channel: patches and class token."""
        return self.patches + self.class_token
