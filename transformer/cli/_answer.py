"""`transformer-zoo answer`: answers of a chat model to messages, each in a separate conversation."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer.cli._chat import ReplyCommand, conversation
from transformer.cli._sampling import PromptsCommand

if TYPE_CHECKING:
    from transformer.inference._generate import StreamedText


@dataclass(frozen=True, kw_only=True)
class Answer(ReplyCommand, PromptsCommand):
    """Print the answer of a chat model to each prompt. `chat` holds a conversation of several messages.

    Without --prompt, stdin is one message.
    """


def main(command: Answer) -> None:
    command.check()
    command.variables()
    from transformer.cli._texts import read_prompts, warn_of_unknown
    from transformer.inference._generate import StreamedText

    chat, run = command.load_chat(command.image)
    prompts = read_prompts(command.prompt, lines=False)
    warn_of_unknown(run, prompts)
    if sys.stdout.isatty() and not command.prints_json:
        command = dataclasses.replace(command, stream=True)

    def write(prompt: str, seed: int, show: Callable[[str], None]) -> StreamedText:
        stream = command.start_reply(chat, conversation(command.system, prompt, command.image), seed)
        for piece in stream:
            show(piece)
        reply, ended = stream.reply, stream.reply.finish == "end"
        names = chat.tokenizer.tokens(reply.tokens)
        return StreamedText(prompt, reply.text, ended, names, reply.log_probabilities, reply.finish)

    command.print_pieces(run, prompts, write, lambda one: one.output)
