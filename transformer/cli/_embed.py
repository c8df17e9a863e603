"""`python -m transformer embed`: embeddings of texts and images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from transformer.cli._arguments import parse
from transformer.cli._models import InputsCommand


@dataclass(frozen=True, kw_only=True)
class Embed(InputsCommand):
    """Print the embedding of each text or image as a JSON array, one per line.

    Pooling and normalization of texts follow the sentence-transformers files in the directory. Without such files, the
    embedding is the mean over the tokens of the text. CLIP and SigLIP embed texts and images in one space.
    """


def main(arguments: Sequence[str]) -> None:
    """Print the embedding of each text or image."""
    command = parse(Embed, "embed", arguments)
    command.check_inputs()
    if command.image:
        from transformer.inference._embed import embed_images

        kind, inputs, opened = "image", list(command.image), command.load()
        found, described = embed_images(opened, inputs), {}
    else:
        from transformer.inference._embed import embed
        from transformer.inference._sentences import SentenceSettings, sentence_settings

        kind = "text"
        opened, inputs = command.load_with_texts()
        settings = SentenceSettings() if opened.pretrained is None else sentence_settings(opened.directory)
        found = embed(opened, inputs, settings)
        described = {"pooling": settings.pooling, "normalize": settings.normalize}
        if opened.model.config.images is not None:  # its own pooling, whatever the files say
            described = {"pooling": opened.model.config.output.pooling, "normalize": True}
    vectors = [[round(float(x), 7) for x in vector] for vector in found]
    if command.json:
        results = [{kind: name, "vector": vector} for name, vector in zip(inputs, vectors, strict=True)]
        command.print_json(opened, **described, results=results)
        return
    for vector in vectors:
        print(json.dumps(vector))
