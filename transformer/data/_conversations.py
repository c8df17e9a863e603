"""Conversations: shared options, and the dataset of packed rows with trained tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar

import numpy as np

from transformer.config._checks import check_choice, check_whole
from transformer.data._chat_tokenizer import chat_tokenizer, texts_in
from transformer.data._config import SUBWORDS, TokenizerConfig, check_date
from transformer.data._dataset import Batch, DataKind, Dataset, fingerprint, spread
from transformer.data._packed_rows import PackedRows
from transformer.data._turns import Conversation, TrainOn, chat_encoders, encode, warn_of_unread
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._pretrained import PretrainedTokenizer

Splits = Mapping[str, Sequence[Conversation]]
"""conversations by split"""
MOST_SHOWN = 1500
"""maximum number of characters of the example that is shown before training"""


@dataclass(frozen=True, kw_only=True)
class ConversationConfig(DataKind):
    """Options of all kinds of conversations: the model is trained to write the messages of the assistant."""

    task: ClassVar[str] = "sft"
    segments: ClassVar[bool] = True

    sequence_length: int = 1024
    """context length: tokens per row; longer conversations are cut, and counted"""
    batch_size: int = 8
    """rows per step, over all devices and processes"""
    eval_batch_size: int = 8
    """rows per evaluation batch"""
    packing: bool = True
    """put several conversations into one row, without attention across them; False: one conversation per row"""
    train_on: TrainOn = "assistant"
    """which messages are trained:
    assistant: all messages of the assistant, and the markers that end them;
    last: only its last message;
    everything: all tokens"""
    template_path: str | None = None
    """file with the chat template (None: the template of the initial model, or a simple default)"""
    date: str = "2025-01-01"
    """date that the template writes, if it writes the current one; fixed, so the data does not change every day"""
    tokenizer: TokenizerConfig = SUBWORDS
    """tokenizer, to which the markers of the template are added; ignored if a pretrained model has its own"""

    def __post_init__(self):
        check_whole(self, "sequence_length", "batch_size", "eval_batch_size")
        check_choice("train_on", self.train_on, TrainOn.__args__)
        check_date(self, "date")

    def prepare(self, tokenizer: Tokenizer | None = None) -> ConversationDataset:
        splits = self.read()
        texts = {
            split: [text for one in part for value in (one.messages, one.tools) for text in texts_in(value)]
            for split, part in splits.items()
        }
        tokenizer = chat_tokenizer(tokenizer, self.template_path, self.tokenizer, texts, splits, self.date)
        return ConversationDataset(self, tokenizer, splits)


@dataclass
class _Encoded:
    """The encoded conversations of a split."""

    ids: list[list[int]] = field(default_factory=list)
    trained: list[list[bool]] = field(default_factory=list)
    cut: int = 0
    """number of conversations that are too long, and lose their end"""
    dropped: int = 0
    """number of conversations that have no trained token in the part that fits"""


class ConversationDataset(Dataset):
    """Conversations in rows of a fixed length, several in one row unless `packing` is off."""

    without_pairs = "has conversations and no pairs of source and target. Use prompts()."

    def __init__(self, config: ConversationConfig, tokenizer: PretrainedTokenizer, splits: Splits):
        self.config, self.tokenizer = config, tokenizer
        self._conversations = splits
        self._now = datetime.fromisoformat(config.date)
        self._encoders = chat_encoders(tokenizer, config.template_path)
        self._example: list[tuple[str, bool]] = []
        encoded = {split: self._encode(part) for split, part in splits.items()}
        warn_of_unread(self._encoders, (one for part in splits.values() for one in part), self._now)
        self._counts = {split: (len(splits[split]), one.cut, one.dropped) for split, one in encoded.items()}
        for split, one in encoded.items():
            if not one.ids:
                raise ValueError(
                    f"no {split} conversation can be used, from {splits[split][0].place} on: in the first "
                    f"sequence_length ({config.sequence_length}) tokens of each of the {one.dropped}, nothing is "
                    f"trained. Use a larger --data.sequence-length."
                )
        length, pad, pack = config.sequence_length, tokenizer.pad_id, config.packing
        self._rows = {s: PackedRows(one.ids, one.trained, length, pad, pack=pack) for s, one in encoded.items()}
        settings = [config.kind, length, config.packing, tokenizer.state()]
        self.fingerprint = fingerprint(settings, {}, [array for rows in self._rows.values() for array in rows.arrays])

    def _encode(self, conversations: Sequence[Conversation]) -> _Encoded:
        found, limit = _Encoded(), self.config.sequence_length + 1
        for one in conversations:
            encoded, trained = encode(self._encoders[bool(one.tools)], one, self.config.train_on, self._now)
            is_cut = len(encoded.ids) > limit
            found.cut += is_cut
            if not any(trained[1:limit]):
                found.dropped += 1
                continue
            found.ids.append(encoded.ids[:limit])
            found.trained.append(trained[:limit])
            if not self._example:
                self._example = _parts(encoded.text, encoded.offsets[:limit], trained[:limit], whole=not is_cut)
        return found

    def describe(self) -> str:
        parts = []
        for split, rows in self._rows.items():
            count, cut, dropped = self._counts[split]
            lost = [f"{cut:,} cut at {self.config.sequence_length:,} tokens"] * bool(cut)
            lost += [f"{dropped:,} of them left out, because nothing is trained before that"] * bool(dropped)
            parts.append(
                f"{count:,} {split} conversations{''.join(f', {text}' for text in lost)}: {rows.targets:,} of "
                f"{rows.tokens:,} tokens trained, {len(rows):,} rows with {100 * rows.padding:.1f} % padding"
            )
        return f"{self.config.kind}: {'; '.join(parts)}; vocabulary of {self.tokenizer.vocab_size:,}"

    @property
    def example(self) -> list[tuple[str, bool]]:
        """Parts of the first training conversation, and whether they are trained."""
        return self._example

    def prompts(self) -> list[str]:
        """Return the last message of the user before an answer, of three held-out conversations."""
        return [text for text, _ in self.openings(3)]

    def openings(self, limit: int) -> list[tuple[str, list[int]]]:
        """Return (last message, token ids) of evenly spaced held-out conversations, up to their last answer, without
        those that fill the context, or that the template can't end there.
        """
        held_out, found = self._conversations["validation"], []
        for place in spread(len(held_out), limit):
            one = held_out[place]
            turns = [i for i, message in enumerate(one.messages) if message.get("role") == "assistant"]
            before = one.messages[: turns[-1] if turns else len(one.messages)]
            encoder = self._encoders[bool(one.tools)]
            try:
                values = encoder.template.variables(before, one.tools, None, True, False, one.switches)
                ids = encoder.encode(values, now=self._now).ids
            except ValueError:
                continue
            if ids and len(ids) < self.config.sequence_length:
                found.append(("".join(texts_in(before[-1].get("content"))), ids))
        return found

    @property
    def end_ids(self) -> list[int]:
        """Ids of the tokens that end an answer."""
        return sorted(self._encoders[False].ends)

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        return self._rows[split].assemble(rows)


def _parts(
    text: str, offsets: Sequence[tuple[int, int]], trained: Sequence[bool], whole: bool
) -> list[tuple[str, bool]]:
    """Return the parts of a text that are covered by trained tokens, and those between them."""
    parts: list[tuple[str, bool]] = []
    done = 0
    for (start, end), counts in zip(offsets, trained, strict=True):
        for upto, flag in ((start, False), (end, counts)):
            if upto > done:
                joined = parts and parts[-1][1] == flag
                before = parts.pop()[0] if joined else ""
                parts.append((before + text[done:upto], flag))
                done = upto
    return [*parts, (text[done:] if whole else " ...", False)] if done < len(text) else parts


def marked(parts: Sequence[tuple[str, bool]], color: bool | None = None) -> str:
    """Return a text with its trained parts in color (None: if stdout is a terminal), or in square brackets."""
    color = sys.stdout.isatty() if color is None else color
    before, after = ("\033[1;32m", "\033[0m") if color else ("[", "]")
    shown, left = [], MOST_SHOWN
    for text, trained in parts:
        cut = text[:left] + (" ..." if len(text) > left else "")
        visible = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in cut)
        shown.append(f"{before}{visible}{after}" if trained else visible)
        left -= len(text)
        if left <= 0:
            break
    return "".join(shown)
