"""Read prompts from the command line or stdin, warn of their unknown parts, and write texts that are safe to show."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from transformer.cli._streams import decode_argument
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.inference._loaded_model import LoadedModel


LONG = 2**18
"""number of characters of an input from which a note is printed"""

MOST_STDIN = 64 * 2**20
"""maximum number of bytes of all prompts from stdin"""
MOST_NAMED = 5
"""maximum number of words or characters that a warning lists"""


def read_prompts(given: Sequence[str], *, lines: bool, option: str = "--prompt") -> list[str]:
    """Return the prompts of the command line and of stdin; `option` is named in errors.

    The prompt "-" reads stdin; without prompts stdin is read, unless it is a terminal. With `lines`, each non-empty
    line of stdin is a prompt, otherwise all of stdin, without its last line end.
    """
    check_prompts(given, option)
    prompts: list[str] = []
    for prompt in given or ["-"]:
        prompts += _stdin_prompts(lines, option) if prompt == "-" else [decode_argument(prompt)]
    note_long(prompts)
    return prompts


def note_long(texts: Iterable[str]) -> None:
    """Print a note on stderr if a text is so long that nothing appears for a while."""
    longest = max(map(len, texts), default=0)
    if longest >= LONG:
        wait = "the model reads all of it first, which can take minutes"
        print(f"note: the longest input has {longest:,} characters; {wait}", file=sys.stderr, flush=True)


def check_prompts(given: Sequence[str], option: str = "--prompt") -> None:
    """Raise ConfigError if there is neither a prompt nor a stdin to read one from."""
    if not given and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError(f'{option} is missing. Pass {option} "...", or pipe a text into this command.')


def _stdin_prompts(lines: bool, option: str) -> list[str]:
    content = sys.stdin.buffer.read(MOST_STDIN + 1)
    if len(content) > MOST_STDIN:
        raise ValueError(
            f"stdin has more than {MOST_STDIN:,} bytes: expected the text of {option}. Check the input, or divide it."
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not UTF-8 text: byte {error.start} can't be read. Convert it to UTF-8.") from None
    text = text.replace("\r\n", "\n").removesuffix("\n")
    if not text.strip():
        what = option[2:]
        raise ValueError(f'the {what} from stdin is empty. Pass {option} "...", or pipe a text into this command.')
    return [line for line in text.split("\n") if line.strip()] if lines else [text]


class UnknownParts:
    """Collect the words and characters of texts that a model's tokenizer does not know, for one warning."""

    def __init__(self, opened: LoadedModel):
        self._run = opened
        self.counts: Counter[str] = Counter()

    def add(self, text: str, *, normalize: bool = True) -> None:
        """Add the unknown parts of a text; `normalize` applies the tokenizer's normalization of sources and prompts."""
        try:
            text = self._run.tokenizer.normalize(text) if normalize else text
            self.counts.update(self._run.tokenizer.unknown_parts(text))
        except ValueError:  # encoding the text reports the error
            return

    def warn(self) -> None:
        """Warn about the unknown parts, if any; list at most `MOST_NAMED` of them."""
        if not self.counts:
            return
        named = [f"{part!r:.40}{f' ({n:,} times)' if n > 1 else ''}" for part, n in self.counts.most_common(MOST_NAMED)]
        more = f" and {len(self.counts) - MOST_NAMED:,} more" if len(self.counts) > MOST_NAMED else ""
        total = self.counts.total()
        what = f"{total:,} words or characters" if total > 1 else "a word or character"
        warnings.warn(
            f"the tokenizer does not know {what} of the input; each is replaced by the unknown token or removed: "
            f"{', '.join(named)}{more}.",
            stacklevel=2,
        )


def warn_of_unknown(opened: LoadedModel, texts: Iterable[str], *, normalize: bool = True) -> None:
    """Warn once about all words and characters of the texts that the tokenizer does not know."""
    found = UnknownParts(opened)
    for text in texts:
        found.add(text, normalize=normalize)
    found.warn()


def shown(text: str) -> str:
    """Return the text as it is printed: on a terminal, control characters are escaped."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
