"""Ablations of configs/shakespeare_fast.py: remove or add one technique per run; update docs/shakespeare-fast.md.

Usage: python -m benchmarks.fast_shakespeare [--manual-dir FOLDER] [--only NAME ...] [--seeds 0 1 2] [--render]

Trains each variant in runs/shakespeare_fast/NAME-seedN (a finished run is not repeated, an interrupted run resumes),
stores the results in docs/shakespeare-fast.json, and writes the tables between the markers of the page. Variants
without a run are left out of the tables. --render only writes the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

import jax

from benchmarks.ablations import Variant
from benchmarks.ablations_page import fill
from benchmarks.machine import machine
from benchmarks.results_page import spread
from transformer.config import LearnedOptions
from transformer.training import find_recipe, load_recipe_file, train

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "shakespeare-fast.json"
PAGE = ROOT / "docs" / "shakespeare-fast.md"

VARIANTS = {
    "full": Variant("the recipe", "full"),
    "adamw": Variant(
        "AdamW instead of Muon, learning rate 3e-3", "removed", {"optimizer": {"name": "adamw", "learning_rate": 3e-3}}
    ),
    "low_rate": Variant("learning rate 1e-3 instead of 1e-2", "removed", {"optimizer": {"learning_rate": 1e-3}}),
    "cosine": Variant(
        "cosine decay to a tenth of the learning rate instead of a long linear decay to 0",
        "removed",
        {"optimizer": {"schedule": "cosine", "final_fraction": 0.1}},
    ),
    "no_qk_norm": Variant("no norm on queries and keys", "removed", {"model": {"attention.qk_norm": None}}),
    "gelu": Variant("GELU instead of squared ReLU", "removed", {"model": {"feed_forward.activation": "gelu_tanh"}}),
    "learned_positions": Variant(
        "learned positions instead of rotary positions",
        "removed",
        {"model": {"position": LearnedOptions(max_length=64)}},
    ),
    "layer_norm": Variant("LayerNorm instead of RMSNorm", "removed", {"model": {"norm.kind": "layer_norm"}}),
    "biases": Variant("biases in the projections", "removed", {"model": {"parameters.use_bias": True}}),
    "high_rate": Variant("learning rate 2e-2", "added", {"optimizer": {"learning_rate": 2e-2}}),
    "small_batches": Variant(
        "batch size 6, 4,000 steps", "added", {"data": {"batch_size": 6}, "training": {"steps": 4000}}
    ),
    "average": Variant(
        "exponential moving average of the parameters for evaluation (0.99)", "added", {"training": {"ema_decay": 0.99}}
    ),
    "z_loss": Variant("z-loss of 1e-4", "added", {"training": {"z_loss": 1e-4}}),
    "softcap": Variant("logits capped at 15", "added", {"model": {"output.softcap": 15.0}}),
    "gated": Variant(
        "gated feed-forward layers (SwiGLU) of width 340",
        "added",
        {"model": {"feed_forward.activation": "silu", "feed_forward.gated": True, "feed_forward.d_ff": 340}},
    ),
}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the generated parts of the page, by the names of their markers.

    Losses are in nats per character: the mean and, with at least two seeds, the standard deviation. A difference is the
    mean difference from `full` over the seeds that both have.

    Args:
        results: {"runs": {name: {seed: run}}, "made": text}.
    """
    runs = results["runs"]
    made = {table: _table(runs, table) for table in ("removed", "added")}
    minutes = sum(run["seconds"] for seeds in runs.values() for run in seeds.values()) / 60
    number = sum(map(len, runs.values()))
    when = f"Measured {results['made']}; {number} runs, {minutes:.0f} minutes of training in total."
    if missing := [f"`{name}`" for name in VARIANTS if name not in runs]:
        when += f"\nNot trained yet: {', '.join(missing)}."
    return made | {"when": when}


def _table(runs: Mapping[str, Mapping[str, Any]], table: str) -> str:
    lines = [
        "| run | variant | parameters | seeds | held-out loss | difference |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, variant in VARIANTS.items():
        if variant.table not in ("full", table) or name not in runs:
            continue
        seeds = sorted(runs[name], key=int)
        losses = [runs[name][seed]["eval_loss"] for seed in seeds]
        full = runs.get("full", {})
        gaps = [runs[name][seed]["eval_loss"] - full[seed]["eval_loss"] for seed in seeds if seed in full]
        gap = f"{mean(gaps):+.3f}" if gaps and name != "full" else ""
        size = f"{runs[name][seeds[0]]['parameters']:,}"
        lines.append(f"| `{name}` | {variant.label} | {size} | {', '.join(seeds)} | {spread(losses)} | {gap} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manual-dir", help="folder that contains input.txt, for a machine without network access")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), metavar="NAME", help=", ".join(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
    parser.add_argument("--render", action="store_true", help="train nothing; render the tables from the results")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"runs": {}}
    base, _ = load_recipe_file(find_recipe("shakespeare_fast", ROOT))
    for seed in [] if options.render else options.seeds:
        for name in options.only or VARIANTS:
            recipe = VARIANTS[name].recipe(base, base.name if name == "full" else name)
            recipe = dataclasses.replace(
                recipe,
                data=dataclasses.replace(recipe.data, manual_dir=options.manual_dir),
                training=dataclasses.replace(recipe.training, seed=seed),
                evaluation=dataclasses.replace(recipe.evaluation, samples=0, sample_tokens=20),
            )
            summary = train(recipe, ROOT / "runs" / "shakespeare_fast" / f"{name}-seed{seed}")
            summary.exit_if_stopped()  # the next call resumes the run
            results["runs"].setdefault(name, {})[str(seed)] = {
                "eval_loss": round(summary.eval_loss, 4),
                "parameters": summary.parameters,
                "seconds": round(summary.seconds),
            }
            results["made"] = f"{date.today().isoformat()}, {machine()}, jax {jax.__version__}"
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), tables(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
