"""Throughput of greedy decoding in tokens per second: ours and `generate` of transformers, GPT-2 124M in float32.

Usage: python -m benchmarks.decode [--batches 1 16] [--prompt 32] [--new 64] [--turns 5]

Needs the parity environment (`make peers`). Random weights, prompts of equal length, no row ends early. Each side runs
in a separate process; the processes take turns. The table also shows our throughput as a fraction of the limit by
memory bandwidth: each decoding step reads all parameters once, and the bandwidth is measured with matrix-vector
products of large matrices. The last line is a JSON object.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.side_by_side import ENVIRONMENTS, Worker, compare, last_line, serve, versions
from transformer.cli._allocator import keep_freed_memory
from transformer.config import EmbeddingOptions, FeedForwardOptions, LearnedOptions, ParameterOptions, TransformerConfig

PARAMETERS = 124_439_808
BYTES = 4 * PARAMETERS
VOCABULARY, LAYERS, HEADS, WIDTH, POSITIONS = 50_257, 12, 12, 768, 1_024


def gpt2() -> TransformerConfig:
    """Return the config of GPT-2 124M."""
    return TransformerConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        feed_forward=FeedForwardOptions(activation="gelu_tanh"),
        position=LearnedOptions(max_length=POSITIONS),
        embedding=EmbeddingOptions(scale=False),
        parameters=ParameterOptions(initializer_range=0.02),
    )


def prompts(batch: int, length: int) -> np.ndarray:
    """Return token ids (batch, length)."""
    return np.random.default_rng(0).integers(0, VOCABULARY, (batch, length), dtype=np.int32)


def ours(batch: int, length: int, new: int) -> Callable[[], Any]:
    """Return our greedy decoding with default options."""
    import jax
    import jax.numpy as jnp

    from transformer import CausalLM
    from transformer.generate import Sampling, generate

    model = CausalLM(gpt2())
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == PARAMETERS
    rows = prompts(batch, length).tolist()
    return lambda: generate(model, params, rows, max_new_tokens=new, sampling=Sampling(temperature=0.0))


def pytorch(batch: int, length: int, new: int) -> Callable[[], Any]:
    """Return the greedy decoding of transformers, with its default attention."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).eval()
    rows = torch.from_numpy(prompts(batch, length)).long()
    options = {
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }

    def run():
        with torch.no_grad():
            found = model.generate(rows, attention_mask=torch.ones_like(rows), **options)
        assert found.shape == (batch, length + new)

    return run


def bandwidth() -> Callable[[], Any]:
    """Return matrix-vector products with eight large matrices that together have the size of the model's parameters."""
    import jax
    import jax.numpy as jnp

    matrices = [jnp.full((PARAMETERS // 8 // WIDTH, WIDTH), 1.0 + i) for i in range(8)]
    vector = jnp.ones((WIDTH,))
    read = jax.jit(lambda vector, matrices: sum((matrix @ vector).sum() for matrix in matrices))
    return lambda: jax.block_until_ready(read(vector, matrices))


SIDES = {"ours": ours, "torch": pytorch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=32, help="tokens per prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens per row")
    parser.add_argument("--environments", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--turns", type=int, default=5, help="turns of each side")
    parser.add_argument("--worker", nargs="+", help="internal: run as a worker process; SIDE BATCH, or bandwidth")
    options = parser.parse_args()
    if options.worker:
        if options.worker[0] == "ours":
            keep_freed_memory()  # the same allocator settings as train.py and python -m transformer
        side, *batch = options.worker
        if side == "bandwidth":
            serve(bandwidth())
        else:
            serve(SIDES[side](int(batch[0]), options.prompt, options.new), warm_up=1)
        return

    from benchmarks.machine import machine

    where, module = machine(), "benchmarks.decode"
    reader = Worker(module, "--worker", "bandwidth")
    bound = BYTES / float(np.median(reader.run(20)))
    reader.stop()
    print(f"{where}; memory bandwidth {bound / 1e9:.1f} GB/s: at most {bound / BYTES:.1f} steps/s")
    print(
        f"{'batch':>6} {'setting':>10} {'ours tokens/s':>14} {'peer tokens/s':>14} {'ours / peer':>12} {'of limit':>9}"
    )
    found = []
    lengths = ("--prompt", str(options.prompt), "--new", str(options.new))
    for batch in options.batches:
        for environment in options.environments:
            sides = [(module, *lengths, "--worker", side, str(batch)) for side in ("ours", "torch")]
            one = compare(
                f"batch {batch}", "transformers", *sides, environment=environment, turns=options.turns, times=2
            )
            found.append(one)
            rates = [batch * options.new / seconds for seconds in (one.ours_seconds, one.peer_seconds)]
            share = rates[0] / batch / (bound / BYTES)
            print(
                f"{batch:6} {environment:>10} {rates[0]:14.1f} {rates[1]:14.1f} {one.ratio:12.2f} {share:9.2f}",
                flush=True,
            )
    tokens = options.batches[0] * options.new
    print(
        last_line(
            f"greedy decoding, GPT-2 124M, {options.prompt} + {options.new} tokens, batch {options.batches[0]}",
            tokens / found[0].peer_seconds,
            tokens / found[0].ours_seconds,
            found[0].ratio,
            "tokens/s",
            where,
            bound_steps_per_second=round(bound / BYTES, 1),
            all=[dataclasses.asdict(one) for one in found],
            versions=versions("jax", "flax", "torch", "transformers"),
        )
    )


if __name__ == "__main__":
    main()
