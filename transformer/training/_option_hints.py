"""Suggest an option of a recipe for one that does not exist, such as `--lr`, which other programs have."""

from __future__ import annotations

from collections.abc import Sequence

from transformer.config._checks import nearest

OTHER_NAMES = {
    "optimizer.learning-rate": ("lr", "max-lr", "base-lr"),
    "training.steps": ("max-steps", "max-iters", "num-steps", "train-steps", "total-steps", "iterations"),
    "training.accumulation": ("gradient-accumulation-steps", "grad-accum", "accumulate-grad-batches"),
    "data.batch-size": ("per-device-train-batch-size", "train-batch-size", "micro-batch-size", "bs"),
    "data.sequence-length": ("block-size", "max-seq-length", "max-seq-len", "seq-len", "context-length", "max-length"),
    "model.num-layers": ("n-layer", "n-layers", "layers", "depth", "num-hidden-layers"),
    "model.num-heads": ("n-head", "n-heads", "heads", "num-attention-heads"),
    "model.d-model": ("n-embd", "hidden-size", "dim", "width"),
    "model.dropout-rate": ("dropout",),
    "model.dtype": ("bf16", "fp16", "precision", "mixed-precision"),
    "optimizer.clip-norm": ("max-grad-norm", "grad-clip", "gradient-clip-val"),
    "optimizer.warmup-steps": ("warmup", "warmup-iters"),
    "optimizer.name": ("optim",),
    "evaluation.every": ("eval-interval", "eval-steps", "eval-every"),
    "checkpoint.every": ("save-steps", "save-every"),
    "logging.every": ("logging-steps", "log-interval", "log-every"),
    "execution.remat": ("gradient-checkpointing", "activation-checkpointing"),
    "parallel.devices": ("gpus", "num-gpus", "nproc-per-node"),
    "workdir": ("output-dir", "out-dir", "out", "logdir", "save-dir", "checkpoint-dir"),
    "init": ("model-name-or-path", "pretrained", "init-from", "load"),
}
"""names of options in nanoGPT, transformers, PyTorch Lightning and MaxText, by our option"""
EXPLANATIONS = {
    ("resume", "resume-from", "resume-from-checkpoint", "continue"): (
        "To resume a run, pass its workdir in place of the recipe."
    ),
    (
        "epochs",
        "num-epochs",
        "num-train-epochs",
        "max-epochs",
    ): "Training is measured in steps, not in epochs: --training.steps.",
    ("wandb", "report-to", "mlflow", "trackio", "tracker"): (
        "Metrics are written to metrics.jsonl and as TensorBoard events, and to the trackers in --logging.writers: "
        "wandb, mlflow, trackio."
    ),
    ("device", "accelerator", "cuda", "cpu", "tpu"): "The environment variable JAX_PLATFORMS=cpu selects devices.",
    ("version",): "`python -m transformer --version` prints the versions.",
}


def suggestion(option: str, options: Sequence[str]) -> str:
    """Return a sentence with the option that "--lr" probably means, with a leading space; "" if none is similar."""
    name = option.removeprefix("--").replace("_", "-").lower()
    for names, explanation in EXPLANATIONS.items():
        if name in names:
            return f" {explanation}"
    last = name.rpartition(".")[2]
    known = [one for one in options if one.rpartition(".")[2].removeprefix("--") == last]
    known += [f"--{ours}" for ours, theirs in OTHER_NAMES.items() if last in theirs and f"--{ours}" in options]
    if known and option not in known:
        return f" Did you mean {' or '.join(map(repr, known[:3]))}?"
    return nearest(option, options)
