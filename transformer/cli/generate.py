"""`python -m transformer generate`: translate or continue texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from transformer.cli.arguments import parse
from transformer.cli.models import ModelCommand
from transformer.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class Generate(ModelCommand):
    """Translates each prompt (encoder-decoder: one line of output a prompt), or goes on with it (causal model).

    Without --prompt the text comes from stdin: every line is a sentence to translate, or all of it is to be continued.
    """

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """text for the model; again for more texts; - reads stdin"""
    max_new_tokens: int | None = None
    """write at most so many tokens a prompt; None: 128 for a translation, 200 for running text"""
    temperature: float | None = None
    """divides the logits, 0: always the likeliest token; None: 0 for a translation, 0.8 for running text, 1 with a
    filter"""
    top_k: int | None = None
    """choose among the k likeliest tokens"""
    top_p: float | None = None
    """choose among the fewest likeliest tokens that together have this probability"""
    min_p: float | None = None
    """choose among tokens at least this share as likely as the likeliest"""
    seed: int = 0
    """of the choices; the same seed gives the same text"""


def main(arguments: Sequence[str]) -> None:
    """Prints what the model writes."""
    command = parse(Generate, "generate", arguments)
    if command.max_new_tokens is not None and command.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {command.max_new_tokens}.")
    if not 0 <= command.seed < 2**32:
        raise ConfigError(f"--seed must be from 0 to {2**32 - 1}, got {command.seed}.")
    from transformer.cli import texts
    from transformer.generate import Sampling
    from transformer.models import Seq2Seq

    filters = {name: getattr(command, name) for name in ("top_k", "top_p", "min_p")}
    Sampling(temperature=1.0 if command.temperature is None else command.temperature, **filters)  # wrong: soon
    run = command.load_writer()
    translates = isinstance(run.model, Seq2Seq)
    prompts = texts.read_prompts(command.prompt, lines=translates)
    usual = 1.0 if any(value is not None for value in filters.values()) else 0.0 if translates else 0.8
    sampling = Sampling(temperature=usual if command.temperature is None else command.temperature, **filters)
    written = (texts.translate if translates else texts.continue_texts)(
        run,
        prompts,
        max_new_tokens=command.max_new_tokens or (128 if translates else 200),
        sampling=sampling,
        seed=command.seed,
    )
    if command.json:
        command.print_json(run, results=[dataclasses.asdict(one) for one in written])
    elif translates:
        for one in written:
            print(texts.shown(one.output))
    else:
        print("\n---\n".join(texts.shown(one.prompt + one.output) for one in written))
