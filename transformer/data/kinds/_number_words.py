"""Number words in seven languages, and their splits: training, validation, test and basics.

The words come from num2words (version 0.5.14), with corrections of its errors below one million:

* Spanish: "uno" is shortened before "mil": 21 000 is "veintiún mil", 31 000 "treinta y un mil", 201 000 "doscientos
  un mil" (RAE, Diccionario panhispánico de dudas, "cardinales").
* German: "eins" is "ein" before "tausend": 101 000 is "einhunderteintausend" (Duden).
* Italian: 118 is "centodiciotto", not "centodicotto"; a final "tre" has an accent: "centoventitré"
  (Treccani, "tre").
* English: no comma after "thousand", as in running text; "and" is kept (British).

Portuguese is European ("dezasseis"). French has the hyphens used before 1990 ("vingt et un", "quatre-vingt-deux").
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from transformer.config._checks import ConfigError, check_choice, check_whole, nearest
from transformer.data._config import WORDS, TokenizerConfig
from transformer.data._dataset import Example
from transformer.data._pairs import PairConfig, Pairs
from transformer.data.files._tfds import Prepared

Language = Literal["en", "es", "pt", "ru", "fr", "de", "it"]

ONE_WORD_LANGUAGES = ("de", "it")
"""Languages that write a number as one word, so that a word vocabulary can't encode unseen numbers."""

NORMALIZATION_OF = {"en": "english_number_words", "pt": "portuguese_number_words"}
"""normalization of sources by language; other languages use number_words"""

BASIC_SHARE = 0.15
"""Fraction of training pairs drawn from 0-20 and d x 10^k, because numbers such as 100 or 10 000 are rare otherwise."""

ROUND_SHARE = 0.15
"""Fraction of training pairs with at most two nonzero digits, such as 40 300 or 700 002."""


@dataclass(frozen=True, kw_only=True)
class NumberWords(PairConfig):
    """Translate number words below 10^max_digits between two languages: a small, exact task that is hard to memorize.

    Raises:
        ConfigError: both languages are the same, a number is out of range, or a word tokenizer with a language that
            writes a number as one word.
    """

    kind: ClassVar[str] = "number_words"
    group_name: ClassVar[str] = "digits"
    bleu_tokenization: ClassVar[None] = None

    source_language: Language = "en"
    """source language"""
    target_language: Language = "es"
    """target language"""
    max_digits: int = 6
    """maximum number of digits, from 2 to 6"""
    train_examples: int = 60_000
    """number of training pairs, drawn at random with repetitions; held-out numbers are excluded"""
    test_examples: int = 1_000
    """number of test numbers, balanced over digit counts as far as possible; they never occur in training"""
    validation_examples: int = 500
    """number of validation numbers, for evaluation during training; they never occur in training or test"""
    tokenizer: TokenizerConfig = WORDS
    """tokenizer; de and it write a number as one word and need char, byte or bpe"""
    data_dir: str | None = None
    """folder of prepared TFDS data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""

    def __post_init__(self):
        super().__post_init__()
        for field in ("source_language", "target_language"):
            check_choice(field, getattr(self, field), Language.__args__)
        if self.source_language == self.target_language:
            raise ConfigError(
                f"source_language and target_language are both {self.source_language!r}. Use two different ones of "
                f"{', '.join(Language.__args__)}."
            )
        check_whole(self, "max_digits", least=2)
        if self.max_digits > 6:
            raise ConfigError(f"max_digits must be from 2 to 6 (numbers below a million), got {self.max_digits}.")
        check_whole(self, "train_examples", least=200)
        check_whole(self, "test_examples", "validation_examples")
        for language in (self.source_language, self.target_language):
            if language in ONE_WORD_LANGUAGES and self.tokenizer.kind == "word":
                raise ConfigError(
                    f"a word tokenizer can't be used with language {language!r}, which writes a number as one word: an "
                    "unseen number would be an unknown word. Use tokenizer.kind char, byte or bpe."
                )

    def read(self) -> Pairs:
        """Return the pairs; a training number occurs as often as it was drawn."""
        found = _prepared(self).records(self.data_dir)
        splits: dict[str, list[Example]] = {split: [] for split in found}
        for split, rows in found.items():
            for row in sorted(rows, key=lambda row: row["number"]):
                pair = Example(row["source"].decode(), row["target"].decode(), str(len(str(row["number"]))))
                splits[split] += [pair] * row["times"]
        return Pairs(splits, NORMALIZATION_OF.get(self.source_language, "number_words"))


def _prepared(config: NumberWords) -> Prepared:
    """Return the description of the dataset for TFDS: splits train, validation, test and basics (0-20 and d x 10^k)."""
    languages = config.source_language, config.target_language
    digits, counts = config.max_digits, (config.train_examples, config.validation_examples, config.test_examples)

    def examples(files: Mapping[str, Path]) -> dict[str, Iterator[tuple[int, dict]]]:
        del files
        numbers = {
            "train": training_numbers(digits, config.train_examples),
            "validation": held_out_numbers("validation", digits, config.validation_examples),
            "test": held_out_numbers("test", digits, config.test_examples),
            "basics": basic_numbers(digits),
        }
        return {split: _in_words(drawn, *languages) for split, drawn in numbers.items()}

    return Prepared(
        name="number_words",
        # The variant contains all options that change the data, so that different data never share prepared files.
        variant="_".join(map(str, (*languages, digits, "digits", *counts))),
        description="Integers in words of two languages, from num2words with corrections.",
        features=lambda features: {
            "number": features.Scalar(dtype=np.int32),
            "times": features.Scalar(dtype=np.int32, doc="how often the number was drawn"),
            "source": features.Text(),
            "target": features.Text(),
        },
        examples=examples,
    )


def _in_words(numbers: list[int], source: str, target: str) -> Iterator[tuple[int, dict]]:
    for number, times in Counter(numbers).items():
        texts = {"source": words(number, source), "target": words(number, target)}
        yield number, {"number": number, "times": times} | texts


def words(number: int, language: str) -> str:
    """Return an integer from 0 to 999,999 in words of a `Language`. Raises ValueError for other numbers or languages.

    >>> words(742, "en"), words(21_000, "es")
    ('seven hundred and forty-two', 'veintiún mil')
    """
    if language not in Language.__args__:
        known = Language.__args__
        raise ValueError(f"language must be one of {', '.join(known)}, got {language!r}.{nearest(language, known)}")
    if not 0 <= number < 1_000_000:
        raise ValueError(f"number must be from 0 to 999,999, got {number}.")
    from num2words import num2words

    text = num2words(number, lang=language)
    if language == "en":
        return text.replace(",", "")
    if language == "es":
        return text.replace("veintiuno mil", "veintiún mil").replace("uno mil", "un mil")
    if language == "de":
        return text.replace("einstausend", "eintausend")
    if language == "it":
        text = text.replace("dicotto", "diciotto")
        return text[:-1] + "é" if text.endswith("tre") and number > 3 else text
    return text


def basic_numbers(max_digits: int) -> list[int]:
    """Return 0 to 20 and d x 10^k, the vocabulary of numbers.

    They are never held out, because no rule derives a word such as "thirteen" from other words.
    """
    round_ones = {digit * 10**zeros for zeros in range(max_digits) for digit in range(1, 10)}
    return sorted(set(range(21)) | round_ones)


def role(thing: int | str) -> str:
    """Return the split of a number that is not basic, or of a text: `"train"` (8 of 10), `"validation"` or `"test"`.

    Its hash determines the split, so that random draws and languages can't move it to another split.
    """
    tenth = int.from_bytes(hashlib.sha256(str(thing).encode()).digest()[:8], "big") % 10
    return {0: "test", 1: "validation"}.get(tenth, "train")


def held_out_numbers(split: str, max_digits: int, count: int) -> list[int]:
    """Return up to `count` numbers of a held-out split, balanced over digit counts as far as possible.

    Short numbers are scarce (the test split has 7 with two digits and about 90 with three), and there are thousands of
    longer ones.
    """
    basic = set(basic_numbers(max_digits))
    chosen: list[int] = []
    for digits in range(2, max_digits + 1):
        # An equal share of what is left to draw, for this and all larger digit counts.
        share = (count - len(chosen)) // (max_digits + 1 - digits)
        draw = random.Random(f"{split} {digits}")
        if digits <= 4:
            supply = [n for n in range(10 ** (digits - 1), 10**digits) if n not in basic and role(n) == split]
            chosen += draw.sample(supply, min(share, len(supply)))
        else:
            # Too many numbers to list: draw until there are enough different ones (dict keys keep the order). There are
            # 9 x 10^(digits - 1) numbers, of which a tenth is in the split; the limit is about half of those.
            longer: dict[int, None] = {}
            needed = min(share, 5_000 * 10 ** (digits - 5))
            # A number is new with a probability of about 0.05 or more: this many draws fail only if `role` is at fault.
            for _ in range(1000 + 1000 * needed):
                if len(longer) >= needed:
                    break
                number = draw.randrange(10 ** (digits - 1), 10**digits)
                if number not in basic and role(number) == split:
                    longer[number] = None
            else:
                raise RuntimeError(
                    f"only {len(longer):,} of {needed:,} held-out numbers with {digits} digits were found for the "
                    f"split {split!r}: `role` assigns too few numbers to it. Correct `role`, or ask for fewer numbers."
                )
            chosen += longer
    return sorted(chosen)


def training_numbers(max_digits: int, count: int) -> list[int]:
    """Draw training numbers, with repetitions: all basic, some round ones, and others with balanced digit counts."""
    basic = basic_numbers(max_digits)
    known = set(basic)
    draw = random.Random(f"train {max_digits} {count}")

    def of_length() -> int:
        digits = draw.randint(1, max_digits)
        return draw.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)

    def few_digits() -> int:
        return sum(draw.randint(1, 9) * 10 ** draw.randrange(max_digits) for _ in range(2))

    # All basic numbers once, and repetitions of them up to their share of the training set.
    numbers = basic + draw.choices(basic, k=max(0, round(BASIC_SHARE * count) - len(basic)))
    while len(numbers) < count:  # ends, because basic numbers are always accepted
        # ROUND_SHARE is a fraction of all numbers, but only 1 - BASIC_SHARE of them are drawn here.
        number = few_digits() if draw.random() < ROUND_SHARE / (1 - BASIC_SHARE) else of_length()
        if number < 10**max_digits and (number in known or role(number) == "train"):
            numbers.append(number)
    draw.shuffle(numbers)
    return numbers[:count]
