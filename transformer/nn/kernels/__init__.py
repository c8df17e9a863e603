"""Attention kernels with a common interface, and the selection of a kernel for a call."""

from __future__ import annotations

import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import jax

from transformer.config._checks import ConfigError, nearest
from transformer.config._model import Execution
from transformer.nn._jax_compat import inside_pmap
from transformer.nn._partitioning import has_mesh, platform
from transformer.nn.kernels import _cudnn as cudnn
from transformer.nn.kernels import _splash as splash
from transformer.nn.kernels._blockwise import blockwise_attention
from transformer.nn.kernels._contract import OPTIONS, AttentionShapes, AttentionSpec, BiasFunction, Kernel, Option
from transformer.nn.kernels._cudnn import cudnn_attention, cudnn_compiler_refusal, cudnn_limits
from transformer.nn.kernels._page_blocks import page_blocks_attention, page_blocks_limits
from transformer.nn.kernels._paged import (
    ragged_paged_attention,
    ragged_paged_compiler_refusal,
    ragged_paged_limits,
)
from transformer.nn.kernels._query_chunked import query_chunked_attention, query_chunked_limits
from transformer.nn.kernels._reference import reference_attention
from transformer.nn.kernels._ring import (
    RING_REASONS,
    RING_RESIDUALS,
    all_gather_kv_attention,
    all_gather_kv_limits,
    ring_attention,
    ring_limits,
)
from transformer.nn.kernels._splash import (
    SplashBlocks,
    splash_attention,
    splash_compiler_refusal,
    splash_limits,
)

__all__ = [
    "ALL_KERNELS",
    "FULL_MATRIX_SCORES",
    "FUSED_FROM",
    "GATHER_PAGES",
    "GPU_KERNELS",
    "KERNELS",
    "OPTIONS",
    "PAGE_BLOCKS",
    "QUERY_CHUNKED_SCORES",
    "RAGGED_PAGED",
    "SPLASH_FROM",
    "SPLIT_KERNELS",
    "TPU_KERNELS",
    "AttentionShapes",
    "AttentionSpec",
    "BiasFunction",
    "Kernel",
    "Option",
    "SplashBlocks",
    "all_gather_kv_attention",
    "blockwise_attention",
    "choose",
    "choose_paged",
    "cudnn_attention",
    "page_blocks_attention",
    "portable",
    "query_chunked_attention",
    "ragged_paged_attention",
    "reference_attention",
    "ring_attention",
    "splash_attention",
]

_NO_WEIGHTS = {"weights": "it never stores the full attention matrix"}
"""why blockwise kernels do not return attention weights"""


def _by_name(*kernels: Kernel) -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in kernels}


KERNELS = _by_name(
    Kernel("reference", reference_attention),
    Kernel("query_chunked", query_chunked_attention, limits=query_chunked_limits, reasons=_NO_WEIGHTS),
    Kernel("blockwise", blockwise_attention, reasons=_NO_WEIGHTS),
)
"""kernels by name, for any device; they need the whole length of keys and values on each device"""

TPU_KERNELS = _by_name(
    Kernel("splash", splash_attention, limits=splash_limits, reasons=splash.REASONS, residuals=(splash.RESIDUALS,))
)
"""kernels by name, for TPUs; on CPU they run in interpret mode, for tests"""

GPU_KERNELS = _by_name(Kernel("cudnn", cudnn_attention, limits=cudnn_limits, reasons=cudnn.REASONS))
"""kernels by name, for NVIDIA GPUs"""

SPLIT_KERNELS = _by_name(
    Kernel(
        "ring", ring_attention, limits=ring_limits, reasons=RING_REASONS, residuals=(RING_RESIDUALS,), split_keys=True
    ),
    Kernel("all_gather_kv", all_gather_kv_attention, limits=all_gather_kv_limits, reasons=_NO_WEIGHTS),
)
"""kernels by name, only for queries whose length is sharded over a mesh"""

ALL_KERNELS: dict[str, Kernel] = KERNELS | TPU_KERNELS | GPU_KERNELS | SPLIT_KERNELS
"""all kernels by name"""

RAGGED_PAGED = "ragged_paged"
"""name of the kernel for a paged KV cache on TPUs; on CPU the library's reference takes its place, for tests"""

PAGE_BLOCKS = "page_blocks"
"""name of the kernel for a paged KV cache in plain JAX, which reads blocks of pages up to the longest row"""

GATHER_PAGES = "gather_pages"
"""name of the alternative for a paged KV cache: gather the pages of each row, then use any other kernel"""

_COMPILER_REFUSALS: dict[str, Callable[[AttentionSpec], str | None]] = {
    "splash": splash_compiler_refusal,
    "cudnn": cudnn_compiler_refusal,
}
"""for kernels that depend on other software's versions: returns why they don't compile for the current devices, or
None"""

FUSED_FROM = 256 * 256
"""auto: minimum number of scores per head for cudnn on a GPU (an estimate, not a measurement: docs/benchmarks.md)"""

SPLASH_FROM = 512 * 512
"""auto: minimum number of scores per head for splash on a TPU (not measured on hardware; the compiler estimates for v5e
that a GPT-2 124M training step at 512 x 512 takes 152 ms with splash and 205 ms without)"""

FULL_MATRIX_SCORES = {"cpu": 96 * 96, "gpu": 1024 * 1024, "tpu": 1024 * 1024}
"""auto: maximum number of scores per head and device for the reference kernel, if no fused kernel is used. Up to this
size the full attention matrix is faster than a loop over blocks (docs/benchmarks.md: measured on CPU; the values for
other platforms are estimates that favor few, large operations)."""

QUERY_CHUNKED_SCORES = {"cpu": 1024 * 1024}
"""auto: maximum number of scores per head for the query_chunked kernel, above the reference limit
(docs/benchmarks.md)"""


def choose(implementation: str, spec: AttentionSpec) -> str:
    """Return the name of the kernel for a call: the given kernel, or for "auto" the fastest one that supports the call.

    "auto" logs its choice once per size (logger "transformer.nn.kernels", level INFO). If the installed compiler
    rejects the fastest kernel, "auto" warns once and chooses another one.

    Args:
        implementation: name of a kernel, or "auto".
        spec: options and sizes of the call.

    Raises:
        ConfigError: if the name is unknown, or if the kernel does not support the call or does not compile for the
            current devices. The message lists the kernels that support the call.
    """
    if implementation == "auto":
        name = _fastest(spec)
        _log_once(
            f"{spec.shapes.num_queries} x {spec.shapes.num_keys} scores per head on {platform()}: auto selects {name}"
        )
        return name
    if implementation not in ALL_KERNELS:
        names = ["auto", *(ALL_KERNELS if spec.shapes.length_shards > 1 else KERNELS | TPU_KERNELS | GPU_KERNELS)]
        raise ConfigError(
            f"the attention kernel must be one of {', '.join(names)}, got {implementation!r}."
            f"{nearest(implementation, names)}"
        )
    # The second check compiles a small program (once per process), so it comes last.
    refused = ALL_KERNELS[implementation].unsupported(spec) or _compiler_refusal(implementation, spec)
    if refused is not None:
        able = [name for name in ALL_KERNELS if name != implementation and _serves(name, spec)]
        raise ConfigError(f"the {implementation} attention kernel can't {refused}. Use {' or '.join(able)}, or auto.")
    return implementation


def choose_paged(implementation: str, spec: AttentionSpec, cache: Any) -> str:
    """Return how a call attends to a paged cache: `RAGGED_PAGED` or `GATHER_PAGES`.

    The kernel `RAGGED_PAGED` reads pages in place. `GATHER_PAGES` copies the pages of each row into one array, for
    every other kernel. "auto" uses the kernel on a TPU if it supports the call, and logs its choice as `choose` does.

    Args:
        implementation: "auto", `RAGGED_PAGED`, or the name of another kernel, which gets the gathered pages.
        spec: options and sizes of the call. Its mask must not contain the offset and the lengths of the cache.
        cache: the `PagedKVCache`, with the new tokens.

    Raises:
        ConfigError: `RAGGED_PAGED` is requested by name and does not support the call, or does not compile.
    """
    if implementation not in ("auto", RAGGED_PAGED, PAGE_BLOCKS):
        return GATHER_PAGES
    if implementation == PAGE_BLOCKS:
        if (limit := page_blocks_limits(spec, cache)) is not None:
            raise ConfigError(f"the {PAGE_BLOCKS} attention kernel can't {limit}. Use auto, which gathers pages then.")
        return PAGE_BLOCKS
    refused = ragged_paged_limits(spec, cache) or ragged_paged_compiler_refusal(spec)
    if implementation == RAGGED_PAGED:
        if refused is not None:
            raise ConfigError(
                f"the {RAGGED_PAGED} attention kernel can't {refused}. Use auto, which gathers pages in that case."
            )
        return RAGGED_PAGED
    chosen, why = RAGGED_PAGED, ""
    # Blocks up to the longest row take time with the texts. Gathered pages take time with the table, S = M Q slots per
    # row.
    if platform() == "cpu" and page_blocks_limits(spec, cache) is None:
        chosen = PAGE_BLOCKS
    elif platform() != "tpu":
        chosen, why = GATHER_PAGES, f" ({RAGGED_PAGED} is for TPUs)"
    elif refused is not None:
        chosen, why = GATHER_PAGES, f" ({RAGGED_PAGED} can't {refused})"
    sizes = f"{spec.shapes.num_queries} x {spec.shapes.num_keys} scores per head"
    _log_once(f"{sizes} in pages of {cache.page_size} on {platform()}: auto selects {chosen}{why}")
    return chosen


def portable(execution: Execution) -> Execution:
    """Return execution options that work on any device, with a KV cache and without a mesh.

    Kernels with narrower support (splash, cudnn, ring, all_gather_kv) are replaced by "auto".
    """
    if execution.attention not in {**TPU_KERNELS, **GPU_KERNELS, **SPLIT_KERNELS}:
        return execution
    return dataclasses.replace(execution, attention="auto")


def _fastest(spec: AttentionSpec) -> str:
    if not isinstance(spec.shapes.num_queries, int) or not isinstance(spec.shapes.num_keys, int):
        return "reference"  # a symbolic length (jax.export) can't be divided into blocks
    # Of the kernels for a split length, only the ring keeps keys and values split: 1 / n of their memory on n devices.
    if _serves("ring", spec):
        return "ring"
    scores = spec.shapes.num_queries * spec.shapes.num_keys // spec.shapes.length_shards  # per head and device
    # Fused kernels keep scores on the chip: they save writing and reading T S numbers per head, which pays from a
    # minimum size on. Both checks at the end can warn, so they come after the sizes.
    for name, least in (("cudnn", FUSED_FROM), ("splash", SPLASH_FROM)):
        if scores >= least and spec.shapes.num_queries > 1 and _compiles(name, spec) and _has_its_devices(name):
            return name
    # A single query (a decoding step) has one row of scores: nothing that a loop over blocks could save.
    # 1,024 x 1,024 float32 scores take 4 MiB for each head and row. Weights exist only in the reference kernel.
    if scores <= FULL_MATRIX_SCORES.get(platform(), 0) or spec.shapes.num_queries == 1 or spec.return_weights:
        return "reference"
    # Complete rows of scores for a few queries at a time, without the keys that a causal mask or a window hides.
    if scores <= QUERY_CHUNKED_SCORES.get(platform(), 0) and _serves("query_chunked", spec):
        return "query_chunked"
    # all_gather_kv only where a mesh splits the length; blockwise supports everything except returning weights.
    return next(name for name in ("all_gather_kv", "blockwise") if _serves(name, spec))


def _compiles(name: str, spec: AttentionSpec) -> bool:
    """Return whether a kernel supports a call and compiles here; warn once if only the compiler rejects it."""
    if not _serves(name, spec):
        return False
    refused = _compiler_refusal(name, spec)
    if refused is not None:
        _warn(f"the {name} attention kernel can't {refused}. A slower kernel is used instead.")
    return refused is None


def _has_its_devices(name: str) -> bool:
    """Return False, with a warning, for splash on several devices without a mesh.

    Arrays may be sharded over these devices in a way that only the compiler knows, and the compiler can't partition a
    Pallas kernel.
    """
    if name not in TPU_KERNELS or has_mesh() or inside_pmap() or jax.device_count() == 1:
        return True
    _warn(
        f"the {name} attention kernel must know how arrays are sharded over {jax.device_count()} devices, but no mesh "
        f"is active. A slower kernel is used instead. Call inside `with jax.set_mesh(mesh):`, also for one device."
    )
    return False


def _compiler_refusal(name: str, spec: AttentionSpec) -> str | None:
    return _COMPILER_REFUSALS[name](spec) if name in _COMPILER_REFUSALS else None


# Cached, so each text appears once: every layer asks again, and so does each new trace.
@functools.cache
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


@functools.cache
def _log_once(choice: str) -> None:
    logging.getLogger(__name__).info(choice)


def _serves(name: str, spec: AttentionSpec) -> bool:
    """Return whether a kernel supports a call on the current platform; it may still fail to compile."""
    # Splash also supports the CPU, in interpret mode, which is for tests: auto must not select it there.
    return ALL_KERNELS[name].unsupported(spec) is None and (name not in TPU_KERNELS or platform() == "tpu")
