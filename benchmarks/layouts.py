"""The same training steps over many layouts of eight devices: how far their losses lie from those of one device.

Usage: python -m benchmarks.layouts [--steps 20]

Eight devices are simulated on a CPU, so this says nothing of speed. Prints the tables of docs/scaling.md.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping

if __name__ == "__main__":  # before JAX starts
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import numpy as np

from transformer.config import Execution, LayerKind, MoE, TransformerConfig
from transformer.data import NumberWords, TextFile
from transformer.sharding import ParallelConfig
from transformer.training import OptimizerConfig, Recipe, TrainingConfig
from transformer.training.parallel import place
from transformer.training.state import TrainState

ALONE = ParallelConfig(devices=1)
LAYOUTS = {
    "pmap x 8": ParallelConfig(kind="pmap"),
    "data x 8": ParallelConfig(),
    "fsdp x 8": ParallelConfig(fsdp=8),
    "tensor x 4, data x 2": ParallelConfig(tensor=4),
    "context x 4, data x 2": ParallelConfig(context=4),
    "expert x 4, data x 2": ParallelConfig(expert=4),
    "fsdp x 2, tensor x 2, data x 2": ParallelConfig(fsdp=2, tensor=2),
}
VOCABULARY, ROWS, LENGTH, SOURCE_LENGTH = 61, 16, 32, 24


def recipe(task: str, parallel: ParallelConfig, dropout_rate: float = 0.0) -> Recipe:
    """A small causal model with routed feed-forwards in every second layer, or an encoder-decoder."""
    kinds = (LayerKind(), LayerKind(moe=MoE(num_experts=4, top_k=2))) if task == "causal_lm" else (LayerKind(),)
    model = TransformerConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        num_layers=2,
        num_heads=4,
        d_ff=64,
        position="rotary",
        dropout_rate=dropout_rate,
        period=kinds,
    )
    data = {
        "causal_lm": TextFile(path="-", sequence_length=LENGTH, batch_size=ROWS),
        "seq2seq": NumberWords(batch_size=ROWS),
    }[task]
    return Recipe(
        name="layouts",
        model=model,
        data=data,
        execution=Execution(scan=True),
        parallel=parallel,
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=5),
        training=TrainingConfig(steps=100),
    )


def batches(task: str, steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of random tokens, in rows of unequal length."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        lengths = rng.integers(1, LENGTH + 1, ROWS)
        tokens = rng.integers(3, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
        inside = (np.arange(LENGTH) < lengths[:, None]).astype(np.float32)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": inside}
        if task == "seq2seq":
            batch["source"] = rng.integers(3, VOCABULARY, (ROWS, SOURCE_LENGTH)).astype(np.int32)
            batch["source_lengths"] = rng.integers(1, SOURCE_LENGTH + 1, ROWS).astype(np.int32)
        yield batch


def losses(of: Recipe, given: Iterator[Mapping[str, np.ndarray]]) -> tuple[np.ndarray, TrainState]:
    """Loss of each step (nats a target), and the state after the last."""
    placement = place(of)
    state, found = placement.spread(placement.new_state()), []
    for batch in given:
        state, metrics = placement.train_step(state, batch)
        found.append(float(metrics["loss_sum"]) / float(metrics["weight"]))
    return np.array(found), placement.whole(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    print(f"{len(jax.devices())} x {jax.devices()[0].device_kind}, jax {jax.__version__}, {options.steps} steps\n")
    for task, title in (("causal_lm", "CausalLM, every second layer routed"), ("seq2seq", "Seq2Seq")):
        print(f"| {title} | dropout | loss of the last step | largest relative difference to one device |")
        print("| --- | ---: | ---: | ---: |", flush=True)
        alone = {rate: losses(recipe(task, ALONE, rate), batches(task, options.steps))[0] for rate in (0.0, 0.1)}
        for name, parallel in {"one device": ALONE, **LAYOUTS}.items():
            rate = 0.0 if parallel.kind == "pmap" else 0.1  # pmap draws its own numbers on each device
            found, _ = losses(recipe(task, parallel, rate), batches(task, options.steps))
            difference = np.abs(found / alone[rate] - 1).max()
            print(f"| {name} | {rate} | {found[-1]:.6f} | {difference:.1e} |", flush=True)
        print()


if __name__ == "__main__":
    main()
