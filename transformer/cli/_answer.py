"""`transformer-zoo answer`: answers of a chat model to messages, each in a conversation of its own."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer.cli._chat import conversation, load_chat, start_reply
from transformer.cli._sampling import ChatOptions, PromptsCommand

if TYPE_CHECKING:
    from transformer.inference._generate import StreamedText


@dataclass(frozen=True, kw_only=True)
class Answer(ChatOptions, PromptsCommand):
    """Print the answer of a chat model to each prompt. `chat` holds a conversation of several messages.

    Without --prompt, stdin is one message.
    """

    max_new_tokens: int | None = None
    """maximum number of tokens of an answer; None: 1024"""
    temperature: float | None = None
    """sampling temperature (0: greedy); None: the value of generation_config.json, or 0"""


def main(command: Answer) -> None:
    command.check()
    command.variables()
    from transformer.cli._texts import read_prompts, warn_of_unknown
    from transformer.inference._generate import StreamedText

    chat, run = load_chat(command)
    prompts = read_prompts(command.prompt, lines=False)
    warn_of_unknown(run, prompts)
    if sys.stdout.isatty() and not command.prints_json:
        command = dataclasses.replace(command, stream=True)

    def write(prompt: str, seed: int, show: Callable[[str], None]) -> StreamedText:
        stream = start_reply(command, chat, conversation(command.system, prompt, command.image), seed)
        for piece in stream:
            show(piece)
        reply, ended = stream.reply, stream.reply.finish == "end"
        names = chat.tokenizer.tokens(reply.tokens)
        return StreamedText(prompt, reply.text, ended, names, reply.log_probabilities, reply.finish)

    command.print_pieces(run, prompts, write, lambda one: one.output)
