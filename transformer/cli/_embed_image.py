"""`transformer-zoo embed image`: embeddings of images."""

from __future__ import annotations

import json
from dataclasses import dataclass

from transformer.cli._embed_text import rounded
from transformer.cli._models import ImagesCommand, check_images


@dataclass(frozen=True, kw_only=True)
class EmbedImage(ImagesCommand):
    """Print the embedding of each image as a JSON array, one per line. CLIP and SigLIP embed texts and images in one
    space.
    """


def main(command: EmbedImage) -> None:
    check_images(command.images)
    from transformer.inference._embed import embed_images

    opened = command.load()
    vectors = rounded(embed_images(opened, list(command.images)))
    results = [{"image": name, "vector": vector} for name, vector in zip(command.images, vectors, strict=True)]
    command.answer_of(opened, map(json.dumps, vectors), results=results)
