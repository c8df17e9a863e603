"""One projection of routed experts: this package's loop over blocks beside `jax.lax.ragged_dot`, forward and backward.

Usage: python -m benchmarks.experts [--turns 5]

Both multiply the rows of each expert with the expert's kernel. `ragged_dot` takes rows that are sorted by expert. The
loop takes blocks of equally many rows, padded at the end of each expert. Rows are spread over the experts evenly, so
that the padding is at its smallest.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp

from benchmarks.machine import machine
from benchmarks.side_by_side import last_line, versions
from transformer.nn._moe import grouped_linear

SHAPES = ((8, 4096, 256, 512), (8, 4096, 512, 1024), (32, 4096, 256, 512), (8, 512, 512, 1024))
"""experts, rows, features in, features out"""


def loop(x, kernel):
    """Rows (M, in) of experts of M / E rows each -> (M, out)."""
    experts, rows = kernel.shape[0], x.shape[0]
    blocks = 8 * experts  # as `routed` has them
    expert = jnp.repeat(jnp.arange(experts), blocks // experts)
    y = grouped_linear(x.reshape(blocks, rows // blocks, -1), kernel, expert, jnp.int32(blocks))
    return y.reshape(rows, -1)


def ragged(x, kernel):
    """The same by one call of JAX."""
    experts = kernel.shape[0]
    return jax.lax.ragged_dot(x, kernel, jnp.full(experts, x.shape[0] // experts, jnp.int32))


def seconds(turns: int, experts: int, rows: int, inputs: int, outputs: int) -> tuple[float, float]:
    """Medians of a call with its gradients, in seconds: the loop's and ragged_dot's, in turns."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (rows, inputs))
    kernel = jax.random.normal(keys[1], (experts, inputs, outputs)) / inputs**0.5

    def loss(function, x, kernel):
        return jnp.square(function(x, kernel)).mean()

    calls = [jax.jit(jax.value_and_grad(functools.partial(loss, one), argnums=(0, 1))) for one in (loop, ragged)]
    values = [jax.block_until_ready(call(x, kernel)) for call in calls]
    jax.tree.map(lambda a, b: _check_equal(a, b), *values)
    found: list[list[float]] = [[], []]
    for _ in range(turns):
        for times, call in zip(found, calls, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call(x, kernel))
            times.append(time.perf_counter() - start)
    return statistics.median(found[0]), statistics.median(found[1])


def _check_equal(a, b):
    if not jnp.allclose(a, b, rtol=1e-3, atol=1e-4):
        raise ValueError("the two give different results: the times can't be compared.")


def main() -> None:
    """Prints a row for each shape, and the geometric mean of the ratios as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5, help="calls of each that are timed, in turns")
    options = parser.parse_args()
    print("experts   rows     in    out   loop ms   ragged_dot ms   ratio")
    ratios, sums = [], [0.0, 0.0]
    for shape in SHAPES:
        ours, theirs = seconds(options.turns, *shape)
        ratios.append(theirs / ours)
        sums = [sums[0] + ours, sums[1] + theirs]
        sizes = "".join(f"{size:7}" for size in shape)
        print(f"{sizes} {1e3 * ours:9.1f} {1e3 * theirs:15.1f} {ratios[-1]:7.2f}", flush=True)
    mean = statistics.geometric_mean(ratios)
    print(
        last_line(
            "experts", sums[1], sums[0], mean, "seconds; ratio: ragged_dot / loop", machine(), versions=versions("jax")
        )
    )


if __name__ == "__main__":
    main()
