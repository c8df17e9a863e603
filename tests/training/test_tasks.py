"""All differences between tasks are in the task classes: no code compares task names, and every task is complete."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from transformer.config._paths import get_path
from transformer.data import DATA, Conversations, Preferences, Prompts
from transformer.training._flops import step_flops
from transformer.training._overrides import load_recipe_file
from transformer.training._recipe import build_model
from transformer.training._state import initial_params
from transformer.training.plan import batch_shapes, without_data
from transformer.training.tasks._base import Task
from transformer.training.tasks._policy_gradient import GRPO
from transformer.training.tasks._table import TASKS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "transformer"


def task_comparisons(source: str) -> Iterator[int]:
    """Yield the lines on which a program compares something with the name of a task, or a `task` with anything."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            compared = [node.value]
        else:
            continue
        names = {part.value for side in compared for part in ast.walk(side) if isinstance(part, ast.Constant)}
        tasks = [side for side in compared if getattr(side, "attr", getattr(side, "id", "")) == "task"]
        if tasks or names & TASKS.keys():
            yield node.lineno


def test_no_code_compares_names_of_tasks():
    found = {
        f"{path.relative_to(PACKAGE.parent)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in task_comparisons(path.read_text(encoding="utf-8"))
    }
    assert not found, f"put what differs on the task, in transformer/training/tasks/: {', '.join(sorted(found))}"


@pytest.mark.parametrize(
    "source",
    [
        'if recipe.task == "forecaster": pass',
        'if recipe.task in ("classifier", "masked_lm"): pass',
        "layers = 2 if task != other else 1",
        'match name:\n    case "seq2seq":\n        pass',
    ],
)
def test_a_comparison_of_task_names_is_detected(source):
    assert len([*task_comparisons(source)]) == 1


def test_other_comparisons_are_allowed():
    assert [*task_comparisons('if kind == "mesh" or TASKS[recipe.task].source: told = {"task": recipe.task}')] == []


def test_every_kind_of_data_has_a_task_and_every_task_has_data():
    assert {kind.task for kind in DATA.values()} == TASKS.keys()
    assert {name: task.name for name, task in TASKS.items()} == {name: name for name in TASKS}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_a_task_defines_the_abstract_methods_of_its_base_class(task):
    for method in ("inputs", "shapes"):
        assert getattr(type(task), method) is not getattr(Task, method), f"{task.name}: {method}"
    assert task.tokens or task.part
    assert bool(task.lengths) == task.tokens
    assert bool(task.try_it) >= task.writes


RECIPES = {
    "causal_lm": "shakespeare_cpu",
    "seq2seq": "number_words",
    "classifier": "sst2",
    "masked_lm": "mlm",
    "image_classifier": "digits_vit",
    "forecaster": "etth1",
    "contrastive": "shapes_clip",
    "captioning": "shapes_caption",
}
OWN_FILES = {
    "sft": Conversations(path="chats.jsonl"),
    "dpo": Preferences(path="pairs.jsonl"),
    "grpo": Prompts(path="prompts.jsonl"),
}
"""data of tasks without a recipe"""


def recipe_of(name):
    recipe, _ = without_data(load_recipe_file(ROOT / "configs" / f"{RECIPES.get(name, 'shakespeare_cpu')}.py")[0])
    grpo = GRPO(rewards=("rewards.py:length",)) if name == "grpo" else None
    model = recipe.model.replace(dropout_rate=0.0) if name == "grpo" else recipe.model
    return dataclasses.replace(recipe, data=OWN_FILES.get(name, recipe.data), grpo=grpo, model=model)


@pytest.mark.default_cases(5)
@pytest.mark.parametrize("name", TASKS)
def test_the_batch_the_model_and_the_loss_of_a_task_fit_together(name):
    """With shapes only: the model accepts the batch of `shapes`, and the loss weighs each target once."""
    recipe = recipe_of(name)
    task, batch = TASKS[recipe.task], batch_shapes(recipe)
    assert task.name == name
    sizes = task.sizes(batch)
    assert sizes == {field: getattr(get_path(recipe.model, task.part), field) for field in sizes}

    def computed(params, batch):
        model = build_model(recipe)
        variables = {"params": params}
        outputs = task.forward(model, variables, batch, deterministic=True)
        if (options := task.options(recipe)) is not None:
            loss, weight, sums, _ = task.compared(model, params, params, batch, options)
            outputs = outputs.reshape(*batch["tokens"].shape, -1)
            return outputs, loss, weight, sums
        if not task.each_token:  # what the loss takes
            given, _ = task.forward(model, variables, batch, deterministic=True, method=type(model).with_aux)
            return outputs, *task.loss(given, batch, recipe.training), task.measures(given, batch)
        return outputs, *task.loss(outputs, batch, recipe.training), task.measures(outputs, batch)

    params = jax.eval_shape(lambda: initial_params(recipe))
    outputs, loss, weight, measures = jax.eval_shape(computed, params, batch)
    rows = batch["weights"].shape
    assert outputs.shape[: len(rows)] == rows
    assert (loss.shape, weight.shape) == ((), ())
    assert all(measure.shape == () for measure in measures.values())
    assert step_flops(recipe).matrices > 0
