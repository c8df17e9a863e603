"""`python -m transformer generate`: generate translations or continuations."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from transformer.cli._arguments import PathText, parse
from transformer.cli._chat import answer, check_chat_options, image_reader, open_chat
from transformer.cli._models import check_images
from transformer.cli._sampling import SamplingCommand
from transformer.cli._speculation import check_speculation, open_draft
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.inference._generate import GeneratedText
    from transformer.inference._loaded_model import LoadedModel

FAST = ("slots", "draft", "lookup")
"""options that generate the texts in another way, of which one can be used"""


@dataclass(frozen=True, kw_only=True)
class Generate(SamplingCommand):
    """Generate text: an encoder-decoder translates each prompt (one line of output per prompt), a causal model
    continues it.

    Without --prompt, the prompts are read from stdin: each line is a sentence to translate, or the whole text is one
    prompt to continue.
    """

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """prompt; repeat the option to pass several; - reads stdin"""
    max_new_tokens: int | None = None
    """maximum new tokens per prompt; None: for a translation that of generation_config.json or 128, for a continuation
    200, with --chat 1024"""
    temperature: float | None = None
    """sampling temperature (0: greedy); None: translation 0, continuation 0.8, with --top-k, --top-p or --min-p 1, with
    --chat the value of generation_config.json"""
    chat: bool = False
    """each prompt is a message to a chat model; print its answer"""
    system: str | None = None
    """with --chat: system message before the prompt"""
    template: Path | None = None
    """with --chat: file with the chat template; None: that of the model"""
    switch: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """with --chat: variable of the template as NAME=VALUE, such as enable_thinking=false; repeat for several"""
    image: tuple[PathText, ...] = ()
    """vision-language model: paths of images that each prompt is about: --image a.jpg b.png"""
    no_parse_special: bool = False
    """continuation: encode the name of a special token in a prompt, such as <|im_end|>, as text, not as that token"""
    stream: bool = False
    """causal model: print the text while it is generated, also into a pipe; on a terminal, a single prompt always is"""
    samples: int = 1
    """causal model: number of texts per prompt, with the seeds --seed, --seed + 1, ..."""
    log_probabilities: bool = False
    """causal model: with --json, also print the tokens and their log-probabilities"""
    slots: int | None = None
    """continuation: number of slots for continuous batching, refilled as prompts end; None: one per prompt"""
    draft: PathText | None = None
    """continuation: draft model for speculative decoding, with the same tokenizer; it does not change the text"""
    draft_tokens: int | None = None
    """number of tokens that the draft model proposes per step; None: 4"""
    lookup: int | None = None
    """continuation: speculative decoding without a draft model: number of tokens to propose per step, those that
    followed the last tokens earlier in the text; it does not change the text"""


def main(arguments: Sequence[str]) -> None:
    """Print the generated texts."""
    command = parse(Generate, "generate", arguments)
    _check(command)
    from transformer.cli import _texts as texts
    from transformer.inference import _generate as generating

    texts.check_prompts(command.prompt)  # before loading the model, which takes seconds
    check_images(command.image)
    run = command.load_writer()
    translates = run.kind.source
    if translates and (used := _causal_options(command)):
        raise ConfigError(f"{used[0]} needs a causal model, but this model is an encoder-decoder. Remove it.")
    if translates and command.no_parse_special:
        raise ConfigError("--no-parse-special needs a causal model: a source is always text. Remove it.")
    options = _decoding_options(command, translates)
    run = command.quantized(run)
    prompts = texts.read_prompts(command.prompt, lines=translates)
    texts.warn_of_unknown(run, prompts)
    if _appears_while_generated(command, run, prompts):
        command = dataclasses.replace(command, stream=True)
    if _causal_options(command):
        _print_pieces(command, run, prompts)
        return
    written = (generating.translate if translates else generating.continue_texts)(
        run,
        prompts,
        max_new_tokens=command.max_new_tokens or (None if translates else 200),
        sampling=command.sampling(greedy=translates),
        seed=command.seed,
        **options,
    )
    if command.json:
        command.print_json(run, results=[dataclasses.asdict(one) for one in written])
    else:
        _print(written, translates)


def _check(command: Generate) -> None:
    """Raise ConfigError for option values and combinations that are invalid with any model."""
    command.check()
    if command.slots is not None and command.slots < 1:
        raise ConfigError(f"--slots must be at least 1, got {command.slots}.")
    fast = [name for name in FAST if getattr(command, name) is not None]
    if len(fast) > 1:
        raise ConfigError(f"--{fast[0]} and --{fast[1]} can't be used together. Remove one of them.")
    check_speculation(command.draft, command.draft_tokens, command.lookup)
    _check_pieces(command)


def _check_pieces(command: Generate) -> None:
    """Raise ConfigError for invalid combinations of options that generate text in pieces."""
    if command.samples < 1:
        raise ConfigError(f"--samples must be at least 1, got {command.samples}.")
    fast = [name for name in FAST if getattr(command, name) is not None]
    used = _causal_options(command) + (["a penalty"] if command.sampling(greedy=False).has_penalties else [])
    if fast and used:
        raise ConfigError(f"--{fast[0]} and {used[0]} can't be used together. Remove one of them.")
    check_chat_options(command)
    if command.no_parse_special and (command.chat or command.image):
        reason = "messages are always text" if command.chat else "the markers of images are special tokens"
        other = "--chat" if command.chat else "--image"
        raise ConfigError(f"--no-parse-special can't be used with {other}: {reason}. Remove it.")
    if command.stream and command.json:
        raise ConfigError("--stream and --json can't be used together. Remove one of them.")
    if command.log_probabilities and not command.json:
        raise ConfigError("--log-probabilities needs --json. Pass --json, or remove --log-probabilities.")


def _causal_options(command: Generate) -> list[str]:
    """Return the given options that need a causal model which generates text in pieces."""
    given = {"--chat": command.chat, "--stream": command.stream, "--stop": bool(command.stop)}
    given |= {"--image": bool(command.image)}
    given |= {"--samples": command.samples > 1, "--log-probabilities": command.log_probabilities}
    return [option for option, is_given in given.items() if is_given]


def _appears_while_generated(command: Generate, run: LoadedModel, prompts: Sequence[str]) -> bool:
    """Return whether a text is printed on a terminal while it is generated; it is the same text as in a pipe.

    Several prompts are generated as one batch instead, which is faster, unless an option needs them one by one.
    """
    if not sys.stdout.isatty() or command.json or run.kind.source:
        return False
    one_by_one = len(prompts) == 1 or bool(_causal_options(command))
    return one_by_one and all(getattr(command, name) is None for name in FAST)


def _print_pieces(command: Generate, run: LoadedModel, prompts: Sequence[str]) -> None:
    """Print continuations or answers that are generated in pieces, one after the other."""
    from transformer.cli import _texts as texts
    from transformer.generate._streaming import TokenStream
    from transformer.inference import _generate as generating

    images = image_reader(run, command.image)
    chat = open_chat(run, command.template, images) if command.chat else None
    stream = TokenStream(run.model, run.params) if chat is None else None

    def show(piece: str) -> None:
        print(texts.shown(piece) if command.stream else "", end="", flush=command.stream)

    results, separator = [], ""
    for number, sample in itertools.product(range(len(prompts)), range(command.samples)):
        prompt, seed = prompts[number], (command.seed + sample + 7919 * number) % 2**32
        show(separator if chat is not None else separator + prompt)
        separator = "\n---\n"
        if chat is not None:
            results.append(answer(command, chat, prompt, seed, show, command.image))
        else:
            limit, sampling = command.max_new_tokens or 200, command.sampling(greedy=False)
            options = {"sampling": sampling, "seed": seed, "stop": command.stop, "show": show}
            options |= {"images": command.image, "reader": images, "parse_special": not command.no_parse_special}
            results.append(generating.stream_text(run, stream, prompt, max_new_tokens=limit, **options))
    if command.stream:
        print()
    elif command.json:
        hidden = set() if command.log_probabilities else {"tokens", "log_probabilities"}
        values = [dataclasses.asdict(one) for one in results]
        command.print_json(run, results=[{k: v for k, v in one.items() if k not in hidden} for one in values])
    elif chat is not None:
        print(separator.join(texts.shown(one.output) for one in results))
    else:
        _print(results, translates=False)


def _print(written: Sequence[GeneratedText], translates: bool) -> None:
    """Print one line for each translation, or each prompt with its continuation."""
    from transformer.cli._texts import shown

    if translates:
        for one in written:
            print(shown(one.output))
    else:
        print("\n---\n".join(shown(one.prompt + one.output) for one in written))


def _decoding_options(command: Generate, translates: bool) -> dict[str, Any]:
    """Return keyword arguments of `generate` for continuous batching and speculative decoding."""
    fast = [f"--{name}" for name in FAST if getattr(command, name) is not None]
    if translates and fast:
        raise ConfigError(f"{fast[0]} needs a causal model, but this model is an encoder-decoder. Remove it.")
    draft = open_draft(command.draft, command.draft_tokens, command.lookup)
    options = {
        "slots": command.slots,
        "draft": draft,
        "parse_special": None if translates else not command.no_parse_special,
    }
    return {name: value for name, value in options.items() if value is not None}
