"""Time and memory of attention over length: each kernel, beside `jax.nn.dot_product_attention`, forward and backward.

Usage: python -m benchmarks.attention [--lengths 128 256 ...] [--batch 1]

Prints the median of five runs in milliseconds, the ratio to jax.nn, and the compiled program's temporary memory.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax

from transformer import Mask, dot_product_attention
from transformer.studies import forward_and_backward

HEADS, HEAD_DIM = 4, 64


def kernel(implementation: str) -> Callable:
    return lambda q, k, v: dot_product_attention(q, k, v, mask=Mask.causal(), implementation=implementation)


WAYS = {
    "jax.nn": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
    "reference": kernel("reference"),
    "chunked": kernel("chunked"),
}


def measure(attend: Callable, batch: int, length: int) -> tuple[float, float]:
    """Milliseconds of a forward and backward pass, MiB of temporaries."""
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, (batch, length, HEADS, HEAD_DIM)) for key in keys]
    step = forward_and_backward(attend)
    compiled = step.lower(*arrays).compile()
    jax.block_until_ready(compiled(*arrays))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times), compiled.memory_analysis().temp_size_in_bytes / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--whole-scores-up-to", type=int, default=2048, help="no quadratic way beyond this length")
    options = parser.parse_args()
    device = jax.devices()[0]
    print(
        f"{device.platform} ({device.device_kind}), jax {jax.__version__}, batch {options.batch}, {HEADS} x {HEAD_DIM}"
    )
    print(f"{'length':>8} {'way':>10} {'ms':>10} {'of jax.nn':>10} {'MiB':>10}")
    for length in options.lengths:
        peer = None
        for name, attend in WAYS.items():
            if length > options.whole_scores_up_to and name != "chunked":
                continue
            milliseconds, mebibytes = measure(attend, options.batch, length)
            peer = milliseconds if name == "jax.nn" else peer
            ratio = f"{milliseconds / peer:.2f}" if peer else "-"
            print(f"{length:8} {name:>10} {milliseconds:10.1f} {ratio:>10} {mebibytes:10.1f}", flush=True)


if __name__ == "__main__":
    main()
