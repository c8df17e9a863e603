"""Reports: generated samples at each evaluation, translations and scores at the end of training."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax

from transformer.config._untrusted import parse_json, read_bounded
from transformer.data._conversations import marked
from transformer.data._dataset import Dataset
from transformer.generate._beam import Beam
from transformer.generate._generation import generate
from transformer.generate._sampling import Sampling
from transformer.training._recipe import Recipe
from transformer.training.metrics._summary import Summary
from transformer.training.tasks import _forecasts as numbers
from transformer.training.tasks._caption_texts import caption_samples, report_captions
from transformer.training.tasks._evaluation import write_texts
from transformer.training.tasks._table import TASKS
from transformer.training.tasks._translation import Translation, corpus_score, make_beam, scores, translate

SAMPLES = "samples.txt"
EXAMPLE = "example.json"
_HEADER = "=== step "


def device_line() -> str:
    """Return a line with the number and kind of the devices of all processes, and the version of JAX."""
    devices = jax.devices()
    kind = devices[0].device_kind
    name = devices[0].platform if kind == devices[0].platform else f"{devices[0].platform} ({kind})"
    of = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"device: {len(devices)} x {name}{of}, jax {jax.__version__}"


def cache_line() -> str:
    """Return a line with the directory of JAX's compilation cache, and how to disable it; "" without a cache."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or not jax.config.jax_enable_compilation_cache:
        return ""
    return f"compiled programs are cached in {folder} (JAX_COMPILATION_CACHE_DIR= turns this off)"


def samples(recipe: Recipe, model: nn.Module, params: Any, dataset: Dataset, step: int) -> str:
    """Generate samples: translations of held-out sources, or continuations of prompts.

    Returns:
        the text of the samples; "" if the recipe asks for none, or the model does not generate text.
    """
    wanted = recipe.evaluation.samples
    task = TASKS[recipe.task]
    if not wanted or not task.writes:
        return ""
    if task.captions:
        return caption_samples(recipe, model, params, dataset, wanted)
    if task.source:
        return "\n".join(
            _arrow(item) for item in _translations(recipe, model, params, dataset, "validation", wanted) or []
        )
    if task.answers:
        texts = [f"{asked}\n-> {text}" for asked, text in _answers(recipe, model, params, dataset, wanted, step)]
    else:
        texts = _continued(recipe, model, params, dataset, dataset.prompts()[:wanted], step)
    return "\n---\n".join(texts)


def append_samples(workdir: Path, step: int, text: str) -> None:
    """Append the samples of a step to samples.txt."""
    with open(workdir / SAMPLES, "a", encoding="utf-8") as file:
        file.write(f"{_HEADER}{step} ===\n{text}\n")


def cut_samples(workdir: Path, step: int) -> None:
    """Remove the samples of later steps: a run that resumes from `step` writes them again."""
    path = workdir / SAMPLES
    if not path.exists():
        return
    # surrogateescape preserves bytes that are not valid UTF-8 (written by another program, or by a damaged disk).
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines(keepends=True)
    for index, line in enumerate(lines):
        number = line.removeprefix(_HEADER).removesuffix(" ===\n")
        if line.startswith(_HEADER) and number.isdecimal() and int(number) > step:
            partial = path.with_suffix(".txt.partial")
            partial.write_text("".join(lines[:index]), encoding="utf-8", errors="surrogateescape")
            os.replace(partial, path)
            return


def read_samples(workdir: str | os.PathLike) -> list[tuple[int, str]]:
    """Return the steps and texts of samples.txt, oldest first; an empty list if the file does not exist."""
    path, found = Path(workdir) / SAMPLES, []
    if not path.exists():
        return found
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        number = line.removeprefix(_HEADER).removesuffix(" ===\n")
        if line.startswith(_HEADER) and number.isdecimal():
            found.append((int(number), ""))
        elif found:
            found[-1] = found[-1][0], found[-1][1] + line
    return found


def example_lines(dataset: Dataset) -> str:
    """Return the training example of a dataset with marked trained parts; "" without one."""
    if not dataset.example:
        return ""
    how = "in color" if sys.stdout.isatty() else "in [brackets]"
    return f"a training conversation, with its trained parts {how}:\n{marked(dataset.example)}"


def save_example(workdir: Path, dataset: Dataset) -> None:
    """Write the training example of a dataset with marked trained parts into example.json, if it has one."""
    if dataset.example:
        partial = workdir / f"{EXAMPLE}.partial"
        partial.write_text(json.dumps(dataset.example) + "\n", encoding="utf-8")
        os.replace(partial, workdir / EXAMPLE)


def read_example(workdir: str | os.PathLike) -> list[tuple[str, bool]]:
    """Return what `save_example` wrote; an empty list if there is no such file, or it is damaged."""
    try:
        parts = parse_json(read_bounded(Path(workdir), EXAMPLE))
        return [(str(text), bool(trained)) for text, trained in parts]
    except (OSError, ValueError, TypeError):
        return []


def report(
    recipe: Recipe,
    model: nn.Module,
    params: Any,
    dataset: Dataset,
    summary: Summary,
    should_stop: Callable[[], bool],
    reference: Any = None,
) -> Summary:
    """Add the results of the trained model to the summary: scores and translations, a text, or test measures.

    `reference` is the tree of the reference model's parameters, for a task that needs them.

    Returns:
        the completed summary, or the given one if `should_stop` returns True before the end.
    """
    task = TASKS[recipe.task]
    if not task.writes:
        if task.try_it is not None:
            summary = dataclasses.replace(summary, prompt=_first_words(dataset.prompts()[0], 60))
        return numbers.measured(recipe, params, dataset, summary, should_stop, reference)
    if task.captions:
        return report_captions(recipe, model, params, dataset, summary, should_stop)
    if task.answers:
        found = _answers(recipe, model, params, dataset, 1, recipe.training.steps)
        asked, text = found[0] if found else ("", "")
        summary = dataclasses.replace(summary, text=text, prompt=_first_words(asked))
        if "test" not in dataset.splits:
            return summary
        return numbers.measured(recipe, params, dataset, summary, should_stop)
    if not task.source:
        prompt = dataset.prompts()[0]
        text = _continued(recipe, model, params, dataset, [prompt], recipe.training.steps)[0]
        return dataclasses.replace(summary, text=text, prompt=_first_words(prompt))
    return _translation_report(recipe, model, params, dataset, summary, should_stop)


def _translation_report(
    recipe: Recipe, model: nn.Module, params: Any, dataset: Dataset, summary: Summary, should_stop: Callable[[], bool]
) -> Summary:
    """Add translations of unseen sources and their scores to the summary."""
    wanted = recipe.evaluation.exact_match_examples
    if not wanted:
        return dataclasses.replace(summary, prompt=dataset.prompts()[0])
    given = recipe, model, params, dataset
    unseen = "test" if "test" in dataset.splits else "validation"
    beam = make_beam(recipe.evaluation.beam_size, recipe.evaluation.beam_alpha)
    done = _translations(*given, unseen, wanted, beam, should_stop)
    basics = None
    if done is not None and "basics" in dataset.splits:
        basics = _translations(*given, "basics", None, beam, should_stop)
        done = None if basics is None else done
    if done is None:
        return summary
    number = min(recipe.evaluation.translations, len(done))
    shown = [done[index * len(done) // max(number, 1)] for index in range(number)]
    by_words = recipe.data.bleu_tokenization is None
    return dataclasses.replace(
        summary,
        exact_match=scores(done) if by_words else {},
        group_name=recipe.data.group_name,
        basics=None if basics is None else scores(basics)[""],
        corpus=None if by_words else corpus_score(done, recipe.data.bleu_tokenization),
        split=unseen,
        translations=tuple((item.example.source, item.example.target, item.output) for item in shown),
        prompt=done[len(done) // 2].example.source,
    )


def _translations(
    recipe: Recipe,
    model: nn.Module,
    params: Any,
    dataset: Dataset,
    split: str,
    limit: int | None,
    beam: Beam | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Translation] | None:
    """Translate up to `limit` sources of a split (None: all); None if `should_stop` returns True before the end."""
    examples = dataset.examples(split, limit)
    outputs = translate(
        model,
        params,
        dataset.tokenizer,
        [example.source for example in examples],
        max_new_tokens=dataset.max_target_length,
        beam=beam,
        batch_size=recipe.data.eval_batch_size,
        should_stop=should_stop,
    )
    return None if outputs is None else [Translation(*pair) for pair in zip(examples, outputs, strict=True)]


def _continued(
    recipe: Recipe, model: nn.Module, params: Any, dataset: Dataset, prompts: list[str], step: int
) -> list[str]:
    """Generate a continuation of each prompt."""
    return write_texts(
        model,
        params,
        dataset.tokenizer,
        prompts,
        context=recipe.data.sequence_length,
        new_tokens=recipe.evaluation.sample_tokens,
        temperature=recipe.evaluation.temperature,
        seed=_seed(recipe, step),
    )


def _answers(
    recipe: Recipe, model: nn.Module, params: Any, dataset: Dataset, wanted: int, step: int
) -> list[tuple[str, str]]:
    """Return (last message, answer of the model) of held-out conversations."""
    found = dataset.openings(wanted)
    if not found:
        return []
    limit = recipe.data.sequence_length - max(len(ids) for _, ids in found)
    generated = generate(
        model,
        params,
        [ids for _, ids in found],
        max_new_tokens=min(recipe.evaluation.sample_tokens, limit),
        sampling=Sampling(temperature=recipe.evaluation.temperature),
        eos_id=dataset.end_ids,
        seed=_seed(recipe, step),
    )
    return [(asked, dataset.tokenizer.decode(ids)) for (asked, _), ids in zip(found, generated, strict=True)]


def _seed(recipe: Recipe, step: int) -> int:
    """Return the seed of the samples: another one for each seed of the run and each step."""
    return (recipe.training.seed * 1_000_003 + step * 1_009) % 2**32


def _arrow(item: Translation) -> str:
    correct = "" if item.exact else f"   (correct: {item.example.target})"
    return f"{item.example.source} -> {item.output}{correct}"


def _first_words(text: str, most: int = 40) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), text.strip())
    return line if len(line) <= most else line[:most].rsplit(" ", 1)[0]
