"""Opening of pretrained weights in any supported format, and of the tokenizers that belong to them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from transformer.config._checks import ConfigError
from transformer.data.tokenizers._base import TOKENIZER_FILE
from transformer.data.tokenizers._gguf import UnsupportedTokenizer, tokenizer_files
from transformer.data.tokenizers._pretrained import PretrainedTokenizer, load_pretrained_tokenizer
from transformer.zoo._gemma_orbax import GemmaOrbaxFiles, is_orbax
from transformer.zoo._gguf import GGUFFiles, is_gguf
from transformer.zoo._text_part import text_part
from transformer.zoo.weights._files import WeightFiles
from transformer.zoo.weights._flax_files import open_files
from transformer.zoo.weights._quantized import plain_files


def open_weights(source: str | os.PathLike, ignored: Sequence[str] = ()) -> WeightFiles:
    """Open a checkpoint directory, an Orbax checkpoint of gemma, or a GGUF file.

    Quantized tensors appear as ordinary ones. Of some models that also read images, only the decoder is opened
    (`TEXT_PARTS`). `ignored` lists unknown metadata keys of a GGUF file that do not affect the computation. Raises
    FileNotFoundError, or ValueError for files that are damaged or not supported; the message lists all problems.
    """
    if is_gguf(source):
        return GGUFFiles(source, ignored)
    return GemmaOrbaxFiles(source) if is_orbax(source) else text_part(plain_files(open_files(source)))


def open_tokenizer(
    files: WeightFiles, vocab_size: int, directory: str | os.PathLike | None = None
) -> PretrainedTokenizer | None:
    """Return the tokenizer of opened weights, or that in `directory`; None if they have none that is supported.

    FileNotFoundError if `directory` has none; ValueError if it is damaged, or does not fit `vocab_size` embeddings.
    """
    if directory is not None:
        return load_pretrained_tokenizer(directory, vocab_size)
    if isinstance(files, GGUFFiles):
        try:
            return PretrainedTokenizer(tokenizer_files(files.metadata), vocab_size)
        except UnsupportedTokenizer:
            return None
        except ValueError as error:
            problem = str(error).rstrip(".")
            raise ConfigError(
                f"{files.directory} has a tokenizer that can't be read: {problem}. Pass the directory of the tokenizer "
                f"instead: --tokenizer DIR, or tokenizer=."
            ) from error
    return load_pretrained_tokenizer(files.directory, vocab_size) if files.place(TOKENIZER_FILE) is not None else None


def why_no_tokenizer(source: str | os.PathLike) -> str:
    """Explain why a model has no tokenizer, and how to pass one."""
    if not is_gguf(source):
        return (
            f"{source} has no tokenizer.json, which is required to read text. Add the tokenizer of the model with "
            f"transformers: AutoTokenizer.from_pretrained(...).save_pretrained({str(source)!r})."
        )
    try:
        tokenizer_files(GGUFFiles(source).metadata)
        reason = "its tokenizer was not loaded"
    except ValueError as error:
        reason = str(error).rstrip(".")
    return (
        f"{source} can't read text: {reason}. Pass a directory with the tokenizer.json of this model: --tokenizer DIR, "
        f"or tokenizer=."
    )
