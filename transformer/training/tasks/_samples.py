"""Sampled texts of a language model: continuations of prompts, and answers to held-out conversations."""

from __future__ import annotations

from collections.abc import Sequence

from transformer.generate._generation import generate
from transformer.generate._sampling import Sampling
from transformer.training.tasks._evaluation import Evaluation


def continuations(run: Evaluation, prompts: Sequence[str]) -> list[str]:
    """Generate a continuation of each prompt by sampling; return it together with its prompt.

    A model that was trained on windows of some length has not learned later positions. So the text is generated in
    pieces of half a window, each with the preceding half window as its prompt.
    """
    half = max(run.dataset.config.sequence_length // 2, 1)
    tokenizer, new_tokens = run.dataset.tokenizer, run.options.sample_tokens
    texts = [tokenizer.encode_source(prompt) for prompt in prompts]
    lengths = [len(text) + new_tokens for text in texts]
    for piece in range(-(-new_tokens // half)):  # ceil(new_tokens / half)
        generated = generate(
            run.model,
            run.params,
            [text[-half:] for text in texts],
            max_new_tokens=half,
            sampling=Sampling(temperature=run.options.temperature),
            seed=(run.seed + piece) % 2**32,  # another seed for each piece; seeds are 32-bit
        )
        texts = [text + new for text, new in zip(texts, generated, strict=True)]
    return [tokenizer.decode(text[:length]) for text, length in zip(texts, lengths, strict=True)]


def answers(run: Evaluation, wanted: int) -> list[tuple[str, str]]:
    """Return (last message, answer of the model) of held-out conversations."""
    found = run.dataset.openings(wanted)
    if not found:
        return []
    limit = run.dataset.config.sequence_length - max(len(ids) for _, ids in found)
    generated = generate(
        run.model,
        run.params,
        [ids for _, ids in found],
        max_new_tokens=min(run.options.sample_tokens, limit),
        sampling=Sampling(temperature=run.options.temperature),
        eos_id=run.dataset.end_ids,
        seed=run.seed,
    )
    return [(asked, run.dataset.tokenizer.decode(ids)) for (asked, _), ids in zip(found, generated, strict=True)]


def first_words(text: str, most: int = 40) -> str:
    """Return the beginning of the first line that is not empty, at most `most` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), text.strip())
    return line if len(line) <= most else line[:most].rsplit(" ", 1)[0]
