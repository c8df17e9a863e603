"""One projection of routed experts: our loop over blocks and `jax.lax.ragged_dot`, forward and backward.

Usage: python -m benchmarks.experts [--turns 5]

Both multiply the rows of each expert with the kernel of that expert. `ragged_dot` takes rows sorted by expert. The loop
takes blocks with an equal number of rows, with padding after the last row of each expert. The rows are distributed
evenly over the experts, so there is as little padding as possible.
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
"""experts, rows, input features, output features"""


def loop(x, kernel):
    """Multiply x (M, in), M / E consecutive rows per expert, with kernel (E, in, out) in our loop: (M, out)."""
    experts, rows = kernel.shape[0], x.shape[0]
    blocks = 8 * experts  # the number of blocks that `routed` uses
    expert = jnp.repeat(jnp.arange(experts), blocks // experts)
    y = grouped_linear(x.reshape(blocks, rows // blocks, -1), kernel, expert, jnp.int32(blocks))
    return y.reshape(rows, -1)


def ragged(x, kernel):
    """Compute the same with `jax.lax.ragged_dot`."""
    experts = kernel.shape[0]
    return jax.lax.ragged_dot(x, kernel, jnp.full(experts, x.shape[0] // experts, jnp.int32))


def seconds(turns: int, experts: int, rows: int, inputs: int, outputs: int) -> tuple[float, float]:
    """Return the median seconds of the loop and of ragged_dot, forward and backward. The two take turns."""
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
        raise ValueError("loop and ragged_dot give different results, so their times can't be compared.")


def main() -> None:
    """Print one row per shape, and the geometric mean of the ratios as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5, help="timed calls of each implementation")
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
