"""Attention kernels with a common interface, and the selection of a kernel for a call."""

from __future__ import annotations

import dataclasses
import functools
import logging
import warnings

import jax

from transformer.config._checks import ConfigError, nearest
from transformer.config._execution import Execution
from transformer.nn._jax_compat import inside_pmap
from transformer.nn._partitioning import has_mesh, platform
from transformer.nn.kernels import _cudnn as cudnn
from transformer.nn.kernels import _flash as flash
from transformer.nn.kernels import _flash_decode as flash_decode
from transformer.nn.kernels import _splash as splash
from transformer.nn.kernels._blockwise import blockwise_attention
from transformer.nn.kernels._contract import OPTIONS, AttentionShapes, AttentionSpec, BiasFunction, Kernel, Option
from transformer.nn.kernels._cudnn import cudnn_attention, cudnn_compiler_refusal, cudnn_limits
from transformer.nn.kernels._flash import flash_attention, flash_compiler_refusal, flash_limits
from transformer.nn.kernels._flash_decode import (
    flash_decode_attention,
    flash_decode_compiler_refusal,
    flash_decode_limits,
)
from transformer.nn.kernels._page_blocks import PAGE_BLOCKS_REASONS, page_blocks_attention, page_blocks_limits
from transformer.nn.kernels._paged import (
    RAGGED_PAGED_REASONS,
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
from transformer.nn.kernels._splash import SplashBlocks, splash_attention, splash_compiler_refusal, splash_limits

__all__ = [
    "ALL_KERNELS",
    "DECODE_KERNELS",
    "FULL_MATRIX_SCORES",
    "FUSED_FROM",
    "GATHER_PAGES",
    "GPU_KERNELS",
    "KERNELS",
    "OPTIONS",
    "PAGED_KERNELS",
    "QUERY_CHUNKED_SCORES",
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
    "cudnn_attention",
    "flash_attention",
    "flash_decode_attention",
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
    Kernel(
        "splash",
        splash_attention,
        limits=splash_limits,
        reasons=splash.REASONS,
        compiler_refusal=splash_compiler_refusal,
        residuals=(splash.RESIDUALS,),
    )
)
"""kernels by name, for TPUs; on CPU they run in interpret mode, for tests"""

GPU_KERNELS = _by_name(
    Kernel(
        "cudnn", cudnn_attention, limits=cudnn_limits, reasons=cudnn.REASONS, compiler_refusal=cudnn_compiler_refusal
    ),
    Kernel(
        "flash",
        flash_attention,
        limits=flash_limits,
        reasons=flash.REASONS,
        compiler_refusal=flash_compiler_refusal,
        residuals=(flash.RESIDUALS,),
    ),
)
"""kernels by name, for NVIDIA GPUs"""

DECODE_KERNELS = _by_name(
    Kernel(
        "flash_decode",
        flash_decode_attention,
        limits=flash_decode_limits,
        reasons=flash_decode.REASONS,
        compiler_refusal=flash_decode_compiler_refusal,
    )
)
"""kernels by name, for one query per row, on NVIDIA GPUs"""

SPLIT_KERNELS = _by_name(
    Kernel(
        "ring", ring_attention, limits=ring_limits, reasons=RING_REASONS, residuals=(RING_RESIDUALS,), split_keys=True
    ),
    Kernel("all_gather_kv", all_gather_kv_attention, limits=all_gather_kv_limits, reasons=_NO_WEIGHTS),
)
"""kernels by name, only for queries whose length is sharded over a mesh"""

PAGED_KERNELS = _by_name(
    Kernel(
        "ragged_paged",
        ragged_paged_attention,
        limits=ragged_paged_limits,
        reasons=RAGGED_PAGED_REASONS,
        compiler_refusal=ragged_paged_compiler_refusal,
    ),
    Kernel("page_blocks", page_blocks_attention, limits=page_blocks_limits, reasons=PAGE_BLOCKS_REASONS),
)
"""kernels by name that read a paged KV cache in place: ragged_paged on TPUs (on CPU the library's reference takes its
place, for tests), and page_blocks in plain JAX, which reads blocks of pages up to the longest row"""

ALL_KERNELS: dict[str, Kernel] = KERNELS | TPU_KERNELS | GPU_KERNELS | DECODE_KERNELS | SPLIT_KERNELS | PAGED_KERNELS
"""all kernels by name"""

GATHER_PAGES = "gather_pages"
"""name of the alternative for a paged KV cache: gather the pages of each row, then use any other kernel"""

FUSED_FROM = 256 * 256
"""auto: minimum number of scores per head for cudnn and flash on a GPU (an estimate, not a measurement:
docs/benchmarks.md)"""

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

    For keys and values in pages, every kernel that does not read these becomes `GATHER_PAGES`.

    Args:
        implementation: name of a kernel, or "auto".
        spec: options and sizes of the call.

    Raises:
        ConfigError: if the name is unknown, or if the kernel does not support the call or does not compile for the
            current devices. The message lists the kernels that support the call.
    """
    if implementation == "auto":
        name, why = (_fastest(spec), "") if spec.pages is None else _fastest_for_pages(spec)
        pages = "" if spec.pages is None else f" in pages of {spec.pages.page_size}"
        sizes = f"{spec.shapes.num_queries} x {spec.shapes.num_keys} scores per head{pages}"
        _log_once(f"{sizes} on {platform()}: auto selects {name}{why}")
        return name
    if spec.pages is not None and implementation not in PAGED_KERNELS:
        return GATHER_PAGES
    if implementation not in ALL_KERNELS:
        names = ["auto", *(KERNELS | TPU_KERNELS | GPU_KERNELS)]
        names += SPLIT_KERNELS if spec.shapes.length_shards > 1 else []
        raise ConfigError(
            f"the attention kernel must be one of {', '.join(names)}, got {implementation!r}."
            f"{nearest(implementation, names)}"
        )
    # The second check compiles a small program (once per process), so it comes last.
    if (refused := _refusal(implementation, spec)) is not None:
        instead = "auto, which gathers pages in that case"
        if spec.pages is None:
            able = [name for name in ALL_KERNELS if name != implementation and _serves(name, spec)]
            instead = f"{' or '.join(able)}, or auto"
        raise ConfigError(f"the {implementation} attention kernel can't {refused}. Use {instead}.")
    return implementation


def portable(execution: Execution) -> Execution:
    """Return execution options that work on any device, with a KV cache and without a mesh.

    Kernels with narrower support (splash, cudnn, flash, ring, all_gather_kv and so on) are replaced by "auto".
    """
    if execution.attention not in {**TPU_KERNELS, **GPU_KERNELS, **DECODE_KERNELS, **SPLIT_KERNELS}:
        return execution
    return dataclasses.replace(execution, attention="auto")


def _fastest(spec: AttentionSpec) -> str:
    if spec.shapes.is_symbolic:
        return "reference"
    # Of the kernels for a split length, only the ring keeps keys and values split: 1 / n of their memory on n devices.
    if _serves("ring", spec):
        return "ring"
    scores = spec.shapes.num_queries * spec.shapes.num_keys // spec.shapes.length_shards  # per head and device
    # Fused kernels keep scores on the chip: they save writing and reading T S numbers per head, which pays from a
    # minimum size on. Both checks at the end can warn, so they come after the sizes.
    for name, least in (("cudnn", FUSED_FROM), ("flash", FUSED_FROM), ("splash", SPLASH_FROM)):
        if scores >= least and spec.shapes.num_queries > 1 and _compiles(name, spec) and _has_its_devices(name):
            return name
    # One query per row and a cache: a decoding step.
    if spec.mask.offset is not None and platform() == "gpu" and _compiles("flash_decode", spec):
        return "flash_decode"
    # A single query (a decoding step) has one row of scores: nothing that a loop over blocks could save.
    # 1,024 x 1,024 float32 scores take 4 MiB for each head and row. Weights exist only in the reference kernel.
    if scores <= FULL_MATRIX_SCORES.get(platform(), 0) or spec.shapes.num_queries == 1 or spec.return_weights:
        return "reference"
    # Complete rows of scores for a few queries at a time, without the keys that a causal mask or a window hides.
    if scores <= QUERY_CHUNKED_SCORES.get(platform(), 0) and _serves("query_chunked", spec):
        return "query_chunked"
    # all_gather_kv only where a mesh splits the length; blockwise supports everything except returning weights.
    return next(name for name in ("all_gather_kv", "blockwise") if _serves(name, spec))


def _fastest_for_pages(spec: AttentionSpec) -> tuple[str, str]:
    """Return the fastest way to attend to pages, and why it is not ragged_paged, if it gathers the pages."""
    # Blocks up to the longest row take time with the texts. Gathered pages take time with the table, S = M Q slots per
    # row.
    if platform() == "cpu" and _serves("page_blocks", spec):
        return "page_blocks", ""
    if platform() != "tpu":
        return GATHER_PAGES, " (ragged_paged is for TPUs)"
    refused = _refusal("ragged_paged", spec)
    return ("ragged_paged", "") if refused is None else (GATHER_PAGES, f" (ragged_paged can't {refused})")


def _compiles(name: str, spec: AttentionSpec) -> bool:
    """Return whether a kernel supports a call and compiles here; warn once if only the compiler rejects it."""
    if not _serves(name, spec):
        return False
    refused = ALL_KERNELS[name].compiler_refusal(spec)
    if refused is not None:
        _warn(f"the {name} attention kernel can't {refused}. A slower kernel is used instead.")
    return refused is None


def _has_its_devices(name: str) -> bool:
    """Return False, with a warning, for splash on several devices without a mesh."""
    # Only the compiler then knows how arrays are sharded over them, and it can't partition a Pallas kernel.
    if name not in TPU_KERNELS or has_mesh() or inside_pmap() or jax.device_count() == 1:
        return True
    _warn(
        f"the {name} attention kernel must know how arrays are sharded over {jax.device_count()} devices, but no mesh "
        f"is active. A slower kernel is used instead. Call inside `with jax.set_mesh(mesh):`, also for one device."
    )
    return False


def _refusal(name: str, spec: AttentionSpec) -> str | None:
    return ALL_KERNELS[name].unsupported(spec) or ALL_KERNELS[name].compiler_refusal(spec)


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
