"""Tokens per second of greedy decoding with weights in float32, bfloat16, 8 and 4 bits: GPT-2 124M, random weights.

    python -m benchmarks.low_bit_decoding [--batches 1 4 16] [--new 130] [--turns 3]

The formats take turns in one process. The time of a step is the difference between texts of `--new` tokens and of two
tokens, so that neither the prompt nor the copy of the weights before the loop counts, both the best of all turns. The
last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.decode import gpt2, prompts
from benchmarks.machine import machine
from transformer import CausalLM
from transformer.cli._allocator import keep_freed_memory
from transformer.generate import Sampling, generate
from transformer.nn import quantize


def models() -> dict[str, tuple[Any, Any]]:
    """Return model and parameters of each format; all have the same weights, up to rounding."""
    config = gpt2()
    model, half = CausalLM(config), CausalLM(config.replace(dtype="bfloat16", **{"parameters.dtype": "bfloat16"}))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    return {
        "float32": (model, params),
        "bfloat16": (half, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)),
        "int8": (model, quantize(params)[0]),
        "int4": (model, quantize(params, bits=4)[0]),
    }


def seconds(model: Any, params: Any, rows: list[list[int]], new: int) -> float:
    """Return the seconds of a call that generates `new` tokens per row."""
    began = time.perf_counter()
    generate(model, params, rows, max_new_tokens=new, sampling=Sampling(temperature=0.0))
    return time.perf_counter() - began


def main() -> None:
    """Measure each format, and print tokens per second and the ratio to float32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--new", type=int, default=130, help="new tokens per row")
    parser.add_argument("--turns", type=int, default=3, help="turns of each format")
    options = parser.parse_args()
    keep_freed_memory()
    every, found = models(), {}
    print(f"{machine()}, jax {jax.__version__}\n")
    print("| batch | weights | tokens/s | beside float32 |\n| ---: | --- | ---: | ---: |")
    for batch in options.batches:
        rows = prompts(batch, 32).tolist()
        best = {(name, new): math.inf for name in every for new in (2, options.new)}
        for turn in range(1 + options.turns):
            for name, new in best:
                took = seconds(*every[name], rows, new)
                best[name, new] = min(best[name, new], took) if turn else math.inf  # the first turn compiles
        steps = {name: (best[name, options.new] - best[name, 2]) / (options.new - 2) for name in every}
        for name, step in steps.items():
            found[f"{batch} {name}"] = {"tokens_per_second": batch / step, "ratio": steps["float32"] / step}
            print(f"| {batch} | {name} | {batch / step:.1f} | {steps['float32'] / step:.2f} |", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
