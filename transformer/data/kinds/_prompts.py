"""Prompts from files of the user, for training with rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

import numpy as np

from transformer.config._checks import check_whole
from transformer.data._chat_tokenizer import chat_tokenizer, texts_in
from transformer.data._config import SUBWORDS, TokenizerConfig, check_date
from transformer.data._dataset import Batch, DataKind, Dataset, Ragged, fingerprint, spread
from transformer.data._held_out import HeldOutEnd
from transformer.data._turns import Conversation, chat_encoders, warn_of_unread
from transformer.data.files._records import Record
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._kinds import build_tokenizer


@dataclass(frozen=True)
class Prompt:
    """A prompt and what a reward function needs to judge a completion of it."""

    prompt: str | list[dict[str, Any]]
    """a text, or messages with roles and contents"""
    columns: Mapping[str, Any]
    """the other columns of its row"""
    place: str
    """file and line or row, for error messages"""


@dataclass(frozen=True, kw_only=True)
class PromptConfig(DataKind):
    """Options of all kinds of prompts: the model completes them, and learns from the rewards of its completions."""

    task: ClassVar[str] = "grpo"

    max_prompt_length: int = 256
    """longest prompt in tokens; a longer one is an error"""
    batch_size: int = 8
    """prompts per step, over all devices and processes"""
    eval_batch_size: int = 16
    """prompts per evaluation batch"""
    answer_column: str = "answer"
    """column with the right completion, for exact matches; a row may lack it"""
    template_path: str | None = None
    """for prompts that are messages: file with the chat template (None: the initial model's template, or a default)"""
    date: str = "2025-01-01"
    """date that the template writes, if it writes the current one"""
    tokenizer: TokenizerConfig = SUBWORDS
    """tokenizer, built from prompts and answers; ignored if a pretrained model has its own"""

    def __post_init__(self):
        check_whole(self, "max_prompt_length", "batch_size", "eval_batch_size")
        check_date(self, "date")

    def prepare(self, tokenizer: Tokenizer | None = None) -> PromptDataset:
        splits = self.read()
        chats = any(not isinstance(one.prompt, str) for part in splits.values() for one in part)
        texts = {split: [text for one in part for text in self._texts(one)] for split, part in splits.items()}
        if chats:
            conversations = {split: list(map(_conversation, part)) for split, part in splits.items()}
            tokenizer = chat_tokenizer(tokenizer, self.template_path, self.tokenizer, texts, conversations, self.date)
        elif tokenizer is None:
            tokenizer = build_tokenizer(self.tokenizer, texts["train"], texts["validation"])
        return PromptDataset(self, tokenizer, splits, chats)

    def _texts(self, one: Prompt) -> list[str]:
        answer = one.columns.get(self.answer_column)
        return [*texts_in(one.prompt), *([str(answer)] if answer is not None else [])]


class PromptDataset(Dataset):
    """Prompts, padded on the right to one shape for all batches. A batch has tokens (B, P), lengths and weights (B,),
    and `rows` (B,): indices into `prompts_of(split)`.
    """

    without_pairs = "has prompts and no pairs of source and target. Use prompts()."

    def __init__(self, config: PromptConfig, tokenizer: Tokenizer, splits: Mapping[str, Sequence[Prompt]], chats: bool):
        self.config, self.tokenizer, self._rows = config, tokenizer, splits
        encoders = chat_encoders(tokenizer, config.template_path) if chats else {}
        self._encoder = encoders.get(False)
        self._tokens = {split: Ragged(map(self._encode, part)) for split, part in splits.items()}
        if chats:
            asked = (_conversation(one) for part in splits.values() for one in part)
            warn_of_unread(encoders, asked, datetime.fromisoformat(config.date))
        self.longest = max(ragged.longest for ragged in self._tokens.values())
        texts = {split: [_as_text(one) for one in part] for split, part in splits.items()}
        arrays = [ragged.values for ragged in self._tokens.values()]
        self.fingerprint = fingerprint([config.kind, config.answer_column, tokenizer.state()], texts, arrays)

    @property
    def end_ids(self) -> list[int]:
        """Ids of the tokens that end a completion."""
        ends = set() if self.tokenizer.eos_id is None else {self.tokenizer.eos_id}
        return sorted(ends if self._encoder is None else ends | set(self._encoder.ends))

    def prompts_of(self, split: str) -> Sequence[Prompt]:
        return self._rows[split]

    def describe(self) -> str:
        return f"{self.config.kind}: {self._sizes} prompts of up to {self.longest} tokens, {self._vocabulary}"

    def prompts(self) -> list[str]:
        """Return three held-out prompts; of messages, the last one."""
        held_out = self._rows["validation"]
        chosen = [held_out[place].prompt for place in spread(len(held_out), 3)]
        return [one if isinstance(one, str) else "".join(texts_in(one[-1].get("content"))) for one in chosen]

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        tokens, lengths = self._tokens[split].padded(rows, self.longest, self.tokenizer.pad_id)
        return {
            "tokens": tokens,
            "lengths": lengths,
            "weights": np.ones(len(rows), np.float32),
            "rows": np.asarray(rows, np.int32),
        }

    def _encode(self, one: Prompt) -> list[int]:
        try:
            ids = self._ids(one.prompt)
        except ValueError as error:
            raise ValueError(f"{one.place}: {error}") from None
        most = self.config.max_prompt_length
        if not 1 <= len(ids) <= most:
            raise ValueError(
                f"{one.place}: a prompt must have 1 to {most} tokens (max_prompt_length), got {len(ids)}. Change or "
                f"remove the row, or raise --data.max-prompt-length."
            )
        return ids

    def _ids(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        if self._encoder is None:
            return self.tokenizer.encode_source(prompt)
        values = self._encoder.template.variables(_messages(prompt), None, None, True, False, {})
        return self._encoder.encode(values, now=datetime.fromisoformat(self.config.date)).ids


@dataclass(frozen=True, kw_only=True)
class Prompts(HeldOutEnd, PromptConfig):
    """Your own prompts: JSON lines (.jsonl), Parquet (.parquet), Arrow (.arrow), or a folder that `save_to_disk` of the
    package datasets wrote. A row has a `prompt`, a text or messages, and any other columns for the rewards.
    """

    kind: ClassVar[str] = "prompts"

    prompt_column: str = "prompt"
    """column with the prompt"""

    def read(self) -> dict[str, list[Prompt]]:
        """Return the prompts by split; without validation_path, a held-out split of the folder, or the last ones."""
        found = self.records("prompts")
        return {split: [_prompt(record, self.prompt_column) for record in records] for split, records in found.items()}


def _prompt(record: Record, column: str) -> Prompt:
    """Return the prompt of a row. Raises ValueError, with file and row, if it is neither a text nor messages."""
    value = record.values.get(column)
    is_text = isinstance(value, str) and bool(value.strip())
    is_chat = isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)
    if not is_text and not is_chat:
        raise ValueError(
            f"{record.place}: {column} must be a text or a list of messages, got {value!r:.60}. Correct the row, or "
            f"name the column of the prompt (--data.prompt-column)."
        )
    columns = {name: one for name, one in record.values.items() if name != column}
    if taken := sorted(columns.keys() & {"prompt", "completion"}):
        raise ValueError(
            f"{record.place}: a column must not be called {taken[0]!r}, because reward functions have an argument of "
            f"this name. Rename the column."
        )
    return Prompt(value, columns, record.place)


def _messages(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a prompt as messages; a text is a message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _conversation(one: Prompt) -> Conversation:
    return Conversation(one.place, _messages(one.prompt))


def _as_text(one: Prompt) -> str:
    """Return prompt and columns as one text, which identifies them."""
    return json.dumps([one.prompt, one.columns], sort_keys=True, ensure_ascii=False, default=str)
