"""`python -m transformer inspect`: where a trained model looks. (A file inspect.py would hide Python's own.)"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer.cli.arguments import parse
from transformer.cli.workdirs import WorkdirCommand
from transformer.config import ConfigError

if TYPE_CHECKING:
    from transformer.training.runs import Run


@dataclass(frozen=True, kw_only=True)
class Inspect(WorkdirCommand):
    """Draws the attention weights of every layer and head for one text, with words on both axes, into PNG files."""

    prompt: str
    """text that the model reads"""
    target: str | None = None
    """encoder-decoder: text on the decoder's side; None: what the model writes itself"""
    output: Path | None = None
    """directory for the pictures; None: WORKDIR/attention"""


def main(arguments: Sequence[str]) -> None:
    """Prints the paths of the pictures."""
    command = parse(Inspect, "inspect", arguments)
    from transformer.cli import texts
    from transformer.generate import Sampling
    from transformer.viz.attention_maps import attention_maps, save_attention_maps

    run = command.load()
    tokenizer = run.tokenizer
    (prompt,) = texts.read_prompts([command.prompt], "causal_lm")  # of stdin, all is one text
    ids = texts.encode_prompt(run, prompt)
    if run.recipe.task == "seq2seq":
        target = command.target
        if target is None:
            greedy = Sampling(temperature=0.0)
            target = texts.translate(run, [prompt], max_new_tokens=128, sampling=greedy, seed=0)[0].output
        read = [tokenizer.bos_id, *texts.encode(run, target, "target")]
        sown, labels = _watch(run, ids, read), {"source": tokenizer.tokens(ids), "target": tokenizer.tokens(read)}
    elif command.target is not None:
        raise ConfigError("--target is for an encoder-decoder; a causal model reads one text: put it into --prompt.")
    else:
        target = None
        sown, labels = _watch(run, ids), {"target": tokenizer.tokens(ids)}
    directory = command.workdir / "attention" if command.output is None else command.output
    paths = save_attention_maps(attention_maps(sown, run.recipe.model), directory, **labels)
    if command.json:
        command.print_json(run, prompt=prompt, target=target, paths=[str(path) for path in paths])
        return
    if target is not None:
        print(f"{prompt} -> {target}")
    for path in paths:
        print(path)


def _watch(run: Run, *rows: list[int]) -> Any:
    """What attention sows when the model reads these rows, one example without padding."""
    import jax
    import jax.numpy as jnp

    # A kernel chosen for the training may be unable to give its weights.
    model = run.model.clone(execution=dataclasses.replace(run.model.execution, attention="auto"))

    @jax.jit
    def watch(params, *tokens):
        return model.apply({"params": params}, *tokens, mutable=["intermediates"])[1]["intermediates"]

    return jax.device_get(watch(run.params, *(jnp.asarray([row], jnp.int32) for row in rows)))
