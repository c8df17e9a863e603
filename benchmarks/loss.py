"""Memory and time of the loss over a large vocabulary, with all logits at once and in chunks.

Usage: python -m benchmarks.loss [--parts memory time] [--tokens 1024] [--width 512] [--vocabulary 131072] [--turns 5]

Memory: temporary memory, as reported by the compilers, of the loss and its gradients with respect to hidden states and
head. It uses 8,192 tokens, d_model 1,024 and a vocabulary of 131,072, compiled for CPU in float32 and, if libtpu is
installed, for one v5e chip in bfloat16. Time: the same computation, by default with fewer tokens and a smaller d_model,
on the current device in float32; the implementations take turns. The table also shows how much value and gradients
differ from those with all logits at once, relative to the largest entry of each array. The last line is a JSON
object.
"""

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import machine
from benchmarks.memory import DTYPES, mebibytes, on, targets, temporaries
from benchmarks.side_by_side import last_line, take_turns, times_faster, versions
from transformer.training.tasks._chunked_loss import loss_in_chunks, tokens_at_once
from transformer.training.tasks._losses import cross_entropy

TOKENS, WIDTH, VOCABULARY = 8_192, 1_024, 131_072
"""sizes in the memory table"""
CHUNKS = (4_096, 1_024, 256, 16)
"""tokens per chunk"""
SAME = 1e-6
"""tolerance for differences of value and gradients"""


def loss(tokens: int | None) -> Callable:
    """Return the jitted loss with its gradients with respect to head and hidden states.

    Args:
        tokens: tokens per chunk; None computes all logits at once.
    """

    def summed(params, hidden, targets, weights):
        return cross_entropy(hidden @ params["kernel"].astype(hidden.dtype), targets, weights)[0]

    def whole(*given):
        return summed(*given) if tokens is None else loss_in_chunks(summed, *given, tokens)

    return jax.jit(jax.value_and_grad(whole, argnums=(0, 1)))


def shapes(tokens: int, width: int, vocabulary: int, dtype: Any = jnp.float32) -> list[Any]:
    """Return the shapes of head, hidden states, targets and weights."""
    shape = jax.ShapeDtypeStruct
    return [
        {"kernel": shape((width, vocabulary), jnp.float32)},
        shape((1, tokens, width), dtype),
        shape((1, tokens), jnp.int32),
        shape((1, tokens), jnp.float32),
    ]


def name(tokens: int | None) -> str:
    """Return the name of an implementation in the tables."""
    return "all at once" if tokens is None else f"{tokens:,} at a time"


def memory() -> dict[str, dict[str, int | None]]:
    """Print a table of temporary memory, and return the bytes by target and implementation."""
    names = targets()
    print(f"{TOKENS:,} tokens, d_model {WIDTH:,}, {VOCABULARY:,} entries: temporary memory in MiB\n")
    print(f"| logits | {' | '.join(names)} |\n| --- |{' ---: |' * len(names)}")
    found: dict[str, dict[str, int | None]] = {target: {} for target in names}
    for tokens in (None, *CHUNKS):
        for target in names:
            arrays = shapes(TOKENS, WIDTH, VOCABULARY, DTYPES[target])
            found[target][name(tokens)] = temporaries(loss(tokens), arrays, target)
        print(f"| {name(tokens)} | {' | '.join(mebibytes(found[t][name(tokens)]) for t in names)} |", flush=True)
    for target in names:
        with on(target):
            taken = tokens_at_once(shapes(TOKENS, WIDTH, VOCABULARY)[1], VOCABULARY)
        print(f"training on {target} uses by default: {name(taken)}")
    return found


def time(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Print a table of times, and return by implementation: seconds, ratio to all logits at once, and differences."""
    head, hidden, targets, weights = shapes(options.tokens, options.width, options.vocabulary)
    random = np.random.default_rng(0)
    given = [
        {"kernel": jnp.asarray(random.standard_normal(head["kernel"].shape, np.float32) / options.width**0.5)},
        jnp.asarray(random.standard_normal(hidden.shape, np.float32)),
        jnp.asarray(random.integers(0, options.vocabulary, targets.shape, np.int32)),
        jnp.ones(weights.shape),
    ]
    taken = tokens_at_once(hidden, options.vocabulary)
    chunks = sorted({taken or options.tokens, *(tokens for tokens in CHUNKS if tokens < options.tokens)}, reverse=True)
    ways = {name(tokens): loss(tokens) for tokens in (None, *chunks)}
    whole = jax.device_get(ways[name(None)](*given))
    apart = {way: _apart(jax.device_get(run(*given)), whole) for way, run in ways.items()}
    works = {way: functools.partial(lambda run: jax.block_until_ready(run(*given)), run) for way, run in ways.items()}
    seconds = take_turns(works, options.turns)
    print(f"\n{options.tokens:,} tokens, d_model {options.width:,}, {options.vocabulary:,} entries; {machine()}\n")
    print(
        "| logits | ms | speedup over all at once | difference of value | difference of gradients |\n| --- |"
        + " ---: |" * 4
    )
    found = {}
    for tokens in (None, *chunks):
        way = name(tokens)
        found[way] = {
            "seconds": statistics.median(seconds[way]),
            "ratio": times_faster(seconds[name(None)], seconds[way]),
            "value_apart": apart[way][0],
            "gradients_apart": apart[way][1],
        }
        row = found[way]
        mark = " (default in training)" if tokens == taken else ""
        print(
            f"| {way}{mark} | {1e3 * row['seconds']:,.0f} | {row['ratio']:.2f} | {row['value_apart']:.1e} | "
            f"{row['gradients_apart']:.1e} |"
        )
    worst = max(max(pair) for pair in apart.values())
    print(f"largest difference {worst:.1e}: {'' if worst <= SAME else 'NOT '}equal to {SAME:.0e}")
    return found


def _apart(found: Any, wanted: Any) -> tuple[float, float]:
    """Return the largest differences of value and gradients, relative to the largest entry of each array."""

    def relative(a, b):
        return float(np.abs(a - b).max() / np.abs(b).max())

    (value, gradients), (right, right_gradients) = found, wanted
    leaves = zip(jax.tree.leaves(gradients), jax.tree.leaves(right_gradients), strict=True)
    return relative(value, right), max(relative(*pair) for pair in leaves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["memory", "time"], default=["memory", "time"])
    parser.add_argument("--tokens", type=int, default=1_024, help="number of tokens for the timing")
    parser.add_argument("--width", type=int, default=512, help="d_model for the timing")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="vocabulary size for the timing")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if "memory" in options.parts:
        found["memory"] = memory()
        work, unit, where = (
            f"temporary memory of the loss of {TOKENS:,} tokens, compiled for CPU",
            "bytes",
            "the compiler",
        )
        sizes = found["memory"]["cpu"]
        peer, ours = sizes[name(None)], sizes[name(1_024)]
        ratio = peer / ours
    if "time" in options.parts:
        found["time"] = time(options)
        work, unit, where = f"loss of {options.tokens:,} tokens, {options.vocabulary:,} entries", "seconds", machine()
        best = max((way for way in found["time"] if way != name(None)), key=lambda way: found["time"][way]["ratio"])
        peer, ours = (found["time"][way]["seconds"] for way in (name(None), best))
        ratio = found["time"][best]["ratio"]
    print(last_line(work, peer, ours, ratio, unit, where, all=found, versions=versions("jax", "libtpu")))


if __name__ == "__main__":
    main()
