"""What the model does, shown: samples at each evaluation, translations and scores at the end."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax

from transformer.data._dataset import Dataset
from transformer.generate._beam import Beam
from transformer.training import _numeric_evaluation as numbers
from transformer.training._evaluation import write_texts
from transformer.training._recipe import Recipe
from transformer.training._summary import Summary
from transformer.training._tasks import TASKS
from transformer.training._translating import Translation, corpus_score, make_beam, scores, translate

SAMPLES = "samples.txt"
_HEADER = "=== step "


def device_line() -> str:
    """What JAX computes on, of all processes."""
    devices = jax.devices()
    kind = devices[0].device_kind
    name = devices[0].platform if kind == devices[0].platform else f"{devices[0].platform} ({kind})"
    of = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"device: {len(devices)} x {name}{of}, jax {jax.__version__}"


def cache_line() -> str:
    """Where JAX keeps what it compiles, and how not to; "" where it keeps nothing."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or not jax.config.jax_enable_compilation_cache:
        return ""
    return f"compiled programs are kept in {folder} (JAX_COMPILATION_CACHE_DIR= turns that off)"


def samples(recipe: Recipe, model: nn.Module, params: Any, dataset: Dataset, step: int) -> str:
    """What the model writes now: sources and their translations, or prompts continued; "" when none are wanted, and of
    a model that writes nothing.
    """
    wanted = recipe.evaluation.samples
    task = TASKS[recipe.task]
    if not wanted or not task.writes:
        return ""
    if task.source:
        return "\n".join(
            _arrow(item) for item in _translations(recipe, model, params, dataset, "validation", wanted) or []
        )
    texts = _continued(recipe, model, params, dataset, dataset.prompts()[:wanted], step)
    return "\n---\n".join(texts)


def append_samples(workdir: Path, step: int, text: str) -> None:
    """Adds the samples of a step to samples.txt."""
    with open(workdir / SAMPLES, "a", encoding="utf-8") as file:
        file.write(f"{_HEADER}{step} ===\n{text}\n")


def cut_samples(workdir: Path, step: int) -> None:
    """Drops the samples of later steps: a run that goes on from `step` writes them again."""
    path = workdir / SAMPLES
    if not path.exists():
        return
    # Bytes that are no UTF-8 (of another program, or of a damaged disk) come out as they went in.
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines(keepends=True)
    for index, line in enumerate(lines):
        number = line.removeprefix(_HEADER).removesuffix(" ===\n")
        if line.startswith(_HEADER) and number.isdecimal() and int(number) > step:
            partial = path.with_suffix(".txt.partial")
            partial.write_text("".join(lines[:index]), encoding="utf-8", errors="surrogateescape")
            os.replace(partial, path)
            return


def read_samples(workdir: str | os.PathLike) -> list[tuple[int, str]]:
    """The steps and texts of samples.txt, oldest first; none where there is no such file."""
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


def report(
    recipe: Recipe, model: nn.Module, params: Any, dataset: Dataset, summary: Summary, should_stop: Callable[[], bool]
) -> Summary:
    """The summary with what only the model can tell: scores and translations, a text, or measures of the test. As it
    was if `should_stop`.
    """
    task = TASKS[recipe.task]
    if not task.writes:
        if task.try_it is not None:
            summary = dataclasses.replace(summary, prompt=_first_words(dataset.prompts()[0], 60))
        return numbers.measured(recipe, params, dataset, summary, should_stop)
    if not task.source:
        prompt = dataset.prompts()[0]
        text = _continued(recipe, model, params, dataset, [prompt], recipe.training.steps)[0]
        return dataclasses.replace(summary, text=text, prompt=_first_words(prompt))
    return _translation_report(recipe, model, params, dataset, summary, should_stop)


def _translation_report(
    recipe: Recipe, model: nn.Module, params: Any, dataset: Dataset, summary: Summary, should_stop: Callable[[], bool]
) -> Summary:
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
    return write_texts(
        model,
        params,
        dataset.tokenizer,
        prompts,
        context=recipe.data.sequence_length,
        new_tokens=recipe.evaluation.sample_tokens,
        temperature=recipe.evaluation.temperature,
        seed=recipe.training.seed * 1_000_003 + step * 1_009,
    )


def _arrow(item: Translation) -> str:
    right = "" if item.exact else f"   (right: {item.example.target})"
    return f"{item.example.source} -> {item.output}{right}"


def _first_words(text: str, most: int = 40) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), text.strip())
    return line if len(line) <= most else line[:most].rsplit(" ", 1)[0]
