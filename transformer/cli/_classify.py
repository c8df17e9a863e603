"""`python -m transformer classify`: the most likely classes of each text or image."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from transformer.cli._arguments import parse
from transformer.cli._models import InputsCommand
from transformer.config._checks import ConfigError


@dataclass(frozen=True, kw_only=True)
class Classify(InputsCommand):
    """Print the most likely class of each text or image, its probability and the text or path, separated by tabs."""

    top_k: int = 1
    """number of classes to print for each text or image, the most likely first"""
    labels: tuple[str, ...] = ()
    """texts that describe the classes of images, for CLIP and SigLIP: --labels "a photo of a cat" "a sketch" """


def main(arguments: Sequence[str]) -> None:
    """Print the most likely classes of each text or image."""
    command = parse(Classify, "classify", arguments)
    if command.top_k < 1:
        raise ConfigError(f"--top-k must be at least 1, got {command.top_k}.")
    command.check_inputs()
    if command.labels and not command.image:
        raise ConfigError("--labels are compared with images. Pass --image, or remove --labels.")
    from transformer.cli._texts import shown

    if command.image:
        kind, inputs, opened = "image", list(command.image), command.load()
        if command.labels:
            from transformer.inference._classify import classify_with_labels

            found = classify_with_labels(opened, inputs, command.labels)
        else:
            from transformer.inference._classify import classify_images

            found = classify_images(opened, inputs)
    else:
        from transformer.inference._classify import classify

        kind = "text"
        opened, inputs = command.load_with_texts()
        found = classify(opened, inputs)
    if command.json:
        results = [{kind: name, **dataclasses.asdict(one)} for name, one in zip(inputs, found, strict=True)]
        command.print_json(opened, results=results)
        return
    for name, one in zip(inputs, found, strict=True):
        for label, probability in one.top(command.top_k):
            print(f"{label}\t{probability:.4f}\t{shown(name)}")
