"""`python -m transformer generate`: generate translations or continuations."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tyro

from transformer.cli._arguments import option_names_in_errors, parse
from transformer.cli._models import ModelCommand
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.cli._texts import GeneratedText
    from transformer.generate._sampling import Sampling
    from transformer.inference._loading import LoadedModel

FILTERS = ("top_k", "top_p", "min_p")
"""options that restrict the tokens to sample from"""


@dataclass(frozen=True, kw_only=True)
class Generate(ModelCommand):
    """Generate text: an encoder-decoder translates each prompt (one line of output per prompt), a causal model
    continues it.

    Without --prompt, the prompts are read from stdin: each line is a sentence to translate, or the whole text is one
    prompt to continue.
    """

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """prompt; repeat the option to pass several; - reads stdin"""
    max_new_tokens: int | None = None
    """maximum new tokens per prompt; None: 128 for a translation, 200 for a continuation"""
    temperature: float | None = None
    """sampling temperature (0: greedy); None: translation 0, continuation 0.8, with --top-k, --top-p or --min-p 1"""
    top_k: int | None = None
    """sample from the k most likely tokens"""
    top_p: float | None = None
    """sample from the smallest set of most likely tokens whose total probability is at least this value"""
    min_p: float | None = None
    """sample from tokens with at least this fraction of the probability of the most likely token"""
    seed: int = 0
    """random seed for sampling; the same seed gives the same text"""
    slots: int | None = None
    """continuation: number of slots for continuous batching, refilled as prompts end; None: one per prompt"""
    draft: str | None = None
    """continuation: draft model for speculative decoding, with the same tokenizer; it does not change the text"""
    draft_tokens: int | None = None
    """number of tokens that the draft model proposes per step; None: 4"""
    int8: bool = False
    """quantize the weights to 8 bits, a quarter of the memory of float32; stderr reports memory and rounding errors"""


def main(arguments: Sequence[str]) -> None:
    """Print the generated texts."""
    command = parse(Generate, "generate", arguments)
    _check(command)
    from transformer.cli import _texts as texts
    from transformer.nn.models._seq2seq import Seq2Seq

    texts.check_prompts(command.prompt)  # before loading the model, which takes seconds
    _check_sampling(command)
    run = command.load_writer()
    translates = isinstance(run.model, Seq2Seq)
    options = _decoding_options(command, translates)
    if command.int8:
        run = _in_8_bits(run)
    prompts = texts.read_prompts(command.prompt, lines=translates)
    texts.warn_of_unknown(run, prompts)
    written = (texts.translate if translates else texts.continue_texts)(
        run,
        prompts,
        max_new_tokens=command.max_new_tokens or (128 if translates else 200),
        sampling=_sampling(command, greedy=translates),
        seed=command.seed,
        **options,
    )
    if command.json:
        command.print_json(run, results=[dataclasses.asdict(one) for one in written])
    else:
        _print(written, translates)


def _check(command: Generate) -> None:
    """Raise ConfigError for option values and combinations that are invalid with any model."""
    if command.max_new_tokens is not None and command.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {command.max_new_tokens}.")
    if not 0 <= command.seed < 2**32:
        raise ConfigError(f"--seed must be from 0 to {2**32 - 1}, got {command.seed}.")
    if command.slots is not None and command.slots < 1:
        raise ConfigError(f"--slots must be at least 1, got {command.slots}.")
    if command.slots is not None and command.draft is not None:
        raise ConfigError("--slots and --draft can't be used together. Remove one of them.")
    if command.draft_tokens is not None and command.draft_tokens < 1:
        raise ConfigError(f"--draft-tokens must be at least 1, got {command.draft_tokens}.")
    if command.draft_tokens is not None and command.draft is None:
        raise ConfigError("--draft-tokens needs --draft. Pass --draft, or remove --draft-tokens.")


def _check_sampling(command: Generate) -> None:
    """Raise ConfigError, naming the option, for sampling parameters that are invalid with any model."""
    with option_names_in_errors(**{name: name for name in ("temperature", *FILTERS)}):
        _sampling(command, greedy=False)


def _sampling(command: Generate, *, greedy: bool) -> Sampling:
    """Return the sampling parameters; without a temperature or a filter, `greedy` selects the default temperature."""
    from transformer.generate._sampling import Sampling

    filters = {name: getattr(command, name) for name in FILTERS}
    temperature = command.temperature
    if temperature is None:
        filtered = any(value is not None for value in filters.values())
        temperature = 1.0 if filtered else 0.0 if greedy else 0.8
    return Sampling(temperature=temperature, **filters)


def _print(written: Sequence[GeneratedText], translates: bool) -> None:
    """Print one line for each translation, or each prompt with its continuation."""
    from transformer.cli._texts import shown

    if translates:
        for one in written:
            print(shown(one.output))
    else:
        print("\n---\n".join(shown(one.prompt + one.output) for one in written))


def _decoding_options(command: Generate, translates: bool) -> dict[str, Any]:
    """Return keyword arguments of `generate` for continuous batching (--slots) and speculative decoding (--draft)."""
    if translates and (command.slots is not None or command.draft is not None):
        raise ConfigError("--slots and --draft need a causal model, but this model is an encoder-decoder. Remove them.")
    options: dict[str, Any] = {} if command.slots is None else {"slots": command.slots}
    if command.draft is not None:
        from transformer.generate._speculative import Draft
        from transformer.inference._loading import open_model

        draft = open_model(command.draft)
        options["draft"] = Draft(model=draft.model, params=draft.params, tokens=command.draft_tokens or 4)
    return options


def _in_8_bits(run: LoadedModel) -> LoadedModel:
    from transformer.nn._int8 import quantize

    params, report = quantize(run.params)
    for row in report:
        print(row, file=sys.stderr)
    return dataclasses.replace(run, params=params)
