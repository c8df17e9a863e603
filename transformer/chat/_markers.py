"""Encode a conversation: markers of the template become special tokens, and markers in messages stay text.

A conversation is rendered twice. In the second rendering an invisible character is put into the texts of the messages,
before each marker name and wherever the text of the template could complete a part of one. Without these characters
both renderings must be equal. Then the positions of the characters show which markers the template wrote: those without
one. The text is encoded as transformers does, with such a character inside of every other marker, so that the tokenizer
does not recognize it.
"""

from __future__ import annotations

import bisect
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from transformer.chat._image_prompts import ImagePrompts, expanded
from transformer.chat._template import ChatTemplate
from transformer.config._checks import ConfigError
from transformer.data.tokenizers._base import TOKENIZER_FILE
from transformer.data.tokenizers._library_errors import held_stderr, library_errors
from transformer.data.tokenizers._long_texts import check_length
from transformer.data.tokenizers._pretrained import PretrainedTokenizer, encode_one

_FIXED = ("role", "type")
"""entries that are checked words rather than texts"""


@dataclass(frozen=True)
class Encoded:
    """A conversation as text and as token ids."""

    text: str
    ids: list[int]
    generated: list[bool]
    """for each id, whether the assistant wrote it, according to `{% generation %}` in the template"""
    offsets: list[tuple[int, int]]
    """for each id, the (start, end) of its characters in the text"""


class ChatEncoder:
    """Encode conversations with a template and a tokenizer.

    The special tokens of the tokenizer are markers, and so are its other added tokens that the template names, such as
    `<tool_call>`. A special token in a message is always text. The other markers are text in messages of people and
    tools, but tokens in messages of the assistant, which writes them itself. Markers of images are replaced by the
    tokens of the images (`images`). A conversation that surely has more than `longest` tokens is refused (None: none
    is) before the work that takes long.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: PretrainedTokenizer,
        images: ImagePrompts | None = None,
        longest: int | None = None,
    ):
        self.template, self._tokenizer, self._images, self._longest = template, tokenizer, images, longest
        with library_errors(f"{TOKENIZER_FILE} is not a valid tokenizer", "Download the file again"), held_stderr():
            self._library = tokenizer.library_copy()
            added = self._library.get_added_tokens_decoder()
        names = {i: self._library.id_to_token(i) for i in tokenizer.special_ids}
        special = {i: name for i, name in names.items() if name and not name.isspace()}
        named = {
            i: token.content
            for i, token in added.items()
            if i not in special and not token.content.isspace() and token.content in template.source
        }
        self._names = special | named
        self._special, self._all = _Marks(special.values()), _Marks(self._names.values())

    def encode(
        self, values: Mapping[str, Any], continue_final_message: bool = False, now: datetime | None = None
    ) -> Encoded:
        """Encode checked variables of the template (`ChatTemplate.variables`).

        `now` is the time that the template may write (None: the current time).

        Raises:
            ChatTemplateError: the template refuses the messages, fails, or takes too long.
            ConfigError: a message contains a marker, and the template changes it, so it can't be recognized.
            TooManyTokensError: the conversation has more than `longest` tokens.
            ValueError: the tokenizer can't encode the text.
        """
        now = now or datetime.now()  # both renderings have the same time
        plain = self.template.run(values, continue_final_message, now)
        if self._longest is not None:
            check_length(self._tokenizer, [plain.text], self._longest)
        character = _unused_character(self.template.source, values)
        marked, touched = self._marked(values, character)
        breaks: list[int] = []
        if touched:
            second = self.template.run(marked, continue_final_message, now).text
            if second.replace(character, "") != plain.text:
                self._refuse(touched)
            found = [place for place, one in enumerate(second) if one == character]
            breaks = [place - before for before, place in enumerate(found)]
        text, parts = plain.text, [place for part in plain.generated for place in part]
        if self._images is not None:
            places = self._image_places(text, breaks)
            parts = expanded(text, places, parts, self._images)[1]
            text, breaks = expanded(text, places, breaks, self._images)
        ids, offsets = self._encoded(text, breaks, character)
        written = list(zip(parts[::2], parts[1::2], strict=True))
        generated = [any(start < last and end > first for first, last in written) for start, end in offsets]
        return Encoded(text, ids, generated, offsets)

    def _image_places(self, text: str, breaks: Sequence[int]) -> list[int]:
        """Return the starts of the markers of images that the template wrote."""
        size = len(self._images.marker)
        found = (found.start() for found in re.finditer(re.escape(self._images.marker), text))
        return [start for start in found if self._cut(start, start + size, breaks) < 0]

    def end_of_turn(self) -> int | None:
        """Return the id of the marker that the template writes after a message of the assistant, or None."""
        content = "Yes."
        messages = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": content}]
        try:
            text = self.template.render(messages)
            end = text.rindex(content) + len(content)
        except ValueError:  # the template refuses or changes these messages
            return None
        after = (i for i, (start, _) in zip(*self._encoded(text, [], ""), strict=True) if start >= end)
        following = next((i for i in after if i in self._names), None)
        is_first = following is not None and text[end:].lstrip().startswith(self._names[following])
        return following if is_first and following in self._tokenizer.special_ids else None

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """Ids of the tokens that end a message of the assistant."""
        end = self.end_of_turn()
        return frozenset(self._tokenizer.eos_ids) | ({end} if end is not None else frozenset())

    def is_marker(self, i: int) -> bool:
        """Return whether an id is a marker, which only the template writes."""
        return i in self._names

    def last_marker(self, text: str) -> str | None:
        """Return the marker that a text ends with, or None."""
        return next((name for name in sorted(self._names.values(), key=len, reverse=True) if text.endswith(name)), None)

    def _marked(self, values: Mapping[str, Any], character: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        """Return the variables with the character in their texts, and (name, text) of each changed text."""
        touched: list[tuple[str, str]] = []

        def change(value: object, name: str, marks: _Marks) -> object:
            if isinstance(value, str):
                if places := marks.places(value):
                    touched.append((name, value))
                return _inserted(value, places, character)
            if isinstance(value, dict):
                return {
                    change_key(key, name, marks): one if key in _FIXED else change(one, name, marks)
                    for key, one in value.items()
                }
            if isinstance(value, list):
                return [change(one, name, marks) for one in value]
            return value

        def change_key(key: object, name: str, marks: _Marks) -> object:
            return change(key, name, marks) if isinstance(key, str) and marks.names_in(key) else key

        messages = [
            change(message, f"message {number}", self._special if message["role"] == "assistant" else self._all)
            for number, message in enumerate(values["messages"])
        ]
        others = {name: change(one, name, self._all) for name, one in values.items() if name != "messages"}
        return {**others, "messages": messages}, touched

    def _refuse(self, touched: list[tuple[str, str]]) -> None:
        name, text = next(((n, t) for n, t in touched if self._all.names_in(t)), touched[0])
        marker = next(iter(self._all.names_in(text)), text)
        raise ConfigError(
            f"{name} contains {marker!r:.80}, a marker of the template or a part of one, and {self.template.name} "
            "changes this text, so it can't be distinguished from a marker of the template. Remove it from the "
            "message."
        )

    def _encoded(self, text: str, breaks: Sequence[int], character: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a rendered text, and for each the (start, end) of its characters.

        A marker with one of the sorted breaks inside, or at its beginning, is text. The character, which does not occur
        in the text, is put into such markers: the tokenizer does not recognize them. Its own tokens are removed.
        """
        cuts = sorted({self._cut(start, end, breaks) for start, end in self._all.spans(text)} - {-1})
        remedy = "Shorten the conversation, or download the tokenizer's file again"
        with library_errors("the tokenizers library failed on this conversation", remedy), held_stderr():
            encoding = encode_one(self._library, _inserted(text, cuts, character), special=False)
        inserted = [cut + number for number, cut in enumerate(cuts)]
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for i, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            start, end = (place - bisect.bisect_left(inserted, place) for place in (first, last))
            if start == end and first < last:  # only the inserted character
                continue
            new = self._as_text(text[start:end]) if self._is_text(i, text, start, end, breaks) else [i]
            ids += new
            offsets += [(start, end)] * len(new)
        return ids, offsets

    def _cut(self, start: int, end: int, breaks: Sequence[int]) -> int:
        """Return where a marker at these places is divided; -1: the template wrote it."""
        place = bisect.bisect_left(breaks, start)
        if place == len(breaks) or breaks[place] >= end:
            return -1
        return max(breaks[place], start + 1)

    def _is_text(self, i: int, text: str, start: int, end: int, breaks: Sequence[int]) -> bool:
        """Return whether a token is a marker that the template did not write, although it was divided.

        Without the marker's name in the text, the token results from a normalization of other characters, or it is the
        unknown token.
        """
        if (name := self._names.get(i)) is None:
            return False
        place = text.find(name, start, max(end, start + len(name)))
        if place < 0:
            return i != self._tokenizer.unk_id
        return self._cut(place, place + len(name), breaks) >= 0

    def _as_text(self, text: str) -> list[int]:
        """Return the ids of a text that the tokenizer would recognize as a marker."""
        for pieces in ([text], [text[:1], text[1:]], list(text)):
            ids = [i for piece in pieces for i in self._inside(piece)]
            if ids and not any(i in self._names and i != self._tokenizer.unk_id for i in ids):
                return ids
        raise ValueError(
            f"a message contains {text!r}, the name of a special token, and this tokenizer can't encode it as text. "
            "Remove it."
        )

    def _inside(self, text: str) -> list[int]:
        """Return the ids of a text inside a line: some tokenizers add a space at the beginning of a text."""
        before = self._tokenizer.encode("\n")
        ids = self._tokenizer.encode(f"\n{text}")
        return ids[len(before) :] if ids[: len(before)] == before else self._tokenizer.encode(text)


class _Marks:
    """Find the names of markers in a text, and the parts of names at its ends."""

    def __init__(self, names: Iterable[str]):
        self._ordered = sorted(set(names), key=lambda name: (-len(name), name))
        self._longest = max(map(len, self._ordered), default=0)
        self._pattern = re.compile("|".join(map(re.escape, self._ordered)) or "(?!)")
        self._beginnings = {name[:size] for name in self._ordered for size in range(1, len(name))}
        self._endings = {name[size:] for name in self._ordered for size in range(1, len(name))}

    def names_in(self, text: str) -> list[str]:
        """Return the names in a text that don't overlap, in order."""
        return self._pattern.findall(text)

    def places(self, text: str) -> list[int]:
        """Return the sorted places before which a character shows that a name comes from this text."""
        starts = {start for start, _ in self.spans(text)}
        return sorted({*starts, *self._at_end(text), *self._at_end(text.rstrip()), *self._at_start(text)})

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of all names, overlapping ones too; of names with the same start only the longest."""
        found = self._pattern.search(text)
        while found is not None:
            yield found.span()
            found = self._pattern.search(text, found.start() + 1)

    def _at_end(self, text: str) -> Iterator[int]:
        """Yield the beginnings of all parts at the end that the template could complete to a name."""
        for place in range(max(0, len(text) - self._longest), len(text)):
            if text[place:] in self._beginnings:
                yield place

    def _at_start(self, text: str) -> Iterator[int]:
        """Yield the place of the first visible character, if it could continue a name that the template begins."""
        first = text.lstrip()
        ends = any(first[:size] in self._endings for size in range(1, min(len(first), self._longest) + 1))
        inside = 0 < len(first) < self._longest and any(first.rstrip() in name for name in self._ordered)
        if ends or inside:
            yield len(text) - len(first)


def _inserted(text: str, places: Sequence[int], character: str) -> str:
    parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    return character.join(parts)


def _unused_character(source: str, values: Mapping[str, Any]) -> str:
    """Return a character of Unicode's private use area that occurs neither in the template nor in the variables."""
    used = source + json.dumps(values, ensure_ascii=False)
    return next(c for c in map(chr, range(0xF0000, 0xFFFFE)) if c not in used)
