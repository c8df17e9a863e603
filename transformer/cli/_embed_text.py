"""`transformer-zoo embed text`: embeddings of texts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from transformer.cli._models import TextsCommand


@dataclass(frozen=True, kw_only=True)
class EmbedText(TextsCommand):
    """Print the embedding of each text as a JSON array, one per line.

    Pooling and normalization follow the sentence-transformers files in the directory. Without such files, the embedding
    is the mean over the tokens of the text. CLIP and SigLIP embed texts and images in one space.
    """


def main(command: EmbedText) -> None:
    from transformer.inference._embed import embed
    from transformer.inference._sentences import SentenceSettings, sentence_settings

    opened, texts = command.load_with_texts()
    settings = SentenceSettings() if opened.pretrained is None else sentence_settings(opened.directory)
    found = embed(opened, texts, settings)
    described = {"pooling": settings.pooling, "normalize": settings.normalize}
    if opened.model.config.images is not None:  # its own pooling, regardless of the files
        described = {"pooling": opened.model.config.output.pooling, "normalize": True}
    vectors = rounded(found)
    results = [{"text": text, "vector": vector} for text, vector in zip(texts, vectors, strict=True)]
    command.answer_of(opened, map(json.dumps, vectors), **described, results=results)


def rounded(vectors: Iterable[Iterable[float]]) -> list[list[float]]:
    """Return vectors for printing, rounded to 7 decimals."""
    return [[round(float(x), 7) for x in vector] for vector in vectors]
