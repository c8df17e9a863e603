"""Kinds of paired text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from transformer.config import ConfigError, check_choice
from transformer.data.configs.common import PairConfig, TokenizerConfig, check_path, check_share, check_whole

Language = Literal["en", "es", "pt", "ru", "fr", "de", "it"]

ONE_WORD_LANGUAGES = ("de", "it")
"""Languages that write a whole number as one word: a vocabulary of words can't meet a number it never saw."""


@dataclass(frozen=True, kw_only=True)
class NumberWords(PairConfig):
    """Whole numbers below 10^max_digits, written out in two languages: small, exact, hard to learn by heart.

    Raises:
        ConfigError: one language twice, a number out of range, or a word tokenizer where a number is one word.
    """

    kind: ClassVar[str] = "number_words"
    group_name: ClassVar[str] = "digits"
    bleu_tokenization: ClassVar[None] = None

    source_language: Language = "en"
    """language to read"""
    target_language: Language = "es"
    """language to write"""
    max_digits: int = 6
    """most digits of a number, 2 to 6"""
    train_examples: int = 60_000
    """pairs to train on, drawn once (held-out numbers are never among them)"""
    test_examples: int = 1_000
    """numbers to test on, never seen in training, as even over digit counts as there are numbers"""
    validation_examples: int = 500
    """numbers to watch during training, never trained on and not in the test"""
    tokenizer: TokenizerConfig = TokenizerConfig(kind="word")
    """how text becomes token ids; de and it write a number as one word and need char, byte or bpe"""
    data_dir: str | None = None
    """where TFDS keeps prepared data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""

    def __post_init__(self):
        super().__post_init__()
        for field in ("source_language", "target_language"):
            check_choice(field, getattr(self, field), Language.__args__)
        if self.source_language == self.target_language:
            raise ConfigError(
                f"source_language and target_language are both {self.source_language!r}. Give two different ones of "
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
                    f"a word tokenizer can't be used with language {language!r}, which writes a number as one word: a "
                    "number never seen would be an unknown word. Take tokenizer.kind char, byte or bpe."
                )


@dataclass(frozen=True, kw_only=True)
class ParallelText(PairConfig):
    """Sentence pairs of one's own: two files with the same number of lines, or one file with a tab in each line.

    Raises:
        ConfigError: an empty path, a share out of range, or validation files in another form than the training files.
    """

    kind: ClassVar[str] = "parallel_text"

    source_path: str
    """one source a line; or source, tab, target when target_path is not given"""
    target_path: str | None = None
    """one target a line"""
    validation_source_path: str | None = None
    """pairs to evaluate on, in the same form (None: the end of the first)"""
    validation_target_path: str | None = None
    """targets to evaluate on; given exactly when target_path and validation_source_path are"""
    validation_share: float = 0.1
    """share of the pairs, at the end, to evaluate on when there is no validation_source_path"""
    tokenizer: TokenizerConfig = TokenizerConfig(kind="bpe")
    """how text becomes token ids"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "source_path")
        check_share(self, "validation_share")
        wanted = self.target_path is not None and self.validation_source_path is not None
        if wanted != (self.validation_target_path is not None):
            raise ConfigError(
                f"validation_target_path is {self.validation_target_path!r}, but target_path is {self.target_path!r} "
                f"and validation_source_path {self.validation_source_path!r}. Give validation files in the form of the "
                "training files: two of each, or one tab-separated file of each."
            )


@dataclass(frozen=True, kw_only=True)
class Multi30k(PairConfig):
    """Captions of photographs, English and German (Elliott et al. 2016, arXiv 1605.00459): 29,000 pairs to train on,
    1,014 to validate, and the 1,000 of test_2016_flickr.

    Raises:
        ConfigError: one language twice.
    """

    kind: ClassVar[str] = "multi30k"

    source_language: Literal["en", "de"] = "en"
    """language to read"""
    target_language: Literal["en", "de"] = "de"
    """language to write"""
    form: Literal["tokenized", "raw"] = "tokenized"
    """tokenized: lower-cased, normalized, punctuation apart, as published BLEU wants it. raw: as people write"""
    tokenizer: TokenizerConfig = TokenizerConfig(kind="bpe")
    """how text becomes token ids"""
    data_dir: str | None = None
    """where TFDS keeps prepared data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""
    manual_dir: str | None = None
    """a folder that holds the files, for a machine without network"""

    def __post_init__(self):
        super().__post_init__()
        for field in ("source_language", "target_language"):
            check_choice(field, getattr(self, field), ("en", "de"))
        check_choice("form", self.form, ("tokenized", "raw"))
        if self.source_language == self.target_language:
            raise ConfigError(
                f"source_language and target_language are both {self.source_language!r}. Give en and de, or de and en."
            )

    @property
    def bleu_tokenization(self) -> str:
        """How BLEU parts words: as it is where blanks part them already."""
        return "none" if self.form == "tokenized" else "13a"


@dataclass(frozen=True, kw_only=True)
class TFDSTranslation(PairConfig):
    """Sentence pairs of any dataset of TFDS that has a text in each language, by name: prepared once in the
    array_record format, and read without TensorFlow.

    Raises:
        ConfigError: a name that is none, one language twice, or one split twice.
    """

    kind: ClassVar[str] = "tfds_translation"

    name: str
    """as TFDS writes it: wmt14_translate/de-en, or with a version wmt14_translate/de-en:1.0.0"""
    source_language: str
    """language to read: the name of its text in the dataset, such as en"""
    target_language: str
    """language to write, likewise"""
    train_split: str = "train"
    """name of the split to train on"""
    validation_split: str = "validation"
    """name of the split to watch during training"""
    test_split: str | None = "test"
    """name of the split that is translated at the end (None: the validation split is)"""
    tokenizer: TokenizerConfig = TokenizerConfig(kind="bpe")
    """how text becomes token ids"""
    data_dir: str | None = None
    """where TFDS keeps prepared data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""

    def __post_init__(self):
        super().__post_init__()
        part = r"[A-Za-z0-9_][\w.+-]*"
        if not isinstance(self.name, str) or not re.fullmatch(rf"{part}(/{part})?(:\d+\.\d+\.\d+)?", self.name):
            raise ConfigError(
                f"name must be that of a dataset of TFDS, such as wmt14_translate/de-en, got {self.name!r}."
            )
        for field in ("source_language", "target_language", "train_split", "validation_split"):
            if not getattr(self, field):
                raise ConfigError(f"{field} must be a name, got {getattr(self, field)!r}.")
        if self.source_language == self.target_language:
            raise ConfigError(
                f"source_language and target_language are both {self.source_language!r}. Give two different ones."
            )
        splits = [self.train_split, self.validation_split, *([] if self.test_split is None else [self.test_split])]
        if len(set(splits)) < len(splits):
            raise ConfigError(
                f"train_split, validation_split and test_split must be different, got {', '.join(splits)}. Slices such "
                "as train[:99%] and train[99%:] part a split in two."
            )
