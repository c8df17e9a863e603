"""`transformer-zoo generate`: generate translations or continuations."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer.cli._arguments import check_least
from transformer.cli._chat import image_reader
from transformer.cli._sampling import PromptsCommand
from transformer.cli._speculation import SpeculationOptions
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.inference._generate import StreamedText
    from transformer.inference._loaded_model import LoadedModel

FAST = ("slots", "draft", "lookup")
"""options that generate the texts in another way, of which one can be used"""


@dataclass(frozen=True, kw_only=True)
class Generate(SpeculationOptions, PromptsCommand):
    """Generate text: an encoder-decoder translates each prompt (one line of output per prompt), a causal model
    continues it. `answer` and `chat` ask a chat model.

    Without --prompt, the prompts are read from stdin: each line is a sentence to translate, or the whole text is one
    prompt to continue.
    """

    max_new_tokens: int | None = None
    """maximum new tokens per prompt; None: 200 for a continuation; for a translation the value of
    generation_config.json, or 128"""
    temperature: float | None = None
    """sampling temperature (0: greedy); None: 0 for a translation, 0.8 for a continuation, 1 with --top-k, --top-p or
    --min-p"""
    no_parse_special: bool = False
    """continuation: encode the name of a special token in a prompt, such as <|im_end|>, as text, not as that token"""
    slots: int | None = None
    """continuation: number of slots for continuous batching, refilled as prompts end; None: one per prompt"""


def main(command: Generate) -> None:
    _check(command)
    from transformer.cli import _texts as texts
    from transformer.inference import _generate as generating

    opened = command.load_writer()
    translates = opened.kind.source
    if translates:
        _check_translation(command)
    draft = command.open_draft()
    opened = command.quantized(opened)
    prompts = texts.read_prompts(command.prompt, lines=translates)
    texts.warn_of_unknown(opened, prompts)
    if _appears_while_generated(command, opened, prompts):
        command = dataclasses.replace(command, stream=True)
    if _causal_options(command):
        _print_pieces(command, opened, prompts)
        return
    write = generating.translate
    if not translates:
        special = not command.no_parse_special
        write = functools.partial(generating.continue_texts, slots=command.slots, draft=draft, parse_special=special)
    written = write(
        opened,
        prompts,
        max_new_tokens=command.max_new_tokens or (None if translates else 200),
        sampling=command.sampling(greedy=translates),
        seed=command.seed,
    )
    lines = [texts.shown(one.output if translates else one.prompt + one.output) for one in written]
    lines = lines if translates else ["\n---\n".join(lines)]
    command.answer_of(opened, lines, results=[dataclasses.asdict(one) for one in written])


def _check(command: Generate) -> None:
    """Raise ConfigError for option values and combinations that are invalid with any model."""
    if command.no_parse_special and command.image:
        raise ConfigError(
            "--no-parse-special can't be used with --image: the markers of images are special tokens. Remove it."
        )
    command.check()
    check_least("slots", command.slots)
    fast = _fast_options(command)
    if len(fast) > 1:
        raise ConfigError(f"{fast[0]} and {fast[1]} can't be used together. Remove one of them.")
    command.check_speculation()
    used = _causal_options(command) + (["a penalty"] if command.sampling(greedy=False).penalties else [])
    if fast and used:
        raise ConfigError(f"{fast[0]} and {used[0]} can't be used together. Remove one of them.")


def _check_translation(command: Generate) -> None:
    """Raise ConfigError for options that need a causal model."""
    used = _causal_options(command)
    if command.no_parse_special and not used:
        raise ConfigError("--no-parse-special needs a causal model: a source is always text. Remove it.")
    if used := used or _fast_options(command):
        raise ConfigError(f"{used[0]} needs a causal model, but this model is an encoder-decoder. Remove it.")


def _fast_options(command: Generate) -> list[str]:
    return [f"--{name}" for name in FAST if getattr(command, name) is not None]


def _causal_options(command: Generate) -> list[str]:
    """Return the given options that need a causal model which generates text in pieces."""
    given = {"--stream": command.stream, "--stop": bool(command.stop), "--image": bool(command.image)}
    given |= {"--samples": command.samples > 1, "--log-probabilities": command.log_probabilities}
    return [option for option, is_given in given.items() if is_given]


def _appears_while_generated(command: Generate, opened: LoadedModel, prompts: Sequence[str]) -> bool:
    """Return whether a text is printed on a terminal while it is generated; it is the same text as in a pipe.

    Several prompts are generated as one batch instead, which is faster, unless an option needs them one by one.
    """
    if not sys.stdout.isatty() or command.prints_json or opened.kind.writes != "continuation":
        return False
    one_by_one = len(prompts) == 1 or bool(_causal_options(command))
    return one_by_one and not _fast_options(command)


def _print_pieces(command: Generate, opened: LoadedModel, prompts: Sequence[str]) -> None:
    """Print continuations that are generated in pieces, one after the other."""
    from transformer.generate._streaming import TokenStream
    from transformer.inference import _generate as generating

    images, stream = image_reader(opened, command.image), TokenStream(opened.model, opened.params)

    def write(prompt: str, seed: int, show: Callable[[str], None]) -> StreamedText:
        show(prompt)
        limit, sampling = command.max_new_tokens or 200, command.sampling(greedy=False)
        options = {"sampling": sampling, "seed": seed, "stop": command.stop, "show": show}
        options |= {"images": command.image, "reader": images, "parse_special": not command.no_parse_special}
        return generating.stream_text(opened, stream, prompt, max_new_tokens=limit, **options)

    command.print_pieces(opened, prompts, write, lambda one: one.prompt + one.output)
