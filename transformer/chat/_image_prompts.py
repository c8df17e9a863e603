"""Images in prompts: the text that stands for an image, and its replacement by the tokens of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer.config._checks import ConfigError
from transformer.data.tokenizers._base import utf8
from transformer.data.tokenizers._pretrained import PretrainedTokenizer


@dataclass(frozen=True, kw_only=True)
class ImageText:
    """How the text of a family of vision-language models represents an image, as its processor in transformers does."""

    marker: str | None = None
    """text that stands for an image in prompts and chat templates; None: the name of the image token"""
    before: str = ""
    """text before the image tokens"""
    after: str = ""
    """text behind the image tokens"""
    begin_after_images: bool = False
    """write the begin token behind the last image instead of at the start, and a line break at the end (PaliGemma)"""


@dataclass(frozen=True, kw_only=True)
class ImagePrompts:
    """Prompts of one vision-language model: the text of its images, and their preprocessing."""

    text: ImageText
    token: str
    """name of the image token"""
    token_id: int
    """id of the image token"""
    count: int
    """number of image tokens per image in the text"""
    read: Callable[[Sequence[Any]], list[np.ndarray]]
    """preprocessing: paths, PIL images or arrays -> arrays (height, width, channels)"""
    count_of: Callable[[Any], int] | None = None
    """number of tokens of one image, if it depends on the image: each image token of the text is then this many,
    and `count` is 1; None: `count`"""

    @property
    def marker(self) -> str:
        """Text that stands for an image in a prompt."""
        return self.token if self.text.marker is None else self.text.marker

    @property
    def expansion(self) -> str:
        """Text that replaces a marker."""
        return f"{self.text.before}{self.token * self.count}{self.text.after}"

    def check_count(self, markers: int, images: int) -> None:
        """Raise ConfigError unless there are as many images as markers."""
        if markers != images:
            raise ConfigError(
                f"the prompt has {markers} image markers ({self.marker}), but {images} images are given: expected one "
                f"image for each marker. Add or remove markers or images."
            )

    def repeated(self, ids: Sequence[int], sources: Sequence[Any]) -> list[int]:
        """Return the indices of the tokens, in which each image token is repeated for the tokens of its image.

        Args:
            ids: of a text with as many images as there are sources.
            sources: paths, PIL images or arrays.
        """
        if self.count_of is None:
            return list(range(len(ids)))
        counts = iter([self.count_of(source) for source in sources])
        return [i for i, token in enumerate(ids) for _ in range(next(counts) if token == self.token_id else 1)]

    def encode(self, prompt: str, images: int, tokenizer: PretrainedTokenizer) -> list[int]:
        """Return the token ids of a prompt about images, before `repeated`.

        Without a marker in the prompt, the images come first.

        Args:
            prompt: the text, with a marker for each image, or without markers.
            images: number of images.
            tokenizer: tokenizer of the model.

        Raises:
            ConfigError: the number of markers is not that of the images, or the prompt contains another special token.
            ValueError: the tokenizer can't encode the prompt.
        """
        utf8(prompt)
        if self.marker not in prompt:
            prompt = self.marker * images + prompt
        self.check_count(prompt.count(self.marker), images)
        begin = ""
        if self.text.begin_after_images:
            begin = "" if tokenizer.bos_id is None else tokenizer.tokens([tokenizer.bos_id])[0]
            end = prompt.rfind(self.marker) + len(self.marker) if images else 0
            prompt = f"{prompt[:end]}{begin}{prompt[end:]}\n"
        names = {name for name in tokenizer.special_tokens if name and not name.isspace()} - {begin}
        rest = prompt.replace(self.marker, "")
        if found := next((name for name in sorted(names) if name in rest), None):
            raise ConfigError(
                f"the prompt contains {found!r}, the name of a special token, which a prompt with images can't "
                f"contain. Remove it."
            )
        text = prompt.replace(self.marker, self.expansion)
        return tokenizer.encode_prompt(text, add_special_tokens=not self.text.begin_after_images)


def without_sources(messages: Any) -> tuple[Any, list[Any]]:
    """Return the messages of a conversation with the sources of images removed, and the sources in order.

    The source of a part of type image is its entry `image`, `path` or `url`: a path, a PIL image or an array.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return messages, []  # `check_messages` reports the error
    found: list[Any] = []

    def bare(part: object) -> object:
        if not isinstance(part, dict) or part.get("type") != "image":
            return part
        sources = [part[name] for name in ("image", "path", "url") if part.get(name) is not None]
        if len(sources) != 1 or part.keys() - {"type", "image", "path", "url"}:
            raise ConfigError(
                f'a part of type image must be {{"type": "image", "image": ...}}, with a path, a PIL image or an '
                f"array, got the entries {', '.join(map(str, part))}. Correct it."
            )
        found.extend(sources)
        return {"type": "image"}

    def changed(message: object) -> object:
        content = message.get("content") if isinstance(message, dict) else None
        return {**message, "content": [bare(part) for part in content]} if isinstance(content, list) else message

    return [changed(message) for message in messages], found


def expanded(text: str, places: Sequence[int], breaks: Sequence[int], images: ImagePrompts) -> tuple[str, list[int]]:
    """Expand the markers of images at `places` of a conversation; return the text, and where the `breaks` then are.

    Places and breaks are sorted.
    """
    parts, last = [], 0
    for place in places:
        parts += [text[last:place], images.expansion]
        last = place + len(images.marker)
    grown = len(images.expansion) - len(images.marker)
    return "".join([*parts, text[last:]]), [one + grown * sum(place < one for place in places) for one in breaks]
