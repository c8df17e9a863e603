"""Texts in; vectors, classes and probabilities out."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError
from transformer.config._options import Pooling
from transformer.generate._prompts import decoding_model
from transformer.inference._batching import Batch, Columns, pool_texts, run_batches, run_pairs, slots_at_once
from transformer.inference._loading import LoadedModel
from transformer.inference._sentences import SentenceSettings
from transformer.nn._masks import Mask
from transformer.nn._partitioning import platform
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._encoders import Classifier
from transformer.nn.models._forecaster import Forecaster
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.nn.models._speech import SpeechToText
from transformer.nn.models._vision import VisionClassifier

FULL_MATRIX_SCORES = 512
"""CPU: up to so many slots a row, an encoder's forward pass takes less time with all scores of a row at once than with
slices of them (docs/benchmarks.md); beyond, their memory counts"""
LOGITS = 2**26
"""logits of a batch that is scored, 256 MiB of them; a single window of text may have more"""


def embed(opened: LoadedModel, texts: Sequence[str], settings: SentenceSettings | None = None) -> np.ndarray:
    """One vector a text, (n, D) float32: hidden states of its real tokens, pooled (of a Seq2Seq: of its encoder).

    A text longer than the model reads is cut, with a warning.

    Raises:
        ConfigError: a model that reads no text.
        ValueError: a text that the tokenizer can't read, or one without tokens; or numbers that are not finite.
    """
    model, settings = _reading(opened), settings or SentenceSettings()
    prepared = [settings.prompt + (text.lower() if settings.lower_case else text) for text in texts]
    encoded = _encode(opened, prepared, settings.max_length)

    options = {"pooling": settings.pooling, "normalize": settings.normalize}
    compute = functools.partial(_vectors, model, opened.params, **options)
    return np.stack(_run(opened, encoded, compute))


@functools.partial(jax.jit, static_argnames=("model", "pooling", "normalize"))
def _vectors(model: Any, params: Any, batch: Batch, *, pooling: Pooling, normalize: bool) -> jax.Array:
    """(K, D) float32, of K texts. Compiled once for each model, settings and size of batch."""
    pooled = pool_texts(_hidden(model, params, batch), batch, pooling).astype(jnp.float32)
    if not normalize:
        return pooled
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)


def _hidden(model: Any, params: Any, batch: Batch) -> jax.Array:
    tokens, types = batch.columns
    model = _with_whole_scores(model, tokens.shape[1])
    places = {"positions": batch.positions, "mask": batch.mask}
    if isinstance(model, Seq2Seq):
        places = {"source_positions": batch.positions, "source_mask": batch.mask}
        return model.apply({"params": params}, tokens, **places, method=type(model).encode)
    if model.config.embedding.token_types is not None and not isinstance(model, CausalLM):
        places["token_types"] = types
    return model.apply({"params": params}, tokens, **places, method=type(model).hidden)


def _with_whole_scores(model: Any, slots: int) -> Any:
    """The model with the kernel that takes least time for a forward pass over rows of so many slots. On CPU, `auto`
    takes slices of queries from 96 slots on, which pay off in training and where causality hides keys from a slice.
    """
    causal = isinstance(model, CausalLM) or (not isinstance(model, Seq2Seq) and model.config.attention.causal)
    if causal or model.execution.attention != "auto" or platform() != "cpu" or slots > FULL_MATRIX_SCORES:
        return model
    return model.clone(execution=dataclasses.replace(model.execution, attention="reference"))


@dataclass(frozen=True)
class Class:
    """What a text was found to be: the `label` of the likeliest class, its `probability`, and those of all."""

    label: str
    probability: float
    probabilities: dict[str, float]
    """of every label"""


def classify(opened: LoadedModel, texts: Sequence[str]) -> list[Class]:
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
    if model.config.output.num_classes == 1 or problem in ("regression", "multi_label_classification"):
        told = "" if problem is None else f" (problem_type {problem})"
        raise ConfigError(
            f"{opened.directory} does not choose one of several classes: it has {model.config.output.num_classes} "
            f"outputs{told}, each for itself. Load it (transformer.load) and read its logits."
        )
    names = opened.labels or [str(i) for i in range(model.config.output.num_classes)]

    rows = _run(opened, _encode(opened, texts), functools.partial(_probabilities, model, opened.params))
    found = []
    for row in rows:
        best = int(row.argmax())
        every = {name: float(p) for name, p in zip(names, row, strict=True)}
        found.append(Class(names[best], float(row[best]), every))
    return found


@functools.partial(jax.jit, static_argnames="model")
def _probabilities(model: Classifier, params: Any, batch: Batch) -> jax.Array:
    """(K, C), of K texts. Compiled once for each model and size of batch."""
    pooled = pool_texts(_hidden(model, params, batch), batch, model.config.output.pooling)
    return jax.nn.softmax(model.apply({"params": params}, pooled, method=Classifier.head))


@dataclass(frozen=True)
class Score:
    """How likely a text is: `log_likelihood`, the sum of log-probabilities of its `tokens`, in nats."""

    log_likelihood: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood of a token."""
        return float(np.exp(min(-self.log_likelihood / self.tokens, 700.0)))


def score(opened: LoadedModel, texts: Sequence[str], sources: Sequence[str] | None = None) -> list[Score]:
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

    windows = [(number, *window) for number, text in enumerate(texts) for window in _windows(opened, text)]
    rows = _run(
        opened,
        [columns for _, columns, _ in windows],
        functools.partial(_likelihoods, model, opened.params),
        numbers=[number for number, _, _ in windows],
        each_token=True,
        most=_scored_at_once(model),
    )
    found = [Score(0.0, 0) for _ in texts]
    for (number, _, first), row in zip(windows, rows, strict=True):
        before = found[number]
        total = before.log_likelihood + float(row[first:].sum(dtype=np.float64))
        found[number] = Score(total, before.tokens + len(row) - first)
    return found


@functools.partial(jax.jit, static_argnames="model")
def _likelihoods(model: CausalLM, params: Any, batch: Batch) -> jax.Array:
    """(R, T), log-probability of what follows each token. Compiled once for each model and size of batch."""
    tokens, targets = batch.columns
    logits = model.apply({"params": params}, tokens, positions=batch.positions, mask=batch.mask)
    return _of_targets(logits, targets)


def _windows(opened: LoadedModel, text: str) -> list[tuple[Columns, int]]:
    """Windows of a text's tokens, each overlapping half of the one before: (tokens that are read, those that follow
    each), and the first of them that no earlier window has counted.
    """
    ids = opened.tokenizer.encode_source(text)
    if len(ids) < 2:
        raise ValueError(f"{text!r} has {len(ids)} tokens: there must be two, of which the second is predicted.")
    context = (opened.context or len(ids)) + 1  # one more: the last token is predicted and not read
    windows, done = [], 1
    while done < len(ids):
        first = 0 if done == 1 else min(done - 1, max(0, done - context // 2))
        window = ids[first : first + context]
        windows.append(((window[:-1], window[1:]), done - 1 - first))
        done = first + len(window)
    return windows


def _scored_at_once(model: Any) -> int:
    """Slots of a batch whose logits are all held at once; 1: as few as can be."""
    return min(slots_at_once(), max(1, LOGITS // model.config.vocab_size))


def _score_targets(
    opened: LoadedModel, model: Seq2Seq, texts: Sequence[str], sources: Sequence[str] | None
) -> list[Score]:
    if sources is None or len(sources) != len(texts):
        given = 0 if sources is None else len(sources)
        raise ConfigError(
            f"an encoder-decoder scores a text given its source: {len(texts)} texts need {len(texts)} sources, got "
            f"{given}."
        )
    tokenizer = opened.tokenizer
    end = list(opened.eos_ids or [])[:1]

    pairs = []
    for text, source in zip(texts, sources, strict=True):
        # With what the model was trained to write around a text, which a tokenizer of others adds by itself.
        ids = [*tokenizer.encode(text), *end] if opened.pretrained is None else tokenizer.encode_source(text)
        if not ids:
            raise ValueError("the text is empty: there is nothing to predict.")
        pairs.append((tokenizer.encode_source(source), [opened.target_start[0], *ids[:-1]], ids))
    compute = functools.partial(_target_likelihoods, model, opened.params)
    limits = model.config.longest_source, model.config.max_length
    rows = run_pairs(pairs, compute, limits=limits, most=_scored_at_once(model))
    rows = [_finite(opened, number, row) for number, row in enumerate(rows)]
    return [Score(float(row.sum(dtype=np.float64)), len(row)) for row in rows]


@functools.partial(jax.jit, static_argnames="model")
def _target_likelihoods(
    model: Seq2Seq, params: Any, source: jax.Array, lengths: jax.Array, tokens: jax.Array, targets: jax.Array
) -> jax.Array:
    """(R, T), log-probability of each target. Compiled once for each model and size of batch."""
    logits = model.apply({"params": params}, source, tokens, source_mask=Mask.lengths(lengths))
    return _of_targets(logits, targets)


def _finite(opened: LoadedModel, number: int, row: np.ndarray) -> np.ndarray:
    """What was computed of a text, when all of it is finite. ValueError else."""
    if not np.isfinite(row).all():
        raise ValueError(
            f"the model computed numbers of text {number} that are not finite: {opened.directory} holds "
            f"{opened.model.config.param_dtype}, beyond which its activations may be. Convert it to another type "
            f"(python -m transformer convert ... --dtype float32) and take that."
        )
    return row


def _run(
    opened: LoadedModel,
    texts: Sequence[Columns],
    compute: Callable[[Batch], jax.Array],
    numbers: Sequence[int] | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """`run_batches`, with an error if results are not finite, in which `numbers` are those of the texts."""
    options |= {"longest": opened.model.config.longest_source}  # of one that has no encoder: max_length
    rows = run_batches(texts, compute, **options)
    for number, row in enumerate(rows):
        if not np.isfinite(row).all():  # by itself, or by a text that it shares a row with
            (alone,) = run_batches(texts[number : number + 1], compute, **options)
            rows[number] = _finite(opened, number if numbers is None else numbers[number], alone)
    return rows


def _of_targets(logits: jax.Array, targets: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


_OTHERS = {VisionClassifier: "images", SpeechToText: "sound", Forecaster: "series"}
"""models that read no text, and what they read"""


def _reading(opened: LoadedModel) -> Any:
    """The model, with a kernel that fits any length, and experts with room for every token: what a text gets must not
    depend on the texts beside it.
    """
    model = opened.model
    read = next((what for kind, what in _OTHERS.items() if isinstance(model, kind)), None)
    if read is not None:
        raise ConfigError(f"{opened.directory} holds a {type(model).__name__}, which reads {read} and no text.")
    return decoding_model(model)


def _encode(opened: LoadedModel, texts: Sequence[str], limit: int | None = None) -> list[Columns]:
    tokenizer = opened.tokenizer
    context = opened.model.config.longest_source if isinstance(opened.model, Seq2Seq) else opened.context
    limit = min(n for n in (limit, context, 2**30) if n is not None)
    encoded = []
    for number, text in enumerate(texts):
        both = getattr(tokenizer, "encode_model", None)
        ids, types = both(text) if both else (tokenizer.encode_source(text), [])
        types = types or [0] * len(ids)
        known = opened.model.config.embedding.token_types
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
        encoded.append((ids, types))
    return encoded
