"""Residual blocks, one class per residual equation.

This is the only module that translates a `TransformerConfig` into attention, feed-forward and norm modules.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer.config import _positions as options
from transformer.config._checks import ConfigError
from transformer.config._execution import Execution
from transformer.config._model import TransformerConfig
from transformer.config._parts import MLA, GatedDelta, LayerKind
from transformer.nn import _positions as schemes
from transformer.nn._attention import MultiHeadAttention
from transformer.nn._axes import Hidden, Leaf, static
from transformer.nn._caches import ContextCache, KVCache, count_tokens
from transformer.nn._delta_net import GatedDeltaNet, StateCache
from transformer.nn._masks import Mask
from transformer.nn._mla import LatentAttention
from transformer.nn._moe import RoutedFeedForward
from transformer.nn._paged import heads_together
from transformer.nn._parameter_axes import declare
from transformer.nn._partitioning import constrain, platform
from transformer.nn._positions import NoPosition, PositionScheme
from transformer.nn.layers._layers import ACTIVATIONS, FeedForward, Initializer, Linear, is_deterministic
from transformer.nn.layers._norms import NORMS
from transformer.nn.quantization._schemes import Quantization

Aux: TypeAlias = dict[str, jax.Array]
"""additional outputs of a layer: the losses of a router, (B,) each, one sum per row; empty for dense layers"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerInputs:
    """Inputs that all layers of a stack share, besides x and the cache of each layer."""

    mask: Leaf = Mask()
    """a `Mask` for self-attention"""
    positions: Leaf | None = None
    """(B, T), or (B, T, A) with `position.sections`; None: 0, 1, 2, ..., counted from the end of the cache"""
    segments: Leaf | None = None
    """(B, T), segment of each token for layers with `within_segments`; None: one segment"""
    position_table: Leaf | None = None
    """(R, W), the learned table of a scheme that biases scores, if the stack owns it"""
    context: Leaf | None = None
    """(B, S, Dc) for cross-attention; None: read its cache"""
    context_mask: Leaf = Mask()
    """a `Mask` for cross-attention"""
    layer_embedding: Leaf | None = None
    """(B, T, P), the embedding of the tokens for this layer alone, if the config has such embeddings"""
    stored: Leaf | None = None
    """name -> `KeysValues`, keys and values of earlier layers with `stores_kv`; None: there are none"""
    deterministic: bool | None = static(None)
    """True: disable dropout and the capacity of experts; False: enable them (rng "dropout"). Required if the config has
    a dropout rate above 0"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """The state of one decoder layer between decoding steps."""

    self_attention: Leaf
    """a `KVCache` or `PagedKVCache`; for linear attention a `StateCache`"""
    cross_attention: Leaf | None = None
    """a `ContextCache`, in a decoder with cross-attention"""

    @staticmethod
    def create(config: TransformerConfig, kind: LayerKind, batch: int, length: int, *, cross: bool) -> LayerCache:
        """Return an empty cache of `length` tokens for each row; without self-attention, it only counts tokens."""
        dtype, context = jnp.dtype(config.dtype), ContextCache() if cross else None
        if kind.gated_delta is not None:
            delta = kind.gated_delta
            heads = (delta.num_key_heads, delta.num_heads, delta.key_dim, delta.value_dim)
            return LayerCache(StateCache.create(batch, heads, delta.conv_width, dtype), context)
        head_dim = config.head_dim_of(kind)
        value_dim = head_dim if config.attention.value_dim is None else config.attention.value_dim
        sizes = (config.kv_heads_of(kind), head_dim, value_dim)
        if config.attention.mla is not None:
            mla = config.attention.mla
            # MLA: instead of keys and values per head, store [latent, rotated key] as the key of a single head.
            sizes = (1, mla.kv_lora_rank + mla.qk_rope_head_dim, 0)
        # Arrays of size 0 still have an axis of slots, so the cache can count tokens.
        sizes = sizes if kind.self_attention and kind.reads_kv is None else (0, 0, 0)
        kv_heads, head_dim, value_dim = sizes
        # Heads can be stored together only if keys and values have the same width W.
        together = heads_together(kv_heads, head_dim) if head_dim == value_dim else 1
        if platform() == "cpu" and dtype.itemsize == 2:
            # XLA would convert the arrays of all tokens to float32 and back, whenever one token is stored.
            dtype = jnp.dtype(jnp.float32)
        return LayerCache(KVCache.create(batch, length, *sizes, dtype, together), context)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerOutput:
    """The result of a layer, or of one of its sublayers."""

    x: Leaf
    """(B, T, D)"""
    cache: Leaf | None = None
    """the updated cache: a `LayerCache`, or the part of a sublayer; None: no cache"""
    stored: Leaf | None = None
    """a `KeysValues` for later layers, with `stores_kv`"""
    aux: Leaf = field(default_factory=dict)
    """`Aux`: the losses of a router, if any"""


def position_scheme(config: TransformerConfig, kind: LayerKind = LayerKind(), *, causal: bool) -> PositionScheme:
    """Return the position scheme of a layer of this kind."""
    position = config.position
    match position:
        case options.SinusoidalOptions():
            return schemes.SinusoidalHalves() if position.halves else schemes.Sinusoidal()
        case options.LearnedOptions():
            tokens = (0, 0) if config.patches is None else (config.patches.extra_tokens, config.patches.registers)
            # Registers are the last of the learned tokens in front of the patches, and the only ones without a
            # position.
            without = range(tokens[0] - tokens[1], tokens[0])
            return schemes.Learned(max_length=config.max_length, features=config.d_model, without=without)
        case options.RotaryOptions() if kind.rotary:
            base = position.base if kind.rotary_base is None else kind.rotary_base
            scaling = position.scaling if kind.rotary_scaling is None else kind.rotary_scaling
            several = {"sections": position.sections, "restart_frequencies": position.restart_frequencies}
            return schemes.Rotary(base=base, size=position.dim, scaling=scaling, **several)
        case options.RotaryGridOptions():
            patches = config.patches
            return schemes.RotaryGrid(base=position.base, grid=patches.grid, first=patches.extra_tokens)
        case options.ALiBiOptions():
            return schemes.ALiBi(num_heads=config.num_heads)
        case options.T5BiasOptions():
            return schemes.T5Bias(
                num_heads=config.num_heads,
                buckets=position.buckets,
                max_distance=position.max_distance,
                bidirectional=not causal,
            )
        case _:
            return NoPosition()


def shares_table(config: TransformerConfig) -> bool:
    """Return whether the layers of a stack share the table of their position scheme, if it has one."""
    return not (isinstance(config.position, options.T5BiasOptions) and config.position.per_layer)


def table_parameter(config: TransformerConfig, scheme: PositionScheme) -> tuple[Initializer, tuple[int, int], str]:
    """Return initializer, shape (R, W) and dtype of the learned table of a position scheme."""
    # 0.02 is the standard deviation of BERT and GPT-2.
    init = nn.initializers.normal(config.parameters.initializer_range or 0.02)
    return init, scheme.table_shape, config.parameters.dtype


def make_norm(config: TransformerConfig, name: str) -> nn.Module:
    """Return a normalization layer of the kind that the config selects."""
    return NORMS[config.norm.kind](config.norm.epsilon, config.dtype, config.parameters.dtype, name=name)


def make_linear(config: TransformerConfig, features: tuple[int, ...], contract: int = 1, *, use_bias: bool) -> Linear:
    """Return a linear map onto `features`, outside of the layers, with initializer and dtypes of the config."""
    return Linear(features, contract, use_bias, kernel_init(config), config.dtype, config.parameters.dtype)


def kernel_init(config: TransformerConfig) -> Initializer | None:
    """Return the initializer of projections into a sublayer; None: the modules' default, Glorot uniform."""
    spread = config.parameters.initializer_range
    return None if spread is None else nn.initializers.normal(spread)


def output_init(config: TransformerConfig) -> Initializer | None:
    """Return the initializer of projections onto the residual stream; None: as `kernel_init`."""
    # Deviation initializer_range / sqrt(2 L). The stream is a sum of 2 L sublayer outputs; this gives it the variance
    # of one unscaled output (Radford et al. 2019, section 2.3).
    spread = config.parameters.initializer_range
    if spread is None:
        return None
    return nn.initializers.normal(spread / math.sqrt(2 * config.num_layers))


class Block(nn.Module):
    """A transformer layer: x = equation(x, f) for each sublayer f. Subclasses differ only in their equation.

    Parameters: `self_attention/`, `cross_attention/`, `feed_forward/`, `attention_norm/` and so on.
    """

    parameter_axes = declare(
        {"position_table": "_ _", "layer_scalar": "_"}
        | {"layer_gate/kernel": "embed -> _", "layer_projection/kernel": "_ -> embed"}
        | dict.fromkeys(("attention_scale", "cross_attention_scale", "feed_forward_scale"), "norm")
    )

    # No method may have the name of a parameter subtree: in NNX (`nnx.bridge.ToNNX`) both are attributes of one object.
    config: TransformerConfig
    kind: LayerKind = LayerKind()
    causal: bool = False
    """whether the stack is causal: the T5 bias then uses all its buckets for past positions"""
    cross: bool = False
    """whether the layer has cross-attention"""
    execution: Execution = Execution()

    def norm(self, name: str) -> Callable[[Hidden], Hidden]:
        """Return the norm (B, T, D) -> (B, T, D) of this name; the identity if this kind of layer omits it."""
        if name == "attention_norm" and not self.kind.attention_norm:
            return lambda x: x
        return make_norm(self.config, name)

    def dropout(self, x: Hidden, inputs: LayerInputs) -> Hidden:
        """Apply dropout to x (B, T, D), unless deterministic: set entries to 0, scale the rest by 1 / (1 - rate)."""
        rate = self.config.dropout_rate
        return nn.Dropout(rate)(x, deterministic=is_deterministic(self, inputs.deterministic, rate))

    def layer_scale(self, name: str, x: Hidden) -> Hidden:
        """Multiply the output x (B, T, D) of a sublayer by a learned vector (D,), if the config has a `layer_scale`."""
        value = self.config.stack.layer_scale
        if value is None:
            return x
        scale = self.param(f"{name}_scale", nn.initializers.constant(value), x.shape[-1:], self.config.parameters.dtype)
        # x + lambda f(x) with one lambda per feature: a small initial value makes every layer close to the identity,
        # which keeps deep stacks trainable (Touvron et al. 2021, arXiv 2103.17239, section 2).
        return x * scale.astype(x.dtype)[None, None]

    def attend_to_self(self, x: Hidden, inputs: LayerInputs, cache: LayerCache | None) -> LayerOutput:
        """Apply self-attention to x (B, T, D), including the tokens in the cache."""
        if self.kind.gated_delta is not None:
            own = None if cache is None else cache.self_attention
            return LayerOutput(*self._linear_attention(self.kind.gated_delta)(x, mask=inputs.mask, cache=own))
        scheme = position_scheme(self.config, self.kind, causal=self.causal)
        scheme = NoPosition() if scheme.adds else scheme  # the stack has already added it to the embeddings
        table = inputs.position_table
        # T5 has one table for all layers of a stack (Raffel et al. 2019, section 2.1), UMT5 one for each layer.
        if not shares_table(self.config):
            table = self.param("position_table", *table_parameter(self.config, scheme))
        given = {
            "mask": self._mask(inputs, cache),
            "positions": inputs.positions,
            "cache": None if cache is None else cache.self_attention,
            "deterministic": inputs.deterministic,
            "sow_weights": self.execution.sow_weights,
        }
        if self.config.attention.mla is not None:
            return LayerOutput(*self._latent_attention(self.config.attention.mla, scheme)(x, **given))
        stored = None if self.kind.reads_kv is None else inputs.stored[self.kind.reads_kv]
        x, own = self._attention("self_attention", scheme)(x, position_table=table, stored=stored, **given)
        return LayerOutput(x, own) if self.kind.stores_kv is None else LayerOutput(x, own.cache, own)

    def _mask(self, inputs: LayerInputs, cache: LayerCache | None) -> Mask:
        """Return the mask of self-attention. The stack has made it causal; the kind of layer hides more keys."""
        mask, chunk = inputs.mask, self.kind.chunk
        if self.kind.within_segments and inputs.segments is not None:
            mask = mask & Mask.segments(inputs.segments)
        if self.kind.window is not None:
            mask = mask & Mask.window(self.kind.window)
        if chunk is None:
            return mask
        if mask.query_segments is None:
            return mask & Mask.chunks(chunk)
        # Chunks of row indices would cut a packed segment at arbitrary places: count from the start of each segment
        # instead.
        return mask.with_chunks_of_segments(chunk, inputs.positions)

    def attend_to_context(self, x: Hidden, inputs: LayerInputs, cache: LayerCache | None) -> LayerOutput:
        """Apply cross-attention from x (B, T, D) to the context (B, S, Dc), or to the cached keys and values of it.

        A ValueError if neither is given, a ConfigError if the config uses MLA.
        """
        if self.config.attention.mla is not None:
            raise ConfigError("mla supports only self-attention: leave it out for an encoder-decoder.")
        if inputs.context is None and cache is None:
            raise ValueError("cross-attention has nothing to attend to: pass a context, or a cache filled with one.")
        attention = self._attention("cross_attention", NoPosition())
        given = {"mask": inputs.context_mask, "cache": None if cache is None else cache.cross_attention}
        given |= {"deterministic": inputs.deterministic, "sow_weights": self.execution.sow_weights}
        return LayerOutput(*attention(x, inputs.context, **given))

    def apply_feed_forward(
        self, x: Hidden, inputs: LayerInputs, cache: LayerCache | None = None, residual: Hidden | None = None
    ) -> LayerOutput:
        """Apply the feed-forward network to each position separately: (B, T, D) -> (B, T, D).

        If the kind of layer has a `moe`, tokens pass through the experts that a router selects. `cache` is not read,
        because no other position is; with a cache, experts have no capacity. `residual` (B, T, D) is the input of the
        sublayer before its norm, for experts in addition to a dense layer; None: x.
        """
        config, moe = self.config, self.kind.moe
        options = {
            "activation": config.feed_forward.activation,
            "gated": config.feed_forward.gated,
            "use_bias": config.parameters.use_bias,
            **self._map_options(),
        }
        if moe is None or moe.beside_dense:
            width = self.kind.d_ff or config.feed_forward_width
            dense = FeedForward(width=width, **options, name="feed_forward")(x)
        if moe is None:
            return LayerOutput(dense)
        # The mask excludes padding from the router's losses and, in training, from the capacity of experts. A decoding
        # step does not see the other tokens of its sequence, so it could not drop the same ones.
        training = inputs.deterministic is False and cache is None
        width = config.feed_forward_width if moe.d_ff is None else moe.d_ff
        options |= {"implementation": self.execution.experts, "norm_epsilon": config.norm.epsilon}
        if not moe.beside_dense:
            routed = RoutedFeedForward(moe, width=width, **options, name="feed_forward")
            x, aux = routed(x, inputs.mask, deterministic=not training)
            return LayerOutput(x, aux=aux)
        # norm(dense(norm(x))) + norm(experts(norm(x))), each with norms of its own; the router reads x itself.
        residual = x if residual is None else residual
        experts = RoutedFeedForward(moe, width=width, **options, name="experts_beside")
        routed, aux = experts(self.norm("experts_norm")(residual), inputs.mask, residual, deterministic=not training)
        return LayerOutput(self.norm("dense_post_norm")(dense) + self.norm("experts_post_norm")(routed), aux=aux)

    def _map_options(self) -> dict[str, Any]:
        """Return the initializers, dtypes and quantization of the linear maps in a sublayer."""
        dtypes = {"dtype": self.config.dtype, "param_dtype": self.config.parameters.dtype}
        initializers = {"kernel_init": kernel_init(self.config), "output_init": output_init(self.config)}
        return initializers | dtypes | {"quantization": Quantization.of(self.execution)}

    def _linear_attention(self, delta: GatedDelta) -> GatedDeltaNet:
        if not self.causal:
            raise ConfigError(
                "gated_delta of a LayerKind is causal, but this stack is not. Remove it, or use a decoder."
            )
        options = {field.name: getattr(delta, field.name) for field in dataclasses.fields(delta)} | self._map_options()
        return GatedDeltaNet(**options, norm_epsilon=self.config.norm.epsilon, name="linear_attention")

    def _attention(self, name: str, scheme: PositionScheme) -> MultiHeadAttention:
        config, kind = self.config, self.kind if name == "self_attention" else LayerKind()
        return MultiHeadAttention(
            num_kv_heads=config.kv_heads_of(kind),
            head_dim=config.attention.head_dim if kind.head_dim is None else kind.head_dim,
            value_dim=config.attention.value_dim,
            use_bias=config.parameters.use_bias,
            biases=config.attention.biases,
            qk_norm=config.attention.qk_norm if kind.qk_norm else None,
            value_norm=config.attention.value_norm,
            keys_as_values=kind.keys_as_values,
            stores_kv=kind.stores_kv is not None,
            sinks=config.attention.sinks,
            output_gate=config.attention.output_gate and name == "self_attention",
            norm_epsilon=config.norm.epsilon,
            temperature=kind.temperature,
            **self._any_attention(name, scheme),
        )

    def _latent_attention(self, mla: MLA, scheme: PositionScheme) -> LatentAttention:
        biases = self.config.attention.biases
        use_bias = self.config.parameters.use_bias if biases is None else bool(biases)
        return LatentAttention(mla=mla, use_bias=use_bias, **self._any_attention("self_attention", scheme))

    def _any_attention(self, name: str, scheme: PositionScheme) -> dict[str, Any]:
        config = self.config
        return {
            "num_heads": config.num_heads,
            "scale": config.attention.scale,
            "softcap": config.attention.softcap,
            "dropout_rate": config.attention.dropout_rate,
            "position": scheme,
            "implementation": self.execution.attention,
            **self._map_options(),
            "name": name,
        }

    def sublayers(self) -> tuple[str, ...]:
        """Return the sublayers of this layer in the order in which they are applied."""
        names = {"attention": self.kind.self_attention, "cross_attention": self.cross, "feed_forward": True}
        return tuple(name for name, exists in names.items() if exists)

    def equation(self, x: Hidden, f: Sublayer) -> Hidden:
        """Apply the sublayer f, with its residual connection and norms, to x: (B, T, D) -> (B, T, D)."""
        raise NotImplementedError(f"{type(self).__name__} has no equation. Use a subclass that defines one.")

    @nn.compact
    def __call__(self, x: Hidden, inputs: LayerInputs, cache: LayerCache | None = None) -> LayerOutput:
        """Apply all sublayers to x (B, T, D)."""
        outputs: dict[str, LayerOutput] = {}
        # The name has an effect only with the remat policy "offload" (`_stacks.py`), which moves this array to the
        # host.
        x = block_input = checkpoint_name(x, "layer_input")
        for name in self.sublayers():
            f = Sublayer(self, name, inputs, cache, residual=x, block_input=block_input)
            # For example, pre-norm computes x = x + dropout(f(norm(x))), first for attention, then for feed-forward.
            x = self.equation(x, f)
            outputs[name] = f.output
        x = self._after_sublayers(x, inputs)
        attended, crossed = (outputs.get(name, LayerOutput(x)) for name in ("attention", "cross_attention"))
        if cache is not None:
            # All layers must have the same cache length: a layer without attention counts the tokens that it does not
            # store.
            own = attended.cache if self.kind.self_attention else count_tokens(x, cache.self_attention)
            cache = LayerCache(own, crossed.cache)
        # Between layers, x is split along rows and length, and replicated over the axis tensor. The compiler then sums
        # the partial results of `out` and `down` once per sublayer (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
        x = constrain(x, "batch", "length", "embed")
        return LayerOutput(x, cache, attended.stored, outputs["feed_forward"].aux)

    def _after_sublayers(self, x: Hidden, inputs: LayerInputs) -> Hidden:
        """Add the per-layer embedding, and multiply by the scalar of the layer, if the config has them."""
        # x + norm(W_2 (act(W_1 x) * e)) with the embedding e (B, T, P) of the tokens for this layer (Gemma 4).
        config = self.config
        if config.embedding.per_layer_width is not None:
            if inputs.layer_embedding is None:
                raise ConfigError("embedding.per_layer_width is for a CausalLM, which has these embeddings. Remove it.")
            types = (config.dtype, config.parameters.dtype)
            options = (1, False, kernel_init(config), *types, Quantization.of(self.execution))
            # (B, T, D) -> (B, T, P) -> (B, T, D)
            gate = Linear((config.embedding.per_layer_width,), *options, name="layer_gate")(x)
            gate = ACTIVATIONS[config.feed_forward.activation](gate) * inputs.layer_embedding
            added = Linear(x.shape[-1:], *options, name="layer_projection")(gate)
            x = x + make_norm(config, "layer_embedding_norm")(added)
        if config.stack.layer_scalar:
            scalar = self.param("layer_scalar", nn.initializers.ones, (1,), config.parameters.dtype)
            x = x * scalar.astype(x.dtype)[None, None]
        return x


@dataclass
class Sublayer:
    """The sublayer f of an equation, (B, T, D) -> (B, T, D), without norms and dropout (Vaswani et al. 2017)."""

    block: Block
    name: str
    """attention, cross_attention or feed_forward: the prefix of the names of its norms"""
    inputs: LayerInputs
    cache: LayerCache | None
    residual: Hidden
    """the input x of the equation"""
    block_input: Hidden
    """the input x of the whole block, before its first sublayer"""
    output: LayerOutput | None = None
    """the result of the call, with cache and aux: an equation only maps arrays to arrays"""

    def __call__(self, x: Hidden) -> Hidden:
        """Return f(x), multiplied by the factors of LayerScale if the config has them."""
        if self.name == "feed_forward":
            self.output = self.block.apply_feed_forward(x, self.inputs, self.cache, self.residual)
        elif self.name == "attention":
            self.output = self.block.attend_to_self(x, self.inputs, self.cache)
        else:
            self.output = self.block.attend_to_context(x, self.inputs, self.cache)
        return self.block.layer_scale(self.name, self.output.x)

    def norm(self, x: Hidden) -> Hidden:
        """Apply the norm of this sublayer, which has its own parameters."""
        return self.block.norm(f"{self.name}_norm")(x)

    def post_norm(self, x: Hidden) -> Hidden:
        """Apply the second norm of this sublayer."""
        return self.block.norm(f"{self.name}_post_norm")(x)

    def dropout(self, x: Hidden) -> Hidden:
        """Apply dropout with the rate of the block."""
        return self.block.dropout(x, self.inputs)


class PreNormBlock(Block):
    """Pre-norm (Xiong et al. 2020, arXiv 2002.04745). The stack applies one more norm after its last layer.

    The residual path contains no norm: x is the sum of the embedding and all sublayer outputs, and along this path the
    gradient reaches every layer unchanged.
    """

    def equation(self, x: Hidden, f: Sublayer) -> Hidden:
        """x + f(norm(x)): (B, T, D) -> (B, T, D)."""
        return x + f.dropout(f(f.norm(x)))


class PostNormBlock(Block):
    """Post-norm, as in the original paper (Vaswani et al. 2017, section 3.1)."""

    def equation(self, x: Hidden, f: Sublayer) -> Hidden:
        """norm(x + f(x)): (B, T, D) -> (B, T, D)."""
        # The norm is on the residual path: gradients to early layers pass through the norm of every later sublayer.
        return f.norm(x + f.dropout(f(x)))


class PreNormWithoutResidualBlock(Block):
    """An ablation: pre-norm without the residual connection `x +` (He et al. 2015, arXiv 1512.03385).

    The output of attention then converges to rank 1 with depth (Dong et al. 2021, arXiv 2103.03404).
    """

    def equation(self, x: Hidden, f: Sublayer) -> Hidden:
        """f(norm(x)): (B, T, D) -> (B, T, D)."""
        # Each sublayer replaces x, so information that it does not pass on is lost.
        return f.dropout(f(f.norm(x)))


class SandwichBlock(Block):
    """Sandwich norm: before and after each sublayer (Ding et al. 2021, arXiv 2105.13290; Gemma 2, arXiv 2408.00118)."""

    def equation(self, x: Hidden, f: Sublayer) -> Hidden:
        """x + post_norm(f(norm(x))): (B, T, D) -> (B, T, D)."""
        # The second norm limits the size of what is added to the residual stream.
        return x + f.dropout(f.post_norm(f(f.norm(x))))


class ReorderedNormBlock(Block):
    """A norm after each sublayer, before the residual sum (Liu et al. 2021, arXiv 2111.09883), as in OLMo 2."""

    def equation(self, x: Hidden, f: Sublayer) -> Hidden:
        """x + norm(f(x)): (B, T, D) -> (B, T, D)."""
        # The norm limits the size of each term of the sum, while the residual path itself contains no norm.
        return x + f.dropout(f.norm(f(x)))


class ParallelBlock(Block):
    """Attention and feed-forward read the same input (GPT-NeoX, Black et al. 2022, arXiv 2204.06745, section 2.1).

    The layer computes x + feed_forward(norm_1(x)) + attention(norm_2(x)); cross-attention is a ConfigError.
    """

    def sublayers(self) -> tuple[str, ...]:
        """Return the sublayers in the order of the terms of the sum: feed-forward first, then attention."""
        if self.cross:
            raise ConfigError(
                "norm.position='parallel' does not support cross-attention. Use another norm.position for an "
                "encoder-decoder."
            )
        return super().sublayers()[::-1]

    def equation(self, x: Hidden, f: Sublayer) -> Hidden:
        """x + f(norm(x_0)) with x_0 the input of the block: (B, T, D) -> (B, T, D)."""
        # x already contains the output of the feed-forward when attention is added, but both read the block's input.
        return x + f.dropout(f(f.norm(f.block_input)))


BLOCKS: dict[str, type[Block]] = {
    "pre": PreNormBlock,
    "post": PostNormBlock,
    "pre_without_residual": PreNormWithoutResidualBlock,
    "sandwich": SandwichBlock,
    "reordered": ReorderedNormBlock,
    "parallel": ParallelBlock,
}
"""block classes by `norm.position`"""
