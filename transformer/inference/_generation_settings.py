"""Beam search as the authors of an encoder-decoder recommend it in generation_config.json."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from transformer.config._checks import ConfigError
from transformer.generate._beam import USUAL, Beam
from transformer.generate._rules import Rules
from transformer.inference._loaded_model import LoadedModel

_SEARCHES = ("num_beams", "length_penalty", "early_stopping")
"""if one of them is given, the score and the end of a search are those of transformers"""
_IGNORED = {
    "begin_suppress_tokens": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "forced_decoder_ids": None,
    "guidance_scale": 1.0,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "renormalize_logits": False,
    "sequence_bias": None,
}
"""fields that change a text in transformers and are not supported, with the value that changes nothing"""


def recommended_beam(opened: LoadedModel, size: int = USUAL.size) -> Beam:
    """Return the beam search that the files of a model recommend; for fields that they lack, the usual one.

    The fields have the meaning that they have in transformers; `size` is the beam size without `num_beams`. A warning
    lists those that are not supported. A model that is no encoder-decoder for text has no recommendations.
    """
    if opened.pretrained is None or opened.kind.writes != "translation":
        return dataclasses.replace(USUAL, size=size)
    given = opened.pretrained.generation
    if ignored := _ignored(given, opened):
        warnings.warn(
            f"{opened.directory} (generation_config.json, or config.json) has generation settings that are not "
            f"supported and are ignored: {', '.join(ignored)}.",
            stacklevel=3,
        )
    read = _Fields(given, opened)
    begin = len(opened.target_start)
    forced = begin - 1  # these tokens count as generated ones in transformers
    fewest = max(read.integer("min_length", 0) - begin, read.integer("min_new_tokens", 0) - forced, 0)
    rules = Rules(
        fewest=fewest,
        force_end=not _ids(given.get("forced_eos_token_id")).isdisjoint(opened.eos_ids or ()),
        no_repeat_ngram=read.integer("no_repeat_ngram_size", 0),
        repetition_penalty=read.number("repetition_penalty", 1.0, above=0),
        ranks_cut=any(given.get(name) is not None for name in _SEARCHES),
    )
    size = max(read.integer("num_beams", size), 1)
    changes: dict[str, Any] = {"rules": rules, "size": size}
    if rules.ranks_cut:
        early = given.get("early_stopping") or False
        if early not in (True, False, "never"):
            read.refuse("early_stopping", early, 'true, false or "never"')
        changes |= {
            "alpha": read.number("length_penalty", 1.0),
            "norm": (forced, 1),
            "early_stop": early is True or size == 1,  # a beam of 1 is greedy decoding
            "estimated": early is False and size > 1,
        }
    longest = read.integer("max_length", 0) - begin
    if new := read.integer("max_new_tokens", 0):
        longest = new - forced
    if longest > 0:
        changes |= {"length_ratio": 0.0, "length_extra": longest}
    return dataclasses.replace(USUAL, **changes)


def longest_target(opened: LoadedModel, max_new_tokens: int | None) -> int | None:
    """Return the maximum number of tokens after the start of a target; a forced start token counts as a new one."""
    forced = len(opened.target_start) - 1
    if max_new_tokens is None or max_new_tokens < 1:  # an error of the search
        return max_new_tokens
    return max(max_new_tokens - forced, 1)


def _ids(value: object) -> set[object]:
    return set(value) if isinstance(value, list) else {value} - {None}


def _ignored(given: Mapping[str, Any], opened: LoadedModel) -> list[str]:
    """Return the fields that have an effect in transformers and none here."""
    names = [name for name, neutral in _IGNORED.items() if given.get(name) not in (None, [], {}, neutral)]
    bad = given.get("bad_words_ids") or []
    if isinstance(bad, list) and any(isinstance(ids, list) and len(ids) > 1 for ids in bad):
        names.append("bad_words_ids of several tokens")
    if not _ids(given.get("forced_eos_token_id")) <= set(opened.eos_ids or ()):
        names.append("forced_eos_token_id, which is not an end token")
    return sorted(names)


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Reads numbers of generation_config.json, in which null means that a field is not given."""

    given: Mapping[str, Any]
    opened: LoadedModel

    def integer(self, name: str, default: int) -> int:
        value = self.given.get(name)
        if value is not None and (type(value) is not int or value < 0):
            self.refuse(name, value, "an integer of at least 0")
        return default if value is None else value

    def number(self, name: str, default: float, above: float | None = None) -> float:
        value = self.given.get(name)
        if value is None:
            return default
        expected = "a finite number of at least 0" if above is None else f"a finite number above {above}"
        if type(value) not in (int, float) or not 0 <= value < float("inf") or (above is not None and value <= above):
            self.refuse(name, value, expected)
        return float(value)

    def refuse(self, name: str, value: object, expected: str) -> None:
        raise ConfigError(
            f"{name} in {self.opened.directory} (generation_config.json, or config.json) must be {expected}, got "
            f"{value!r:.80}. Correct it, or remove it."
        )
