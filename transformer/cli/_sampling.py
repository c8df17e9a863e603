"""Options of the commands that sample text: `generate`, `answer` and `chat`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from transformer.cli._arguments import PathText, check_least, option_names_in_errors
from transformer.cli._models import ModelCommand, QuantizationOptions, check_images
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.generate._sampling import Sampling
    from transformer.inference._generate import StreamedText
    from transformer.inference._loaded_model import LoadedModel

FILTERS = ("top_k", "top_p", "min_p")
"""options that restrict the tokens to sample from"""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""options that make tokens of the text less probable"""


@dataclass(frozen=True, kw_only=True)
class SamplingCommand(QuantizationOptions, ModelCommand):
    """Options of a command that samples text."""

    max_new_tokens: int | None = None
    """maximum new tokens per text"""
    temperature: float | None = None
    """sampling temperature (0: greedy)"""
    top_k: int | None = None
    """sample from the k most likely tokens"""
    top_p: float | None = None
    """sample from the smallest set of most likely tokens whose total probability is at least this value"""
    min_p: float | None = None
    """sample from tokens with at least this fraction of the probability of the most likely token"""
    repetition_penalty: float | None = None
    """values above 1 penalize tokens that already occurred in the prompt or in the text"""
    presence_penalty: float | None = None
    """subtracted from the logits of tokens that were already generated"""
    frequency_penalty: float | None = None
    """subtracted from the logits of generated tokens, once for each occurrence"""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """causal model: stop string, not included in the output"""
    seed: int = 0
    """random seed for sampling; the same seed gives the same text"""

    def check(self) -> None:
        """Raise ConfigError, naming the option, for values that are invalid with any model."""
        check_least("max-new-tokens", self.max_new_tokens)
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed must be from 0 to {2**32 - 1}, got {self.seed}.")
        if "" in self.stop:
            raise ConfigError("--stop must be a text of at least one character, got ''. Remove it.")
        self.quantization()
        with option_names_in_errors(**{name: name for name in ("temperature", *FILTERS, *PENALTIES)}):
            self.sampling(greedy=False)

    def quantized(self, opened: LoadedModel) -> LoadedModel:
        """Return the model with quantized weights if --quantize asks for them; print memory and errors on stderr."""
        if (chosen := self.quantization()) is None:
            return opened
        from transformer.nn.quantization._int8 import quantize

        bits, group_size = chosen
        params, report = quantize(opened.params, bits=bits, group_size=group_size)
        for row in report:
            print(row, file=sys.stderr)
        return dataclasses.replace(opened, params=params)

    def sampling(self, *, greedy: bool) -> Sampling:
        """Return the sampling settings; without a temperature or a filter, `greedy` selects the default temperature."""
        from transformer.generate._sampling import Sampling

        filters = {name: getattr(self, name) for name in FILTERS}
        temperature = self.temperature
        if temperature is None:
            filtered = any(value is not None for value in filters.values())
            temperature = 1.0 if filtered else 0.0 if greedy else 0.8
        return Sampling(temperature=temperature, **filters, **self._given(PENALTIES))

    def sampling_from(self, default: Sampling) -> Sampling:
        """Return the settings that are given, and those of `default` for the others."""
        given = self._given(("temperature", *FILTERS, *PENALTIES))
        if default.temperature == 0 and "temperature" not in given and self._given(FILTERS):
            given["temperature"] = 1.0
        return dataclasses.replace(default, **given)

    def _given(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class PromptsCommand(SamplingCommand):
    """Options of a command that generates texts for prompts of the command line or of stdin."""

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """prompt; - reads stdin; None: stdin"""
    image: tuple[PathText, ...] = ()
    """vision-language model: images that each prompt is about: --image a.jpg b.png"""
    stream: bool = False
    """causal model: print the text while it is generated, even into a pipe; a terminal shows a single text like this"""
    samples: int = 1
    """causal model: number of texts per prompt, with the seeds --seed, --seed + 1, ..."""
    log_probabilities: bool = False
    """causal model: print JSON with the tokens and their log-probabilities"""

    def check(self) -> None:
        """Raise an error for values that are invalid with any model, before the model is loaded."""
        from transformer.cli._texts import check_prompts

        super().check()
        check_least("samples", self.samples)
        if self.stream and self.prints_json:
            other = "--json" if self.json else "--log-probabilities"
            raise ConfigError(f"--stream and {other} can't be used together. Remove one of them.")
        check_prompts(self.prompt)
        check_images(self.image)

    @property
    def prints_json(self) -> bool:
        """Whether to print JSON."""
        return self.json or self.log_probabilities

    def print_pieces(
        self,
        opened: LoadedModel,
        prompts: Sequence[str],
        write: Callable[[str, int, Callable[[str], None]], StreamedText],
        shown: Callable[[StreamedText], str],
    ) -> None:
        """Print texts that are generated one after the other, in pieces; each prompt gives `samples` texts.

        `write` generates the text of a prompt with a seed, and passes its pieces to a function; `shown` is printed.
        """
        from transformer.cli import _texts as texts

        def show(piece: str) -> None:
            print(texts.shown(piece) if self.stream else "", end="", flush=self.stream)

        results, separator = [], "\n---\n"
        for number, sample in itertools.product(range(len(prompts)), range(self.samples)):
            prompt, seed = prompts[number], (self.seed + sample + 7919 * number) % 2**32
            show(separator if results else "")
            results.append(write(prompt, seed, show))
        if self.stream:
            print()
            return
        hidden = set() if self.log_probabilities else {"tokens", "log_probabilities"}
        values = [{k: v for k, v in dataclasses.asdict(one).items() if k not in hidden} for one in results]
        line = separator.join(texts.shown(shown(one)) for one in results)
        dataclasses.replace(self, json=self.prints_json).answer_of(opened, [line], results=values)


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of a command that writes conversations with a chat template."""

    system: str | None = None
    """system message"""
    template: Path | None = None
    """file with the chat template; None: the template of the model"""
    switch: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """variable of the template as NAME=VALUE, such as enable_thinking=false"""

    def variables(self) -> dict[str, Any]:
        """Return the variables of the template that --switch sets; a value is JSON, or else a text."""
        found: dict[str, Any] = {}
        for entry in self.switch:
            name, separator, value = entry.partition("=")
            if not separator or not name.isidentifier():
                raise ConfigError(f"--switch must be NAME=VALUE, such as enable_thinking=false, got {entry!r:.80}.")
            try:
                found[name] = json.loads(value)
            except ValueError:
                found[name] = value
        return found
