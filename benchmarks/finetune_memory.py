"""Memory of fine-tuning on one TPU chip according to the TPU compiler: models, methods, lengths and batch sizes.

Usage: python -m benchmarks.finetune_memory [--models gemma-3-270m ...] [--methods LoRA ...] [--lengths 2048 ...]
       [--batch-sizes 8 ...]

Needs libtpu (`pip install "libtpu>=0.0.51"`) and no TPU: nothing runs on a device. For each row of the table, the
training step of the task `sft` (conversations packed into rows of a fixed length) is compiled, which takes 1 to 2
minutes on two cores. Parameters are float32 unless the method quantizes the frozen ones, computation is bfloat16, the
optimizer is AdamW, and layers are recomputed in the backward pass (remat `full`). The last line is a JSON object.
`plan batch RECIPE` searches for the largest batch of one recipe.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
from typing import Any

from benchmarks.side_by_side import versions
from transformer.cli._plan import quiet_stderr

GIB = 2**30
METHODS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "LoRA": {},
    "LoRA, bfloat16 base": {"base": "bfloat16"},
    "QLoRA, nf4 base": {"base": "nf4"},
}
"""fine-tuning methods, as changes of the LoRA config of the recipe `llama_1b`; None: all parameters are trained"""
MODELS = ("gemma-3-270m", "qwen3-0.6b", "llama-3.2-1b")
"""variants of the zoo (`python -m transformer list`)"""
COLUMNS = ("model", "method", "tokens per row", "rows", "memory, GiB", "fits", "tokens/s, upper bound")


def sft_recipe(model: str, method: str, length: int, batch_size: int) -> Any:
    """Return the recipe of one row of the table."""
    from transformer import zoo
    from transformer.data import Conversations
    from transformer.training._overrides import find_recipe, load_recipe_file

    (recipe, _), changes = load_recipe_file(find_recipe("llama_1b")), METHODS[method]
    return dataclasses.replace(
        recipe,
        name=f"{model}, {method}",
        model=zoo.build(model).config.replace(dtype="bfloat16", dropout_rate=0.0),
        data=Conversations(path="conversations.jsonl", sequence_length=length, batch_size=batch_size),
        execution=dataclasses.replace(recipe.execution, remat="full"),
        lora=None if changes is None else dataclasses.replace(recipe.lora, **changes),
    )


def row_of(model: str, method: str, length: int, batch_size: int, topology: str) -> dict[str, Any]:
    """Compile the step, and return the row of the table: values by column."""
    from transformer.training.plan import make_plan, parse_topology, topology_devices, without_data

    chips = parse_topology(topology)
    with quiet_stderr():
        recipe, _ = without_data(sft_recipe(model, method, length, batch_size))
        plan = make_plan(recipe, chips, topology_devices(chips))
    speed = None if plan.estimate is None else batch_size * length / plan.estimate.seconds
    values = (model, method, length, batch_size, plan.needed_bytes / GIB, "yes" if plan.fits else "no", speed)
    return dict(zip(COLUMNS, values, strict=True))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help="variants of causal models")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS], metavar="NAME")
    parser.add_argument("--lengths", nargs="+", type=int, default=(2048,), metavar="T", help="tokens per row")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=(8,), metavar="B", help="rows of a batch")
    parser.add_argument("--topology", default="v5e:1x1", help="chips (default: v5e:1x1)")
    args = parser.parse_args()
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

    print("| " + " | ".join(COLUMNS) + " |\n| --- | --- |" + " ---: |" * (len(COLUMNS) - 2))
    rows = []
    for model, length, size, method in itertools.product(args.models, args.lengths, args.batch_sizes, args.methods):
        rows.append(row_of(model, method, length, size, args.topology))
        print("| " + " | ".join(map(_cell, rows[-1].values())) + " |", flush=True)
    print(json.dumps({"topology": args.topology, "rows": rows, "versions": versions("jax", "libtpu")}))


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.1f}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
