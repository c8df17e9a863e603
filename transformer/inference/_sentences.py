"""How the authors of a sentence encoder want its vectors made: the files of sentence-transformers, read as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer.config._checks import ConfigError
from transformer.config._options import Pooling
from transformer.zoo.weights._files import WeightFiles

_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMED: dict[str, Pooling] = {"cls": "first", "mean": "mean", "lasttoken": "last"}


@dataclass(frozen=True)
class SentenceSettings:
    """How texts become vectors: which tokens are pooled, how long a text may be; `normalize` gives vectors length 1,
    `lower_case` is done to the text first.
    """

    pooling: Pooling = "mean"
    normalize: bool = False
    max_length: int | None = None
    """tokens, special ones included; None: as many as the model reads"""
    lower_case: bool = False
    prompt: str = ""
    """written before every text"""


def sentence_settings(directory: Path) -> SentenceSettings:
    """What modules.json and the files that it names say; the mean over real tokens where there are none.

    Raises:
        ConfigError: a module or a kind of pooling that is not built here, or a value that can't be.
        WeightsError: a file that can't be read.
    """
    files = WeightFiles(directory)
    modules = files.json("modules.json", list)
    if modules is None:
        return SentenceSettings()
    settings: dict[str, Any] = {}
    for module in modules:
        named = module if isinstance(module, dict) else {}
        kind, path = named.get("type"), named.get("path", "")
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ConfigError(
                f"modules.json in {directory} must hold objects with a type and a path, got {module!r:.80}. Get it "
                f"anew."
            )
        kind = kind.rpartition(".")[2]
        match kind:
            case "Transformer":
                settings |= _transformer(files.json(f"{path}/sentence_bert_config.json".lstrip("/")) or {})
            case "Pooling":
                values = files.json(f"{path}/config.json") or {}
                settings |= {"pooling": _pooling(values, path), "include_prompt": values.get("include_prompt", True)}
            case "Normalize":
                settings["normalize"] = True
            case _:
                raise ConfigError(
                    f"modules.json in {directory} asks for a module {kind}, which is not built here: there are "
                    f"Transformer, Pooling and Normalize. Its vectors can't be made as its authors meant them."
                )
    settings["prompt"] = _prompt(files.json("config_sentence_transformers.json") or {})
    if settings["prompt"] and not settings.pop("include_prompt", True):
        raise ConfigError(
            f"{directory} leaves its prompt out of the pooling (include_prompt is false), which is not built here: its "
            f"vectors can't be made as its authors meant them."
        )
    settings.pop("include_prompt", None)
    return SentenceSettings(**settings)


def _transformer(values: dict[str, Any]) -> dict[str, Any]:
    length = values.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(
            f"max_seq_length in sentence_bert_config.json must be an integer of at least 1, got {length!r:.80}. "
            f"Correct it."
        )
    return {"max_length": length, "lower_case": bool(values.get("do_lower_case"))}


def _pooling(values: dict[str, Any], path: str) -> Pooling:
    if "pooling_mode" in values:
        asked = [values["pooling_mode"]]
        known: dict[str, Pooling] = _NAMED
    else:
        asked = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
        known = _POOLINGS
    if len(asked) != 1 or asked[0] not in list(known):
        raise ConfigError(
            f"{path}/config.json asks for pooling by {', '.join(map(str, asked)) or 'nothing'}: there are "
            f"{', '.join(known)} here, one of them."
        )
    return known[asked[0]]


def _prompt(values: dict[str, Any]) -> str:
    name, prompts = values.get("default_prompt_name"), values.get("prompts")
    if name is None:
        return ""
    if not isinstance(name, str) or not isinstance(prompts, dict) or not isinstance(prompts.get(name), str):
        raise ConfigError(
            f"config_sentence_transformers.json asks for the prompt {name!r:.80}, but prompts is {prompts!r:.80}. "
            f"Correct it."
        )
    return prompts[name]
