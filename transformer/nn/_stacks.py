"""Encoder and decoder stacks: prefix, repeats of a period of layers (compiled once by `nn.scan`), suffix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.config._execution import Execution
from transformer.config._model import TransformerConfig
from transformer.config._parts import LayerKind
from transformer.nn._axes import Array, Context, Coordinates, Float, Hidden, Int, PyTree
from transformer.nn._blocks import (
    BLOCKS,
    Aux,
    LayerCache,
    LayerInputs,
    LayerOutput,
    make_norm,
    position_scheme,
    shares_table,
    table_parameter,
)
from transformer.nn._caches import cache_length, check_room
from transformer.nn._masks import Mask
from transformer.nn._parameter_axes import LAYERS, declare
from transformer.nn._partitioning import constrain
from transformer.nn.kernels import ALL_KERNELS
from transformer.nn.layers._layers import is_deterministic

SAVED_NAMES = ("attention_output", "feed_forward_hidden")
"""names of the values that remat="names" stores for the backward pass"""

_RESIDUALS = tuple(name for kernel in ALL_KERNELS.values() for name in kernel.residuals)


def _is_saved_dot(prim: Any, *factors: Any, **params: Any) -> bool:
    """Return whether the remat policy "dots" stores the result of an operation: of a product without batch axes."""
    # Not that of 8-bit factors, which takes 4 bytes a number: `_linear.py` names it after it is scaled and rounded.
    small = all(getattr(factor, "dtype", None) is not None and factor.dtype.itemsize == 1 for factor in factors)
    return not small and jax.checkpoint_policies.dots_with_no_batch_dims_saveable(prim, *factors, **params)


REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    # A kernel is no dot: without its residuals, the backward pass would run the forward kernel a second time.
    "dots": jax.checkpoint_policies.save_from_both_policies(
        _is_saved_dot, jax.checkpoint_policies.save_only_these_names("quantized_product", *_RESIDUALS)
    ),
    "names": jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES, *_RESIDUALS),
    # The input of a layer is always stored. It has a name here, so that it is stored in host memory too.
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["layer_input", *SAVED_NAMES, *_RESIDUALS],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""values that the backward pass may store instead of recomputing them, by name of the policy"""


class _Period(nn.Module):
    """The layers of one period, the pattern that the stack repeats."""

    config: TransformerConfig
    causal: bool
    cross: bool
    execution: Execution

    @nn.compact
    def __call__(self, state: Any, layer: Any, inputs: LayerInputs) -> tuple[Any, tuple[Any, Aux]]:
        """Apply the layers of one repeat; return the new state, and the new caches of cross-attention and aux.

        The state is x (B, T, D) and the caches of self-attention of all repeats, or None. `layer` is the number of the
        repeat and its caches of cross-attention, both None without a cache, and its per-layer embeddings (layers of the
        period, B, T, P) or None.
        """
        (x, caches), (number, contexts, embeddings) = state, layer
        caches, contexts, auxes = dict(caches or {}), dict(contexts or {}), {}
        for slot, kind in enumerate(self.config.stack.period):
            name = f"slot_{slot}"
            block = _block(self, kind, name, scanned=self.execution.scan)
            cache = None
            if name in caches:
                cache = LayerCache(dataclasses.replace(caches[name], layer=number), contexts[name])
            own = inputs if embeddings is None else dataclasses.replace(inputs, layer_embedding=embeddings[slot])
            output = block(x, own, cache)
            x, auxes[name] = output.x, output.aux
            if output.cache is not None:
                caches[name] = dataclasses.replace(output.cache.self_attention, layer=None)
                contexts[name] = output.cache.cross_attention
        return (x, caches or None), (contexts or None, sum_aux(auxes.values()))


def _block(parent: Stack | _Period, kind: LayerKind, name: str, scanned: bool) -> nn.Module:
    block, remat = BLOCKS[parent.config.norm.position], parent.execution.remat
    if remat != "none":
        # Common-subexpression elimination would merge the recomputation with the original computation, which undoes
        # remat. Inside a loop the compiler can't do this, so no (slower) barrier against it is needed there.
        block = nn.remat(block, policy=REMAT_POLICIES[remat], prevent_cse=not scanned)
    return block(parent.config, kind, parent.causal, parent.cross, parent.execution, name=name)


def sum_aux(auxes: Iterable[Aux]) -> Aux:
    """Add the aux of several layers or stacks name by name, (B,) each. Dense layers add nothing."""
    total: Aux = {}
    for aux in auxes:
        total = total | {name: total[name] + aux[name] if name in total else aux[name] for name in aux}
    return total


def _with_embedding(inputs: LayerInputs, embeddings: Float[Array, "L B T P"] | None, layer: int) -> LayerInputs:
    return inputs if embeddings is None else dataclasses.replace(inputs, layer_embedding=embeddings[layer])


class Stack(nn.Module):
    """A stack of layers over embeddings (B, T, D).

    Positions are added to the embeddings, followed by an optional norm and dropout. Then the layers run, and a final
    norm follows, except with post-norm.

    Parameters: `prefix_i/`, `layers/slot_k/` (leading axis: repeats), `suffix_i/`, `final_norm/` except with post-norm,
    and `embedding_norm/` and `position_table` if the config needs them. They don't depend on `execution.scan`. `causal`
    and `cross` are those of `Block`.
    """

    parameter_axes = declare({"position_table": "_ _"})

    config: TransformerConfig
    num_layers: int | None = None
    """number of layers; None: the config's num_layers"""
    causal: bool = False
    cross: bool = False
    execution: Execution = Execution()

    @nn.compact
    def __call__(
        self,
        x: Hidden,
        context: Context | None = None,
        *,
        positions: Coordinates | None = None,
        mask: Mask | Array | None = None,
        context_mask: Mask | Array | None = None,
        cache: PyTree | None = None,
        deterministic: bool | None = None,
        layer_embeddings: Float[Array, "L B T P"] | None = None,
        segments: Int[Array, "B T"] | None = None,
    ) -> tuple[Hidden, Any, Aux]:
        """Apply the stack to embeddings x (B, T, D). A `Decoder` makes `mask` causal itself.

        Args:
            x: (B, T, D).
            context: (B, S, Dc), the input of cross-attention.
            positions: (B, T), or (B, T, A) with `position.sections`; None: 0, 1, 2, ..., counted from the end of the
                cache.
            mask: mask of self-attention.
            context_mask: mask of cross-attention.
            cache: the result of `init_cache`, or the cache that an earlier call returned; None: no cache.
            deterministic: False: training, with dropout (rng "dropout") and a capacity of experts, if the config has
                them. True: without both. Required if the config has a dropout rate above 0; else None means True.
            layer_embeddings: (L, B, T, P), the embeddings of the tokens for each layer, if the config has them.
            segments: (B, T), segment of each token for layers with `within_segments`; None: one segment.

        Returns:
            Hidden states (B, T, D), the updated cache, and aux. Inside jit, the hidden states of tokens that don't fit
            the cache are NaN.

        Raises:
            ValueError: embeddings of another rank or width, `deterministic` is missing, or, outside jit, tokens don't
                fit the cache.
        """
        config = self.config
        if x.ndim != 3 or x.shape[-1] != config.d_model:
            raise ValueError(
                f"embeddings must be (batch, length, d_model {config.d_model}), got shape {x.shape}. Project them to "
                f"d_model, or change it; for a single sequence pass x[None]."
            )
        check_room(cache, x.shape[1])
        deterministic = is_deterministic(self, deterministic, config.dropout_rate, config.attention.dropout_rate)
        if positions is None:
            # With a cache, rows may have different lengths: each row continues at its own position.
            start = 0 if cache is None else cache_length(cache)[:, None]
            positions = jnp.broadcast_to(start + jnp.arange(x.shape[1])[None, :], x.shape[:2])
        # Dropout on the sum of embeddings and positions (Vaswani et al. 2017, section 5.4).
        x, table = self._add_positions(x, positions)
        x = nn.Dropout(config.dropout_rate)(constrain(x, "batch", "length", "embed"), deterministic=deterministic)

        mask = Mask.of(mask)
        inputs = LayerInputs(
            mask=Mask.causal() & mask if self.causal else mask,
            positions=positions,
            segments=segments,
            position_table=table,
            context=context,
            context_mask=Mask.of(context_mask),
            deterministic=deterministic,
        )
        x, caches, aux = self._run_layers(x, cache, inputs, layer_embeddings)
        # Post-norm normalizes the output of every layer, so only the other kinds need a final norm.
        if config.stack.final_norm and config.norm.position != "post":
            x = make_norm(config, "final_norm")(x)
        return x, caches, aux

    def _add_positions(self, x: Hidden, positions: Coordinates) -> tuple[Hidden, Array | None]:
        """Add positions to embeddings, with a norm if configured; return them and the table that all layers share."""
        config, table = self.config, None
        scheme = position_scheme(config, causal=self.causal)
        if scheme.table_shape is not None and shares_table(config):
            table = self.param("position_table", *table_parameter(config, scheme))
        # Schemes that rotate or bias return x unchanged here; the layers apply them.
        x = scheme.add(x, positions, table).astype(config.dtype)
        return (make_norm(config, "embedding_norm")(x) if config.embedding.norm else x), table

    def _run_layers(
        self, x: Hidden, cache: PyTree | None, inputs: LayerInputs, embeddings: Float[Array, "L B T P"] | None
    ) -> tuple[Hidden, Any, Aux]:
        stack, repeats = self.config.stack, self.config.repeats(self.num_layers)
        first = len(stack.prefix)
        last = first + repeats * len(stack.period)
        given, outputs = cache or {}, {}
        for i, kind in enumerate(stack.prefix):
            own, block = _with_embedding(inputs, embeddings, i), _block(self, kind, f"prefix_{i}", scanned=False)
            output = outputs[block.name] = block(x, own, given.get(block.name))
            x = output.x
            if kind.stores_kv is not None:
                inputs = dataclasses.replace(inputs, stored={**(inputs.stored or {}), kind.stores_kv: output.stored})
        if repeats:
            # Without `scan`, this is still nn.scan, but with all repeats unrolled. Either way the parameters of repeats
            # are stacked on a leading axis, so a checkpoint loads with both settings.
            period = nn.scan(
                _Period,
                variable_axes={"params": 0, "intermediates": 0},
                # Separate random keys per repeat: otherwise all layers would start equal and drop the same entries.
                split_rngs={"params": True, "dropout": True},
                in_axes=(0, nn.broadcast),  # each repeat gets its number and context cache, and the same inputs
                length=repeats,
                unroll=1 if self.execution.scan else repeats,
                metadata_params={nn.PARTITION_NAME: LAYERS},  # for parameters in boxes (`sharding.with_logical_axes`)
            )(self.config, self.causal, self.cross, self.execution, name="layers")
            # Caches of self-attention are carried from repeat to repeat, and each repeat updates its own part in place.
            # If each repeat got its slice and returned it, every token would copy the whole cache several times.
            number, own, contexts = None, None, None
            if cache is not None:
                number = jnp.arange(repeats)
                own = {name: one.self_attention for name, one in cache["layers"].items()}
                contexts = {name: one.cross_attention for name, one in cache["layers"].items()}
            # (L, B, T, P) -> (repeats, layers of a period, B, T, P); None stays None
            each = jax.tree.map(lambda a: a[first:last].reshape(repeats, -1, *a.shape[1:]), embeddings)
            (x, own), (contexts, aux) = period((x, own), (number, contexts, each), inputs)
            caches = None if cache is None else {name: LayerCache(own[name], contexts[name]) for name in own}
            aux = jax.tree.map(lambda a: a.sum(0), aux)  # (repeats, B) -> (B,)
            outputs["layers"] = LayerOutput(x, caches, aux=aux)
        for i, kind in enumerate(stack.suffix):
            own, block = _with_embedding(inputs, embeddings, last + i), _block(self, kind, f"suffix_{i}", scanned=False)
            output = outputs[block.name] = block(x, own, given.get(block.name))
            x = output.x
        caches = None if cache is None else {name: output.cache for name, output in outputs.items()}
        return x, caches, sum_aux(output.aux for output in outputs.values())

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> dict[str, Any]:
        """Return an empty cache of `length` tokens for each of `batch` rows. This needs no parameters."""
        config = self.config

        def named(name: str, kinds: tuple[LayerKind, ...]) -> dict[str, Any]:
            caches = (LayerCache.create(config, kind, batch, length, cross=self.cross) for kind in kinds)
            return {f"{name}_{i}": one for i, one in enumerate(caches)}

        cache = named("prefix", config.stack.prefix) | named("suffix", config.stack.suffix)
        repeats = config.repeats(self.num_layers)
        if repeats:
            period = named("slot", config.stack.period)
            # One leading axis of repeats, as for the parameters
            cache["layers"] = jax.tree.map(lambda a: jnp.broadcast_to(a, (repeats, *a.shape)), period)
        return cache


class Encoder(Stack):
    """A stack with bidirectional self-attention."""


class Decoder(Stack):
    """A stack with causal self-attention; with `cross`, each layer also attends to a context."""

    causal: bool = True
