"""Conversations from files of the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformer.data._conversations import ConversationConfig
from transformer.data._held_out import HeldOutEnd
from transformer.data._turns import Conversation, conversation


@dataclass(frozen=True, kw_only=True)
class Conversations(HeldOutEnd, ConversationConfig):
    """Your own conversations: JSON lines (.jsonl), Parquet (.parquet), Arrow (.arrow), or a folder that `save_to_disk`
    of the package datasets wrote. A row has `messages` with roles and contents, or `prompt` and `completion`.
    """

    kind: ClassVar[str] = "conversations"

    def read(self) -> dict[str, list[Conversation]]:
        """Return the conversations; without validation_path, a held-out split of the folder, or the last ones."""
        return {split: list(map(conversation, rows)) for split, rows in self.records("conversations").items()}
