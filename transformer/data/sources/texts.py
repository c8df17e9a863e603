"""Running text: Tiny Shakespeare by TFDS, and files of one's own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from transformer.data import local_files
from transformer.data.configs import JsonLines, LocalText, TinyShakespeare
from transformer.data.sources.prepared import cut, data_dir, records


@dataclass(frozen=True)
class Documents:
    """Running text: documents by split, `splits`. With `separate`, an end token follows each document."""

    splits: dict[str, list[str]]
    separate: bool = False


def local_text(config: LocalText) -> Documents:
    """A file of one's own, its end held out where no second one is named."""
    separate = isinstance(config, JsonLines)

    def documents(path: str) -> list[str]:
        return local_files.read_json_lines(path, config.field) if separate else [local_files.read_text(path)]

    train = documents(config.path)
    if config.validation_path is not None:
        return Documents({"train": train, "validation": documents(config.validation_path)}, separate)
    if separate:
        end = cut(len(train), config.validation_share, config.path, "documents")
        return Documents({"train": train[:end], "validation": train[end:]}, separate)
    end = cut(len(train[0]), config.validation_share, config.path, "characters")
    return Documents({"train": [train[0][:end]], "validation": [train[0][end:]]}, separate)


def tiny_shakespeare(config: TinyShakespeare) -> Documents:
    """The last tenth is held out, as nanoGPT does. ValueError for prepared data that is another text."""
    from transformer.data.builders.tiny_shakespeare import FILE, URL, TinyShakespeareBuilder

    found = records(TinyShakespeareBuilder, config.data_dir, downloads={URL: FILE}, manual_dir=config.manual_dir)
    texts = {split: b"".join(row["text"] for row in rows) for split, rows in found.items()}
    whole = b"".join(texts.get(split, b"") for split in ("train", "validation", "test"))
    if hashlib.sha256(whole).hexdigest() != FILE.checksum:
        place = data_dir(config.data_dir) / "tiny_shakespeare"
        raise ValueError(
            f"the prepared data in {place} is not Tiny Shakespeare: expected {int(FILE.size):,} bytes with "
            f"SHA-256 {FILE.checksum}, got {len(whole):,} others. Delete that folder: the next run prepares it anew."
        )
    held_out = (texts["validation"] + texts["test"]).decode()
    return Documents({"train": [texts["train"].decode()], "validation": [held_out]})
