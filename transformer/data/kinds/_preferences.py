"""Preferences from a file of the user: prompts with a chosen and a rejected response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

import numpy as np

from transformer.config._checks import check_whole
from transformer.data._chat_tokenizer import chat_tokenizer, texts_in
from transformer.data._config import SUBWORDS, TokenizerConfig, check_date
from transformer.data._dataset import Batch, DataKind, Dataset, Example, Ragged, fingerprint, same_start
from transformer.data._held_out import HeldOutEnd
from transformer.data._turns import Conversation, chat_encoders, conversation, encode, one_or_list, warn_of_unread
from transformer.data.files._records import Record, parsed
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._kinds import build_tokenizer


@dataclass(frozen=True)
class Preference:
    """A prompt with two responses: texts, or messages, of which both conversations contain those of the prompt."""

    place: str
    """file and line or row, for error messages"""
    prompt: str
    """the prompt, or the last message of it"""
    chosen: str | Conversation
    rejected: str | Conversation

    @property
    def texts(self) -> list[str]:
        """All texts, for a vocabulary and the fingerprint."""
        both = [one if isinstance(one, str) else one.messages for one in (self.chosen, self.rejected)]
        return [text for part in (self.prompt, *both) for text in texts_in(part)]

    @property
    def conversations(self) -> list[Conversation]:
        """Both conversations; empty for texts."""
        return [one for one in (self.chosen, self.rejected) if isinstance(one, Conversation)]


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(DataKind):
    """Options of all kinds of preferences: the model learns to prefer the chosen of two responses."""

    task: ClassVar[str] = "dpo"

    max_length: int = 512
    """maximum length of a prompt with a response, in tokens; longer responses are truncated"""
    batch_size: int = 16
    """pairs per step, over all devices and processes"""
    eval_batch_size: int = 16
    """pairs per evaluation batch"""
    template_path: str | None = None
    """for messages: file with the chat template (None: the template of the initial model, or a simple default)"""
    date: str = "2025-01-01"
    """for messages: date that the template writes, if it writes the current one"""
    tokenizer: TokenizerConfig = SUBWORDS
    """tokenizer; ignored if a pretrained model has its own"""

    def __post_init__(self):
        check_whole(self, "batch_size", "eval_batch_size")
        check_whole(self, "max_length", least=2)
        check_date(self, "date")

    def prepare(self, tokenizer: Tokenizer | None = None) -> PreferenceDataset:
        """Return the dataset. Raises ValueError if some rows have messages and others texts."""
        found = self.read()
        kinds = {isinstance(one.chosen, str): one.place for rows in found.values() for one in rows}
        if len(kinds) == 2:
            raise ValueError(
                f"{kinds[False]} has messages, and {kinds[True]} has texts: expected the same in all rows. Put "
                f"them into two files."
            )
        if True in kinds and self.template_path is not None:
            raise ValueError(f"data.template_path is for messages, but {kinds[True]} has texts. Remove it.")
        texts = {split: [text for one in rows for text in one.texts] for split, rows in found.items()}
        if False in kinds:
            chats = {split: [chat for one in rows for chat in one.conversations] for split, rows in found.items()}
            tokenizer = chat_tokenizer(tokenizer, self.template_path, self.tokenizer, texts, chats, self.date)
        elif tokenizer is None:
            tokenizer = build_tokenizer(self.tokenizer, texts["train"], texts["validation"])
        return PreferenceDataset(self, tokenizer, found)


@dataclass(frozen=True, kw_only=True)
class Preferences(HeldOutEnd, PreferenceConfig):
    """Your own preferences: a prompt, a chosen and a rejected response per row, for direct preference optimization.

    The file is JSON lines, Parquet, Arrow, or a folder that `datasets` saved. Its columns are `prompt`, `chosen` and
    `rejected`, with texts, or with lists of messages, which may repeat the prompt. Without `prompt`, the common
    beginning of both responses is the prompt.
    """

    kind: ClassVar[str] = "preferences"

    def read(self) -> dict[str, list[Preference]]:
        """Return the preferences; without validation_path, a held-out split of the folder, or the last ones."""
        return {split: list(map(_preference, rows)) for split, rows in self.records("preferences").items()}


def _preference(record: Record) -> Preference:
    for column in ("chosen", "rejected"):
        if column not in record.values:
            raise ValueError(
                f"{record.place}: expected the columns prompt, chosen and rejected, got {record.columns}. Rename the "
                f"columns, or fill in or remove the row."
            )
    found = _of_texts(record) if isinstance(record.values["chosen"], str) else _of_messages(record)
    if found.chosen == found.rejected:
        raise ValueError(
            f"{record.place}: chosen and rejected are equal, so the row has no effect. Remove it, or correct them."
        )
    return found


def _of_texts(record: Record) -> Preference:
    given, place = record.values, record.place
    for column in ("prompt", "chosen", "rejected"):
        if not isinstance(given.get(column, ""), str):
            raise ValueError(
                f"{place}: {column} must be a text like chosen, got {given[column]!r:.60}. Use texts in all three "
                f"columns, or lists of messages in chosen and rejected."
            )
    chosen, rejected = given["chosen"], given["rejected"]
    prompt, hint = given.get("prompt"), ""
    if prompt is None:
        hint = " (without a column prompt, it is the common beginning of both responses)"
        prompt = _common_beginning(chosen, rejected) if chosen != rejected else chosen
        chosen, rejected = chosen.removeprefix(prompt), rejected.removeprefix(prompt)
    for name, text in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
        if not text.strip() and given["chosen"] != given["rejected"]:
            raise ValueError(
                f"{place}: the text of {name} is empty{hint}: expected some words, got {text!r}. Remove the row."
            )
    return Preference(place, prompt, chosen, rejected)


def _of_messages(record: Record) -> Preference:
    """Return the preference of a row with lists of messages; its prompt is that of the row, or their beginning."""
    given = {column: parsed(record, column) for column in ("chosen", "rejected")}
    for column, messages in given.items():
        if not isinstance(messages, list) or not messages:
            raise ValueError(f"{record.place}: {column} must be a list of messages, got {messages!r:.60}. Correct it.")
    before, shared = _prompt_of(record, *given.values())
    if not before:
        raise ValueError(
            f"{record.place}: the prompt is empty: chosen and rejected have no first message in common, and there is "
            f"no column prompt. Add the prompt."
        )
    others = {name: record.values[name] for name in ("tools", "chat_template_kwargs") if name in record.values}
    both = []
    for column, messages in given.items():
        response = messages[shared:]
        if not response and given["chosen"] != given["rejected"]:
            raise ValueError(f"{record.place}: {column} has no message after the prompt. Add the response.")
        row = {"prompt": before, "completion": response or messages, **others}
        both.append(conversation(Record(record.place, row)))
    last = both[0].messages[both[0].given - 1]
    content = last.get("content") if isinstance(last, Mapping) else None
    return Preference(record.place, "".join(texts_in(content)), *both)


def _prompt_of(record: Record, chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], int]:
    """Return the messages of the prompt, and how many of them chosen and rejected repeat at their beginning.

    The column prompt has messages, or the text of a message of the user; many files repeat it in both responses.
    Without it, the messages that both responses begin with are the prompt.
    """
    shared = same_start(chosen, rejected)
    beginning = chosen[:shared]
    if not record.values.get("prompt"):
        return beginning, shared
    prompt = one_or_list(record, "prompt", "user")
    if beginning[: len(prompt)] == prompt:
        return prompt, len(prompt)
    is_text = len(prompt) == 1 and isinstance(record.values["prompt"], str)
    if is_text and any(isinstance(one, Mapping) and one.get("content") == prompt[0]["content"] for one in beginning):
        return beginning, shared  # behind a system message, for example
    return prompt, 0


def _response(one: str | Conversation) -> str:
    return one if isinstance(one, str) else "".join(texts_in(one.messages[one.given :]))


def _common_beginning(first: str, second: str) -> str:
    """Return the longest common beginning of two texts that ends between two words, or after a line."""
    size = same_start(first, second)
    end = max(first.rfind(mark, 0, size) for mark in (" ", "\n"))
    return first[: end + 1]


@dataclass(frozen=True)
class _Encoded:
    """Token ids of a prompt with a response, and which of them belong to the response."""

    ids: list[int]
    trained: list[bool]


class PreferenceDataset(Dataset):
    """Pairs of sequences, the prompt with the chosen and with the rejected response, padded on the right to max_length.

    A batch has `tokens`, `targets` and `weights` (B, 2, T); the weights are 1 for the tokens of the responses, with the
    end token. Pairs without two different responses in max_length tokens are left out.
    """

    def __init__(self, config: PreferenceConfig, tokenizer: Tokenizer, splits: Mapping[str, Sequence[Preference]]):
        self.config, self.tokenizer = config, tokenizer
        self._rows: dict[str, list[Preference]] = {}
        self._left_out = self._truncated = 0
        self._tokens: dict[str, Ragged] = {}
        self._trained: dict[str, Ragged] = {}
        self._now = datetime.fromisoformat(config.date)
        first = next(iter(splits.values()))[0]
        self._encoders = {} if isinstance(first.chosen, str) else chat_encoders(tokenizer, config.template_path)
        for split, rows in splits.items():
            pairs = [(one, self._pair(one)) for one in rows]
            kept = [(one, pair) for one, pair in pairs if pair is not None]
            self._left_out += len(pairs) - len(kept)
            if not kept:
                raise ValueError(
                    f"no {split} preference fits, from {rows[0].place} on: in the first {config.max_length} tokens "
                    f"(max_length), a response is missing or both are the same. Raise --data.max-length."
                )
            self._rows[split] = [one for one, _ in kept]
            self._tokens[split] = Ragged(part.ids for _, pair in kept for part in pair)  # chosen, rejected, chosen, ...
            self._trained[split] = Ragged(part.trained for _, pair in kept for part in pair)
        warn_of_unread(self._encoders, self._conversations(), self._now)
        arrays = [array for split in splits for array in (self._tokens[split].values, self._trained[split].values)]
        texts = {split: [text for one in rows for text in one.texts] for split, rows in self._rows.items()}
        self.fingerprint = fingerprint([config.kind, config.max_length, tokenizer.state()], texts, arrays)

    def _conversations(self) -> Iterator[Conversation]:
        return (chat for rows in self._rows.values() for one in rows for chat in one.conversations)

    def describe(self) -> str:
        longest = max(ragged.longest for ragged in self._tokens.values())
        cut = f", {self._truncated:,} responses truncated" if self._truncated else ""
        cut += f", {self._left_out:,} pairs left out that differ only after max_length" if self._left_out else ""
        return f"{self.config.kind}: {self._sizes} pairs; up to {longest} tokens{cut}, {self._vocabulary}"

    def _pair_at(self, split: str, row: int) -> Example:
        one = self._rows[split][row]
        return Example(one.prompt, _response(one.chosen))

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        both = np.stack([2 * rows, 2 * rows + 1], 1).reshape(-1)  # (2B,)
        # (2B, T + 1): one token more than a row, because the targets are the tokens shifted left by one.
        width = self.config.max_length + 1
        ids, _ = self._tokens[split].padded(both, width, self.tokenizer.pad_id)
        trained, _ = self._trained[split].padded(both, width, 0)
        ids, trained = ids.reshape(len(rows), 2, width), trained.reshape(len(rows), 2, width)
        return {"tokens": ids[..., :-1], "targets": ids[..., 1:], "weights": trained[..., 1:].astype(np.float32)}

    def _pair(self, one: Preference) -> tuple[_Encoded, ...] | None:
        """Return the ids of both sequences, truncated to max_length + 1; None if the prompt leaves no place."""
        pair = tuple(self._encoded(one, response) for response in (one.chosen, one.rejected))
        if pair[0].ids == pair[1].ids:
            raise ValueError(
                f"{one.place}: the tokenizer or the chat template has the same tokens for chosen and rejected. Remove "
                f"the row, or use another tokenizer."
            )
        most = self.config.max_length + 1
        kept = tuple(_Encoded(part.ids[:most], part.trained[:most]) for part in pair)
        if not all(any(part.trained[1:]) for part in kept) or kept[0].ids == kept[1].ids:
            return None
        self._truncated += sum(len(part.ids) > most for part in pair)
        return kept

    def _encoded(self, one: Preference, response: str | Conversation) -> _Encoded:
        if isinstance(response, Conversation):
            encoded, trained = encode(self._encoders[bool(response.tools)], response, "assistant", self._now)
            return _Encoded(encoded.ids, trained)
        # As one text: a token may contain the end of the prompt and the beginning of the response.
        try:
            before, ids = (self.tokenizer.encode_source(text) for text in (one.prompt, one.prompt + response))
        except ValueError as error:
            raise ValueError(f"{one.place}: {error}") from None
        start, end = same_start(before, ids), self.tokenizer.eos_id
        ids = ids if end is None or ids[-1:] == [end] else [*ids, end]
        return _Encoded(ids, [place >= start for place in range(len(ids))])
