"""Translate held-out sources, and score the translations by exact match or by BLEU and chrF."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import flax.linen as nn
from jaxtyping import PyTree

from transformer.config._progress import counting
from transformer.config._replaced_files import replace_file
from transformer.data._dataset import Example
from transformer.data.tokenizers._base import Tokenizer
from transformer.generate._batches import beam_search_all
from transformer.generate._beam import Beam
from transformer.generate._generation import generate
from transformer.generate._sampling import Sampling
from transformer.training.tasks._evaluation import Evaluation

T = TypeVar("T")


@dataclass(frozen=True)
class Translation:
    """An example and the model's translation of its source, `output`."""

    example: Example
    output: str

    @property
    def exact(self) -> bool:
        """Whether all words are correct, regardless of whitespace."""
        return self.output.split() == self.example.target.split()


def corrected(item: Translation) -> str:
    """Return the output, followed by the correct target if they differ."""
    return item.output + ("" if item.exact else f"   (correct: {item.example.target})")


def selection(items: Sequence[T], wanted: int) -> list[T]:
    """Return at most `wanted` evenly spaced items."""
    number = min(wanted, len(items))
    return [items[index * len(items) // max(number, 1)] for index in range(number)]


def make_beam(size: int, alpha: float) -> Beam | None:
    """Return the beam search options for `translate`; None (greedy decoding) for size 1."""
    return None if size == 1 else Beam(size=size, alpha=alpha)


def translate(
    model: nn.Module,
    params: PyTree,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    *,
    max_new_tokens: int,
    beam: Beam | None = None,
    batch_size: int = 250,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[str] | None:
    """Translate each source, by beam search or greedily; None if `should_stop`, called before each batch, is True.

    Sources of similar length share a batch, which reduces padding and lets a batch of short sources end early.
    ValueError if a source has text that the tokenizer can't encode.
    """
    ids = [tokenizer.encode_source(source) for source in sources]
    outputs = [""] * len(ids)
    # Longest first, so that a batch that does not fit into memory fails at the start.
    order = sorted(range(len(ids)), key=lambda place: -len(ids[place]))
    size = min(batch_size, len(ids))
    limit = model.config.max_length
    most = max_new_tokens if limit is None else min(max_new_tokens, limit - 1)  # the begin token takes one position
    add = counting("translations", len(ids))
    for start in range(0, len(ids), max(size, 1)):
        if should_stop():
            return None
        places = order[start : start + size]
        part = [ids[place] for place in places]
        options = {"max_new_tokens": most, "eos_id": tokenizer.eos_id}
        if beam is None:
            filled = part + part[-1:] * (size - len(part))  # a fixed batch size, so that fewer shapes are compiled
            begin = [[tokenizer.begin_id]] * size
            rows = generate(model, params, begin, sources=filled, sampling=Sampling(temperature=0.0), **options)
        else:
            found = beam_search_all(model, params, part, begin=[tokenizer.begin_id], beam=beam, **options)
            rows = [best.tokens for best, *_ in found]
        for place, row in zip(places, rows, strict=False):
            outputs[place] = tokenizer.decode(row)
        add(len(places))
    return outputs


def translations(run: Evaluation, split: str, limit: int | None, beam: Beam | None = None) -> list[Translation] | None:
    """Translate up to `limit` sources of a split (None: all); None if `should_stop` ended it."""
    dataset = run.dataset
    examples = dataset.examples(split, limit)
    outputs = translate(
        run.model,
        run.params,
        dataset.tokenizer,
        [example.source for example in examples],
        max_new_tokens=dataset.max_target_length,
        beam=beam,
        batch_size=dataset.config.eval_batch_size,
        should_stop=run.should_stop,
    )
    return None if outputs is None else [Translation(*pair) for pair in zip(examples, outputs, strict=True)]


@dataclass(frozen=True)
class Score:
    """Number of correct examples, `right`, of `total` examples in a group."""

    right: int
    total: int

    @property
    def rate(self) -> float:
        """Fraction of correct examples, 0 to 1."""
        return self.right / max(self.total, 1)

    def __str__(self):
        return f"{self.right} of {self.total} ({100 * self.rate:.1f} %)"


def scores(translations: Sequence[Translation]) -> dict[str, Score]:
    """Return the exact-match scores by group of the examples, in order of the groups; "" is the group of all."""
    # Shorter names first, so that groups named by numbers are in numeric order.
    groups = sorted({item.example.group for item in translations}, key=lambda name: (len(name), name))
    by_group = {"": list(translations)} | {
        group: [item for item in translations if item.example.group == group] for group in groups if group
    }
    return {group: Score(sum(item.exact for item in items), len(items)) for group, items in by_group.items()}


@dataclass(frozen=True)
class CorpusScore:
    """BLEU and chrF of the translations of a corpus."""

    bleu: float
    """0 to 100: precision of word n-grams, n = 1 to 4, with a brevity penalty (Papineni et al. 2002)"""
    chrf: float
    """0 to 100: F-score of character n-grams, n = 1 to 6 (Popović 2015)"""
    pairs: int
    """number of translated pairs"""
    bleu_signature: str
    """sacreBLEU's description of how BLEU was computed"""
    chrf_signature: str
    """sacreBLEU's description of how chrF was computed"""

    def lines(self, split: str) -> list[str]:
        """Return the lines to print; `split` is the name of the split that contains the pairs."""
        return [
            f"BLEU on {self.pairs:,} pairs of {split}: {self.bleu:.2f}   ({self.bleu_signature})",
            f"chrF on {self.pairs:,} pairs of {split}: {self.chrf:.2f}   ({self.chrf_signature})",
        ]


def corpus_score(translations: Sequence[Translation], tokenization: str) -> CorpusScore:
    """Compute BLEU and chrF of the whole corpus with sacreBLEU (Post 2018, arXiv 1804.08771).

    Args:
        translations: translations of the corpus.
        tokenization: sacreBLEU's tokenization for BLEU: "13a" for plain text, "none" for text that is split at spaces.

    Raises:
        ValueError: no translations.
    """
    from sacrebleu.metrics import BLEU, CHRF  # imported late: loading its tables would delay the first step

    if not translations:
        raise ValueError("there are no translations to score. Translate at least one source.")
    outputs = [line(item.output) for item in translations]
    right = [[line(item.example.target) for item in translations]]
    bleu, chrf = BLEU(tokenize=tokenization, force=True), CHRF()  # force: no warning about text that looks tokenized
    found = bleu.corpus_score(outputs, right).score, chrf.corpus_score(outputs, right).score
    return CorpusScore(*found, len(outputs), str(bleu.get_signature()), str(chrf.get_signature()))


def line(text: str) -> str:
    """Return the text in one line, the form in which it is scored and written."""
    return " ".join(text.splitlines())


def write_lines(path: Path, texts: Iterable[str]) -> None:
    """Write each text as a line of a file, atomically."""
    replace_file(path, "".join(f"{line(text)}\n" for text in texts))
