"""A loaded model: its Flax module, parameters, tokenizer and settings, and its adapters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

import flax.linen as nn
import numpy as np

from transformer.config._checks import ConfigError
from transformer.config._local_paths import local_path
from transformer.data.tokenizers._base import Tokenizer
from transformer.nn.models._kinds import ModelKind, kind_of
from transformer.zoo._adapters import adapter_for
from transformer.zoo._formats import why_no_tokenizer
from transformer.zoo._pretrained import Pretrained
from transformer.zoo.weights._adapters import Adapter

if TYPE_CHECKING:
    from transformer.training.workdir._runs import Run

Params: TypeAlias = Mapping[str, Any]
"""parameters of a model, without the outer "params\""""


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its parameters and tokenizer. Exactly one of `run` and `pretrained` is set."""

    model: nn.Module
    params: Params
    """Parameters, without the outer "params"."""
    directory: Path
    """Workdir, directory of weights or GGUF file that was loaded."""
    vocabulary: Tokenizer | None
    """Tokenizer; None: the directory has none."""
    context: int | None
    """Context length: maximum number of tokens that the model reads; None: unlimited."""
    bos_id: int | None
    """First decoder token of a Seq2Seq."""
    run: Run | None = None
    """The training run that the model comes from."""
    pretrained: Pretrained | None = None
    """The pretrained weights that the model comes from."""
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    """Adapters for this model, by name (`add_adapter`)."""
    base: Params | None = None
    """Parameters without an adapter; None: `params`, because no adapter is applied."""

    def add_adapter(self, directory: str | os.PathLike, name: str | None = None) -> Self:
        """Return the model with an adapter in the format of PEFT added to `adapters`, for `with_adapter`.

        Args:
            directory: directory with adapter_config.json and adapter_model.safetensors.
            name: name of the adapter; None: the name of the directory.

        Raises:
            FileNotFoundError, WeightsError: the adapter is missing, damaged or has options that are not supported.
            ConfigError: the adapter does not fit the model; the message names the modules and their sizes.
        """
        directory = local_path(directory, "directory")
        base = self.params if self.base is None else self.base
        found = self.pretrained
        family, architecture = (None, None) if found is None else (found.family, found.architecture)
        adapter = adapter_for(self.model, base, directory, family, architecture)
        return replace(self, adapters=dict(self.adapters) | {name or Path(directory).name: adapter})

    def with_adapter(self, name: str | None) -> Self:
        """Return the model with one of its adapters applied, or with none. The weights are shared, not copied.

        Raises:
            ConfigError: no adapter has this name.
        """
        base = self.params if self.base is None else self.base
        if name is not None and name not in self.adapters:
            raise ConfigError(
                f"unknown adapter {name!r}. Choose from {', '.join(self.adapters) or 'none'}, or add it with "
                f"add_adapter(directory)."
            )
        return self._replaced(base if name is None else self.adapters[name].applied_to(base), base)

    def merged(self) -> Self:
        """Return the model with its adapter merged into the weights, which is faster to apply and can be exported."""
        from transformer.training.lora import flatten_adapted

        return self._replaced(flatten_adapted(self.params), None)

    def _replaced(self, params: Params, base: Params | None) -> Self:
        run = None if self.run is None else replace(self.run, params=params)
        return replace(self, params=params, base=base, run=run)

    @property
    def kind(self) -> ModelKind:
        """What the model reads and computes."""
        return kind_of(self.model)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ConfigError: the directory has no tokenizer.
        """
        if self.vocabulary is None and self.run is not None:
            raise ConfigError(
                f"{self.directory} contains a {type(self.model).__name__}, which reads numeric data, not text."
            )
        if self.vocabulary is None:
            raise ConfigError(why_no_tokenizer(self.directory))
        return self.vocabulary

    @property
    def eos_ids(self) -> Sequence[int] | None:
        """End-of-sequence tokens; None: the tokenizer has none."""
        tokenizer = self.tokenizer
        several = getattr(tokenizer, "eos_ids", None)
        ids = [tokenizer.eos_id] if several is None else list(several)
        return [i for i in ids if i is not None] or None

    @property
    def target_start(self) -> list[int]:
        """Decoder prompt: the tokens at the start of every target of a Seq2Seq.

        Raises:
            ConfigError: the config specifies no start token.
        """
        if self.bos_id is None:
            raise ConfigError(
                f"config.json in {self.directory} has no decoder_start_token_id, the first token of a target. Add it."
            )
        forced = self._generation.get("forced_bos_token_id")
        begin = self._tokens("decoder_start_token_id", [self.bos_id])
        return begin if forced is None else begin + self._tokens("forced_bos_token_id", [forced])

    @property
    def suppressed(self) -> tuple[int, ...]:
        """Tokens that are never generated: `suppress_tokens`, and entries of `bad_words_ids` with one token.

        Longer entries of `bad_words_ids` are not enforced.
        """
        suppressed = self._tokens("suppress_tokens", self._generation.get("suppress_tokens") or [])
        bad = self._generation.get("bad_words_ids") or []
        if not isinstance(bad, list) or not all(isinstance(ids, list) for ids in bad):
            self._refuse("bad_words_ids", bad, "lists of token ids")
        single = self._tokens("bad_words_ids", [ids[0] for ids in bad if len(ids) == 1])
        return tuple(dict.fromkeys([*suppressed, *single]))

    def _tokens(self, field: str, ids: object) -> list[int]:
        """Return the ids of a field if they are valid tokens of the model; raise ConfigError otherwise."""
        size = self.model.config.vocab_size
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
            self._refuse(field, ids, f"token ids from 0 to {size - 1}")
        return ids

    def _refuse(self, field: str, value: object, expected: str) -> NoReturn:
        raise ConfigError(
            f"{field} in {self.directory} (generation_config.json, or config.json) must contain {expected}, got "
            f"{value!r:.80}. Correct it."
        )

    @property
    def _generation(self) -> Mapping[str, Any]:
        return {} if self.pretrained is None else self.pretrained.generation

    @property
    def labels(self) -> list[str]:
        """Names of a classifier's classes, in order; empty if the classes have no names.

        Raises:
            ConfigError: the names are incomplete or not unique.
        """
        if self.run is not None:
            return list(getattr(self.run.recipe.data, "labels", ()))
        named = {} if self.pretrained is None else self.pretrained.fields.get("id2label") or {}
        classes = self.model.config.output.num_classes
        if not named or classes is None:
            return []
        numbers = [str(i) for i in range(classes)]
        names = [str(named[key]) for key in numbers if key in named] if isinstance(named, dict) else []
        if len(named) != classes or len(set(names)) != classes:
            raise ConfigError(
                f"id2label in {self.directory}/config.json must give each of the classes 0 to {classes - 1} a "
                f"unique name, got {named!r:.200}. Correct it."
            )
        return names

    def finite(self, number: int, row: np.ndarray, what: str = "text") -> np.ndarray:
        """Return the result of a text or image if it is finite.

        Raises:
            ValueError: it is not.
        """
        if not np.isfinite(row).all():
            raise ValueError(
                f"the model computed numbers of {what} {number} that are not finite: the weights in {self.directory} "
                f"are {self.model.config.parameters.dtype}, and activations may exceed its range. Convert the model to "
                f"another dtype (python -m transformer convert ... --dtype float32) and use the result."
            )
        return row

    def place(self) -> dict[str, Any]:
        """Return the origin of the model, as JSON values."""
        if self.run is not None:
            return {"workdir": str(self.directory), "step": self.run.step}
        return {"directory": str(self.directory), "architecture": self.pretrained.architecture}
