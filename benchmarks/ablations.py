"""Ablations on Tiny Shakespeare: train variants without one part of the transformer; update docs/without-attention.md.

Usage: python -m benchmarks.ablations [--manual-dir FOLDER] [--only NAME ...] [--render]

Trains each variant of configs/shakespeare.py in runs/ablations/NAME; a finished run is not repeated, an interrupted run
resumes. Then writes docs/ablations.json, the plots in docs/images/ and the tables between the markers of the page.
--only trains some of the variants. --render trains none, and renders plots and tables from docs/ablations.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.ablations_page import write_page
from transformer.config import LayerKind, SinusoidalOptions
from transformer.data import Dataset, prepare
from transformer.training import Recipe, find_recipe, load_recipe_file, train
from transformer.training.metrics._summary import Summary
from transformer.viz import read_metrics

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "ablations.json"
BLIND = (LayerKind(self_attention=False),)
PATIENCE = 500
"""training steps of the six-layer models, which are compared only with each other"""


@dataclass(frozen=True)
class Variant:
    """One run: its label in a table, the name of the table, and its changes to the base recipe."""

    label: str
    table: str
    changes: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def recipe(self, base: Recipe, name: str) -> Recipe:
        """Return the base recipe with the changes, {group: {field: value}}."""
        groups = {group: dataclasses.replace(getattr(base, group), **fields) for group, fields in self.changes.items()}
        return dataclasses.replace(base, name=name, **groups)


def _model(**changes: Any) -> dict[str, dict[str, Any]]:
    return {"model": changes}


def _deep(norm_position: str, warmup_steps: int) -> dict[str, dict[str, Any]]:
    return {
        "model": {"num_layers": 6, "norm.position": norm_position},
        "optimizer": {"warmup_steps": warmup_steps},
        "training": {"steps": PATIENCE},
    }


VARIANTS = {
    "attention": Variant("with attention", "main"),
    "no_attention": Variant("without attention", "main", _model(**{"stack.period": BLIND})),
    "no_attention_1_layer": Variant("1 layer", "blind", _model(**{"stack.period": BLIND}, num_layers=1)),
    "no_attention_6_layers": Variant("6 layers", "blind", _model(**{"stack.period": BLIND}, num_layers=6)),
    "no_attention_narrow": Variant("d_model 32", "blind", _model(**{"stack.period": BLIND}, d_model=32)),
    "no_attention_wide": Variant("d_model 256", "blind", _model(**{"stack.period": BLIND}, d_model=256)),
    "no_attention_sinusoidal": Variant(
        "sinusoidal positions added", "blind", _model(**{"stack.period": BLIND}, position=SinusoidalOptions())
    ),
    "one_head": Variant("one head of 128 instead of two of 64", "parts", _model(num_heads=1)),
    "eight_heads": Variant("eight heads of 16", "parts", _model(num_heads=8)),
    "no_position": Variant("no positions", "parts", _model(position=None)),
    "no_scale": Variant("scores without 1/sqrt(d_k)", "parts", _model(**{"attention.scale": 1.0})),
    "no_residual": Variant("no residual connections", "parts", _model(**{"norm.position": "pre_without_residual"})),
    "pre_norm": Variant("pre-norm, warm-up of 100 steps", "norm", _deep("pre", 100)),
    "pre_norm_cold": Variant("pre-norm, no warm-up", "norm", _deep("pre", 0)),
    "post_norm": Variant("post-norm, warm-up of 100 steps", "norm", _deep("post", 100)),
    "post_norm_cold": Variant("post-norm, no warm-up", "norm", _deep("post", 0)),
    "no_residual_deep": Variant(
        "pre-norm without residual connections, warm-up of 100 steps", "norm", _deep("pre_without_residual", 100)
    ),
}


def bigram_bounds(dataset: Dataset) -> dict[str, float]:
    """Return lower bounds on the held-out loss of a model that sees at most one token, in nats per token.

    Returns:
        `entropy`: H(next | current) of the held-out text. No function of the current token alone has a lower loss, even
        if it is fitted to that text. `learnt`: the held-out loss of a bigram model with the pair frequencies of the
        training text. `unigram`: the entropy of single tokens, the bound for a model without any input.
    """
    held_out = pair_counts(dataset.eval_batches(), dataset.tokenizer.vocab_size)
    train = pair_counts(dataset.eval_batches("train"), dataset.tokenizer.vocab_size)
    return {
        "entropy": conditional_loss(held_out, held_out),
        # Add 0.1 to each count: a held-out pair that is absent from the training text would have infinite loss.
        "learnt": conditional_loss(held_out, train + 0.1),
        "unigram": conditional_loss(held_out.sum(0, keepdims=True), held_out.sum(0, keepdims=True)),
    }


def pair_counts(batches: Iterable[dict[str, np.ndarray]], vocab_size: int) -> np.ndarray:
    """Count how often each token (row) is followed by each other token (column), over the targets with weight 1.

    Returns:
        Counts (V, V).
    """
    counts = np.zeros((vocab_size, vocab_size))
    for batch in batches:
        np.add.at(counts, (batch["tokens"], batch["targets"]), batch["weights"])
    return counts


def conditional_loss(seen: np.ndarray, model: np.ndarray) -> float:
    """Return the mean of -ln q(next | current) over the pairs counted in `seen`, both arrays (V, V).

    q is `model` with normalized rows. With `model` equal to `seen`, this is the conditional entropy H(next | current).
    """
    # q(next | current); the maximum avoids 0 / 0 for a token that never occurs.
    frequencies = model / np.maximum(model.sum(1, keepdims=True), 1e-300)
    present = seen > 0  # other pairs contribute 0; their logarithm may be -inf
    return float(-(seen[present] * np.log(frequencies[present])).sum() / seen.sum())


def outcome(workdir: Path, summary: Summary) -> dict[str, Any]:
    """Return the results to store of a run: sizes, loss curve, and a generated text."""
    summary.exit_if_stopped()  # the next call resumes the run
    records = read_metrics(workdir / "metrics.jsonl")

    return {
        "parameters": summary.parameters,
        "steps": summary.step,
        "eval_loss": round(summary.eval_loss, 4),
        "seconds": round(summary.seconds),
        "eval": [[record["step"], round(record["eval/loss"], 4)] for record in records if "eval/loss" in record],
        "prompt": summary.prompt,
        "text": summary.text,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manual-dir", help="folder that contains input.txt, for a machine without network access")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), metavar="NAME", help=", ".join(VARIANTS))
    parser.add_argument("--render", action="store_true", help="train nothing; render plots and tables from the results")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"runs": {}}
    if not options.render:
        base, _ = load_recipe_file(find_recipe("shakespeare", ROOT))
        base = dataclasses.replace(
            base,
            data=dataclasses.replace(base.data, manual_dir=options.manual_dir),
            evaluation=dataclasses.replace(base.evaluation, every=100, samples=0, sample_tokens=400),
        )
        results["bounds"] = {name: round(value, 4) for name, value in bigram_bounds(prepare(base.data)).items()}
        results["made"] = f"{date.today().isoformat()}, {jax.devices()[0].device_kind}, jax {jax.__version__}"
        for name in options.only or VARIANTS:
            recipe, workdir = VARIANTS[name].recipe(base, name), ROOT / "runs" / "ablations" / name
            results["runs"][name] = outcome(workdir, train(recipe, workdir))
            RESULTS.write_text(json.dumps(results) + "\n", encoding="utf-8")
    if missing := VARIANTS.keys() - results["runs"].keys():
        print(f"page not written, because these runs are missing: {', '.join(sorted(missing))}")
    else:
        write_page(results, {name: (variant.table, variant.label) for name, variant in VARIANTS.items()}, ROOT / "docs")


if __name__ == "__main__":
    main()
