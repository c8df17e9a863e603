"""Pairs at the end: sources translated, and what was written compared with what was right, word for word or by BLEU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn

from transformer.data._dataset import Example
from transformer.data._tokenizer import Tokenizer
from transformer.generate._batches import beam_search_all
from transformer.generate._beam import Beam
from transformer.generate._generation import generate
from transformer.generate._sampling import Sampling


@dataclass(frozen=True)
class Translation:
    """One example and the `output` that the model made of its source."""

    example: Example
    output: str

    @property
    def exact(self) -> bool:
        """Every word right (blanks apart)."""
        return self.output.split() == self.example.target.split()


def make_beam(size: int, alpha: float) -> Beam | None:
    """How `translate` searches with a beam of this size; None for a size of 1.

    Raises:
        ConfigError: a number out of range.
    """
    return None if size == 1 else Beam(size=size, alpha=alpha)


def translate(
    model: nn.Module,
    params: Any,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    *,
    max_new_tokens: int,
    beam: Beam | None = None,
    batch_size: int = 250,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[str] | None:
    """The best target that a `beam` finds for each source, or without one the target of always the likeliest token;
    None when `should_stop` said so in between.

    Sources of like length share a batch, so that little is padding and a batch of short ones ends soon.

    Raises:
        ValueError: a source with text that the tokenizer doesn't know.
    """
    ids = [tokenizer.encode_source(source) for source in sources]
    outputs = [""] * len(ids)
    # The longest first: what is too much for memory fails soon.
    order = sorted(range(len(ids)), key=lambda place: -len(ids[place]))
    size = min(batch_size, len(ids))
    limit = model.config.max_length
    most = max_new_tokens if limit is None else min(max_new_tokens, limit - 1)  # behind the token that begins it
    for start in range(0, len(ids), max(size, 1)):
        if should_stop():
            return None
        places = order[start : start + size]
        part = [ids[place] for place in places]
        options = {"max_new_tokens": most, "eos_id": tokenizer.eos_id}
        if beam is None:
            filled = part + part[-1:] * (size - len(part))  # one batch size, so that fewer shapes are compiled
            begin = [[tokenizer.begin_id]] * size
            rows = generate(model, params, begin, sources=filled, sampling=Sampling(temperature=0.0), **options)
        else:
            found = beam_search_all(model, params, part, begin=[tokenizer.begin_id], beam=beam, **options)
            rows = [best.tokens for best, *_ in found]
        for place, row in zip(places, rows, strict=False):
            outputs[place] = tokenizer.decode(row)
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


@dataclass(frozen=True)
class CorpusScore:
    """How near a corpus of so many `pairs` comes to what is right; `bleu_signature` and `chrf_signature` say how that
    was computed.
    """

    bleu: float
    """0 to 100: words shared, singly and two to four in a row (Papineni et al. 2002)"""
    chrf: float
    """0 to 100: characters shared, singly and two to six in a row (Popović 2015)"""
    pairs: int
    bleu_signature: str
    chrf_signature: str

    def lines(self, split: str) -> list[str]:
        """What to show; `split` is what the pairs are of."""
        return [
            f"BLEU on {self.pairs:,} pairs of {split}: {self.bleu:.2f}   ({self.bleu_signature})",
            f"chrF on {self.pairs:,} pairs of {split}: {self.chrf:.2f}   ({self.chrf_signature})",
        ]


def corpus_score(translations: Sequence[Translation], tokenization: str) -> CorpusScore:
    """BLEU and chrF of all translations together, as sacreBLEU computes them (Post 2018, arXiv 1804.08771).

    `tokenization` is sacreBLEU's name of how BLEU parts words: "none" where blanks do it already, "13a" for plain text.

    Raises:
        ValueError: no translations.
    """
    from sacrebleu.metrics import BLEU, CHRF  # its tables take a while: not before the first step

    if not translations:
        raise ValueError("there is no translation to score. Translate at least one source.")
    outputs = [line(item.output) for item in translations]
    right = [[line(item.example.target) for item in translations]]
    bleu, chrf = BLEU(tokenize=tokenization, force=True), CHRF()  # force: no advice on text that looks tokenized
    found = bleu.corpus_score(outputs, right).score, chrf.corpus_score(outputs, right).score
    return CorpusScore(*found, len(outputs), str(bleu.get_signature()), str(chrf.get_signature()))


def line(text: str) -> str:
    """The text on one line, as it is scored and written."""
    return " ".join(text.splitlines())


def write_lines(path: Path, texts: Iterable[str]) -> None:
    """Writes each text on a line of its own, the whole file or nothing."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("".join(f"{line(text)}\n" for text in texts), encoding="utf-8")
    os.replace(partial, path)
