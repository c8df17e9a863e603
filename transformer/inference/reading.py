"""Texts in; vectors, classes and probabilities out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config import ConfigError
from transformer.generate.prompts import bucket
from transformer.inference.opening import Opened
from transformer.inference.sentences import SentenceSettings
from transformer.kernels import anywhere
from transformer.masks import Mask
from transformer.models import CausalLM, Classifier, Forecaster, Seq2Seq, SpeechToText, VisionClassifier
from transformer.models.encoders import pool

BATCH = 16
"""texts that are read at once"""


@dataclass(frozen=True)
class _Encoded:
    ids: list[int]
    types: list[int]


def embed(opened: Opened, texts: Sequence[str], settings: SentenceSettings | None = None) -> np.ndarray:
    """One vector a text, (n, D) float32: hidden states of its real tokens, pooled (of a Seq2Seq: of its encoder).

    A text longer than the model reads is cut, with a warning.

    Raises:
        ConfigError: a model that reads no text.
        ValueError: a text that the tokenizer can't read, or one without tokens; or numbers that are not finite.
    """
    model, settings = _reading(opened), settings or SentenceSettings()
    prepared = [settings.prompt + (text.lower() if settings.lower_case else text) for text in texts]
    encoded = _encode(opened, prepared, settings.max_length)

    @jax.jit
    def vectors(params, tokens, lengths, types):
        mask = Mask.lengths(lengths)

        def hidden(module):
            if isinstance(model, Seq2Seq):
                return module.encode(tokens, source_mask=mask)
            if isinstance(model, CausalLM):
                return module.hidden(tokens, mask=mask)
            return module.hidden(tokens, mask=mask, token_types=_types(model, types))

        pooled = pool(model.apply({"params": params}, method=hidden), mask, settings.pooling).astype(jnp.float32)
        if not settings.normalize:
            return pooled
        return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)

    return np.stack([_finite(opened, number, row) for number, row in enumerate(_batched(opened, encoded, vectors))])


@dataclass(frozen=True)
class Class:
    """What a text was found to be: the `label` of the likeliest class, its `probability`, and those of all."""

    label: str
    probability: float
    probabilities: dict[str, float]
    """of every label"""


def classify(opened: Opened, texts: Sequence[str]) -> list[Class]:
    """The likeliest class of each text.

    Raises:
        ConfigError: the model is no classifier, or one whose outputs are no probabilities of one class among several.
        ValueError: as `embed`.
    """
    model = _reading(opened)
    if not isinstance(model, Classifier):
        raise ConfigError(
            f"{opened.directory} holds a model of the kind {type(model).__name__}, which knows no classes. Give a "
            f"classifier, or train one: configs/finetune_classifier.py."
        )
    problem = None if opened.pretrained is None else opened.pretrained.fields.get("problem_type")
    if model.config.num_classes == 1 or problem in ("regression", "multi_label_classification"):
        told = "" if problem is None else f" (problem_type {problem})"
        raise ConfigError(
            f"{opened.directory} does not choose one of several classes: it has {model.config.num_classes} "
            f"outputs{told}, each for itself. Load it (transformer.load) and read its logits."
        )
    names = opened.labels or [str(i) for i in range(model.config.num_classes)]

    @jax.jit
    def probabilities(params, tokens, lengths, types):
        named = {"mask": Mask.lengths(lengths), "token_types": _types(model, types)}
        return jax.nn.softmax(model.apply({"params": params}, tokens, **named))

    rows = _batched(opened, _encode(opened, texts), probabilities)
    found = []
    for number, row in enumerate(rows):
        best = int(_finite(opened, number, row).argmax())
        every = {name: float(p) for name, p in zip(names, row, strict=True)}
        found.append(Class(names[best], float(row[best]), every))
    return found


@dataclass(frozen=True)
class Score:
    """How likely a text is: `log_likelihood`, the sum of log-probabilities of its `tokens`, in nats."""

    log_likelihood: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood of a token."""
        return float(np.exp(min(-self.log_likelihood / self.tokens, 700.0)))


def score(opened: Opened, texts: Sequence[str], sources: Sequence[str] | None = None) -> list[Score]:
    """Log-likelihood of each text under a causal model, or under a Seq2Seq given its source.

    A causal model predicts each token from those before it, so the first is not counted (it is where the tokenizer puts
    a token in front). A text longer than the model reads is read in windows that overlap by half.

    Raises:
        ConfigError: a model that gives no such probabilities, or sources where there must be (none).
        ValueError: a text with nothing to predict, or that the tokenizer can't read; or numbers that are not finite.
    """
    model = _reading(opened)
    if isinstance(model, Seq2Seq):
        return _score_targets(opened, model, texts, sources)
    if not isinstance(model, CausalLM):
        raise ConfigError(
            f"{opened.directory} holds a model of the kind {type(model).__name__}: only one that writes scores a text."
        )
    if sources is not None:
        raise ConfigError("a source is for an encoder-decoder; a causal model reads one text.")

    @jax.jit
    def likelihoods(params, tokens, lengths, types):
        logits = model.apply({"params": params}, tokens[:, :-1], mask=Mask.lengths(jnp.maximum(lengths - 1, 0)))
        return _of_targets(logits, tokens[:, 1:])

    scores = [_score_one(opened, text, likelihoods) for text in texts]
    for number, one in enumerate(scores):
        _finite(opened, number, np.asarray(one.log_likelihood))
    return scores


def _score_one(opened: Opened, text: str, likelihoods: Callable) -> Score:
    ids = opened.tokenizer.encode_source(text)
    if len(ids) < 2:
        raise ValueError(f"{text!r} has {len(ids)} tokens: there must be two, of which the second is predicted.")
    context = (opened.context or len(ids)) + 1  # one more: the last token is predicted and not read
    total, done = 0.0, 1
    while done < len(ids):
        first = 0 if done == 1 else min(done - 1, max(0, done - context // 2))
        window = ids[first : first + context]
        (row,) = _batched(opened, [_Encoded(window, [0] * len(window))], likelihoods)
        total += float(row[done - 1 - first : len(window) - 1].sum(dtype=np.float64))
        done = first + len(window)
    return Score(total, len(ids) - 1)


def _score_targets(opened: Opened, model: Seq2Seq, texts: Sequence[str], sources: Sequence[str] | None) -> list[Score]:
    if sources is None or len(sources) != len(texts):
        given = 0 if sources is None else len(sources)
        raise ConfigError(
            f"an encoder-decoder scores a text given its source: {len(texts)} texts need {len(texts)} sources, got "
            f"{given}."
        )
    tokenizer = opened.tokenizer
    end = list(opened.eos_ids or [])[:1]

    @jax.jit
    def likelihoods(params, source, lengths, target):
        mask = Mask.lengths(lengths)
        logits = model.apply({"params": params}, source, target[:, :-1], source_mask=mask)
        return _of_targets(logits, target[:, 1:])

    scores = []
    for text, source in zip(texts, sources, strict=True):
        # With what the model was trained to write around a text, which a tokenizer of others adds by itself.
        ids = [*tokenizer.encode(text), *end] if opened.pretrained is None else tokenizer.encode_source(text)
        target = [opened.target_start[0], *ids]
        if len(target) < 2:
            raise ValueError("the text is empty: there is nothing to predict.")
        ids = _padded([tokenizer.encode_source(source)])
        row = likelihoods(opened.params, *ids, jnp.asarray([target], jnp.int32))
        total = _finite(opened, len(scores), np.asarray(row, np.float64).sum())
        scores.append(Score(float(total), len(target) - 1))
    return scores


def _finite(opened: Opened, number: int, row: np.ndarray) -> np.ndarray:
    """What was computed of a text, when all of it is finite. ValueError else."""
    if not np.isfinite(row).all():
        raise ValueError(
            f"the model computed numbers of text {number} that are not finite: {opened.directory} holds "
            f"{opened.model.config.param_dtype}, beyond which its activations may be. Convert it to another type "
            f"(python -m transformer convert ... --dtype float32) and take that."
        )
    return row


def _of_targets(logits: jax.Array, targets: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


_OTHERS = {VisionClassifier: "images", SpeechToText: "sound", Forecaster: "series"}
"""models that read no text, and what they read"""


def _reading(opened: Opened) -> Any:
    """The model, with a kernel that fits any length."""
    model = opened.model
    read = next((what for kind, what in _OTHERS.items() if isinstance(model, kind)), None)
    if read is not None:
        raise ConfigError(f"{opened.directory} holds a {type(model).__name__}, which reads {read} and no text.")
    return model.clone(execution=anywhere(model.execution))


def _types(model: Any, types: jax.Array) -> jax.Array | None:
    return None if model.config.token_types is None else types


def _encode(opened: Opened, texts: Sequence[str], limit: int | None = None) -> list[_Encoded]:
    tokenizer = opened.tokenizer
    context = opened.model.config.longest_source if isinstance(opened.model, Seq2Seq) else opened.context
    limit = min(n for n in (limit, context, 2**30) if n is not None)
    encoded = []
    for number, text in enumerate(texts):
        both = getattr(tokenizer, "encode_model", None)
        ids, types = both(text) if both else (tokenizer.encode_source(text), [])
        types = types or [0] * len(ids)
        known = opened.model.config.token_types
        if known is not None and max(types, default=0) >= known:
            raise ValueError(
                f"text {number} has the token type {max(types)}, but the model knows {known}: tokenizer.json is not "
                f"that of this model. Get both anew."
            )
        if not ids:
            raise ValueError(f"text {number} is empty ({text!r}): give at least one word or character.")
        if len(ids) > limit:
            warnings.warn(f"text {number} has {len(ids)} tokens and is cut to {limit}.", stacklevel=3)
            # What a tokenizer puts at the end stays at the end.
            last = len(ids) - 1 if both and ids[-1] not in tokenizer.encode(text)[-1:] else limit - 1
            ids = [*ids[: limit - 1], ids[last]]
            types = types[:limit]
        encoded.append(_Encoded(ids, types))
    return encoded


def _padded(rows: Sequence[Sequence[int]], slots: int | None = None) -> tuple[jax.Array, jax.Array]:
    slots = max(map(len, rows)) if slots is None else slots
    table = np.zeros((len(rows), slots), np.int32)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return jnp.asarray(table), jnp.asarray([len(row) for row in rows], jnp.int32)


def _batched(opened: Opened, encoded: Sequence[_Encoded], compute: Callable) -> list[np.ndarray]:
    """`compute` of batches of alike lengths, padded to few different sizes; its rows in the order of the texts."""
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i].ids))
    rows: dict[int, np.ndarray] = {}
    limit = opened.model.config.longest_source  # of one that has no encoder: max_length
    for start in range(0, len(order), BATCH):
        numbers = order[start : start + BATCH]
        longest = max(len(encoded[i].ids) for i in numbers)
        slots = max(longest, min(bucket(longest), limit or 2**30))
        tokens, lengths = _padded([encoded[i].ids for i in numbers], slots)
        types, _ = _padded([encoded[i].types for i in numbers], slots)
        for i, row in zip(numbers, np.asarray(compute(opened.params, tokens, lengths, types)), strict=True):
            rows[i] = row
    return [rows[i] for i in range(len(encoded))]
