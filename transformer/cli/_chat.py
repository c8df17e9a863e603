"""`transformer-zoo chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from transformer.cli._arguments import PathText
from transformer.cli._errors import describe
from transformer.cli._models import check_images
from transformer.cli._sampling import ChatOptions, SamplingCommand
from transformer.cli._streams import decode_argument
from transformer.config._checks import ConfigError, nearest
from transformer.config._local_paths import local_path
from transformer.config._replaced_files import replace_file
from transformer.config._untrusted import bounded_lines

if TYPE_CHECKING:
    from transformer.chat._chat import Chat, ReplyStream
    from transformer.chat._image_prompts import ImagePrompts
    from transformer.chat._prompts import Message
    from transformer.inference._loaded_model import LoadedModel

COMMANDS = {
    "/help": "list these commands",
    "/reset": "forget the conversation, but not the system message",
    "/system TEXT": "begin a new conversation with this system message; without TEXT: with none",
    "/save FILE": "write the conversation into a JSON file",
}
"""lines that are commands instead of messages"""


@dataclass(frozen=True, kw_only=True)
class ReplyCommand(ChatOptions, SamplingCommand):
    """Options of a command that prints the replies of a chat model."""

    max_new_tokens: int | None = None
    """maximum number of tokens of an answer; None: 1024"""
    temperature: float | None = None
    """sampling temperature (0: greedy); None: the value of generation_config.json, or 0"""

    def load_chat(self, images: Sequence[str]) -> tuple[Chat, LoadedModel]:
        """Return the chat of the model, which reads these images, and the model."""
        opened = self.load_writer()
        reader = image_reader(opened, images)
        opened = self.quantized(opened)
        return open_chat(opened, self.template, reader), opened

    def start_reply(self, chat: Chat, messages: Sequence[Message], seed: int) -> ReplyStream:
        """Return the reply to a conversation."""
        limit = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        sampling = self.sampling_from(chat.sampling)
        return chat.stream(messages, sampling=sampling, stop=self.stop, seed=seed, **limit, **self.variables())


@dataclass(frozen=True, kw_only=True)
class ChatCommand(ReplyCommand):
    """Talk to a chat model. Each line is a message; lines that begin with / are commands, which /help lists.

    Ctrl-C stops an answer, Ctrl-D ends the conversation. If stdin is not a terminal, each of its lines is a message.
    """

    image: tuple[PathText, ...] = ()
    """vision-language model: images at the beginning of the first message: --image a.jpg b.png"""


def main(command: ChatCommand) -> None:
    command.check()
    command.variables()
    check_images(command.image)
    chat, _ = command.load_chat(command.image)
    Conversation(chat, command).hold(_lines())


def image_reader(opened: LoadedModel, images: Sequence[str]) -> ImagePrompts | None:
    """Return how the model reads images in prompts; None if there are no images."""
    if not images:
        return None
    from transformer.inference._image_prompts import image_prompts

    return image_prompts(opened)


def open_chat(opened: LoadedModel, template: Path | None = None, images: ImagePrompts | None = None) -> Chat:
    """Return the chat of a model, with the template of a file, or with the model's own."""
    from transformer.chat._template import ChatTemplate
    from transformer.inference._opened_model import open_chat as open_with

    if template is None:
        return open_with(opened, images=images)
    if template.exists() and not template.is_file():  # reading a pipe can block forever
        raise ConfigError(f"{template} must be a file with a chat template; a directory, pipe or device is not read.")
    try:
        return open_with(opened, ChatTemplate(template.read_text(encoding="utf-8"), str(template)), images)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{template} is not UTF-8: byte {error.start} can't be read. Convert it.") from None


def conversation(system: str | None, prompt: str, images: Sequence[str] = ()) -> list[Message]:
    """Return the messages of a conversation with one message of the user, which begins with images."""
    return [*_system(system), _of_user(prompt, images)]


def _of_user(text: str, images: Sequence[str]) -> Message:
    if not images:
        return {"role": "user", "content": text}
    parts = [{"type": "image", "image": name} for name in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _system(text: str | None) -> list[Message]:
    return [] if text is None else [{"role": "system", "content": decode_argument(text)}]


class Conversation:
    """The messages of a conversation in the terminal, and the commands that change them."""

    def __init__(self, chat: Chat, command: ChatCommand):
        self._chat, self._command = chat, command
        self.messages: list[Message] = _system(command.system)
        self._saved: set[Path] = set()
        self._answers = 0

    def hold(self, lines: Iterator[str]) -> None:
        """Answer each line, until there are no more.

        In a terminal, an error is printed, and the message that caused it is not added to the conversation.
        """
        interactive = sys.stdin.isatty()
        if interactive:
            print("Ctrl-C stops an answer, Ctrl-D ends, /help lists the commands.", file=sys.stderr)
        for line in lines:
            try:
                self._take(line)
            except (ValueError, OSError) as error:
                if not interactive:
                    raise
                print(describe(error), file=sys.stderr)

    def _take(self, line: str) -> None:
        if not line.strip():
            return
        if line.startswith("/") and not line.startswith("//"):
            self._obey(line)
        else:
            self._answer(line.removeprefix("/") if line.startswith("//") else line)

    def _answer(self, text: str) -> None:
        """Print the answer to a message while it is generated, and add both to the conversation."""
        from transformer.cli._texts import note_long, shown

        note_long([text])
        first = not any(message["role"] == "user" for message in self.messages)
        messages = [*self.messages, _of_user(text, self._command.image if first else ())]
        stream = self._command.start_reply(self._chat, messages, (self._command.seed + self._answers) % 2**32)
        with interruptions() as interrupted, contextlib.suppress(KeyboardInterrupt):
            for piece in stream:
                print("" if self._command.json else shown(piece), end="", flush=True)
                if interrupted.is_set():
                    break
        self._answers += 1
        reply = stream.reply
        if self._command.json:
            values = {"message": text, "output": reply.text, "finish": reply.finish, "tokens": len(reply.tokens)}
            print(json.dumps(values), flush=True)
        else:
            print(" [stopped]" if reply.finish == "interrupted" else "", flush=True)
        if reply.text or reply.finish != "interrupted":
            self.messages = [*messages, reply.message]

    def _obey(self, line: str) -> None:
        """Carry out a command."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name.strip():
            case "/help":
                print("\n".join(f"{command:14}{what}" for command, what in COMMANDS.items()))
                print("//text         send a message that begins with /")
            case "/reset":
                self.messages = [message for message in self.messages if message["role"] == "system"]
            case "/system":
                self.messages = _system(rest or None)
            case "/save":
                self._save(rest)
            case _:
                names = [command.partition(" ")[0] for command in COMMANDS]
                raise ConfigError(
                    f"unknown command {name!r:.40}.{nearest(name, names)} Use one of {', '.join(names)}; a message "
                    "that begins with / is typed with //."
                )

    def _save(self, name: str) -> None:
        if not name:
            raise ConfigError("/save needs the name of a file, such as /save conversation.json.")
        path = local_path(name, "the file of /save").expanduser()
        if path.exists() and path.resolve() not in self._saved:
            raise ConfigError(f"{path} exists, and this conversation did not write it. Use another name.")
        replace_file(path, json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n")
        self._saved.add(path.resolve())
        print(f"wrote {len(self.messages)} messages into {path}", file=sys.stderr)


def _lines() -> Iterator[str]:
    """Yield the messages that the user types, or the lines of stdin if it is not a terminal."""
    if sys.stdin is None:
        return
    if not sys.stdin.isatty():
        for number, raw in enumerate(bounded_lines(sys.stdin.buffer, "stdin"), 1):
            try:
                yield raw.decode("utf-8-sig").rstrip("\r\n")
            except UnicodeDecodeError:
                raise ConfigError(f"line {number} of stdin is not UTF-8. Convert it.") from None
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, for editing the line and for earlier lines
    prompt = "> " if sys.stdout.isatty() else ""  # stdout that is redirected contains answers only
    while True:
        try:
            yield input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\nCtrl-D ends the conversation.", file=sys.stderr)


@contextlib.contextmanager
def interruptions() -> Iterator[threading.Event]:
    """Let Ctrl-C set an event instead of raising KeyboardInterrupt; a second Ctrl-C raises it.

    Outside of the main thread, which alone receives signals, nothing changes.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
