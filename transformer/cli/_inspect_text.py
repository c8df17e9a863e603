"""`transformer-zoo inspect text`: attention maps of a model for a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer.cli._inspect import ModelInput, PromptCommand, called, check_reader, draw
from transformer.cli._streams import decode_argument
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.inference._loaded_model import LoadedModel


@dataclass(frozen=True, kw_only=True)
class InspectText(PromptCommand):
    """Draw the attention weights of every layer and head for one text, with the tokens on both axes: as PNG files, or
    with --html as one interactive page.
    """

    target: str | None = None
    """encoder-decoder: target text; None: the text that the model generates"""
    max_new_tokens: int | None = None
    """maximum new tokens to generate (greedily) and to show; None: 128 for a translation, 0 for a causal model"""


def main(command: InspectText, arguments: Sequence[str]) -> None:
    command.check()
    if command.max_new_tokens is not None and command.target is not None:
        raise ConfigError(
            "--target and --max-new-tokens can't be used together: --target replaces the generated text. Remove one "
            "of them."
        )
    opened = command.load()
    check_reader(opened)
    draw(command, opened, _read(command, opened), called("text", arguments))


def _read(command: InspectText, opened: LoadedModel) -> ModelInput:
    from transformer.cli import _texts as texts
    from transformer.generate._sampling import Sampling
    from transformer.inference import _generate as generating

    (prompt,) = texts.read_prompts([command.prompt], lines=False)  # with "-", all of stdin is one text
    target = None if command.target is None else decode_argument(command.target)
    texts.warn_of_unknown(opened, [prompt])
    ids, new = generating.encode_prompt(opened, prompt), command.max_new_tokens
    if not opened.kind.source:
        if target is not None:
            raise ConfigError(
                "--target needs an encoder-decoder; this model has one stack and reads one text. Pass it as --prompt."
            )
        if opened.kind.writes == "continuation":
            return _input(prompt, {"target": ids}) if new is None else _continued(opened, prompt, ids, new)
        if new is not None:
            raise ConfigError(
                f"--max-new-tokens needs a model that generates text, got {type(opened.model).__name__}. Remove it."
            )
        return _input(prompt, {"source": ids})
    texts.warn_of_unknown(opened, [] if target is None else [target], normalize=False)
    if target is None:
        greedy = Sampling(temperature=0.0)
        target = generating.translate(opened, [prompt], max_new_tokens=new or 128, sampling=greedy, seed=0)[0].output
    start = opened.target_start
    rows = {"source": ids, "target": [*start, *generating.encode(opened, target, "target")]}
    return _input(prompt, rows, target, len(start) if command.target is None else None)


def _continued(opened: LoadedModel, prompt: str, ids: list[int], new: int) -> ModelInput:
    """Return a prompt with its greedy continuation by a causal model."""
    from transformer.generate._generation import generate
    from transformer.generate._sampling import Sampling
    from transformer.inference import _generate as generating

    if opened.context is not None and len(ids) + new > opened.context:
        room = opened.context - len(ids)
        remedy = f"Pass at most --max-new-tokens {room}" if room > 0 else "Remove --max-new-tokens"
        raise ConfigError(
            f"the prompt and the new tokens must fit the model's context of {opened.context} tokens, got {len(ids)} "
            f"prompt tokens and {new} new tokens. {remedy}, or shorten the prompt."
        )
    greedy = Sampling(temperature=0.0, suppress=opened.suppressed)
    (row,) = generate(opened.model, opened.params, [ids], max_new_tokens=new, eos_id=opened.eos_ids, sampling=greedy)
    ids = [*ids, *row]
    return _input(
        prompt, {"target": ids}, generating.continuation(opened.tokenizer, ids, len(row)), len(ids) - len(row)
    )


def _input(
    prompt: str, rows: dict[str, list[int]], target: str | None = None, generated_from: int | None = None
) -> ModelInput:
    from transformer.inference import _generate as generating

    texts, line = {"Prompt": prompt}, None
    if target is not None:
        texts["Target" if generated_from is None else "Generated"] = target
        line = f"{prompt} -> {target}" if "source" in rows else f"{prompt}{target}"
    return ModelInput(
        prompt, rows, lambda opened: generating.encode_prompt(opened, prompt), texts, target, generated_from, line
    )
