"""Temporary memory of attention by sequence length, as reported by the compilers; nothing is run.

Usage: python -m benchmarks.memory [--lengths 2048 8192 32768 131072] [--picture docs/images/attention-memory.png]

Temporary memory of forward and backward, causal attention, one sequence, 4 heads of size 64, compiled for CPU in
float32 and, if libtpu is installed, for one v5e chip in bfloat16. Data that fits in the on-chip memory (VMEM) of a TPU
is not counted. At 131,072 tokens, `splash` needs minutes to find the blocks that a causal mask hides. The last line is
a JSON object.
"""

import argparse
import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from benchmarks.side_by_side import last_line, versions
from transformer import Mask, dot_product_attention
from transformer.viz.studies import forward_and_backward

HEADS, HEAD_DIM = 4, 64
KERNELS = {"cpu": ("reference", "blockwise"), "v5e": ("reference", "blockwise", "splash")}
DTYPES = {"cpu": jnp.float32, "v5e": jnp.bfloat16}
"""dtype of the computation, by target"""
HBM = {"v5e": 15.75 * 2**30}
"""bytes of HBM that the compiler may use, by target"""
GOAL, AT = 20, 32_768
"""required memory ratio of reference to blockwise attention, and the length at which it applies"""


@functools.cache
def v5e() -> Any:
    """Return a v5e chip to compile for, or None without libtpu."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from transformer.training.plan import CompilerError, parse_topology, topology_devices

    try:
        return topology_devices(parse_topology("v5e:1x1"))
    except CompilerError as error:
        print(f"no results for v5e: {error}")
        return None


def targets() -> list[str]:
    """Return the targets that can be compiled for on this machine."""
    return ["cpu", *(["v5e"] if v5e() is not None else [])]


def on(target: str) -> contextlib.AbstractContextManager:
    """Return a context in which programs are compiled for a target, independently of the current devices."""
    devices = v5e() if target == "v5e" else jax.devices("cpu")
    return jax.set_mesh(jax.sharding.Mesh(devices[:1], ("data",), axis_types=(AxisType.Auto,)))


def temporaries(function: Any, arrays: list[Any], target: str) -> int | None:
    """Return the bytes of temporary memory of a jitted function for trees of shapes.

    Returns None if the compiler reports that the program does not fit into memory.
    """
    with on(target):
        try:
            return int(function.lower(*arrays).compile().memory_analysis().temp_size_in_bytes)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None


def mebibytes(size: int | None) -> str:
    """Format a table cell."""
    return "does not fit" if size is None else f"{size / 2**20:,.1f}"


def attention(kernel: str, length: int, target: str) -> int | None:
    """Return the bytes of temporary memory of attention over `length` tokens."""

    def attend(query, key, value):
        return dot_product_attention(query, key, value, mask=Mask.causal(), implementation=kernel)

    shape = jax.ShapeDtypeStruct((1, length, HEADS, HEAD_DIM), DTYPES[target])
    return temporaries(forward_and_backward(attend), [shape] * 3, target)


def draw(lengths: list[int], found: dict[str, dict[str, list[int | None]]], path: Path) -> None:
    """Draw a panel per target with a line per kernel. Crosses at the memory limit mark programs that do not fit."""
    from transformer.viz._style import COLORS, dress, new_figure, save

    figure = new_figure(5.5 * len(found), 4.2)
    panels = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for panel, (target, kernels) in zip(panels, found.items(), strict=True):
        for color, (kernel, sizes) in zip(COLORS, kernels.items(), strict=False):
            points = [(length, size / 2**20) for length, size in zip(lengths, sizes, strict=True) if size]
            panel.plot(*zip(*points, strict=True), color=color, marker="o", label=kernel)
            beyond = [length for length, size in zip(lengths, sizes, strict=True) if size is None]
            panel.plot(beyond, [HBM.get(target, 0) / 2**20] * len(beyond), color=color, marker="x", linestyle="")
        if target in HBM:
            limit = {"color": "#888888", "linestyle": "--", "linewidth": 0.8, "label": "memory of the chip"}
            panel.axhline(HBM[target] / 2**20, **limit)
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [f"{length // 1024}k" for length in lengths], minor=False)
        panel.set_yscale("log")
        dress(panel, f"Attention, {target}", "tokens", "MiB, forward and backward")
        panel.legend(frameon=False)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2_048, 8_192, AT, 131_072])
    parser.add_argument("--picture", type=Path, help="also draw a plot into this file")
    options = parser.parse_args()
    lengths = options.lengths
    print(f"| compiled for | kernel | {' | '.join(f'{length:,}' for length in lengths)} |")
    print(f"| --- | --- |{' ---: |' * len(lengths)}")
    found: dict[str, dict[str, list[int | None]]] = {}
    for target in targets():
        found[target] = {}
        for kernel in KERNELS[target]:
            found[target][kernel] = [attention(kernel, length, target) for length in lengths]
            print(f"| {target} | `{kernel}` | {' | '.join(map(mebibytes, found[target][kernel]))} |", flush=True)
    if options.picture:
        draw(lengths, found, options.picture)
        print(options.picture)
    at = lengths.index(AT) if AT in lengths else -1
    whole, blockwise = found["cpu"]["reference"][at], found["cpu"]["blockwise"][at]
    goal = f" (goal: {GOAL})" if lengths[at] == AT else ""
    print(
        f"{lengths[at]:,} tokens on CPU: reference needs {whole / blockwise:,.0f} times the memory of blockwise{goal}"
    )
    print(
        last_line(
            f"temporary memory of attention at {lengths[at]:,} tokens, compiled for CPU",
            whole,
            blockwise,
            whole / blockwise,
            "bytes",
            "the compilers",
            lengths=lengths,
            attention=found,
            versions=versions("jax", "libtpu"),
        )
    )


if __name__ == "__main__":
    main()
