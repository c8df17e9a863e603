"""`transformer-zoo classify image`: the most likely classes of each image."""

from __future__ import annotations

from dataclasses import dataclass

from transformer.cli._arguments import check_least
from transformer.cli._classify_text import ClassifyCommand
from transformer.cli._models import ImagesCommand, check_images


@dataclass(frozen=True, kw_only=True)
class ClassifyImage(ClassifyCommand, ImagesCommand):
    """Print the most likely class of each image, its probability and the path, separated by tabs."""

    labels: tuple[str, ...] = ()
    """CLIP and SigLIP: texts that describe the classes: --labels "a photo of a cat" "a sketch" """


def main(command: ClassifyImage) -> None:
    check_least("top-k", command.top_k)
    check_images(command.images)
    images, opened = list(command.images), command.load()
    if command.labels:
        from transformer.inference._classify import classify_with_labels

        found = classify_with_labels(opened, images, command.labels)
    else:
        from transformer.inference._classify import classify_images

        found = classify_images(opened, images)
    command.print_classes(opened, "image", images, found)
