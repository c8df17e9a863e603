"""The printable form of bytes in byte-level vocabularies (GPT-2; Radford et al. 2019)."""

from __future__ import annotations

import functools


@functools.cache
def byte_level_characters() -> tuple[str, ...]:
    """Return the character of each byte: printable bytes stand for themselves, all others, in order, follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return tuple(characters[byte] for byte in range(256))


@functools.cache
def _byte_of_character() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_level_characters())}


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary, as the decoder of the tokenizers library returns them.

    A token with another character, such as an added token with a space, is unchanged.
    """
    table = _byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode("utf-8", "replace")
