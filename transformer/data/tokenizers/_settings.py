"""Settings of tokenizer_config.json that also are in tokenizer.json, where the two files contradict each other.

The tokenizers of transformers (version 5) build the normalizer and the division into words of their model from
tokenizer_config.json; the generic class `PreTrainedTokenizerFast` takes those of tokenizer.json. Each class reads only
some of the settings.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Side = Literal["left", "right"]

_NORMALIZER = {"do_lower_case": "lowercase", "strip_accents": "strip_accents"}
_NORMALIZER |= {"tokenize_chinese_chars": "handle_chinese_chars"}
"""Settings -> fields of a BertNormalizer."""
_BERT = ("Bert", "DistilBert", "Electra", "Funnel", "Lxmert", "MPNet", "MobileBert", "Splinter", "SqueezeBert")
_PREFIX = ("Albert", "Bart", "BigBird", "Blenderbot", "Camembert", "CodeGen", "CodeLlama", "Deberta", "GPT2", "GPTNeoX")
_PREFIX += ("LED", "Llama", "Longformer", "Luke", "Mvp", "Qwen2", "Roberta", "Whisper", "XGLM", "XLMRoberta")
_CLASSES = dict.fromkeys(_NORMALIZER, _BERT) | {"add_prefix_space": _PREFIX}
"""Settings -> models whose tokenizer class of transformers reads them."""


def with_settings(content: dict[str, Any], config: Mapping[str, Any], class_name: str | None) -> dict[str, Any]:
    """Return the content of tokenizer.json with the settings of tokenizer_config.json that contradict it.

    They apply if the tokenizer class reads them, as in transformers, or is unknown. A warning lists what contradicts.
    """
    known = None if class_name is None else class_name.removesuffix("Fast").removesuffix("Tokenizer")
    changed, used, ignored = copy.deepcopy({name: content.get(name) for name in _PARTS}), [], []
    for setting, models in _CLASSES.items():
        if not isinstance(value := config.get(setting), bool):
            continue
        applied = copy.deepcopy(changed)
        if setting == "add_prefix_space":
            _set_prefix(applied, value)
        else:
            for one in _components(applied["normalizer"]):
                if one.get("type") == "BertNormalizer":
                    one[_NORMALIZER[setting]] = value
        if applied == changed:
            continue
        if known is None or known in models:
            changed = applied
            used.append(f"{setting} is {str(value).lower()}")
        else:
            ignored.append(f"{setting} is {str(value).lower()}")
    for said, counts in ((used, "tokenizer_config.json"), (ignored, "tokenizer.json")):
        if said:
            reason = f"as for {class_name} in transformers" if class_name else "because the tokenizer class is unknown"
            warnings.warn(
                f"tokenizer_config.json contradicts tokenizer.json: {', '.join(said)}. {counts} is used, {reason}. If "
                f"this is wrong, correct the other file.",
                stacklevel=2,
            )
    return content | changed if used else content


_PARTS = ("normalizer", "pre_tokenizer")


def truncation_side(content: Mapping[str, Any], config: Mapping[str, Any]) -> Side:
    """Return the side at which long texts are cut: that of tokenizer_config.json, else that of tokenizer.json."""
    own = content.get("truncation")
    side = config.get("truncation_side", own.get("direction", "right") if isinstance(own, Mapping) else "right")
    if not isinstance(side, str) or side.lower() not in ("left", "right"):
        raise ValueError(
            f"truncation_side in tokenizer_config.json must be 'left' or 'right', got {side!r:.40}. Correct it."
        )
    return "left" if side.lower() == "left" else "right"


def truncated(ids: list[int], text: list[int], limit: int, side: Side) -> list[int]:
    """Return at most `limit` ids: those of the text lose its end or its start, special tokens around it are kept.

    `text` has the ids of the text alone; the side "right" cuts its end.
    """
    around = len(ids) - len(text)
    starts = [i for i in range(around + 1) if ids[i : i + len(text)] == text]
    if not starts or around >= limit:  # the special tokens alone exceed the limit
        return ids[:limit]
    start, kept = starts[0], limit - around
    text = text[:kept] if side == "right" else text[len(text) - kept :]
    return [*ids[:start], *text, *ids[start + len(ids) - around :]]


def _components(part: object) -> Iterator[dict[str, Any]]:
    """Yield a component and, if it is a sequence, those inside."""
    if isinstance(part, dict):
        yield part
        for inner in part.get("normalizers") or part.get("pretokenizers") or ():
            yield from _components(inner)


def _set_prefix(parts: dict[str, Any], value: bool) -> None:
    """Set whether a space is put before a text, as SentencePiece and the byte-level BPE of GPT-2 can do."""
    spaces = [one for one in _components(parts["normalizer"]) if one.get("type") == "Prepend"]
    for one in _components(parts["pre_tokenizer"]):
        if one.get("type") == "ByteLevel":
            one["add_prefix_space"] = value
        elif one.get("type") == "Metaspace" and not spaces:
            before = one.get("prepend_scheme", "always" if one.get("add_prefix_space", True) else "never")
            if (before != "never") != value:
                one.pop("add_prefix_space", None)
                one["prepend_scheme"] = "always" if value else "never"
    if spaces and not value:
        parts["normalizer"] = _without_prepend(parts["normalizer"])


def _without_prepend(normalizer: dict[str, Any]) -> dict[str, Any] | None:
    if normalizer.get("type") == "Prepend":
        return None
    if "normalizers" in normalizer:
        inner = [_without_prepend(one) for one in normalizer["normalizers"]]
        return normalizer | {"normalizers": [one for one in inner if one is not None]}
    return normalizer
