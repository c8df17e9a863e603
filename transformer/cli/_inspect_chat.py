"""`transformer-zoo inspect chat`: attention maps of a chat model for a message and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer.cli._chat import conversation, open_chat
from transformer.cli._inspect import ModelInput, PromptCommand, called, check_reader, draw
from transformer.cli._sampling import ChatOptions
from transformer.cli._streams import decode_argument

if TYPE_CHECKING:
    from transformer.inference._loaded_model import LoadedModel


@dataclass(frozen=True, kw_only=True)
class InspectChat(ChatOptions, PromptCommand):
    """Draw the attention weights of every layer and head for a conversation: a message as the chat template writes it,
    and the answer of the model.
    """

    prompt: str
    """message to the model; - reads stdin"""
    max_new_tokens: int | None = None
    """maximum new tokens of the answer; None: 128"""


def main(command: InspectChat, arguments: Sequence[str]) -> None:
    command.variables()
    command.check()
    opened = command.load()
    check_reader(opened)
    draw(command, opened, _answered(command, opened), called("chat", arguments))


def _answered(command: InspectChat, opened: LoadedModel) -> ModelInput:
    """Return a conversation as its template writes it, with the greedy answer of a chat model."""
    from transformer.chat._chat import Chat
    from transformer.cli._texts import read_prompts, shown
    from transformer.generate._sampling import Sampling

    (prompt,) = read_prompts([command.prompt], lines=False)  # with "-", all of stdin is one text
    chat = open_chat(opened, command.template)
    messages, variables = conversation(command.system, prompt), command.variables()

    def encode(other: LoadedModel) -> list[int]:
        """Encode the conversation with the template of the first model: a base model has none."""
        chat_of = Chat(other.model, other.params, other.tokenizer, template=chat.template)
        return chat_of.encode(messages, add_generation_prompt=True, **variables).ids

    given = chat.encode(messages, add_generation_prompt=True, **variables).ids
    greedy = Sampling(temperature=0.0)
    reply = chat.reply(messages, max_new_tokens=command.max_new_tokens or 128, sampling=greedy, **variables)
    texts = {} if command.system is None else {"System message": decode_argument(command.system)}
    texts |= {"Prompt": prompt, "Answer": reply.text}
    rows = {"target": [*given, *reply.tokens]}
    return ModelInput(prompt, rows, encode, texts, reply.text, len(given), shown(reply.text))
