"""Texts with masked tokens: what their kinds share (options, texts by split, and the dataset, which draws the masked
positions anew each time that a text is trained on).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from transformer.config._checks import ConfigError
from transformer.data._config import SMALLEST_BPE, SUBWORDS, DataKind, TokenizerConfig, check_share, check_whole
from transformer.data._dataset import Batch, Dataset, Example, Ragged, fingerprint, spread
from transformer.data._tokenizer import Tokenizer
from transformer.data._tokenizer_kinds import build_tokenizer
from transformer.nn._axes import Array, Bool, Float, Int

if TYPE_CHECKING:
    import grain

HIDDEN, REPLACED = 0.8, 0.1
"""of the tokens that are to be predicted, shares that the mask token and a random token stand for"""


def hide(
    tokens: Int[np.ndarray, "B T"],
    may_hide: Bool[np.ndarray, "B T"],
    draws: Float[np.ndarray, "B T 3"],
    share: float,
    mask_id: int,
    text_ids: Int[np.ndarray, "V"],
) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """What the model reads, and where it has to predict: BERT's masking (Devlin et al. 2018, arXiv 1810.04805, section
    3.1 and appendix A.1).

    A `share` of the places that `may_hide` is chosen. Of those, 80 % become `mask_id`, 10 % a random one of `text_ids`,
    and 10 % stay. Each place has three `draws` from [0, 1): whether it is chosen, what becomes of it, which token.
    """
    chosen = may_hide & (draws[..., 0] < share)
    random_ids = text_ids[(draws[..., 2] * len(text_ids)).astype(np.int64)]
    fate = draws[..., 1]
    replaced = np.where(fate < HIDDEN, mask_id, np.where(fate < HIDDEN + REPLACED, random_ids, tokens))
    return np.where(chosen, replaced, tokens).astype(np.int32), chosen


@dataclass(frozen=True)
class Texts:
    """Texts by split, `splits`."""

    splits: Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class MaskedConfig(DataKind):
    """Options of every kind of masked text: the model predicts a share of the tokens from the others.

    Raises:
        ConfigError: a number out of range.
    """

    task: ClassVar[str] = "masked_lm"

    max_length: int = 128
    """tokens in one row, special ones included; a longer text becomes several rows"""
    batch_size: int = 32
    """rows in one step, over all devices and processes together"""
    eval_batch_size: int = 64
    """rows in one batch of evaluation"""
    mask_share: float = 0.15
    """share of the tokens that are to be predicted; of these 80 % are hidden, 10 % replaced, 10 % left as they are"""
    tokenizer: TokenizerConfig = SUBWORDS
    """how text becomes token ids, where no pretrained model brings its own"""

    def __post_init__(self):
        check_whole(self, "batch_size", "eval_batch_size")
        check_whole(self, "max_length", least=2)
        check_share(self, "mask_share")
        least = {"bpe": SMALLEST_BPE, "word": 5}.get(self.tokenizer.kind)
        if least is not None and self.tokenizer.vocab_size == least:
            raise ConfigError(
                f"tokenizer.vocab_size must be at least {least + 1} here, with a mask token, got {least}."
            )

    def prepare(self, tokenizer: Tokenizer | None = None) -> MaskedDataset:
        """Return the dataset of the texts. Raises as `DataKind.prepare`."""
        found = self.read()
        held_out = [text for split, part in found.splits.items() if split != "train" for text in part]
        tokenizer = tokenizer or build_tokenizer(self.tokenizer, found.splits["train"], held_out, masked=True)
        return MaskedDataset(self, tokenizer, found.splits)


class MaskedDataset(Dataset):
    """Texts of which the model predicts what was hidden, padded on the right to one shape for all batches.

    What is hidden in training depends on the seed and the place in the data alone; in evaluation it is always the same.

    Raises:
        ValueError: a tokenizer without a mask token, or a split without a token of text.
    """

    def __init__(self, config: MaskedConfig, tokenizer: Tokenizer, splits: Mapping[str, Sequence[str]]):
        if tokenizer.mask_id is None:
            raise ValueError(
                f"the {tokenizer.kind} tokenizer has no mask token to hide others with. Start from a model that was "
                "trained to fill in, or from none: a tokenizer is made then."
            )
        self.config = config
        self.tokenizer = tokenizer
        self._texts = splits
        self._ids = np.array(tokenizer.text_ids, np.int32)
        self._is_text = np.zeros(tokenizer.vocab_size, bool)
        self._is_text[self._ids] = True
        self._tokens = {}
        for split, texts in splits.items():
            rows = [row for text in texts for row in self._rows(text)]
            if not rows:
                raise ValueError(f"the {split} texts have no tokens: there is nothing to hide. Give more text.")
            self._tokens[split] = Ragged(rows)
        self.longest = max(ragged.longest for ragged in self._tokens.values())
        settings = [config.kind, self.longest, config.mask_share, tokenizer.state()]
        self.fingerprint = fingerprint(settings, splits, [ragged.values for ragged in self._tokens.values()])

    @property
    def splits(self) -> tuple[str, ...]:
        """`train` and `validation`, and `test` where the data has one."""
        return tuple(self._tokens)

    def describe(self) -> str:
        """One line: rows and tokens, lengths and vocabulary."""
        sizes = ", ".join(
            f"{len(ragged.lengths):,} {split} rows ({len(ragged.values):,} tokens)"
            for split, ragged in self._tokens.items()
        )
        return (
            f"{self.config.kind}: {sizes}, up to {self.longest} tokens, vocabulary of {self.tokenizer.vocab_size:,} "
            f"({self.tokenizer.kind})"
        )

    def examples(self, split: str = "validation", limit: int | None = None) -> list[Example]:
        """Raises ValueError: there are no pairs."""
        raise ValueError(f"{self.config.kind} has texts and no pairs of source and target. Use prompts().")

    def prompts(self) -> list[str]:
        """Three held-out texts, whole."""
        texts = [text for text in self._texts["validation"] if text.strip()]
        return [texts[place] for place in spread(len(texts), 3)]

    def _rows(self, text: str) -> list[list[int]]:
        """The text as rows of at most `max_length`, each with what the tokenizer puts around a text."""
        ids, whole = self.tokenizer.encode(self.tokenizer.normalize(text)), self.tokenizer.encode_source(text)
        start = next((i for i in range(len(whole) - len(ids) + 1) if whole[i : i + len(ids)] == ids), 0)
        before, after = whole[:start], whole[start + len(ids) :]
        room = self.config.max_length - len(before) - len(after)
        if room < 1:
            raise ValueError(
                f"max_length ({self.config.max_length}) has no room for text: this tokenizer adds {len(before)} tokens "
                f"before and {len(after)} behind it. Give a larger --data.max-length."
            )
        return [[*before, *ids[i : i + room], *after] for i in range(0, len(ids), room)]

    def _size(self, split: str) -> int:
        return len(self._tokens[split].lengths)

    def _eval_rows(self, split: str) -> np.ndarray:
        return np.arange(self._size(split))

    def _train_batches(self, seed: int, own: Callable[[int], np.ndarray]) -> grain.MapDataset:
        import grain

        size = self.config.batch_size
        rows = own(size)

        def assemble(place: int, chosen: np.ndarray) -> Batch:
            draws = np.random.default_rng([seed, place]).random((size, self.longest, 3))
            return self._hidden("train", chosen[rows], draws[rows])

        order = grain.MapDataset.range(self._size("train")).seed(seed).shuffle().repeat()
        return order.batch(size).map_with_index(assemble)

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        """Rows to evaluate on: each has draws of its own, whatever rows are beside it."""
        draws = [np.random.default_rng([int(row)]).random((self.longest, 3)) for row in rows]
        return self._hidden(split, rows, np.stack(draws))

    def _hidden(self, split: str, rows: np.ndarray, draws: Float[Array, "B T 3"]) -> Batch:
        targets, lengths = self._tokens[split].padded(rows, self.longest, self.tokenizer.pad_id)
        inside = np.arange(self.longest) < lengths[:, None]
        may_hide = inside & self._is_text[targets]
        tokens, chosen = hide(targets, may_hide, draws, self.config.mask_share, self.tokenizer.mask_id, self._ids)
        return {"tokens": tokens, "lengths": lengths, "targets": targets, "weights": chosen.astype(np.float32)}
