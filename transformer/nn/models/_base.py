"""Base classes of the models: embedding and head, and an encoder of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError
from transformer.config._execution import Execution
from transformer.config._model import TransformerConfig
from transformer.config._parts import HeadTransform
from transformer.nn._axes import Array, Float, Hidden, Int, Logits, Positions, PyTree, Tokens
from transformer.nn._blocks import Aux, kernel_init, make_linear, make_norm
from transformer.nn._masks import Mask
from transformer.nn._parameter_axes import declare
from transformer.nn._stacks import Encoder
from transformer.nn.layers._layers import ACTIVATIONS, Embedding, Linear


class HeadMap(nn.Module):
    """The config's `head_transform`, as in BERT: `dense` (D, D), an activation and an optional `norm`."""

    parameter_axes = declare({"head_transform/dense/kernel": "embed -> _"}, role="output")

    config: TransformerConfig
    transform: HeadTransform  # the config's head_transform

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Transform hidden states (..., D) to (..., D)."""
        config, transform = self.config, self.transform
        features, init = (x.shape[-1],), kernel_init(config)
        x = Linear(features, 1, transform.use_bias, init, config.dtype, config.parameters.dtype, name="dense")(x)
        # BERT: norm(gelu(x W + b)), and then the output layer
        x = ACTIVATIONS[transform.activation](x)
        return make_norm(config, "norm")(x) if transform.norm else x


class Model(nn.Module):
    """Base class of all models: embedding and head (Vaswani et al. 2017, section 3.4)."""

    parameter_axes = declare(
        {"output/kernel": "embed -> vocab", "output/bias": "vocab", "output_bias": "vocab"}, role="output", int8=True
    ) | declare({"embedding_in/kernel": "_ -> embed", "embedding_out/kernel": "embed -> _"})

    config: TransformerConfig
    execution: Execution = Execution()

    def _needed(self, number: int | None, field: str, what: str) -> int:
        if number is None:
            raise ConfigError(f"{field} is not set: a {type(self).__name__} needs the number of {what}. Set it.")
        return number

    def _table(self, vocab_size: int | None, field: str = "vocab_size", width: int | None = None) -> Embedding:
        config, rows = self.config, self._needed(vocab_size, field, "tokens")
        return Embedding(rows, width or config.d_model, kernel_init(config), config.dtype, config.parameters.dtype)

    def _setup_embedding(self) -> None:
        # A table (V, P) and a map (P, D) have P (V + D) parameters instead of V D (ALBERT, Lan et al. 2019, arXiv
        # 1909.11942, section 3.1).
        config, width = self.config, self.config.embedding.width
        self.embedding = self._table(config.vocab_size, width=width)
        if width is not None:
            self.embedding_in = make_linear(config, (config.d_model,), use_bias=False)
            self.embedding_out = make_linear(config, (width,), use_bias=False)

    def _setup_head(self, features: int, *, tied: bool, use_bias: bool = False) -> None:
        """Create the submodules of `head` for `features` logits; `use_bias` is the default if the config sets none."""
        config = self.config
        use_bias = use_bias if config.output.bias is None else config.output.bias
        self._setup_transform()
        if not tied:
            self.output = make_linear(config, (features,), use_bias=use_bias)
        # A tied output layer has no kernel of its own, so its bias is a parameter of the model, as in BERT.
        elif use_bias:
            self.output_bias = self.param("output_bias", nn.initializers.zeros, (features,), config.parameters.dtype)

    def _setup_transform(self) -> None:
        if self.config.output.transform is not None:
            self.head_transform = HeadMap(self.config, self.config.output.transform)

    def _embed(self, table: Embedding, tokens: Tokens) -> Hidden:
        """Return token embeddings (B, T, D), scaled if the config requests it (Vaswani et al. 2017, section 3.4)."""
        check_tokens(tokens, table.vocab_size)
        # With a tied table, rows are initialized for the output layer, with variance about 1 / D. Multiplication by
        # sqrt(D) gives embeddings of variance about 1, the size of sinusoidal positions.
        x = table(tokens)
        return x * jnp.asarray(math.sqrt(self.config.d_model), x.dtype) if self.config.embedding.scale else x

    def _embed_in(self, tokens: Tokens) -> Hidden:
        x = self._embed(self.embedding, tokens)
        return x if self.config.embedding.width is None else self.embedding_in(x)

    def _embed_out(self, hidden: Hidden) -> Float[Array, "B T Do"]:
        return hidden if self.config.embedding.width is None else self.embedding_out(hidden)

    def hidden(self, *inputs: Any, **options: Any) -> Hidden | tuple[Hidden, Any]:
        """Return hidden states (B, T, D) for `head`, with a cache (hidden states, cache); arguments as in a call."""
        x, cache, _ = self.run_stacks(*inputs, **options)
        return x if cache is None else (x, cache)

    def with_aux(self, *inputs: Any, **options: Any) -> tuple[Logits, Aux]:
        """Return logits (B, T, V) and aux, the layers' terms of the training loss; takes the arguments of a call."""
        x, _, aux = self.run_stacks(*inputs, **options)
        return self.head(x), aux

    @nn.nowrap
    def head_parameters(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a parameter tree that `head` uses."""
        names = {"embedding"} if self.config.embedding.tie else {"output"}
        return {name: params[name] for name in names | {"output_bias", "head_transform"} if name in params}

    def head(self, hidden: Hidden) -> Logits:
        """Compute logits (B, T, V), float32, from hidden states (B, T, D)."""
        hidden = self._before_output(hidden)
        # With tied embeddings the logits are E h, where E (V, D) is the table of the input embeddings.
        logits = self.embedding.attend(hidden) if self.config.embedding.tie else self.output(hidden)
        # The softmax of the loss exponentiates the logits: in bfloat16 it would lose too much precision.
        logits = logits.astype(jnp.float32)
        if self.config.embedding.tie and self.config.output.bias:
            # (B, T, V) + (V,); with an untied output, the bias is part of `output`
            logits = logits + self.output_bias.astype(jnp.float32)[None, None]
        cap = self.config.output.softcap  # limits the logits to (-cap, cap) (Gemma 2, arXiv 2408.00118, section 2)
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _before_output(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        x, scale = self._transformed(x), self.config.output.scale
        return x if scale is None else x * jnp.asarray(scale, x.dtype)

    def _transformed(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return x if self.config.output.transform is None else self.head_transform(x)


class TokenEncoder(Model):
    """Base class of encoders of tokens and token types, causal or not as the config says (Devlin et al. 2018)."""

    parameter_axes = declare({"token_type_embedding/embedding": "_ embed"})

    def _setup_encoder(self) -> None:
        config = self.config
        self._setup_embedding()
        if config.embedding.token_types is not None:
            self.token_type_embedding = self._table(config.embedding.token_types)
        self.encoder = Encoder(config, causal=config.attention.causal, execution=self.execution)

    def __call__(
        self,
        tokens: Tokens,
        positions: Positions | None = None,
        mask: Mask | None = None,
        deterministic: bool = True,
        token_types: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B ..."]:
        """Apply `head` to the (pooled) encoding of tokens (B, T), in float32; arguments are those of `run_stacks`."""
        return self.head(self.pool(self.hidden(tokens, positions, mask, deterministic, token_types), mask))

    def pool(self, hidden: Hidden, mask: Mask | None = None) -> Float[Array, "B ..."]:
        """Return hidden states (B, T, D) unchanged, where subclasses reduce them to one vector per sequence."""
        return hidden

    def run_stacks(
        self,
        tokens: Tokens,
        positions: Positions | None = None,
        mask: Mask | None = None,
        deterministic: bool = True,
        token_types: Int[Array, "B T"] | None = None,
    ) -> tuple[Hidden, None, Aux]:
        """Return hidden states (B, T, D), None for the cache, and aux, the layers' terms of the training loss.

        Args:
            tokens: (B, T), token ids.
            positions: (B, T); None: 0, 1, 2, ...
            mask: which tokens are padding, or which segments are packed into a row.
            deterministic: False: training, with dropout (rng "dropout") and a capacity of experts, if any.
            token_types: (B, T), such as the number of the sentence in a pair; None: type 0 everywhere.

        Raises:
            ValueError: if ids or types are outside their tables (only for concrete values: under jit the result is NaN
                instead), or if types are given to a model without token types.
        """
        x = self._embed_in(tokens)
        if self.config.embedding.token_types is not None:
            token_types = jnp.zeros_like(tokens) if token_types is None else token_types
            check_tokens(token_types, self.config.embedding.token_types, "token_types")
            # Token + segment + position embedding (Devlin et al. 2018, figure 2); the encoder adds the positions.
            x = x + self.token_type_embedding(token_types)
        elif token_types is not None:
            raise ValueError(
                "token_types are given, but the model has no table of token types. Omit them, or set "
                "embedding.token_types in the config."
            )
        x, cache, aux = self.encoder(x, positions=positions, mask=mask, deterministic=deterministic)
        return self._embed_out(x), cache, aux


def check_tokens(tokens: Tokens, vocab_size: int, field: str = "vocab_size") -> None:
    """Check that `tokens` (B, T) are indices of a table with `vocab_size` rows, or raise ValueError."""
    # Compiled code can't raise: under jit only shape and dtype are checked, and an id outside the table gives NaN.
    what = "token ids" if field == "vocab_size" else field
    if getattr(tokens, "ndim", None) != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        got = f"{tokens.dtype} of shape {tokens.shape}" if hasattr(tokens, "dtype") else type(tokens).__name__
        raise ValueError(
            f"{what} must be an array of integers of shape (batch, length), got {got}. For a single row, pass "
            f"jnp.asarray([ids])."
        )
    if isinstance(tokens, jax.core.Tracer) or not tokens.size:
        return
    ids = np.asarray(tokens)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{what} must be from 0 to {vocab_size - 1} ({field} {vocab_size}), got {low if low < 0 else high}. "
            f"Was the text encoded by another tokenizer?"
        )


def first_bad_parameter(params: PyTree) -> str | None:
    """Return the path of the first parameter that contains NaN or infinity; None if all are finite."""
    # One transfer for all flags: reading them one by one would wait for the device each time.
    finite = jax.device_get(_are_finite(params))
    for path, is_finite in jax.tree_util.tree_leaves_with_path(finite):
        if not is_finite:
            return jax.tree_util.keystr(path, simple=True, separator="/")
    return None


@jax.jit
def _are_finite(params: PyTree) -> PyTree:
    """Return a boolean per leaf. One program for all leaves: called leaf by leaf, JAX would compile one per shape."""
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), params)


def count_parameters(params: PyTree) -> int:
    """Return the number of parameters in a tree of arrays, or of their shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
