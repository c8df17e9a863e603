"""`python -m transformer embed`: text embeddings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from transformer.cli._arguments import parse
from transformer.cli._models import TextsCommand


@dataclass(frozen=True, kw_only=True)
class Embed(TextsCommand):
    """Print the embedding of each text as a JSON array, one per line.

    Pooling and normalization follow the sentence-transformers files in the directory. Without such files, the embedding
    is the mean over the tokens of the text.
    """


def main(arguments: Sequence[str]) -> None:
    """Print the embedding of each text."""
    command = parse(Embed, "embed", arguments)
    from transformer.inference._reading import embed
    from transformer.inference._sentences import SentenceSettings, sentence_settings

    opened, texts = command.load_with_texts()
    settings = SentenceSettings() if opened.pretrained is None else sentence_settings(opened.directory)
    vectors = [[round(float(x), 7) for x in vector] for vector in embed(opened, texts, settings)]
    if command.json:
        results = [{"text": text, "vector": vector} for text, vector in zip(texts, vectors, strict=True)]
        command.print_json(opened, pooling=settings.pooling, normalize=settings.normalize, results=results)
        return
    for vector in vectors:
        print(json.dumps(vector))
