"""Time and memory of attention by length: each kernel and `jax.nn.dot_product_attention`, forward and backward.
Also reports from which length each kernel is the fastest, and the thresholds of `auto`.

Usage: python -m benchmarks.attention [--lengths 64 96 128 ...] [--batch 4] [--turns 5] [--whole-scores-up-to 2048]

Causal attention, 4 heads of size 64, in float32 on a CPU and in bfloat16 elsewhere. At each length the implementations
take turns. Prints medians in milliseconds, and the temporary memory of the compiled programs in MiB. If `auto` does not
take the fastest kernel, the table shows the factor that this costs. The last line is a JSON object with the result of
`auto` at the longest length that jax.nn was measured at.
"""

import argparse
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.machine import machine
from benchmarks.side_by_side import last_line, take_turns, times_faster, versions
from transformer import Mask, dot_product_attention
from transformer.cli._allocator import keep_freed_memory
from transformer.nn.kernels import (
    FULL_MATRIX_SCORES,
    FUSED_FROM,
    QUERY_CHUNKED_SCORES,
    AttentionShapes,
    AttentionSpec,
    choose,
)
from transformer.viz.studies import forward_and_backward

HEADS, HEAD_DIM = 4, 64
PEER = "jax.nn"
KERNELS = {
    "cpu": ("reference", "query_chunked", "blockwise"),
    "gpu": ("reference", "blockwise", "cudnn"),
    "tpu": ("reference", "blockwise", "splash"),
}
"""kernels that `auto` chooses from, by platform"""
WHOLE = (PEER, "reference")
"""implementations that store the full attention matrix"""


def way(name: str) -> Callable:
    """Return a function of query, key and value that computes causal attention with this implementation."""
    if name == PEER:
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return lambda q, k, v: dot_product_attention(q, k, v, mask=Mask.causal(), implementation=name)


def auto(length: int, dtype: Any) -> str:
    """Return the kernel that `auto` takes for this length."""
    sizes = {"num_queries": length, "num_keys": length, "head_dim": HEAD_DIM, "value_dim": HEAD_DIM}
    return choose("auto", AttentionSpec(shapes=AttentionShapes(**sizes, dtype=dtype)))


def measure(names: list[str], arrays: list[jax.Array], turns: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of each implementation in each turn, and its temporary memory in MiB."""
    compiled = {name: forward_and_backward(way(name)).lower(*arrays).compile() for name in names}
    works = {
        name: functools.partial(lambda run: jax.block_until_ready(run(*arrays)), run) for name, run in compiled.items()
    }
    memory = {name: run.memory_analysis().temp_size_in_bytes / 2**20 for name, run in compiled.items()}
    return take_turns(works, turns), memory


def stretches(names: list[str], lengths: list[int]) -> str:
    """Merge neighbors with the same name into ranges: "reference to 96, query_chunked to 1,024, blockwise"."""
    parts = [
        f"{name} to {length:,}"
        for name, length, after in zip(names, lengths, [*names[1:], None], strict=True)
        if after not in (name, None)
    ]
    return ", ".join([*parts, names[-1]])


def bounds(platform: str) -> str:
    """Return the thresholds of `auto` on a platform in words: up to which length it takes which kernel."""
    most = {"reference": FULL_MATRIX_SCORES, "query_chunked": QUERY_CHUNKED_SCORES}
    ranges = [f"{name} to {math.isqrt(most[name][platform]):,}" for name in most if platform in most[name]]
    if platform == "gpu":
        return ", ".join([f"cudnn from {math.isqrt(FUSED_FROM):,}; if cudnn is unsupported, {ranges[0]}", "blockwise"])
    return ", ".join([*ranges, KERNELS[platform][-1]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = [64, 80, 96, 128, 192, 256, 512, 768, 1_024, 1_536, 2_048]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--whole-scores-up-to",
        type=int,
        default=1_024,
        help="maximum length of the implementations that store the full attention matrix",
    )
    options = parser.parse_args()
    if min(options.lengths) > options.whole_scores_up_to:
        parser.error(
            f"all --lengths exceed --whole-scores-up-to ({options.whole_scores_up_to}), so there is no baseline to "
            f"compare with. Add a shorter length, or increase --whole-scores-up-to."
        )
    lengths, platform, where = sorted(options.lengths), jax.default_backend(), machine()
    dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
    kernels = KERNELS[platform]
    print(f"{where}; batch {options.batch}, {HEADS} x {HEAD_DIM}, {jnp.dtype(dtype).name}, {options.turns} turns\n")
    columns = [*(f"{name} ms" for name in (PEER, *kernels)), "fastest", "`auto`", *(f"{name} MiB" for name in kernels)]
    print(f"| length | {' | '.join(columns)} |\n| ---: |{' ---: |' * len(columns)}")
    found: dict[int, dict[str, Any]] = {}
    for length in lengths:
        names = [name for name in (PEER, *kernels) if length <= options.whole_scores_up_to or name not in WHOLE]
        shape, keys = (options.batch, length, HEADS, HEAD_DIM), jax.random.split(jax.random.key(0), 3)
        seconds, memory = measure(names, [jax.random.normal(key, shape, dtype) for key in keys], options.turns)
        middle = {name: statistics.median(times) for name, times in seconds.items()}
        fastest, taken = min((name for name in names if name != PEER), key=middle.get), auto(length, dtype)
        costs = f" ({middle[taken] / middle[fastest]:.2f} x)" if taken != fastest and taken in middle else ""
        found[length] = {"seconds": middle, "mebibytes": memory, "fastest": fastest, "auto": taken}
        if PEER in middle and taken in middle:
            found[length]["ratio"] = times_faster(seconds[PEER], seconds[taken])
        times = [f"{1e3 * middle[name]:.1f}" if name in middle else "" for name in (PEER, *kernels)]
        sizes = [f"{memory[name]:.1f}" if name in memory else "" for name in kernels]
        print(f"| {length:,} | {' | '.join([*times, fastest, taken + costs, *sizes])} |", flush=True)
    print(f"\nfastest on {platform}: {stretches([found[length]['fastest'] for length in lengths], lengths)}")
    print(f"auto takes: {stretches([found[length]['auto'] for length in lengths], lengths)}")
    print(f"thresholds of auto: {bounds(platform)}")
    compared = [length for length in lengths if "ratio" in found[length]]
    last = found[compared[-1]]
    print(
        last_line(
            f"attention of {compared[-1]:,} tokens, forward and backward, auto ({last['auto']}) compared with {PEER}",
            last["seconds"][PEER],
            last["seconds"][last["auto"]],
            last["ratio"],
            "seconds",
            where,
            all=found,
            bounds={"whole": FULL_MATRIX_SCORES, "query_chunked": QUERY_CHUNKED_SCORES, "fused": FUSED_FROM},
            versions=versions("jax"),
        )
    )


if __name__ == "__main__":
    keep_freed_memory()  # the same allocator settings as train.py
    main()
