"""Time of reading prompts with a common prefix in the engine of the server, beside prompts without one.

Usage: python -m benchmarks.serving_prefix [--requests 32] [--prefix 1000] [--turns 2] [--layers 12] [--width 768]

All requests are submitted together. Each prompt has --prefix tokens, the same in all prompts or random ones, and 24
random tokens, and gets one new token. The prefill time is the time of the calls that read prompts, each of which is
waited for; their processor time depends less on other programs. Both kinds take turns in one process. The model is a
Llama with random weights and GPT-2 124M's width and depth, in float32 (--layers and --width change them). Run on an
idle machine. The last line is a JSON object.
"""

import argparse
import queue
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import machine
from benchmarks.side_by_side import last_line, versions
from transformer import CausalLM, llama_decoder
from transformer.cli._allocator import keep_freed_memory
from transformer.data.tokenizers._vocabularies import ByteTokenizer
from transformer.serve import Engine, Request

SUFFIX = 24
"""tokens of a prompt after the prefix"""


def prompts(count: int, prefix: int, vocab_size: int, common: bool, seed: int) -> list[list[int]]:
    """Return prompts of `prefix` tokens, the same ones or not, and `SUFFIX` random tokens."""
    random = np.random.default_rng(seed)
    same = random.integers(3, vocab_size, prefix)
    begins = [same if common else random.integers(3, vocab_size, prefix) for _ in range(count)]
    return [np.concatenate([begin, random.integers(3, vocab_size, SUFFIX)]).tolist() for begin in begins]


class Timed:
    """Measures the calls of an engine that read prompts."""

    def __init__(self, engine: Engine):
        self.engine, self.seconds, self.cpu = engine, 0.0, 0.0
        device = engine._device
        self._read, device.read = device.read, self.read

    def read(self, *given: Any) -> int:
        """Read a part of a prompt, and wait for it."""
        jax.block_until_ready(self.engine._device._rows.lengths)
        began, cpu = time.perf_counter(), time.process_time()
        count = self._read(*given)
        jax.block_until_ready(self.engine._device._rows.pools)
        self.seconds, self.cpu = self.seconds + time.perf_counter() - began, self.cpu + time.process_time() - cpu
        return count

    def answer(self, rows: list[list[int]]) -> tuple[float, float, float, int]:
        """Return seconds and processor seconds of the prefill, seconds of all, and the number of shared tokens."""
        finished: queue.Queue[str | None] = queue.Queue()
        self.seconds = self.cpu = 0.0
        shared, began = self.engine.metrics.shared_tokens, time.perf_counter()
        requests = [Request(prompt=row, max_tokens=1) for row in rows]
        self.engine.submit(requests, lambda number, delta: finished.put(delta.finish))
        left = len(requests)
        while left:
            left -= finished.get(timeout=600) is not None
        whole = time.perf_counter() - began
        return self.seconds, self.cpu, whole, self.engine.metrics.shared_tokens - shared


def main() -> None:
    """Measure both kinds of prompts in turns, and print the medians and the ratio of the prefill times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=1000, help="number of common tokens")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768, help="d_model, a multiple of 64")
    options = parser.parse_args()
    keep_freed_memory()
    tokenizer, where = ByteTokenizer(), machine()
    sizes = {"d_model": options.width, "num_layers": options.layers, "num_heads": options.width // 64}
    # three matrices, with the parameters of two that are 4 d_model wide
    sizes |= {"feed_forward.d_ff": options.width * 4 * 2 // 3}
    model = CausalLM(llama_decoder(vocab_size=tokenizer.vocab_size, **sizes))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    engine = Engine(model, params, tokenizer, slots=16, positions=options.prefix + SUFFIX + 8, queue=options.requests)
    engine.warm_up()
    timed = Timed(engine)
    engine.start()
    found: dict[str, list[tuple[float, float, float, int]]] = {"none in common": [], "a common prefix": []}
    for turn in range(options.turns):
        for common, (name, results) in enumerate(found.items()):
            given = options.requests, options.prefix, tokenizer.vocab_size, bool(common), 2 * turn + common
            results.append(timed.answer(prompts(*given)))
            print(f"turn {turn}, {name}: prefill {results[-1][0]:.2f} s, all {results[-1][2]:.2f} s", flush=True)
    engine.close()
    print(
        f"\n{where}, {options.requests} prompts of {options.prefix + SUFFIX} tokens, parts of {engine.chunk} tokens\n"
    )
    print("| prompts | prefill, s | prefill, processor s | all, s | shared tokens |")
    print("| --- | ---: | ---: | ---: | ---: |")
    medians = {name: [statistics.median(column) for column in zip(*one, strict=True)] for name, one in found.items()}
    for name, (prefill, cpu, whole, shared) in medians.items():
        print(f"| {name} | {prefill:.2f} | {cpu:.2f} | {whole:.2f} | {shared:,.0f} |")
    alone, common = medians.values()
    print(f"ratio: {common[0] / alone[0]:.3f}, of processor time {common[1] / alone[1]:.3f}")
    more = {"all": medians, "chunk": engine.chunk, "versions": versions("jax", "flax")}
    print(last_line("prefill of a common prefix", alone[0], common[0], common[0] / alone[0], "seconds", where, **more))


if __name__ == "__main__":
    main()
