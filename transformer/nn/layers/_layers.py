"""Linear maps, norms, feed-forward network and embedding: the modules that own most parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from transformer.nn import _few_rows as few_rows
from transformer.nn._axes import Array, DType, Float, Hidden, Logits, Tokens
from transformer.nn._parameter_axes import declare
from transformer.nn._partitioning import constrain, lookup, lookup_tokens, platform, rows_can_merge
from transformer.nn.quantization._adapted import Encoded, kernel_parameter, linear_frozen
from transformer.nn.quantization._int8 import Int8
from transformer.nn.quantization._linear import linear, multiplies_few_rows
from transformer.nn.quantization._schemes import Quantization, Scheme
from transformer.nn.quantization._transposed import row_product

Initializer = Callable[..., jax.Array]
"""(key, shape, dtype) -> initial value of a parameter"""


@jax.custom_jvp
def gelu_erf(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute x Phi(x), Phi the standard normal CDF, of any shape (Hendrycks & Gimpel 2016, arXiv 1606.08415)."""
    return _gelu_and_slope(x)[0]


@gelu_erf.defjvp
def _gelu_erf_jvp(primals, tangents):
    # Value and derivative share one erf, so the backward pass is a single elementwise multiplication.
    value, slope = _gelu_and_slope(*primals)
    return value, slope * tangents[0]


def _gelu_and_slope(x):
    # d/dx [x Phi(x)] = Phi(x) + x phi(x), with Phi(x) = (1 + erf(x / sqrt(2))) / 2 and phi the normal density.
    # In float32, because 1 + erf cancels for negative x: bfloat16 would leave few correct bits.
    wide = x.astype(jnp.float32)
    below = 0.5 * (1.0 + jax.lax.erf(wide * math.sqrt(0.5)))
    density = jnp.exp(-0.5 * jnp.square(wide)) * (1.0 / math.sqrt(2.0 * math.pi))
    return (wide * below).astype(x.dtype), (below + wide * density).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,  # max(0, x)
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),  # x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2
    "gelu_erf": gelu_erf,  # x Phi(x)
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "silu": jax.nn.silu,  # x sigmoid(x)
    "tanh": jnp.tanh,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
"""nonlinearities by name: GELU (Hendrycks & Gimpel 2016, arXiv 1606.08415) with the tanh approximation, exact, and with
the sigmoid approximation (quick_gelu); relu2 is the square of ReLU, from Primer (So et al. 2021, arXiv 2109.08668)"""


def _swiglu_clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    # (up + 1) gate sigmoid(1.702 gate). The gate needs no lower bound: sigmoid takes a very negative gate to about 0.
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return (up + 1.0) * (gate * jax.nn.sigmoid(1.702 * gate))


GATED: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {"swiglu_clamped": _swiglu_clamped}
"""functions of (gate, up) other than an activation of the gate times up; swiglu_clamped is that of gpt-oss (OpenAI
2025, arXiv 2508.10925)"""


def activate(activation: str, up: Float[Array, "..."], gate: Float[Array, "..."] | None = None) -> Float[Array, "..."]:
    """Compute the hidden features of a feed-forward network, (..., F), the input of its last linear map.

    act(up) without a gate, act(gate) * up with one (Shazeer 2020, arXiv 2002.05202, section 2), or the function of
    `GATED`; `activation` is a name in `ACTIVATIONS` or, with a gate, in `GATED`.
    """
    if gate is None:
        return ACTIVATIONS[activation](up)
    # Gated: the gate decides for each feature how much of `up` passes. With silu this is SwiGLU, with gelu GEGLU.
    return GATED[activation](gate, up) if activation in GATED else ACTIVATIONS[activation](gate) * up


IN_KERNELS = ("relu", "gelu_tanh", "silu")
"""activations that the kernel for gated products of few rows computes"""


@functools.cache
def _gated_by(activation: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda gate, up: activate(activation, up, gate)


@dataclass(frozen=True)
class Factors:
    """The factors of a linear map that are not multiplied yet, so that several maps of one input can be joined."""

    x: Float[Array, "..."]
    """(..., *in)"""
    kernel: Array | Encoded
    """(*in, *out)"""
    bias: Array | None
    """(*out); None: no bias"""
    contract: int
    """number of axes in *in*"""
    scheme: Scheme | None
    """how the factors are quantized for the multiplication; None: they are not"""

    def product(self) -> Float[Array, "..."]:
        """Return x @ kernel + bias, (..., *out)."""
        if not isinstance(self.kernel, Encoded):
            return linear(self.x, self.kernel, self.bias, contract=self.contract, quantization=self.scheme)
        return self._plus_bias(linear_frozen(self.x, self.kernel, self.contract, self.scheme))

    @property
    def has_few_rows(self) -> bool:
        """Whether the kernels for few rows of a GPU (`_few_rows.py`) multiply the factors."""
        if isinstance(self.kernel, Encoded) or self.scheme is not None:
            return False
        return multiplies_few_rows(self.x, self.kernel, self.contract)

    def matrices(self) -> tuple[Float[Array, "R Di"], Float[Array, "Di Do"]]:
        """Return x as (rows, inputs) and the kernel, which is an array, as (inputs, outputs)."""
        inputs = math.prod(self.kernel.shape[: self.contract])
        return self.x.reshape(-1, inputs), self.kernel.reshape(inputs, -1)

    def shaped(self, rows: Float[Array, "R Do"]) -> Float[Array, "..."]:
        """Return rows of a product in the shape (..., *out), plus the bias."""
        lead = self.x.shape[: self.x.ndim - self.contract]
        return self._plus_bias(rows.reshape(*lead, *self.kernel.shape[self.contract :]))

    def _plus_bias(self, y: Float[Array, "..."]) -> Float[Array, "..."]:
        return y if self.bias is None else y + self.bias.reshape((1,) * (y.ndim - self.bias.ndim) + self.bias.shape)

    @staticmethod
    def products(maps: Sequence[Factors]) -> list[Float[Array, "..."]]:
        """Return the product of each map; `maps` have the same x, and a GPU multiplies few rows in one launch."""
        if len(maps) == 1 or not all(one.has_few_rows for one in maps):
            return [one.product() for one in maps]
        # The copies of x are equal, also where the maps converted it to their dtype: the first one serves all.
        x, _ = maps[0].matrices()
        rows = few_rows.products(x, tuple(one.matrices()[1] for one in maps))
        return [one.shaped(y) for one, y in zip(maps, rows, strict=True)]


def defers(module: nn.Module, x: Float[Array, "..."]) -> bool:
    """Return whether linear maps of x (..., D) gain from being multiplied together: few rows on a GPU."""
    # Where intermediate values are collected, each map returns its own product.
    return few_rows.apply_to(x, math.prod(x.shape[:-1])) and not module.is_mutable_collection("intermediates")


def activated(activation: str, up: Factors, gate: Factors) -> Float[Array, "..."]:
    """Compute `activate` of two linear maps that are not multiplied yet, in one launch if the kernel supports it."""
    if activation in IN_KERNELS and all(one.bias is None and one.has_few_rows for one in (up, gate)):
        x, kernel = up.matrices()
        rows = few_rows.gated_product(x, gate.matrices()[1], kernel, _gated_by(activation))
        return up.shaped(rows)
    return activate(activation, *Factors.products([up, gate]))


class Linear(nn.Module):
    """A linear map from the last `contract` axes to `features`.

    Parameters: `kernel` (*in, *features) and, with `use_bias`, `bias` (*features). `kernel_init` initializes the kernel
    as a matrix (prod(in), prod(features)), as in Flax's `nn.DenseGeneral`; None: Glorot uniform. `quantization`
    selects kernels whose multiplication has quantized factors.
    """

    features: tuple[int, ...]
    contract: int = 1
    use_bias: bool = True
    kernel_init: Initializer | None = None
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32
    quantization: Quantization | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "..."], *, defer: bool = False) -> Float[Array, "..."] | Factors:
        """Apply the map: (..., *in) -> (..., *features); with `defer`, return the factors without multiplying them."""
        shape = (*x.shape[x.ndim - self.contract :], *self.features)
        init = as_matrix(self.kernel_init or glorot_uniform(), self.contract)
        kernel = kernel_parameter(self, init, shape, self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, self.features, self.param_dtype) if self.use_bias else None
        scheme = None if self.quantization is None else self.quantization.at(*self.path, "kernel")
        if isinstance(kernel, Encoded):
            x, bias = x.astype(self.dtype), None if bias is None else bias.astype(self.dtype)
        else:
            # Parameters stay in `param_dtype` (float32) for the optimizer; only this copy is in the computation's
            # dtype.
            x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        factors = Factors(x, kernel, bias, self.contract, scheme)
        return factors if defer else factors.product()


def projection(
    module: nn.Module, name: str, features: tuple[int, ...], contract: int = 1, use_bias: bool = False
) -> Linear:
    """Return a map of an attention module with the module's options; `output_init` initializes the map `out`."""
    init = (module.output_init or module.kernel_init) if name == "out" else module.kernel_init
    options = (module.dtype, module.param_dtype, module.quantization)
    return Linear(features, contract, use_bias, init, *options, name=name)


def is_deterministic(module: nn.Module, deterministic: bool | None, *rates: float) -> bool:
    """Return whether `module` runs without dropout: `deterministic` if it is given.

    None is allowed during initialization and if all dropout `rates` are 0. Otherwise it is a ValueError, because either
    default would be silently wrong: True would train without dropout, False would evaluate with it.
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
    """Wrap an initializer: it draws a kernel (*in, *out) as a matrix and reshapes it; *in* has `contract` axes."""
    # Initializers that scale by fan-in and fan-out (`nn.initializers.xavier_uniform()`) treat all axes except the last
    # two as a receptive field, so they would scale a kernel (D, N, H) wrongly. A box around the kernel
    # (`nn.with_partitioning`, `nn.with_logical_partitioning`) is kept: its names are those of (*in, *out).

    def init_kernel(key, shape, dtype=jnp.float32):
        matrix = math.prod(shape[:contract]), math.prod(shape[contract:])
        # Boxes are pytrees. Unboxing one here would apply its sharding constraint to the matrix, not to the kernel.
        return jax.tree.map(lambda kernel: kernel.reshape(shape), init(key, matrix, dtype))

    return init_kernel


def glorot_uniform(contract: int = 1) -> Initializer:
    """Initialize by U(-a, a), a = sqrt(6 / (fan_in + fan_out)), for `contract` input axes (Glorot & Bengio 2010)."""

    def init(key, shape, dtype=jnp.float32):
        # U(-a, a) has variance a^2 / 3.
        limit = math.sqrt(6.0 / (math.prod(shape[:contract]) + math.prod(shape[contract:])))
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return init


class FeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2 (Vaswani et al. 2017, section 3.3, equation 2), with any activation.

    With `gated`: (act(x W_g) * x W_1) W_2 (Shazeer 2020, arXiv 2002.05202), or a function of `GATED`. `activation` is a
    name in `ACTIVATIONS` or, gated, in `GATED`. Parameters: `up` (D, F) is W_1, `down` (F, D) is W_2 and, if gated,
    `gate` (D, F) is W_g; F is `width`. With `use_bias`, each has a bias. `kernel_init` initializes all kernels (None:
    Glorot uniform), except `down` when `output_init` is given. `quantization` is that of `Linear`.
    """

    parameter_axes = declare(
        dict.fromkeys(("up/kernel", "gate/kernel"), "embed -> feed_forward")
        | dict.fromkeys(("up/bias", "gate/bias"), "feed_forward")
        | {"down/kernel": "feed_forward -> embed", "down/bias": "embed"}
    )

    width: int
    activation: str = "relu"
    gated: bool = False
    use_bias: bool = True
    kernel_init: Initializer | None = None
    output_init: Initializer | None = None
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32
    quantization: Quantization | None = None

    @nn.compact
    def __call__(self, x: Hidden) -> Hidden:
        """Apply the network to each position: (B, T, D) -> (B, T, D)."""

        def project(name, features, init):
            options = (self.dtype, self.param_dtype, self.quantization)
            return Linear((features,), 1, self.use_bias, init, *options, name=name)

        defer = self.gated and defers(self, x)
        up = project("up", self.width, self.kernel_init)(x, defer=defer)
        gate = project("gate", self.width, self.kernel_init)(x, defer=defer) if self.gated else None
        # (B, T, F). The name lets the remat policy "names" (`_stacks.py`) store this array instead of recomputing it.
        hidden = (activated if defer else activate)(self.activation, up, gate)
        hidden = constrain(hidden, "batch", "length", "feed_forward")
        hidden = checkpoint_name(hidden, "feed_forward_hidden")
        return project("down", x.shape[-1], self.output_init or self.kernel_init)(hidden)


class Embedding(nn.Module):
    """A token embedding (V, D), `vocab_size` x `features`: looks up tokens, and computes logits with the same table.

    That is weight tying (Press & Wolf 2017, arXiv 1608.05859). `embedding_init` None: normal, deviation 1 / sqrt(D).
    """

    parameter_axes = declare({"*embedding/embedding": "vocab <- embed"}, role="input", int8=True)

    vocab_size: int
    features: int
    embedding_init: Initializer | None = None
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32

    def setup(self):
        # A logit is a sum of D products: with x of variance 1 and rows of variance 1 / D, its variance is 1.
        init = self.embedding_init or nn.initializers.normal(1 / np.sqrt(self.features))
        shape = (self.vocab_size, self.features)
        self.embedding = kernel_parameter(self, init, shape, self.param_dtype, "embedding")

    def __call__(self, tokens: Tokens) -> Hidden:
        """Look up tokens: (B, T) -> (B, T, D). An id outside the table gives NaN, because compiled code can't raise."""
        # Gather the embed axis of the table first. If it stayed split, XLA would look up a slice of D for the tokens of
        # the whole batch on every device, instead of whole rows for the tokens of this device.
        if isinstance(self.embedding, Encoded):
            rows = jax.tree.map(lambda part: lookup(part, tokens), self.embedding)
            return rows.array(self.dtype)
        table = constrain(self.embedding, "vocab", "embed")
        x = lookup_tokens(table, tokens).astype(self.dtype)
        return constrain(x, "batch", "length", "embed")

    def attend(self, x: Hidden) -> Logits:
        """Compute logits x E^T, the dot product with each row of the table: (B, T, D) -> (B, T, V)."""
        # A decoding step has one position. With more positions, converting the table is a small part of the work.
        step = x.shape[-2] == 1 and platform() == "cpu" and rows_can_merge()
        if isinstance(self.embedding, Int8):
            if step:
                return self._row_product(x, self.embedding.values, self.embedding.scale[:, 0])
            return jax.tree.map(jnp.transpose, self.embedding).product(x.astype(self.dtype))
        if isinstance(self.embedding, Encoded):
            return linear(x.astype(self.dtype), self.embedding.array(self.dtype).T, transposed=True)
        if step and self.embedding.dtype.itemsize == 2 and self.dtype == self.embedding.dtype:
            return self._row_product(x, self.embedding)
        # (B, T, D) @ (D, V)
        x, table = nn.dtypes.promote_dtype(x, self.embedding, dtype=self.dtype)
        return linear(x, table.T, transposed=True)

    def _row_product(self, x: Hidden, table: jax.Array, scale: jax.Array | None = None) -> Logits:
        """Compute logits without an array of the table in float32: (B, T, D) -> (B, T, V)."""
        rows = x.astype(self.dtype).reshape(-1, x.shape[-1])
        return row_product(rows, table, scale).astype(self.dtype).reshape(*x.shape[:-1], -1)
