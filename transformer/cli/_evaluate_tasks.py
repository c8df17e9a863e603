"""`transformer-zoo evaluate tasks`: evaluate a model on tasks of lm-evaluation-harness."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from transformer.cli._models import ModelCommand
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.inference._loaded_model import LoadedModel


@dataclass(frozen=True, kw_only=True)
class EvaluateTasks(ModelCommand):
    """Evaluate a causal model on tasks of lm-evaluation-harness, and print its table."""

    tasks: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="TASK")]
    """names of tasks of lm-evaluation-harness, such as arc_easy (pip install 'transformer-zoo[evaluate]')"""
    include_dir: Path | None = None
    """directory with further tasks as YAML files"""
    limit: float | None = None
    """number of examples per task, or their fraction if below 1; None: all"""
    num_fewshot: int | None = None
    """number of solved examples in the prompt; None: as the task defines"""
    apply_chat_template: bool = False
    """write prompts with the chat template of the model"""
    batch_size: int | None = None
    """number of texts that are generated at the same time; None: by their length"""
    max_length: int | None = None
    """maximum number of tokens that the model reads at once; None: its context length"""


def main(command: EvaluateTasks) -> None:
    _check(command)
    from transformer.inference import _harness as harness

    harness.check_harness()  # before the model is loaded
    opened, mesh = _load_on_all_devices(command)
    model = harness.harness_model(opened, mesh=mesh, max_length=command.max_length, batch_size=command.batch_size)
    limit = command.limit
    results = harness.evaluate_tasks(
        model,
        [*command.tasks],
        include_path=None if command.include_dir is None else str(command.include_dir),
        limit=int(limit) if limit is not None and limit >= 1 else limit,
        num_fewshot=command.num_fewshot,
        apply_chat_template=command.apply_chat_template,
    )
    if command.json:
        kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
        values = {name: results[name] for name in kept if name in results}
        # Numbers of the harness may be of types that JSON does not have.
        command.answer_of(opened, (), **json.loads(json.dumps(values, default=str)), max_length=model.max_length)
        return
    print(harness.table(results))
    if results.get("groups"):
        print(harness.table(results, "groups"))


def _check(command: EvaluateTasks) -> None:
    """Raise ConfigError for values that are out of range."""
    if command.limit is not None and command.limit <= 0:
        raise ConfigError(f"--limit must be above 0, got {command.limit:g}. Change it.")
    if command.num_fewshot is not None and command.num_fewshot < 0:
        raise ConfigError(f"--num-fewshot must be at least 0, got {command.num_fewshot}. Change it.")
    if command.include_dir is not None and not command.include_dir.is_dir():
        raise FileNotFoundError(f"no directory {command.include_dir}. Pass a directory with tasks as YAML files.")


def _load_on_all_devices(command: EvaluateTasks) -> tuple[LoadedModel, Any]:
    """Load a model, and shard its parameters over a mesh of all devices; of a single device, the mesh is None."""
    import jax

    from transformer.inference._load import is_workdir
    from transformer.nn._sharding import make_mesh, state_shardings

    if jax.device_count() == 1:
        return command.load(), None
    mesh = make_mesh({"fsdp": -1})  # rows of a batch and parameters are split over the same devices
    if not is_workdir(command.directory):
        return command.load(mesh=mesh), mesh
    opened = command.load()
    params = jax.device_put(opened.params, state_shardings(opened.params, mesh))
    return dataclasses.replace(opened, params=params), mesh
