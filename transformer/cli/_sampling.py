"""Options of the commands that sample text: `generate` and `chat`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import tyro

from transformer.cli._arguments import option_names_in_errors
from transformer.cli._models import ModelCommand
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.generate._sampling import Sampling
    from transformer.inference._loaded_model import LoadedModel

FILTERS = ("top_k", "top_p", "min_p")
"""options that restrict the tokens to sample from"""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""options that make tokens of the text less probable"""


@dataclass(frozen=True, kw_only=True)
class SamplingCommand(ModelCommand):
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
    """above 1: make tokens of the prompt and of the text less probable"""
    presence_penalty: float | None = None
    """subtract this from the logits of tokens that were generated"""
    frequency_penalty: float | None = None
    """subtract this from the logits of generated tokens, once for each time they occur"""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """causal model: text that ends the output, which does not contain it; repeat the option for several"""
    seed: int = 0
    """random seed for sampling; the same seed gives the same text"""
    int8: bool = False
    """quantize the weights to 8 bits, a quarter of the memory of float32; stderr reports memory and rounding errors"""
    int4: bool = False
    """quantize the weights of the layers to 4 bits, the embeddings and the output layer to 8 bits"""
    group_size: Literal[32, 64, 128] = 32
    """with --int4: number of weights that share a scale"""

    def check(self) -> None:
        """Raise ConfigError, naming the option, for values that are invalid with any model."""
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens must be at least 1, got {self.max_new_tokens}.")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed must be from 0 to {2**32 - 1}, got {self.seed}.")
        if self.int8 and self.int4:
            raise ConfigError("--int8 and --int4 can't be used together. Remove one of them.")
        if "" in self.stop:
            raise ConfigError("--stop must be a text of at least one character, got ''. Remove it.")
        with option_names_in_errors(**{name: name for name in ("temperature", *FILTERS, *PENALTIES)}):
            self.sampling(greedy=False)

    def quantized(self, run: LoadedModel) -> LoadedModel:
        """Return the model with the weights that --int8 or --int4 asks for; print memory and errors on stderr."""
        if not self.int8 and not self.int4:
            return run
        import dataclasses

        from transformer.nn._int8 import quantize

        params, report = quantize(run.params, bits=4 if self.int4 else 8, group_size=self.group_size)
        for row in report:
            print(row, file=sys.stderr)
        return dataclasses.replace(run, params=params)

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
        import dataclasses

        given = self._given(("temperature", *FILTERS, *PENALTIES))
        if default.temperature == 0 and "temperature" not in given and self._given(FILTERS):
            given["temperature"] = 1.0
        return dataclasses.replace(default, **given)

    def _given(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def switches(given: Sequence[str]) -> dict[str, Any]:
    """Return the variables of a template that `--switch NAME=VALUE` sets; a value is JSON, or else a text.

    Raises:
        ConfigError: an entry has no name or no "=".
    """
    found: dict[str, Any] = {}
    for entry in given:
        name, separator, value = entry.partition("=")
        if not separator or not name.isidentifier():
            raise ConfigError(f"--switch must be NAME=VALUE, such as enable_thinking=false, got {entry!r:.80}.")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
