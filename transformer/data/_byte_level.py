"""The printable form of bytes in byte-level vocabularies (GPT-2; Radford et al. 2019)."""

from __future__ import annotations

import functools


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Return the byte of each of the 256 characters: printable bytes stand for themselves, others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary, as the decoder of the tokenizers library returns them.

    A token with another character, such as an added token with a space, is spelled as it is.
    """
    table = _byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode("utf-8", "replace")
