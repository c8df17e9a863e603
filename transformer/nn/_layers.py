"""Linear maps, norms, feed-forward and embedding: the leaves that own parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from transformer.nn._axes import Array, DType, Float, Hidden, Logits, Tokens
from transformer.nn._int8 import Int8
from transformer.nn._parameter_axes import declare
from transformer.nn._partitioning import (
    constrain,
    explicit_spec,
    in_auto_axes,
    joined_spec,
    lookup,
    platform,
    rows_can_merge,
)

Initializer = Callable[..., jax.Array]
"""(key, shape, dtype) -> the first values of a parameter"""


@jax.custom_jvp
def gelu_erf(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x Phi(x), Phi the normal distribution (Hendrycks & Gimpel 2016, arXiv 1606.08415): (...) -> (...)."""
    return _gelu_and_slope(x)[0]


@gelu_erf.defjvp
def _gelu_erf_jvp(primals, tangents):
    # The slope is made with the value, of the same erf, so that the backward pass is one product.
    value, slope = _gelu_and_slope(*primals)
    return value, slope * tangents[0]


def _gelu_and_slope(x):
    wide = x.astype(jnp.float32)
    below = 0.5 * (1.0 + jax.lax.erf(wide * math.sqrt(0.5)))
    density = jnp.exp(-0.5 * jnp.square(wide)) * (1.0 / math.sqrt(2.0 * math.pi))
    return (wide * below).astype(x.dtype), (below + wide * density).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_erf": gelu_erf,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
"""nonlinearities by name (GELU: Hendrycks & Gimpel 2016, arXiv 1606.08415, by tanh and exact; relu2 is the
square of relu, from Primer: So et al. 2021, arXiv 2109.08668)"""


def _swiglu_clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return (up + 1.0) * (gate * jax.nn.sigmoid(1.702 * gate))


GATED: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {"swiglu_clamped": _swiglu_clamped}
"""functions of (gate, up) that are no activation of the gate times up; swiglu_clamped is gpt-oss's (OpenAI 2025, arXiv
2508.10925)"""


def activate(activation: str, up: Float[Array, "..."], gate: Float[Array, "..."] | None = None) -> Float[Array, "..."]:
    """What a feed-forward's last map reads, of `up` (..., F) and perhaps `gate` (..., F): act(up), or act(gate) * up
    (Shazeer 2020, arXiv 2002.05202, section 2), or what `GATED` makes of them -> (..., F).
    """
    if gate is None:
        return ACTIVATIONS[activation](up)
    return GATED[activation](gate, up) if activation in GATED else ACTIVATIONS[activation](gate) * up


def linear_int8(x: Float[Array, "..."], kernel: Int8, contract: int = 1) -> Float[Array, "..."]:
    """`linear` with a kernel (*in, *out) in 8 bits, without a bias: (..., *in) -> (..., *out) in the dtype of x. The
    whole numbers are multiplied; each output is scaled once (Dettmers et al. 2022, arXiv 2208.07339, section 2).
    """
    scale = kernel.scale.reshape(kernel.shape[contract:]).astype(x.dtype)
    y = linear(x, kernel.values.astype(x.dtype), contract=contract)
    return y * scale.reshape((1,) * (y.ndim - scale.ndim) + scale.shape)


def linear(
    x: Float[Array, "..."], kernel: Float[Array, "..."], bias: Float[Array, "..."] | None = None, *, contract: int = 1
) -> Float[Array, "..."]:
    """x (..., *in) @ kernel (*in, *out) + bias (*out) -> (..., *out), as one matrix product; *in* has `contract` axes.

    On CPU the leading axes are flattened to one: the weight gradient then contracts one axis instead of two, which
    XLA's CPU products need to run at full speed. Not when the length may be split over devices: that would gather it.
    """
    inner, out = math.prod(kernel.shape[:contract]), kernel.shape[contract:]
    lead = x.shape[: x.ndim - contract]
    rows = explicit_spec(x)
    if platform() == "cpu" and rows_can_merge():
        y = (x.reshape(-1, inner) @ kernel.reshape(inner, -1)).reshape(*lead, *out)
    else:
        y = _product(x, kernel, contract, rows)
    return y if bias is None else y + bias.reshape((1,) * len(lead) + out)


def _product(x: jax.Array, kernel: jax.Array, contract: int, rows: PartitionSpec | None) -> jax.Array:
    """x (..., *in) times kernel (*in, *out). No array is reshaped: where one is split, the compiler may gather it for
    that. With Explicit mesh axes, where `rows` is the sharding of x, outputs are split as in the kernel.
    """
    kept = x.ndim - contract
    axes = tuple(range(kept, x.ndim)), tuple(range(contract))
    spec = None if rows is None else joined_spec(*rows[:kept], *explicit_spec(kernel)[contract:])
    return in_auto_axes(lambda x, kernel: jax.lax.dot_general(x, kernel, (axes, ((), ()))), spec)(x, kernel)


class Linear(nn.Module):
    """A linear map from the last `contract` axes to `features`; parameters `kernel` (*in, *features) and, with
    `use_bias`, `bias` (*features). `kernel_init` draws the kernel as a matrix (prod(in), prod(features)), as in Flax's
    `nn.DenseGeneral`; None: Glorot uniform.
    """

    features: tuple[int, ...]
    contract: int = 1
    use_bias: bool = True
    kernel_init: Initializer | None = None
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """(..., *in) -> (..., *features)."""
        shape = (*x.shape[x.ndim - self.contract :], *self.features)
        init = as_matrix(self.kernel_init or glorot_uniform(), self.contract)
        kernel = self.param("kernel", init, shape, self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, self.features, self.param_dtype) if self.use_bias else None
        if isinstance(kernel, Int8):
            y = linear_int8(x.astype(self.dtype), kernel, self.contract)
            return y if bias is None else y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape).astype(self.dtype)
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        return linear(x, kernel, bias, contract=self.contract)


def is_deterministic(module: nn.Module, deterministic: bool | None, *rates: float) -> bool:
    """Whether `module` computes without dropout: `deterministic` if given. None is enough while parameters are
    initialized and where all dropout `rates` are 0.

    Raises:
        ValueError: None with a rate above 0. Either default would be wrong silently: True trains without dropout,
            False evaluates with it.
    """
    if deterministic is not None:
        return deterministic
    if any(rate > 0.0 for rate in rates) and not module.is_initializing():
        name = type(module).__name__
        raise ValueError(
            f"{name} has a dropout rate of {max(rates)} and deterministic is not given: pass deterministic=True to "
            f'evaluate or deterministic=False to train (with rngs={{"dropout": key}}).'
        )
    return True


def as_matrix(init: Initializer, contract: int = 1) -> Initializer:
    """The initializer that draws a kernel (*in, *out) with `init` as a matrix (prod(in), prod(out)) and reshapes it.
    *in* has `contract` axes.

    Initializers that scale by fan-in and fan-out (`nn.initializers.xavier_uniform()`) count all axes but the last two
    as a receptive field, so they would scale a kernel (D, N, H) wrongly. A box around the kernel
    (`nn.with_partitioning`, `nn.with_logical_partitioning`) stays around it: its names are those of (*in, *out).
    """

    def init_kernel(key, shape, dtype=jnp.float32):
        matrix = math.prod(shape[:contract]), math.prod(shape[contract:])
        # Boxes are pytrees. Unboxing one here would apply its sharding constraint to the matrix, not to the kernel.
        return jax.tree.map(lambda kernel: kernel.reshape(shape), init(key, matrix, dtype))

    return init_kernel


def glorot_uniform(contract: int = 1) -> Initializer:
    """Glorot & Bengio 2010, for a kernel whose first `contract` axes are inputs and the rest outputs."""

    def init(key, shape, dtype=jnp.float32):
        limit = math.sqrt(6.0 / (math.prod(shape[:contract]) + math.prod(shape[contract:])))
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return init


class LayerNorm(nn.Module):
    """gamma (x - mean) / sqrt(variance + epsilon) + beta over the last axis, in float32 (Ba et al. 2016, arXiv
    1607.06450).
    """

    parameter_axes = declare({"scale": "embed", "bias": "embed"})

    epsilon: float = 1e-6
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """(..., D) -> (..., D), in `dtype`."""
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], self.param_dtype)
        x = x.astype(jnp.float32)
        x = x - x.mean(-1, keepdims=True)
        y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
        return (y * _row(scale, x) + _row(bias, x)).astype(self.dtype)


class RMSNorm(nn.Module):
    """gamma x / sqrt(mean(x^2) + epsilon) over the last axis, in float32 (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    parameter_axes = declare({"scale": "embed"})

    epsilon: float = 1e-6
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """(..., D) -> (..., D), in `dtype`."""
        x = x.astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
        return (y * self._factor(x)).astype(self.dtype)

    def _factor(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return _row(self.param("scale", nn.initializers.ones, x.shape[-1:], self.param_dtype), x)


class LayerNormWithoutBias(RMSNorm):
    """gamma (x - mean) / sqrt(variance + epsilon): without beta, as in ModernBERT (Warner et al. 2024, arXiv
    2412.13663, section 2.1.1). It is RMSNorm of x - mean.
    """

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """(..., D) -> (..., D), in `dtype`."""
        x = x.astype(jnp.float32)
        return super().__call__(x - x.mean(-1, keepdims=True))


class ZeroCenteredRMSNorm(RMSNorm):
    """(1 + gamma) x / sqrt(mean(x^2) + epsilon) over the last axis. Gamma is zero at first, so that weight decay draws
    the factor to 1 (Gemma; Gemma Team 2024, arXiv 2403.08295). 1 + gamma is summed in float32.
    """

    def _factor(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return 1.0 + _row(self.param("scale", nn.initializers.zeros, x.shape[-1:], self.param_dtype), x)


class FrozenBatchNorm(nn.Module):
    """gamma (x - mean) / sqrt(variance + epsilon) + beta with a `mean` and `variance` of each feature that are given,
    in float32: a batch normalization after its training (Ioffe & Szegedy 2015, arXiv 1502.03167, algorithm 2). They
    get no gradient, and no training here changes them: new ones, 0 and 1, normalize nothing.
    """

    parameter_axes = declare({"scale": "embed", "bias": "embed", "mean": "embed", "variance": "embed"})

    epsilon: float = 1e-6
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """(..., D) -> (..., D), in `dtype`."""
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        initial = {"scale": ones, "bias": zeros, "mean": zeros, "variance": ones}
        rows = {name: _row(self.param(name, init, x.shape[-1:], self.param_dtype), x) for name, init in initial.items()}
        mean, variance = jax.lax.stop_gradient((rows["mean"], rows["variance"]))
        y = (x.astype(jnp.float32) - mean) * jax.lax.rsqrt(variance + self.epsilon)
        return (y * rows["scale"] + rows["bias"]).astype(self.dtype)


def _row(vector: jax.Array, like: jax.Array) -> jax.Array:
    return vector.astype(jnp.float32).reshape((1,) * (like.ndim - 1) + (-1,))


NORMS: dict[str, type[nn.Module]] = {
    "layer_norm": LayerNorm,
    "rms_norm": RMSNorm,
    "zero_centered_rms_norm": ZeroCenteredRMSNorm,
    "layer_norm_without_bias": LayerNormWithoutBias,
    "frozen_batch_norm": FrozenBatchNorm,
}
"""normalizations by name"""


class FeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2 (Vaswani et al. 2017, section 3.3), with any activation; gated: act(x W_g) * (x
    W_1) before W_2 (Shazeer 2020, arXiv 2002.05202), or what `GATED` makes of the two. Parameters `up` (D, F), `down`
    (F, D) and, if gated, `gate` (D, F); F is `width`. With `use_bias`, each has one. `kernel_init` draws all kernels
    (None: Glorot uniform), except `down` when `output_init` is given.
    """

    parameter_axes = declare(
        {
            "up/kernel": "embed -> feed_forward",
            "up/bias": "feed_forward",
            "gate/kernel": "embed -> feed_forward",
            "gate/bias": "feed_forward",
            "down/kernel": "feed_forward -> embed",
            "down/bias": "embed",
        }
    )

    width: int
    activation: str = "relu"
    gated: bool = False
    use_bias: bool = True
    kernel_init: Initializer | None = None
    output_init: Initializer | None = None
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, x: Hidden) -> Hidden:
        """(B, T, D) -> (B, T, D)."""

        def project(name, features, init):
            return Linear((features,), 1, self.use_bias, init, self.dtype, self.param_dtype, name=name)

        up = project("up", self.width, self.kernel_init)(x)
        gate = project("gate", self.width, self.kernel_init)(x) if self.gated else None
        hidden = activate(self.activation, up, gate)
        hidden = constrain(hidden, "batch", "length", "feed_forward")
        hidden = checkpoint_name(hidden, "feed_forward_hidden")
        return project("down", x.shape[-1], self.output_init or self.kernel_init)(hidden)


class Embedding(nn.Module):
    """A table (V, D), `vocab_size` x `features`: looks tokens up, and turns vectors back into logits over the same rows
    (Press & Wolf 2017, arXiv 1608.05859). `embedding_init` None: normal with standard deviation 1 / sqrt(D).
    """

    parameter_axes = declare({"*embedding/embedding": "vocab <- embed"}, role="input", int8=True)

    vocab_size: int
    features: int
    embedding_init: Initializer | None = None
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32

    def setup(self):
        init = self.embedding_init or nn.initializers.normal(1 / np.sqrt(self.features))
        self.embedding = self.param("embedding", init, (self.vocab_size, self.features), self.param_dtype)

    def __call__(self, tokens: Tokens) -> Hidden:
        """(B, T) -> (B, T, D). An id outside the table gives NaN: compiled code can't raise, and must not guess."""
        # Rows of the table whole, before they are looked up: split, XLA would look up parts of all rows of the batch.
        if isinstance(self.embedding, Int8):
            rows = jax.tree.map(lambda part: lookup(part, tokens), self.embedding)
            return rows.array(self.dtype)
        table = constrain(self.embedding, "vocab", "embed")
        x = lookup(table, tokens).astype(self.dtype)
        return constrain(x, "batch", "length", "embed")

    def attend(self, x: Hidden) -> Logits:
        """(B, T, D) -> (B, T, V): the product with each row of the table."""
        if isinstance(self.embedding, Int8):
            return linear_int8(x.astype(self.dtype), jax.tree.map(jnp.transpose, self.embedding))
        x, table = nn.dtypes.promote_dtype(x, self.embedding, dtype=self.dtype)
        return linear(x, table.T)
