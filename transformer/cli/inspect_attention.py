"""`python -m transformer inspect`: where a trained model looks. (A file inspect.py would hide Python's own.)"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer.cli.arguments import parse
from transformer.cli.models import ModelCommand
from transformer.config import ConfigError

if TYPE_CHECKING:
    from transformer.inference import Opened


@dataclass(frozen=True, kw_only=True)
class Inspect(ModelCommand):
    """Draws the attention weights of every layer and head for one text, with words on both axes, into PNG files."""

    prompt: str
    """text that the model reads"""
    target: str | None = None
    """encoder-decoder: text on the decoder's side; None: what the model writes itself"""
    sizes: bool = False
    """also print the size of everything between the tokens and the logits"""
    output: Path | None = None
    """directory for the pictures; None: DIR/attention"""


def main(arguments: Sequence[str]) -> None:
    """Prints the paths of the pictures, after the sizes where they are wanted."""
    command = parse(Inspect, "inspect", arguments)
    import jax.numpy as jnp

    from transformer.studies.sizes import sizes, sizes_table
    from transformer.viz.attention_maps import attention_maps, save_attention_maps

    run = command.load_writer()
    # A kernel chosen for the training may be unable to give its weights.
    model = run.model.clone(execution=dataclasses.replace(run.model.execution, attention="auto"))
    prompt, target, rows = _read(command, run)
    tokens = {name: jnp.asarray([ids], jnp.int32) for name, ids in rows.items()}
    labels = {name: run.tokenizer.tokens(ids) for name, ids in rows.items()}
    sown = _watch(model, run.params, *tokens.values())
    if not sown and not command.sizes:
        raise ConfigError(
            f"no layer of the model in {command.directory} attends to anything: there is nothing to draw. "
            f"--sizes shows what it computes instead."
        )
    directory = command.directory / "attention" if command.output is None else command.output
    paths = save_attention_maps(attention_maps(sown, run.model.config), directory, **labels) if sown else []
    found = sizes(model, *tokens.values()) if command.sizes else []
    if command.json:
        values = {"sizes": [dataclasses.asdict(size) for size in found]} if command.sizes else {}
        command.print_json(run, prompt=prompt, target=target, paths=[str(path) for path in paths], **values)
        return
    if target is not None:
        print(f"{prompt} -> {target}")
    if command.sizes:
        for name, words in labels.items():
            print(f"{name}, {len(words)} tokens: {' '.join(words)}")
        print(f"\n{sizes_table(found)}\n")
    for path in paths:
        print(path)


def _read(command: Inspect, run: Opened) -> tuple[str, str | None, dict[str, list[int]]]:
    """The prompt, the text on the decoder's side, and the ids of each side of the model."""
    from transformer.cli import texts
    from transformer.generate import Sampling
    from transformer.models import Seq2Seq

    (prompt,) = texts.read_prompts([command.prompt], lines=False)  # of stdin, all is one text
    ids = texts.encode_prompt(run, prompt)
    target = command.target
    if not isinstance(run.model, Seq2Seq):
        if target is not None:
            raise ConfigError(
                "--target is for an encoder-decoder; a causal model reads one text: put it into --prompt."
            )
        return prompt, None, {"target": ids}
    if target is None:
        greedy = Sampling(temperature=0.0)
        target = texts.translate(run, [prompt], max_new_tokens=128, sampling=greedy, seed=0)[0].output
    return prompt, target, {"source": ids, "target": [*run.target_start, *texts.encode(run, target, "target")]}


def _watch(model: Any, params: Any, *tokens: Any) -> Any:
    """What attention sows when the model reads these tokens (1, T) each; nothing when no layer attends."""
    import jax

    @jax.jit
    def watch(params, *tokens):
        return model.apply({"params": params}, *tokens, mutable=["intermediates"])[1].get("intermediates", {})

    return jax.device_get(watch(params, *tokens))
