"""Rewards of completions: Python functions of the user, and a classifier as a reward model."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from transformer.config._checks import ConfigError, nearest
from transformer.config._local_paths import local_path
from transformer.data.kinds._prompts import Prompt
from transformer.training.tasks._policy_gradient import GRPO, reward_names

RewardModel: TypeAlias = Callable[[Sequence[str]], Sequence[float]]
"""function from texts, each a prompt with a completion, to their rewards"""


class RewardError(ValueError):
    """A reward function raised an error, or returned no finite number. The message names the prompt's file and row."""


class Rewards:
    """The rewards of a recipe, in the order of `GRPO.weights`; ConfigError if one can't be imported or is missing."""

    def __init__(self, options: GRPO, model: RewardModel | None = None):
        if (options.reward_model is None) != (model is None):
            raise ConfigError(
                f"grpo.reward_model is {options.reward_model!r}, but train() got "
                f"{'no' if model is None else 'a'} reward_model. Pass train(..., reward_model=...), for example "
                f"transformer.inference.reward_model(recipe), or use the command line, which loads it."
            )
        self.options = options
        self._functions = [(name, load_function(name)) for name in options.rewards]
        self._model, self._weights = model, np.array(options.weights)
        self.names = reward_names(options)

    def check(self, prompt: Prompt) -> None:
        """Raise ConfigError for a function that does not take the arguments for this prompt."""
        for name, function in self._functions:
            try:
                signature = inspect.signature(function)
            except (TypeError, ValueError):  # a function of an extension module has none
                continue
            try:
                signature.bind(prompt=prompt.prompt, completion="", **prompt.columns)
            except TypeError as error:
                raise ConfigError(
                    f"the reward {name} has the arguments {signature}, but is called with prompt, completion, and the "
                    f"columns {', '.join(prompt.columns) or '(none)'} of {prompt.place} as keywords ({error}). Add "
                    f"**columns to its arguments."
                ) from None

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> np.ndarray:
        """Compute the rewards of N completions, (N, K); RewardError if one failed, or is no finite number."""
        found = [
            [_called(name, function, prompt, completion) for name, function in self._functions]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        if self._model is not None:
            texts = [_text(prompt.prompt) + completion for prompt, completion in zip(prompts, completions, strict=True)]
            for row, prompt, value in zip(found, prompts, self._model(texts), strict=True):
                row.append(_number("reward_model", value, prompt))
        return np.array(found, np.float64).reshape(len(prompts), len(self.names))

    def total(self, values: np.ndarray) -> np.ndarray:
        """Return the weighted sums (N,) of rewards (N, K)."""
        return values @ self._weights


def exact_answer(completion: str, answer: Any, **columns: Any) -> float:
    """Return 1 if a completion equals the column `answer` of its prompt, apart from spaces at both ends, otherwise 0.

    This is the reward "transformer.training:exact_answer".
    """
    return float(completion.strip() == str(answer).strip())


def load_function(name: str) -> Callable[..., Any]:
    """Return the function "module:function" or "file.py:function"; ConfigError if it can't be imported."""
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise ConfigError(f"a reward must be 'module:function' or 'file.py:function', got {name!r}. Name both.")
    try:
        module = _file(local_path(place, "grpo.rewards").expanduser()) if place.endswith(".py") else _module(place)
    except ConfigError:
        raise
    except Exception as error:  # the file runs code of the user, which can raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(".")
        raise ConfigError(f"the reward {name} can't be imported: {reason}. Correct the file, or its name.") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        choices = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        raise ConfigError(
            f"{place} has no function {attribute!r}.{nearest(attribute, choices)} Name one after the colon."
        )
    return function


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"no file {path} with a reward function (grpo.rewards). Check the path.")
    spec = importlib.util.spec_from_file_location(f"rewards_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    # The command line does not search the current directory, where a user keeps a module of rewards.
    here = os.getcwd()
    sys.path.append(here)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(here)


def _called(name: str, function: Callable[..., Any], prompt: Prompt, completion: str) -> float:
    try:
        value = function(prompt=prompt.prompt, completion=completion, **prompt.columns)
    except Exception as error:  # code of the user can raise anything
        raise RewardError(
            f"the reward {name} raised {type(error).__name__} ({' '.join(str(error).split())[:200]}) for the prompt of "
            f"{prompt.place} and the completion {completion!r:.80}. Correct the function or the row."
        ) from error
    return _number(name, value, prompt, completion)


def _number(name: str, value: Any, prompt: Prompt, completion: str = "") -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(
            f"the reward {name} must be a finite number, got {value!r:.60} for the prompt of {prompt.place} and the "
            f"completion {completion!r:.80}. Correct the function or the row."
        )
    return number


def _text(prompt: str | list[dict[str, Any]]) -> str:
    """Return a prompt as one text; of messages, their contents with a line feed after each."""
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{one.get('content', '')}\n" for one in prompt)
