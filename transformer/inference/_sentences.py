"""Settings of sentence encoders, from the configuration files of sentence-transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer.config._checks import ConfigError
from transformer.config._local_paths import local_path
from transformer.config._options import Pooling
from transformer.zoo.weights._flax_files import open_files

_NAMED: dict[str, Pooling] = {"cls": "first", "mean": "mean", "lasttoken": "last"}
_FLAGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken"}
_POOLINGS: dict[str, Pooling] = {flag: _NAMED[name] for flag, name in _FLAGS.items()}

_UNLIMITED = 10**20
"""Values of model_max_length above this number mean no limit, as in transformers."""


@dataclass(frozen=True)
class SentenceSettings:
    """Settings for computing embeddings of texts."""

    pooling: Pooling = "mean"
    """How the hidden states of the tokens are pooled."""
    normalize: bool = False
    """Whether vectors are scaled to length 1."""
    max_length: int | None = None
    """Maximum number of tokens, including special tokens; None: the context length of the model."""
    lower_case: bool = False
    """Whether texts are converted to lower case."""
    prompt: str = ""
    """Text in front of every text."""
    dimensions: int | None = None
    """Number of dimensions to keep, the first ones, after the normalization (Kusupati et al. 2022, arXiv 2205.13147);
    None: all."""


def sentence_settings(directory: Path) -> SentenceSettings:
    """Read the settings of modules.json and the files that it lists.

    Without modules.json, the result is the default: the mean over all non-padding tokens. The maximum length is
    max_seq_length in sentence_bert_config.json, else model_max_length in tokenizer_config.json, where version 6 of
    sentence-transformers writes it.

    Raises:
        ConfigError: an unsupported module or kind of pooling, or an invalid value.
        WeightsError: a file can't be read.
    """
    files = open_files(local_path(directory, "directory"))
    modules = files.json("modules.json", list)
    longest = _documented_length(files.json("tokenizer_config.json") or {})
    if modules is None:
        return SentenceSettings(max_length=longest)
    settings: dict[str, Any] = {"max_length": longest}
    for module in modules:
        named = module if isinstance(module, dict) else {}
        kind, path = named.get("type"), named.get("path", "")
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ConfigError(
                f"modules.json in {directory} must contain objects with a type and a path, got {module!r:.80}. "
                f"Download it again."
            )
        kind = kind.rpartition(".")[2]
        match kind:
            case "Transformer":
                settings |= _transformer(files.json(f"{path}/sentence_bert_config.json".lstrip("/")) or {}, longest)
            case "Pooling":
                values = files.json(f"{path}/config.json") or {}
                settings |= {"pooling": _pooling(values, path), "include_prompt": values.get("include_prompt", True)}
            case "Normalize":
                settings["normalize"] = True
            case _:
                raise ConfigError(
                    f"modules.json in {directory} requires a module {kind}, which is not supported (supported: "
                    f"Transformer, Pooling, Normalize). The embeddings would differ from those of the authors."
                )
    outer = files.json("config_sentence_transformers.json") or {}
    settings["prompt"] = _prompt(outer)
    settings["dimensions"] = _positive(outer, "truncate_dim", "config_sentence_transformers")
    includes_prompt = settings.pop("include_prompt", True)
    if settings["prompt"] and not includes_prompt:
        raise ConfigError(
            f"{directory} excludes its prompt from the pooling (include_prompt is false), which is not supported. The "
            f"embeddings would differ from those of the authors."
        )
    return SentenceSettings(**settings)


def _transformer(values: dict[str, Any], longest: int | None) -> dict[str, Any]:
    length = _positive(values, "max_seq_length", "sentence_bert_config")
    return {"max_length": longest if length is None else length, "lower_case": bool(values.get("do_lower_case"))}


def _documented_length(values: dict[str, Any]) -> int | None:
    """Return model_max_length of tokenizer_config.json; None: none, or the huge number that means unlimited."""
    length = values.get("model_max_length")
    if isinstance(length, int | float) and not isinstance(length, bool) and length > _UNLIMITED:
        return None
    return _positive(values, "model_max_length", "tokenizer_config")


def _positive(values: dict[str, Any], field: str, file: str) -> int | None:
    """Return a field that is a positive integer, if present."""
    value = values.get(field)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"{field} in {file}.json must be an integer of at least 1, got {value!r:.80}. Correct it.")
    return value


def _pooling(values: dict[str, Any], path: str) -> Pooling:
    if "pooling_mode" in values:
        requested = [values["pooling_mode"]]
        known: dict[str, Pooling] = _NAMED
    else:
        requested = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
        known = _POOLINGS
    if len(requested) != 1 or requested[0] not in list(known):
        raise ConfigError(
            f"{path}/config.json requires pooling by {', '.join(map(str, requested)) or 'nothing'}: expected exactly "
            f"one of {', '.join(known)}."
        )
    return known[requested[0]]


def _prompt(values: dict[str, Any]) -> str:
    name, prompts = values.get("default_prompt_name"), values.get("prompts")
    if name is None:
        return ""
    if not isinstance(name, str) or not isinstance(prompts, dict) or not isinstance(prompts.get(name), str):
        raise ConfigError(
            f"config_sentence_transformers.json requires the prompt {name!r:.80}, but prompts is {prompts!r:.80}. "
            f"Correct it."
        )
    return prompts[name]
