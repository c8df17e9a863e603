"""Write the captions of held-out images, and score them by exact match."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn

from transformer.config._progress import counting
from transformer.data._captioning import CaptioningDataset
from transformer.generate._generation import generate
from transformer.generate._sampling import Sampling
from transformer.training._recipe import Recipe
from transformer.training.metrics._summary import Summary
from transformer.training.tasks._translation import Translation, scores

PICTURES = "pictures"
"""folder of a workdir with the images of the captions that the summary shows"""


def write_captions(
    model: nn.Module,
    params: Any,
    dataset: CaptioningDataset,
    split: str,
    places: Sequence[int],
    *,
    batch_size: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[str] | None:
    """Write the caption of each image by greedy decoding.

    Args:
        model: a vision-language model.
        params: tree of its parameters.
        dataset: the data.
        split: the split that contains the images.
        places: indices of rows of the split.
        batch_size: number of images per batch.
        should_stop: called before each batch; True stops.

    Returns:
        The captions, in the order of the images; None if `should_stop` returned True.
    """
    outputs: list[str] = []
    size, add = min(batch_size, len(places)), counting("captions", len(places))
    for start in range(0, len(places), max(size, 1)):
        if should_stop():
            return None
        part = list(places[start : start + size])
        filled = part + part[-1:] * (size - len(part))  # a fixed batch size, so that one program is compiled
        rows = generate(
            model,
            params,
            [dataset.prefix] * size,
            images=[[pixels] for pixels in dataset.values(split, filled)],
            max_new_tokens=dataset.max_new_tokens,
            sampling=Sampling(temperature=0.0),
            eos_id=dataset.tokenizer.eos_id,
        )
        outputs += [dataset.tokenizer.decode(row) for row in rows[: len(part)]]
        add(len(part))
    return outputs


def caption_samples(recipe: Recipe, model: nn.Module, params: Any, dataset: CaptioningDataset, wanted: int) -> str:
    """Return the captions of some held-out images, one per line, with the right one where it differs."""
    found = _captioned(recipe, model, params, dataset, "validation", wanted)
    return "\n".join(
        item.output + ("" if item.exact else f"   (correct: {item.example.target})") for _, item in found or []
    )


def report_captions(
    recipe: Recipe,
    model: nn.Module,
    params: Any,
    dataset: CaptioningDataset,
    summary: Summary,
    should_stop: Callable[[], bool],
) -> Summary:
    """Add the captions of unseen images and their exact match to the summary.

    The images that it shows are in files, which it names: those of the data, or new ones in the workdir.

    Returns:
        The completed summary, or the given one if `should_stop` returns True before the end.
    """
    split = "test" if "test" in dataset.splits else "validation"
    wanted = recipe.evaluation.exact_match_examples
    done = _captioned(recipe, model, params, dataset, split, wanted, should_stop)
    if not done:
        return summary
    number = min(recipe.evaluation.translations, len(done))
    shown, folder = [done[index * len(done) // max(number, 1)] for index in range(number)], Path(summary.workdir)
    files = [str(dataset.picture_file(split, place, folder / PICTURES)) for place, _ in shown]
    shown = [(file, item.example.target, item.output) for file, (_, item) in zip(files, shown, strict=True)]
    return dataclasses.replace(
        summary,
        exact_match=scores([item for _, item in done]),
        group_name=recipe.data.group_name,
        split=split,
        translations=tuple(shown),
        prompt=files[0] if files else "",
    )


def _captioned(
    recipe: Recipe,
    model: nn.Module,
    params: Any,
    dataset: CaptioningDataset,
    split: str,
    limit: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[tuple[int, Translation]] | None:
    """Return the index and the caption of up to `limit` images of a split; None if `should_stop` returns True."""
    places = dataset.places(split, limit)
    size = recipe.data.eval_batch_size
    outputs = write_captions(model, params, dataset, split, places, batch_size=size, should_stop=should_stop)
    if outputs is None:
        return None
    pairs = zip(dataset.examples(split, limit), outputs, strict=True)
    return list(zip(places, (Translation(*pair) for pair in pairs), strict=True))
