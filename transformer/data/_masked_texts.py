"""Masked texts: shared options, texts by split, and the dataset, which masks new random positions in every pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from transformer.config._checks import ConfigError, check_whole
from transformer.data._config import SMALLEST_BPE, SUBWORDS, TokenizerConfig, check_share
from transformer.data._dataset import Batch, DataKind, Dataset, Ragged, fingerprint, spread
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._kinds import tokenizer_of_splits
from transformer.nn._axes import Array, Bool, Float, Int

if TYPE_CHECKING:
    import grain

HIDDEN, REPLACED = 0.8, 0.1
"""Fractions of the selected tokens that are replaced by the mask token and by a random token."""


def hide(
    tokens: Int[np.ndarray, "B T"],
    may_hide: Bool[np.ndarray, "B T"],
    draws: Float[np.ndarray, "B T 3"],
    share: float,
    mask_id: int,
    text_ids: Int[np.ndarray, "V"],
) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Mask tokens as in BERT (Devlin et al. 2018, arXiv 1810.04805, section 3.1 and appendix A.1).

    Of the positions in `may_hide`, a `share` is selected. Of these tokens, 80 % become `mask_id`, 10 % become a random
    one of `text_ids`, and 10 % are unchanged: texts in later fine-tuning have no mask tokens. `draws` has three uniform
    random numbers from [0, 1) per position: the first selects it, the second decides whether it is masked, replaced or
    unchanged, and the third selects the random token. Returns the model input, and the selected positions.
    """
    chosen = may_hide & (draws[..., 0] < share)
    # floor(u V) is uniform over 0 to V - 1.
    random_ids = text_ids[(draws[..., 2] * len(text_ids)).astype(np.int64)]
    fate = draws[..., 1]
    replaced = np.where(fate < HIDDEN, mask_id, np.where(fate < HIDDEN + REPLACED, random_ids, tokens))
    return np.where(chosen, replaced, tokens).astype(np.int32), chosen


@dataclass(frozen=True, kw_only=True)
class MaskedConfig(DataKind):
    """Options of all kinds of masked text: the model predicts a random fraction of the tokens from the others."""

    task: ClassVar[str] = "masked_lm"

    max_length: int = 128
    """maximum row length in tokens, including special tokens; longer texts are split into several rows"""
    batch_size: int = 32
    """rows per step, over all devices and processes"""
    eval_batch_size: int = 64
    """rows per evaluation batch"""
    mask_share: float = 0.15
    """fraction of the tokens to predict; of these, 80 % are masked, 10 % replaced at random and 10 % unchanged"""
    tokenizer: TokenizerConfig = SUBWORDS
    """tokenizer; ignored if a pretrained model has its own"""

    def __post_init__(self):
        check_whole(self, "batch_size", "eval_batch_size")
        check_whole(self, "max_length", least=2)
        check_share(self, "mask_share")
        least = {"bpe": SMALLEST_BPE, "word": 5}.get(self.tokenizer.kind)
        if least is not None and self.tokenizer.vocab_size == least:
            raise ConfigError(
                f"tokenizer.vocab_size must be at least {least + 1}, because the mask token needs an id, got {least}."
            )

    def prepare(self, tokenizer: Tokenizer | None = None) -> MaskedDataset:
        splits = self.read()
        return MaskedDataset(self, tokenizer or tokenizer_of_splits(self.tokenizer, splits, masked=True), splits)


class MaskedDataset(Dataset):
    """Texts with masked tokens to predict, padded on the right to one shape for all batches.

    In training, the masked positions depend only on the seed and the index of the batch, so that a resumed run masks
    the same positions. In evaluation they are fixed.
    """

    without_pairs = "has texts and no pairs of source and target. Use prompts()."

    def __init__(self, config: MaskedConfig, tokenizer: Tokenizer, splits: Mapping[str, Sequence[str]]):
        if tokenizer.mask_id is None:
            raise ValueError(
                f"the {tokenizer.kind} tokenizer has no mask token. Initialize from a masked language model, or train "
                "from scratch: training then builds a tokenizer with a mask token."
            )
        self.config, self.tokenizer, self._texts = config, tokenizer, splits
        self._ids = np.array(tokenizer.text_ids, np.int32)
        self._is_text = np.zeros(tokenizer.vocab_size, bool)
        self._is_text[self._ids] = True
        self._rows: dict[str, Ragged] = {}
        for split, texts in splits.items():
            rows = [row for text in texts for row in self._divided(text)]
            if not rows:
                raise ValueError(f"the {split} texts have no tokens to mask. Add more text.")
            self._rows[split] = Ragged(rows)
        self.longest = max(ragged.longest for ragged in self._rows.values())
        settings = [config.kind, self.longest, config.mask_share, tokenizer.state()]
        self.fingerprint = fingerprint(settings, splits, [ragged.values for ragged in self._rows.values()])

    def describe(self) -> str:
        sizes = (f"{len(one):,} {split} rows ({len(one.values):,} tokens)" for split, one in self._rows.items())
        return f"{self.config.kind}: {', '.join(sizes)}, up to {self.longest} tokens, {self._vocabulary}"

    def prompts(self) -> list[str]:
        """Return three full held-out texts."""
        texts = [text for text in self._texts["validation"] if text.strip()]
        return [texts[place] for place in spread(len(texts), 3)]

    def _divided(self, text: str) -> list[list[int]]:
        """Split a text into rows of at most `max_length`, each with the special tokens that the tokenizer adds."""
        ids, whole = self.tokenizer.encode(self.tokenizer.normalize(text)), self.tokenizer.encode_source(text)
        # Find the ids of the text within those with special tokens: what is before and after it belongs to every row.
        start = next((i for i in range(len(whole) - len(ids) + 1) if whole[i : i + len(ids)] == ids), 0)
        before, after = whole[:start], whole[start + len(ids) :]
        room = self.config.max_length - len(before) - len(after)
        if room < 1:
            raise ValueError(
                f"max_length ({self.config.max_length}) leaves no room for text: this tokenizer adds {len(before)} "
                f"tokens before a text and {len(after)} after it. Use a larger --data.max-length."
            )
        return [[*before, *ids[i : i + room], *after] for i in range(0, len(ids), room)]

    def _train_batches(self, seed: int, own: Callable[[int], np.ndarray]) -> grain.MapDataset:
        import grain

        size = self.config.batch_size
        rows = own(size)

        def assemble(place: int, chosen: np.ndarray) -> Batch:
            # Draw for the global batch and then select the rows of this process: the draws must not depend on the
            # number of processes.
            draws = np.random.default_rng([seed, place]).random((size, self.longest, 3))
            return self._hidden("train", chosen[rows], draws[rows])

        order = grain.MapDataset.range(self._size("train")).seed(seed).shuffle().repeat()
        return order.batch(size).map_with_index(assemble)

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        """Assemble evaluation rows. The random draws depend only on the row, not on the other rows of its batch."""
        draws = [np.random.default_rng([int(row)]).random((self.longest, 3)) for row in rows]
        return self._hidden(split, rows, np.stack(draws))

    def _hidden(self, split: str, rows: np.ndarray, draws: Float[Array, "B T 3"]) -> Batch:
        targets, lengths = self._rows[split].padded(rows, self.longest, self.tokenizer.pad_id)
        inside = np.arange(self.longest) < lengths[:, None]  # (B, T), false for padding
        may_hide = inside & self._is_text[targets]  # special tokens are never masked
        tokens, chosen = hide(targets, may_hide, draws, self.config.mask_share, self.tokenizer.mask_id, self._ids)
        return {"tokens": tokens, "lengths": lengths, "targets": targets, "weights": chosen.astype(np.float32)}
