"""Held-out perplexity of a trained run whose weights are stored in fewer bits.

    python -m benchmarks.low_bit_weights RUN [--output docs/quantization.md]

Each row quantizes the parameters, and evaluates the run with the loss that training reports. Q8_0 and Q4_0 are the
formats of GGUF files: the matrices are written as blocks of 32 weights along the inputs, and decoded as by the loader.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import machine
from reliability.page import put
from transformer.data._pipeline import prepare
from transformer.inference import open_model
from transformer.nn import quantize
from transformer.nn._parameter_axes import axes_of
from transformer.training._step import compiled_eval_step
from transformer.training.tasks._evaluation import evaluate_loss
from transformer.zoo.weights._gguf_blocks import FORMATS

BLOCK = 32


def q8_0(blocks: np.ndarray) -> np.ndarray:
    """Encode blocks (B, 32) as Q8_0: w / d rounded, d = max |w| / 127."""
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    codes = np.rint(blocks / np.where(scale == 0, 1, scale)).astype(np.int8)
    return np.concatenate([scale.astype(np.float16).view(np.uint8), codes.view(np.uint8)], 1)


def q4_0(blocks: np.ndarray) -> np.ndarray:
    """Encode blocks (B, 32) as Q4_0: w / d + 8 rounded, d = w / -8 for the weight of largest magnitude."""
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1, keepdims=True), 1)
    scale = largest / np.float32(-8)
    codes = np.floor(blocks / np.where(scale == 0, 1, scale) + np.float32(8.5)).clip(0, 15).astype(np.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    return np.concatenate([scale.astype(np.float16).view(np.uint8), packed], 1)


def round_trip(params: Any, encode: Callable[[np.ndarray], np.ndarray], code: int) -> tuple[Any, int]:
    """Return the parameters with all matrices encoded and decoded again, and their size in bytes."""
    size = 0

    def one(path: Any, leaf: jax.Array) -> jax.Array:
        nonlocal size
        axes = axes_of(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.ndim)
        if axes is None or not axes.inputs:
            size += leaf.nbytes
            return leaf
        inputs = [leaf.ndim + axis for axis in axes.inputs]
        order = [axis for axis in range(leaf.ndim) if axis not in inputs] + inputs  # inputs last, as in a file
        moved = np.asarray(leaf, np.float32).transpose(order)
        raw = encode(moved.reshape(-1, BLOCK))
        size += raw.nbytes
        decoded = FORMATS[code].decode(np.ascontiguousarray(raw).reshape(-1)).reshape(moved.shape)
        return jnp.asarray(decoded.transpose(np.argsort(order)))

    return jax.tree_util.tree_map_with_path(one, params), size


def nbytes(params: Any) -> int:
    """Return the size of all arrays of a tree in bytes."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def variants(params: Any) -> dict[str, tuple[str, Any, int]]:
    """Return dtype of the computation, parameters and their size in bytes, by the name of the row."""
    found = {
        "float32": ("float32", params, nbytes(params)),
        "bfloat16": ("bfloat16", jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), nbytes(params) // 2),
    }
    int8, _ = quantize(params)
    found["int8"] = ("float32", int8, nbytes(int8))
    for group in (32, 128):
        int4, _ = quantize(params, bits=4, group_size=group)
        found[f"int4, groups of {group}"] = ("float32", int4, nbytes(int4))
    for name, encode, code in (("Q8_0", q8_0, 8), ("Q4_0", q4_0, 2)):
        found[f"{name} of GGUF"] = ("float32", *round_trip(params, encode, code))
    return found


def main() -> None:
    """Print the table, or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="workdir of a run that models text")
    parser.add_argument(
        "--output", type=Path, help="page with the marks <!-- low bits --> and <!-- end of low bits -->"
    )
    options = parser.parse_args()
    run = open_model(options.run, step="newest").run
    dataset = prepare(run.recipe.data, tokenizer=run.tokenizer)
    rows, whole = [], None
    for name, (dtype, params, size) in variants(run.params).items():
        model = dataclasses.replace(run.recipe.model, dtype=dtype, **{"parameters.dtype": dtype})
        step = compiled_eval_step(dataclasses.replace(run.recipe, model=model), None)
        loss = evaluate_loss(step, params, dataset.eval_batches("validation")).loss
        whole = loss if whole is None else whole
        difference = f"{100 * (math.exp(loss - whole) - 1):+.2f} %" if rows else ""
        rows.append(f"| {name} | {size / 1e6:.2f} MB | {loss:.4f} | {math.exp(loss):.3f} | {difference} |")
        print(rows[-1], flush=True)
    table = "\n".join(
        [
            f"`python -m benchmarks.low_bit_weights RUN` after {run.step:,} steps of `{run.recipe.name}`, {machine()}, "
            f"jax {jax.__version__}, {date.today().isoformat()}.",
            "",
            "| weights | size | held-out loss, nats | perplexity | relative to float32 |",
            "| --- | ---: | ---: | ---: | ---: |",
            *rows,
            "",
        ]
    )
    print(table)
    if options.output:
        content = options.output.read_text(encoding="utf-8")
        options.output.write_text(put(content, "low bits", table), encoding="utf-8")


if __name__ == "__main__":
    main()
