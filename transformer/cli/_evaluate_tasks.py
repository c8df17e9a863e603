"""`evaluate --tasks` and `evaluate --text`: tasks of lm-evaluation-harness, and bits per byte of a text file."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.cli._evaluate_run import Evaluate
    from transformer.inference._loaded_model import LoadedModel

TASK_OPTIONS = ("include_dir", "limit", "num_fewshot", "apply_chat_template", "batch_size")
"""Options that need --tasks."""
RUN_OPTIONS = ("split", "examples", "beam_size", "alpha")
"""Options of the evaluation on the data of a run."""


def check(command: Evaluate) -> None:
    """Raise ConfigError for options that don't belong together, or are out of range."""

    def given(names: tuple[str, ...]) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name in names if getattr(command, name) not in (None, False)]

    if command.tasks is not None and command.text is not None:
        raise ConfigError("--tasks and --text can't be used together. Remove one of them.")
    kind = "--tasks" if command.tasks is not None else "--text" if command.text is not None else None
    if kind and (used := given(RUN_OPTIONS)):
        raise ConfigError(f"{used[0]} is for the data of a run, and can't be used with {kind}. Remove one of them.")
    if kind != "--tasks" and (used := given(TASK_OPTIONS)):
        raise ConfigError(f"{used[0]} needs --tasks. Pass --tasks, or remove {used[0]}.")
    if kind is None and command.max_length is not None:
        raise ConfigError("--max-length needs --tasks or --text. Pass one of them, or remove --max-length.")
    _check_values(command)


def _check_values(command: Evaluate) -> None:
    """Raise ConfigError for values that are out of range."""
    if command.tasks is not None and not _names(command):
        raise ConfigError(
            "--tasks is empty. Pass names of tasks, separated by commas: --tasks arc_easy,lambada_openai."
        )
    if command.limit is not None and command.limit <= 0:
        raise ConfigError(f"--limit must be above 0, got {command.limit:g}. Change it.")
    if command.num_fewshot is not None and command.num_fewshot < 0:
        raise ConfigError(f"--num-fewshot must be at least 0, got {command.num_fewshot}. Change it.")
    if command.include_dir is not None and not command.include_dir.is_dir():
        raise FileNotFoundError(f"no directory {command.include_dir}. Pass a directory with tasks as YAML files.")


def _names(command: Evaluate) -> list[str]:
    return [name.strip() for name in (command.tasks or "").split(",") if name.strip()]


def evaluate_tasks(command: Evaluate) -> None:
    """Print the results of tasks, as the tables of the harness."""
    from transformer.inference import _harness as harness

    harness.check_harness()  # before the model is loaded
    opened, mesh = _load_on_all_devices(command)
    model = harness.harness_model(opened, mesh=mesh, max_length=command.max_length, batch_size=command.batch_size)
    limit = command.limit
    results = harness.evaluate_tasks(
        model,
        _names(command),
        include_path=None if command.include_dir is None else str(command.include_dir),
        limit=int(limit) if limit is not None and limit >= 1 else limit,
        num_fewshot=command.num_fewshot,
        apply_chat_template=command.apply_chat_template,
    )
    if command.json:
        kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
        values = {name: results[name] for name in kept if name in results}
        # Numbers of the harness may be of types that JSON does not have.
        command.print_json(opened, **json.loads(json.dumps(values, default=str)), max_length=model.max_length)
        return
    print(harness.table(results))
    if results.get("groups"):
        print(harness.table(results, "groups"))


def evaluate_text(command: Evaluate) -> None:
    """Print loss, perplexity and bits per byte of a text file."""
    from transformer.data._local_files import read_text
    from transformer.inference._score import score_text

    text = read_text(str(command.text))
    opened = command.load()
    if opened.kind.writes != "continuation":
        raise ConfigError(
            f"--text needs a causal language model, but {command.directory} contains a "
            f"{type(opened.model).__name__}. Pass another model."
        )
    if command.max_length is not None:
        table = opened.model.config.max_length
        if not 0 < command.max_length <= (table or command.max_length):
            limit = "" if table is None else f" and at most {table}, the length of the position table"
            raise ConfigError(f"--max-length must be at least 1{limit}, got {command.max_length}. Change it.")
        opened = dataclasses.replace(opened, context=command.max_length)
    found = score_text(opened, text)
    values = {"loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
    if command.json:
        sizes = {"tokens": found.tokens, "bytes": found.num_bytes, "max_length": opened.context}
        command.print_json(opened, text=str(command.text), **values, **sizes)
        return
    print(f"{command.text}: {found.tokens:,} predicted tokens, {found.num_bytes:,} bytes")
    print(
        f"loss: {found.loss:.4f} nats per token, perplexity {found.perplexity:.4g}, bits per byte "
        f"{found.bits_per_byte:.4f}"
    )


def _load_on_all_devices(command: Evaluate) -> tuple[LoadedModel, Any]:
    """Load a model; with several devices, shard its parameters over all of them.

    Returns:
        The model, and the mesh (None: a single device).
    """
    import jax

    from transformer.inference._loading import is_workdir
    from transformer.nn._sharding import make_mesh, state_shardings

    if jax.device_count() == 1:
        return command.load(), None
    mesh = make_mesh({"fsdp": -1})  # rows of a batch and parameters are split over the same devices
    if not is_workdir(command.directory):
        return command.load(mesh=mesh), mesh
    opened = command.load()
    params = jax.device_put(opened.params, state_shardings(opened.params, mesh))
    return dataclasses.replace(opened, params=params), mesh
