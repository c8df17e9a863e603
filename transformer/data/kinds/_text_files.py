"""Running text from any number of files of the user, of any size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from transformer.config._checks import ConfigError
from transformer.data._config import SUBWORDS, TokenizerConfig, check_share
from transformer.data._dataset import spread
from transformer.data._texts import TextConfig
from transformer.data.corpus._cache import cache_errors, cache_key, cache_root, locked, tokenize
from transformer.data.corpus._dataset import Corpus, CorpusDataset
from transformer.data.corpus._files import Source, find_source, read_documents, shared_file
from transformer.data.corpus._mixture import Mixture
from transformer.data.corpus._shard import held_out
from transformer.data.tokenizers._base import TOKENIZER_FILE, Tokenizer
from transformer.data.tokenizers._kinds import build_tokenizer, load_tokenizer

SAMPLE = 2**26
"""characters of text that a bpe vocabulary is learned from, at most"""
_SAMPLED_PLACES = 1024
"""segments of a source that the sample is taken from"""


@dataclass(frozen=True, kw_only=True)
class TextFiles(TextConfig):
    """Any number of your own text files of any size: .txt, .jsonl, .parquet and .arrow, and datasets of TFDS.

    The files are tokenized once, by all cores, and then read from disk. An end token follows each document.

    Raises:
        ConfigError: no path, weights that are not positive or not one per path, or a number out of range.
    """

    kind: ClassVar[str] = "text_files"

    paths: tuple[str, ...]
    """sources: glob patterns such as 'corpus/**/*.jsonl', or tfds:NAME[@SPLIT] for a prepared dataset of TFDS"""
    weights: tuple[float, ...] = ()
    """share of each source in the training rows, such as 0.7 0.3; each is repeated or cut as needed (none: by size)"""
    text_field: str = "text"
    """field of JSON lines, column of Parquet and Arrow files, or TFDS feature that contains the document"""
    packing: bool = False
    """whole documents in each row, without attention across them; False: windows of continuous tokens"""
    validation_paths: tuple[str, ...] = ()
    """sources for evaluation, as in paths (none: hold out a share of the documents)"""
    validation_share: float = 0.01
    """without validation_paths: fraction of the documents to hold out for evaluation, chosen by a hash of their text"""
    tokenizer: TokenizerConfig = SUBWORDS
    """tokenizer: byte, or bpe, learned from a sample of the text; ignored if a pretrained model has its own"""
    data_dir: str | None = None
    """folder of prepared TFDS data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""
    cache_dir: str | None = None
    """folder for tokenized text (None: transformer-zoo/text in $XDG_CACHE_HOME, else in ~/.cache)"""

    def __post_init__(self):
        super().__post_init__()
        check_share(self, "validation_share")
        if isinstance(self.paths, str) or isinstance(self.validation_paths, str):
            raise ConfigError(f"paths must be a list of patterns, got one text: {self.paths!r:.80}. Put it in a list.")
        if not self.paths or not all(self.paths) or not all(self.validation_paths):
            raise ConfigError(
                f"paths must name at least one pattern of files, such as 'corpus/*.jsonl', got {list(self.paths)}; "
                f"validation_paths {list(self.validation_paths)}."
            )
        if not self.text_field:
            raise ConfigError("text_field must be the name of a field or column, got ''.")
        if self.weights and len(self.weights) != len(self.paths):
            raise ConfigError(
                f"weights must have one number for each of the {len(self.paths)} paths, got {len(self.weights)}: "
                f"{', '.join(map(str, self.weights))}. Put patterns in quotation marks: each one is a source."
            )
        if wrong := [weight for weight in self.weights if not 0 < weight < float("inf")]:
            raise ConfigError(f"weights must be positive numbers, got {wrong[0]}. Remove the source to leave it out.")
        if self.weights:
            Mixture(self.weights)
        if self.tokenizer.kind not in ("bpe", "byte"):
            raise ConfigError(
                f"tokenizer.kind must be bpe or byte, got {self.tokenizer.kind!r}: the vocabulary of the others would "
                "need all of the text. Use one of them."
            )

    @property
    def segments(self) -> bool:
        """Whether documents are packed."""
        return self.packing

    def read(self) -> dict[str, list[Source]]:
        """Find the files of the sources by split, and check them; they are not read completely.

        Raises ValueError if a file has another format or no such field, or is for training and for evaluation.
        """
        splits = {"train": self.paths, "validation": self.validation_paths}
        found = {
            split: [find_source(pattern, self.text_field, self.data_dir) for pattern in patterns]
            for split, patterns in splits.items()
        }
        if (twice := shared_file(found["train"], found["validation"])) is not None:
            raise ValueError(
                f"{twice} is in --data.paths and in --data.validation-paths: held-out text would be trained on. Use "
                "patterns without common files, or disjoint splits."
            )
        return found

    def prepare(self, tokenizer: Tokenizer | None = None) -> CorpusDataset:
        """Return the dataset; tokenize what is not in the cache yet.

        Raises:
            OSError: the disk is full, or the cache is not writable.
            RuntimeError: a process of the tokenization was killed.
            ValueError: a file is damaged, or a split has no document. Also raises the errors of `read`.
        """
        found, root = self.read(), cache_root(self.cache_dir)
        share = 0.0 if self.validation_paths else self.validation_share
        tokenizer = tokenizer or self._tokenizer(found["train"], share, root)
        splits = {
            split: [tokenize(source, tokenizer, self.text_field, held, root) for source in found[split]]
            for split, held in (("train", share), ("validation", 1.0))
        }
        return CorpusDataset(
            self, tokenizer, Corpus({**splits, "validation": splits["validation"] or splits["train"]}, self.weights)
        )

    def _tokenizer(self, sources: Sequence[Source], share: float, root: Path) -> Tokenizer:
        """Return a byte tokenizer, or a bpe tokenizer from the cache, or learn it from a sample of the text."""
        if self.tokenizer.kind == "byte":
            return build_tokenizer(self.tokenizer, ())
        files = [source.files for source in sources]
        facts = files, self.text_field, share, self.weights, dataclasses.asdict(self.tokenizer), SAMPLE
        folder = root / f"tokenizer-{cache_key(*facts)}"
        with cache_errors(root):
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder, "learns a vocabulary"):
                if not (folder / TOKENIZER_FILE).exists():
                    build_tokenizer(self.tokenizer, self._sample(sources, share)).save_alone(folder)
        return load_tokenizer(folder)

    def _sample(self, sources: Sequence[Source], share: float) -> Iterator[str]:
        """Yield training documents from all over the sources, `SAMPLE` characters in the proportions of the sources."""
        sizes = [source.size for source in sources]
        everything, weights = sum(sizes) <= SAMPLE, self.weights or sizes
        for source, weight in zip(sources, weights, strict=True):
            places = spread(len(source.segments), len(source.segments) if everything else _SAMPLED_PLACES)
            for place in places:
                left = SAMPLE if everything else SAMPLE * weight / sum(weights) / len(places)
                for text in read_documents([source.segments[place]], self.text_field):
                    if left <= 0:
                        break
                    if not held_out(text, share):
                        yield text[: int(left) + 1]
                        left -= len(text)
