"""Compilation time of a training step by depth, with scanned and with unrolled layers.

Usage: python -m benchmarks.compile [--depths 2 12 48] [--unrolled 2 12] [--turns 3]

A small CausalLM (d_model 64, 32 tokens per row) with its complete training step: loss, gradients, AdamW. Each
measurement traces, lowers and compiles with empty caches and without the persistent compilation cache; the depths take
turns. With scanned layers, XLA compiles one layer at any depth: the goal is that depth 48 takes at most 1.3 times as
long as depth 2. The last line is a JSON object; its `ratio` is the time of the deepest scanned model over that of the
shallowest one.
"""

import argparse
import functools
import statistics

import jax
import jax.numpy as jnp

from benchmarks.machine import machine
from benchmarks.side_by_side import last_line, take_turns, times_faster, versions
from transformer.config import Execution, RotaryOptions, TransformerConfig
from transformer.data import TextFile
from transformer.training import OptimizerConfig, Recipe, TrainingConfig
from transformer.training._state import abstract_state
from transformer.training._step import make_train_step

ROWS, LENGTH = 2, 32
GOAL = 1.3


def recipe(depth: int, scan: bool) -> Recipe:
    """Return a recipe with this depth, as small as possible otherwise."""
    return Recipe(
        name="benchmark",
        model=TransformerConfig(vocab_size=64, d_model=64, num_layers=depth, num_heads=2, position=RotaryOptions()),
        data=TextFile(path="none", sequence_length=LENGTH, batch_size=ROWS),
        execution=Execution(scan=scan),
        optimizer=OptimizerConfig(weight_decay=0.1),
        training=TrainingConfig(),
    )


def compile_step(depth: int, scan: bool) -> None:
    """Trace, lower and compile the training step with empty caches."""
    jax.clear_caches()
    of = recipe(depth, scan)
    shape = functools.partial(jax.ShapeDtypeStruct, (ROWS, LENGTH))
    batch = {"tokens": shape(jnp.int32), "targets": shape(jnp.int32), "weights": shape(jnp.float32)}
    jax.jit(make_train_step(of), donate_argnums=0).lower(abstract_state(of), batch).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 12, 48], help="depths with scanned layers")
    parser.add_argument("--unrolled", type=int, nargs="*", default=[2, 12], help="depths with unrolled layers")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    ways = [(depth, True) for depth in sorted(options.depths)] + [(depth, False) for depth in sorted(options.unrolled)]
    works = {way: functools.partial(compile_step, *way) for way in ways}
    seconds = take_turns(works, options.turns)
    where = machine()
    print(f"{where}; median of {options.turns}\n")
    print("| depth | layers | s | ratio to the shallowest |\n| ---: | --- | ---: | ---: |")
    found = {}
    for depth, scan in ways:
        layers = "scanned" if scan else "unrolled"
        shallowest = seconds[min(way for way in ways if way[1] == scan)]
        times = times_faster(seconds[depth, scan], shallowest)
        found[f"{depth} {layers}"] = {"seconds": statistics.median(seconds[depth, scan]), "ratio": times}
        print(f"| {depth} | {layers} | {statistics.median(seconds[depth, scan]):.2f} | {times:.2f} |")
    first, last = f"{min(options.depths)} scanned", f"{max(options.depths)} scanned"
    ratio = found[last]["ratio"]
    print(
        f"\n{last}: {ratio:.2f} times the time of {first} (goal: at most {GOAL}{'' if ratio <= GOAL else '; MISSED'})"
    )
    print(
        last_line(
            f"compilation of a training step, {last} compared with {first}",
            *(found[one]["seconds"] for one in (first, last)),
            ratio,
            "seconds; ratio: ours / peer",
            where,
            all=found,
            versions=versions("jax", "flax"),
        )
    )


if __name__ == "__main__":
    main()
