"""What to train on: one frozen dataclass per kind of data, typed and validated at birth. Nothing heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from transformer.config import ConfigError, check_choice

TokenizerKind = Literal["char", "byte", "word", "bpe"]
Language = Literal["en", "es", "pt", "ru", "fr", "de", "it"]

ONE_WORD_LANGUAGES = ("de", "it")
"""Languages that write a whole number as one word: a vocabulary of words can't meet a number it never saw."""

SMALLEST_BPE = 256 + 3
"""Every byte and the three special tokens (padding, begin, end)."""

PLACES = frozenset(
    {"data_dir", "manual_dir", "path", "source_path", "target_path"}
    | {"validation_path", "validation_source_path", "validation_target_path"}
)
"""Fields that say where bytes lie. They may change between runs: a fingerprint says what the bytes are."""


def _check_whole(config: object, *fields: str, least: int = 1, none: bool = False) -> None:
    for field in fields:
        value = getattr(config, field)
        if none and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            allowed = f"a whole number of at least {least}" + (", or None" if none else "")
            raise ConfigError(f"{field} must be {allowed}, got {value!r}.")


def _check_share(config: object, field: str) -> None:
    value = getattr(config, field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
        raise ConfigError(f"{field} must be above 0 and below 1, got {value!r}.")


def _check_path(config: object, *fields: str) -> None:
    for field in fields:
        if not getattr(config, field):
            raise ConfigError(f"{field} must name a file, got {getattr(config, field)!r}.")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes token ids. Source and target of a pair share one vocabulary.

    Raises:
        ConfigError: an unknown kind, or a vocab_size that it has no use for or that is too small.
    """

    kind: TokenizerKind = "char"
    """char: every character of the data. byte: UTF-8. word: what blanks separate. bpe: learned parts, over bytes"""
    vocab_size: int | None = None
    """bpe: the size to train to (None: 8192). word: keep the most frequent, the rest become <unk> (None: keep all)"""

    def __post_init__(self):
        check_choice("tokenizer.kind", self.kind, TokenizerKind.__args__)
        if self.vocab_size is None:
            return
        if self.kind in ("char", "byte"):
            raise ConfigError(
                f"vocab_size ({self.vocab_size}) can't be chosen for a {self.kind} tokenizer: its vocabulary follows "
                "from the data. Leave it out, or take kind word or bpe."
            )
        _check_whole(self, "vocab_size", least=SMALLEST_BPE if self.kind == "bpe" else 5)


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """What every kind of running text has: examples are windows of `sequence_length` tokens, to be continued."""

    task: ClassVar[str] = "causal_lm"

    sequence_length: int = 256
    """tokens in one training window"""
    batch_size: int = 32
    """windows in one step, over all devices and processes together"""
    eval_batch_size: int = 64
    """windows in one batch of evaluation"""
    tokenizer: TokenizerConfig = TokenizerConfig(kind="char")
    """how text becomes token ids"""

    def __post_init__(self):
        _check_whole(self, "sequence_length", "batch_size", "eval_batch_size")


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """What every kind of paired text has: a source to be read and a target to be written."""

    task: ClassVar[str] = "seq2seq"
    group_name: ClassVar[str] = "group"
    """what the groups are in which exact matches are counted"""

    max_source_length: int | None = None
    """longest source in tokens; longer pairs are left out and counted (None: the longest in the data)"""
    max_target_length: int | None = None
    """longest target in tokens, its end token included; longer pairs are left out and counted (None: the longest)"""
    batch_size: int = 128
    """pairs in one step, over all devices and processes together"""
    eval_batch_size: int = 250
    """pairs in one batch of evaluation"""

    def __post_init__(self):
        _check_whole(self, "batch_size", "eval_batch_size")
        _check_whole(self, "max_source_length", none=True)
        _check_whole(self, "max_target_length", least=2, none=True)


@dataclass(frozen=True, kw_only=True)
class NumberWords(PairConfig):
    """Whole numbers below 10^max_digits, written out in two languages: small, exact, hard to learn by heart.

    Raises:
        ConfigError: one language twice, a number out of range, or a word tokenizer where a number is one word.
    """

    kind: ClassVar[str] = "number_words"
    group_name: ClassVar[str] = "digits"

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
        _check_whole(self, "max_digits", least=2)
        if self.max_digits > 6:
            raise ConfigError(f"max_digits must be from 2 to 6 (numbers below a million), got {self.max_digits}.")
        _check_whole(self, "train_examples", least=200)
        _check_whole(self, "test_examples", "validation_examples")
        for language in (self.source_language, self.target_language):
            if language in ONE_WORD_LANGUAGES and self.tokenizer.kind == "word":
                raise ConfigError(
                    f"a word tokenizer can't be used with language {language!r}, which writes a number as one word: a "
                    "number never seen would be an unknown word. Take tokenizer.kind char, byte or bpe."
                )


@dataclass(frozen=True, kw_only=True)
class TinyShakespeare(TextConfig):
    """Karpathy's Tiny Shakespeare through TFDS: 1,115,394 characters, the last 10 % held out as nanoGPT does."""

    kind: ClassVar[str] = "tiny_shakespeare"

    data_dir: str | None = None
    """where TFDS keeps prepared data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""
    manual_dir: str | None = None
    """a folder that holds input.txt, for a machine without network"""


@dataclass(frozen=True, kw_only=True)
class LocalText(TextConfig):
    """What running text from one's own file has."""

    path: str
    """the file to train on"""
    validation_path: str | None = None
    """a second file to evaluate on (None: the end of the first)"""
    validation_share: float = 0.1
    """share at the end of the file to evaluate on when there is no validation_path"""

    def __post_init__(self):
        super().__post_init__()
        _check_path(self, "path")
        _check_share(self, "validation_share")


@dataclass(frozen=True, kw_only=True)
class TextFile(LocalText):
    """A text file of one's own (UTF-8), as one running text."""

    kind: ClassVar[str] = "text_file"


@dataclass(frozen=True, kw_only=True)
class JsonLines(LocalText):
    """A file of one's own with one JSON object per line, each with a document in one of its fields."""

    kind: ClassVar[str] = "json_lines"

    field: str = "text"
    """the field that holds the document"""


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
        _check_path(self, "source_path")
        _check_share(self, "validation_share")
        wanted = self.target_path is not None and self.validation_source_path is not None
        if wanted != (self.validation_target_path is not None):
            raise ConfigError(
                f"validation_target_path is {self.validation_target_path!r}, but target_path is {self.target_path!r} "
                f"and validation_source_path {self.validation_source_path!r}. Give validation files in the form of the "
                "training files: two of each, or one tab-separated file of each."
            )


@dataclass(frozen=True, kw_only=True)
class LabeledConfig:
    """What every kind of labeled text has: a text to be read, and the class it is of.

    Raises:
        ConfigError: a number out of range, or labels that are one, empty or twice the same.
    """

    task: ClassVar[str] = "classifier"

    labels: tuple[str, ...] = ()
    """the classes as the files write them, by number; none: all that the training file has, in order"""
    max_length: int = 128
    """longest text in tokens, special ones included; of longer ones the end is cut off"""
    batch_size: int = 32
    """texts in one step, over all devices and processes together"""
    eval_batch_size: int = 64
    """texts in one batch of evaluation"""
    tokenizer: TokenizerConfig = TokenizerConfig(kind="bpe")
    """how text becomes token ids, where no pretrained model brings its own"""

    def __post_init__(self):
        _check_whole(self, "batch_size", "eval_batch_size")
        _check_whole(self, "max_length", least=2)
        if len(self.labels) == 1 or len(set(self.labels)) < len(self.labels) or "" in self.labels:
            raise ConfigError(
                f"labels must be at least two, all different, got {', '.join(map(repr, self.labels))}. Leave them out "
                "to take those of the training file."
            )


@dataclass(frozen=True, kw_only=True)
class LabeledText(LabeledConfig):
    """Texts of one's own and their classes: a tab-separated file (UTF-8) whose first line names its columns.

    Raises:
        ConfigError: an empty path, a share out of range, or one column for both.
    """

    kind: ClassVar[str] = "labeled_text"

    path: str
    """the file to train on"""
    validation_path: str | None = None
    """a second file to evaluate on (None: the end of the first)"""
    validation_share: float = 0.1
    """share at the end of the file to evaluate on when there is no validation_path"""
    text_column: str = "sentence"
    """name of the column that holds the text"""
    label_column: str = "label"
    """name of the column that holds its class"""

    def __post_init__(self):
        super().__post_init__()
        _check_path(self, "path")
        _check_share(self, "validation_share")
        if not self.text_column or not self.label_column or self.text_column == self.label_column:
            raise ConfigError(
                f"text_column and label_column must name two columns, got {self.text_column!r} and "
                f"{self.label_column!r}."
            )


@dataclass(frozen=True, kw_only=True)
class SST2(LabeledConfig):
    """Phrases and sentences of movie reviews, negative or positive (Socher et al. 2013), in the files of GLUE (Wang et
    al. 2018, arXiv 1804.07461): 67,349 of train.tsv to train on, 872 of dev.tsv to evaluate on.

    Raises:
        ConfigError: other than two labels.
    """

    kind: ClassVar[str] = "sst2"

    labels: tuple[str, ...] = ("negative", "positive")
    """names of the classes that the files write as 0 and 1"""
    manual_dir: str | None = None
    """the folder that holds train.tsv and dev.tsv"""

    def __post_init__(self):
        super().__post_init__()
        if len(self.labels) != 2:
            raise ConfigError(f"labels must be two, for 0 and 1 in the files, got {len(self.labels)}.")


DataConfig = NumberWords | TinyShakespeare | TextFile | JsonLines | ParallelText | LabeledText | SST2
"""What a recipe's `data` may be."""

DATA: dict[str, type] = {
    config.kind: config
    for config in (NumberWords, TinyShakespeare, TextFile, JsonLines, ParallelText, LabeledText, SST2)
}
"""Every kind of data by the tag it is saved under."""
