"""What a model is worth on data it never saw: loss, translations that are right word for word, texts to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax

from transformer.data import Batch, Example, Tokenizer
from transformer.generate import Sampling, generate
from transformer.training.step import EvalStep


@dataclass(frozen=True)
class EvalLoss:
    """Means over held-out targets."""

    loss: float
    """nats per target"""
    accuracy: float
    """share of targets that were the likeliest"""
    targets: float
    """how many there were (their weight)"""


def evaluate_loss(
    eval_step: EvalStep, params: Any, batches: Iterable[Batch], should_stop: Callable[[], bool] = lambda: False
) -> EvalLoss | None:
    """Loss over all batches, each target counted once by its weight; None when `should_stop` said so in between.

    Raises:
        ValueError: no target at all, or a loss that is not a number.
    """
    sums = {"loss_sum": 0.0, "correct": 0.0, "weight": 0.0}
    for batch in batches:
        if should_stop():
            return None
        for name, value in jax.device_get(eval_step(params, batch)).items():
            sums[name] += float(value)
    if not sums["weight"]:
        raise ValueError("there is nothing to evaluate on: the held-out data has no target. Hold out more of it.")
    return EvalLoss(sums["loss_sum"] / sums["weight"], sums["correct"] / sums["weight"], sums["weight"])


@dataclass(frozen=True)
class Translation:
    """One example and the `output` that the model made of its source."""

    example: Example
    output: str

    @property
    def exact(self) -> bool:
        """Every word right (blanks apart)."""
        return self.output.split() == self.example.target.split()


def translate(
    model: nn.Module,
    params: Any,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    *,
    max_new_tokens: int,
    batch_size: int = 250,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[str] | None:
    """The likeliest target of each source, greedily; None when `should_stop` said so in between.

    Raises:
        ValueError: a source with text that the tokenizer doesn't know.
    """
    outputs: list[str] = []
    size = min(batch_size, len(sources))
    for start in range(0, len(sources), max(size, 1)):
        if should_stop():
            return None
        part = [tokenizer.encode_source(source) for source in sources[start : start + size]]
        filled = part + part[:1] * (size - len(part))  # one shape, one compilation
        ids = generate(
            model,
            params,
            [[tokenizer.begin_id]] * size,
            sources=filled,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature=0.0),
            eos_id=tokenizer.eos_id,
        )
        outputs += [tokenizer.decode(row) for row in ids[: len(part)]]
    return outputs


@dataclass(frozen=True)
class Score:
    """How many of a group of examples were right, of how many in `total`."""

    right: int
    total: int

    @property
    def rate(self) -> float:
        """Share that was right, 0 to 1."""
        return self.right / max(self.total, 1)

    def __str__(self):
        return f"{self.right} of {self.total} ({100 * self.rate:.1f} %)"


def scores(translations: Sequence[Translation]) -> dict[str, Score]:
    """Exact matches by group of the examples, in order of the groups; "" is the group of all."""
    groups = sorted({item.example.group for item in translations}, key=lambda name: (len(name), name))
    by_group = {"": list(translations)} | {
        group: [item for item in translations if item.example.group == group] for group in groups if group
    }
    return {group: Score(sum(item.exact for item in items), len(items)) for group, items in by_group.items()}


def write_texts(
    model: nn.Module,
    params: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    context: int,
    new_tokens: int,
    temperature: float,
    seed: int,
) -> list[str]:
    """Prompts continued by sampling, each as prompt and continuation.

    A model trained on windows of `context` tokens doesn't know later positions, so the text is written in pieces, each
    after the last half window.
    """
    half = max(context // 2, 1)
    texts = [tokenizer.encode_source(prompt) for prompt in prompts]
    lengths = [len(text) + new_tokens for text in texts]
    for piece in range(-(-new_tokens // half)):
        windows = [text[-half:] for text in texts]
        written = generate(
            model,
            params,
            windows,
            max_new_tokens=half,
            sampling=Sampling(temperature=temperature),
            seed=seed + piece,
        )
        texts = [text + new for text, new in zip(texts, written, strict=True)]
    return [tokenizer.decode(text[:length]) for text, length in zip(texts, lengths, strict=True)]
