"""Embedding, classification and scoring of texts."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError
from transformer.config._options import Pooling
from transformer.data._byte_counts import bytes_after_first
from transformer.data._tokenizer_settings import truncated
from transformer.generate._prompts import decoding_model
from transformer.inference._loading import LoadedModel
from transformer.inference._sentences import SentenceSettings
from transformer.inference._text_batches import Batch, Columns, pool_texts, run_batches, run_pairs, scored_at_once
from transformer.nn._masks import Mask
from transformer.nn._partitioning import platform
from transformer.nn.models._audio import SpeechEncoder
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._dual import DualEncoder
from transformer.nn.models._encoders import Classifier
from transformer.nn.models._forecaster import SeriesEncoder
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.nn.models._series import SeriesClassifier
from transformer.nn.models._speech import SpeechToText
from transformer.nn.models._vision import VisionEncoder

FULL_MATRIX_SCORES = 512
"""Maximum row length for full attention matrices on CPU. Up to this length, the forward pass of an encoder is faster
with the full attention matrix than with the query-chunked kernel (docs/benchmarks.md). For longer rows it needs
too much memory."""

FIRST_CHARACTERS = 1000
"""Characters of a text that determine its first token."""


def embed(opened: LoadedModel, texts: Sequence[str], settings: SentenceSettings | None = None) -> np.ndarray:
    """Compute embeddings: pooled hidden states of the non-padding tokens (of the encoder, for a Seq2Seq).

    Vectors of a DualEncoder (CLIP, SigLIP) are in the space of its images, of length 1, without `settings`. A text that
    exceeds the context length is truncated with a warning.

    Args:
        opened: the model.
        texts: n texts.
        settings: pooling, normalization and preprocessing; None: the defaults of `SentenceSettings`.

    Returns:
        (n, D) float32, one vector per text.

    Raises:
        ConfigError: the model does not read text.
        ValueError: a text that the tokenizer can't encode or that has no tokens, or results that are not finite.
    """
    if isinstance(opened.model, DualEncoder):
        from transformer.inference._dual import embed_texts

        return embed_texts(opened, texts)
    settings = settings or SentenceSettings()
    return embed_encoded(opened, encode_sentences(opened, texts, settings), settings)


def encode_sentences(
    opened: LoadedModel, texts: Sequence[str], settings: SentenceSettings, *, truncate: bool = True
) -> list[Columns]:
    """Return token ids and token types of texts as `embed` reads them.

    Args:
        opened: the model.
        texts: the texts.
        settings: preprocessing and maximum length.
        truncate: truncate long texts, with a warning; False: return all of their tokens.

    Raises:
        ConfigError: the model does not read text.
        ValueError: a text that the tokenizer can't encode or that has no tokens.
    """
    text_model(opened)
    prepared = [settings.prompt + text for text in texts]
    if settings.lower_case:
        from tokenizers import normalizers

        # Character by character, as sentence-transformers; str.lower writes the last sigma of a word differently.
        prepared = [normalizers.Lowercase().normalize_str(text) for text in prepared]
    return encode_texts(opened, prepared, settings.max_length, truncate=truncate)


def embed_encoded(opened: LoadedModel, rows: Sequence[Columns], settings: SentenceSettings) -> np.ndarray:
    """Compute embeddings of texts that `encode_sentences` has encoded.

    Returns:
        (n, D) float32, one vector per text; D is at most `settings.dimensions`.

    Raises:
        ConfigError: the model does not read text.
        ValueError: results that are not finite.
    """
    options = {"pooling": settings.pooling, "normalize": settings.normalize}
    compute = functools.partial(_vectors, text_model(opened), opened.params, **options)
    return np.stack(_run(opened, rows, compute))[:, : settings.dimensions]


@functools.partial(jax.jit, static_argnames=("model", "pooling", "normalize"))
def _vectors(model: Any, params: Any, batch: Batch, *, pooling: Pooling, normalize: bool) -> jax.Array:
    """Return the vectors (K, D) of K texts in float32. Compiled once per model, settings and batch shape."""
    pooled = pool_texts(_hidden(model, params, batch), batch, pooling).astype(jnp.float32)
    if not normalize:
        return pooled
    # L2 normalization; the bound avoids 0 / 0 for a zero vector.
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)


def _hidden(model: Any, params: Any, batch: Batch) -> jax.Array:
    """Return the hidden states (R, T, D) of a batch (of the encoder, for a Seq2Seq)."""
    tokens, types = batch.columns
    model = _with_full_attention_matrix(model, tokens.shape[1])
    places = {"positions": batch.positions, "mask": batch.mask}
    if isinstance(model, Seq2Seq):
        places = {"source_positions": batch.positions, "source_mask": batch.mask}
        return model.apply({"params": params}, tokens, **places, method=type(model).encode)
    if model.config.embedding.token_types is not None and not isinstance(model, CausalLM):
        places["token_types"] = types
    return model.apply({"params": params}, tokens, **places, method=type(model).hidden)


def _with_full_attention_matrix(model: Any, slots: int) -> Any:
    """Return the model with the fastest attention kernel for a forward pass over rows of this length.

    On CPU, `auto` uses the query-chunked kernel from 96 slots. It is faster in training and for causal models, where it
    skips masked keys, but slower for the forward pass of encoders with short rows.
    """
    causal = isinstance(model, CausalLM) or (not isinstance(model, Seq2Seq) and model.config.attention.causal)
    if causal or model.execution.attention != "auto" or platform() != "cpu" or slots > FULL_MATRIX_SCORES:
        return model
    return model.clone(execution=dataclasses.replace(model.execution, attention="reference"))


@dataclass(frozen=True)
class Class:
    """Classification result: the most probable class, its probability, and the probabilities of all classes."""

    label: str
    """Name of the most probable class."""
    probability: float
    probabilities: dict[str, float]
    """Probability of every label."""

    def top(self, count: int) -> list[tuple[str, float]]:
        """Return the `count` most probable labels with their probabilities, the most probable first."""
        return sorted(self.probabilities.items(), key=lambda both: -both[1])[:count]


def classify(opened: LoadedModel, texts: Sequence[str]) -> list[Class]:
    """Return the most probable class of each text.

    Raises:
        ConfigError: the model is not a classifier, or its outputs are not probabilities of mutually exclusive classes.
        ValueError: see `embed`.
    """
    model = text_model(opened)
    if not isinstance(model, Classifier):
        raise ConfigError(
            f"{opened.directory} contains a model of the class {type(model).__name__}, which is not a classifier. Pass "
            f"a classifier, or train one: configs/finetune_classifier.py."
        )
    names = class_names(opened)
    rows = _run(opened, encode_texts(opened, texts), functools.partial(_probabilities, model, opened.params))
    return [class_of(row, names) for row in rows]


def class_names(opened: LoadedModel) -> list[str]:
    """Return the names of a classifier's classes, or their numbers if they have no names.

    Raises:
        ConfigError: its outputs are not probabilities of mutually exclusive classes.
    """
    classes = opened.model.config.output.num_classes
    problem = None if opened.pretrained is None else opened.pretrained.fields.get("problem_type")
    if classes == 1 or problem in ("regression", "multi_label_classification"):
        reason = "" if problem is None else f" (problem_type {problem})"
        raise ConfigError(
            f"{opened.directory} does not choose one of several classes: it has {classes} independent outputs{reason}. "
            f"Load it with transformer.load and use its logits."
        )
    return opened.labels or [str(i) for i in range(classes)]


def class_of(probabilities: np.ndarray, names: Sequence[str]) -> Class:
    """Return the classification result for the probabilities (C,) of classes with these names."""
    best = int(probabilities.argmax())
    every = {name: float(p) for name, p in zip(names, probabilities, strict=True)}
    return Class(names[best], float(probabilities[best]), every)


@functools.partial(jax.jit, static_argnames="model")
def _probabilities(model: Classifier, params: Any, batch: Batch) -> jax.Array:
    """Return the class probabilities (K, C) of K texts. Compiled once per model and batch shape."""
    pooled = pool_texts(_hidden(model, params, batch), batch, model.config.output.pooling)
    return jax.nn.softmax(model.apply({"params": params}, pooled, method=Classifier.head))  # over C


@dataclass(frozen=True)
class Score:
    """Sum `log_likelihood` of the log-probabilities of a text, in nats, over its `tokens` predicted tokens."""

    log_likelihood: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(-log_likelihood / tokens). The exponent is bounded, because exp(710) overflows."""
        return float(np.exp(min(self.loss, 700.0)))

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats per token."""
        return -self.log_likelihood / self.tokens


@dataclass(frozen=True)
class TextScore(Score):
    """Score of a text whose predicted tokens stand for `num_bytes` UTF-8 bytes of the original text."""

    num_bytes: int

    @property
    def bits_per_byte(self) -> float:
        """-log2 of the probability of the text, divided by its bytes: comparable between tokenizers."""
        return -self.log_likelihood / (math.log(2) * self.num_bytes)


def score(opened: LoadedModel, texts: Sequence[str], sources: Sequence[str] | None = None) -> list[Score]:
    """Compute the log-likelihood of each text under a causal model, or under a Seq2Seq given its source.

    A causal model predicts each token from the preceding ones. The first token is not predicted and not counted, so the
    first token of the text counts only if the tokenizer adds a start token. A text that exceeds the context length is
    split into windows that overlap by half.

    Args:
        opened: the model.
        texts: texts to score.
        sources: source of each text, for a Seq2Seq only.

    Raises:
        ConfigError: the model does not predict tokens, or sources are missing or not allowed.
        ValueError: a text with nothing to predict or that the tokenizer can't encode, or results that are not finite.
    """
    model = text_model(opened)
    if isinstance(model, Seq2Seq):
        return _score_targets(opened, model, texts, sources)
    if not isinstance(model, CausalLM):
        raise ConfigError(
            f"{opened.directory} contains a model of the class {type(model).__name__}. Only a language model or an "
            f"encoder-decoder can score texts. Pass one of these."
        )
    if sources is not None:
        raise ConfigError("sources are only for encoder-decoder models, but this is a causal model. Omit the sources.")

    windows = [(number, *window) for number, text in enumerate(texts) for window in _windows(opened, text)]
    rows = _run(
        opened,
        [columns for _, columns, _ in windows],
        functools.partial(_likelihoods, model, opened.params),
        numbers=[number for number, _, _ in windows],
        each_token=True,
        most=scored_at_once(model),
    )
    found = [Score(0.0, 0) for _ in texts]
    for (number, _, first), row in zip(windows, rows, strict=True):
        before = found[number]
        # Skip predictions that an earlier window has counted. Summed in float64: a text may have many tokens.
        total = before.log_likelihood + float(row[first:].sum(dtype=np.float64))
        found[number] = Score(total, before.tokens + len(row) - first)
    return found


def score_text(opened: LoadedModel, text: str) -> TextScore:
    """Score a text of any length with a causal model, as `score` does, and count its bytes.

    The first token has no prediction unless the tokenizer adds a start token. Then its bytes are not counted either.

    Raises:
        ConfigError, ValueError: see `score`.
    """
    (found,) = score(opened, [text])
    num_bytes = bytes_after_first(opened.tokenizer, text, opened.tokenizer.encode_source(text[:FIRST_CHARACTERS]))
    return TextScore(found.log_likelihood, found.tokens, num_bytes)


@functools.partial(jax.jit, static_argnames="model")
def _likelihoods(model: CausalLM, params: Any, batch: Batch) -> jax.Array:
    """Return the log-probability (R, T) of the token after each token. Compiled once per model and batch shape."""
    tokens, targets = batch.columns
    # (R, T, V). Row t predicts the token after t.
    logits = model.apply({"params": params}, tokens, positions=batch.positions, mask=batch.mask)
    return _target_log_probs(logits, targets)


def _windows(opened: LoadedModel, text: str) -> list[tuple[Columns, int]]:
    """Split the tokens of a text into windows that overlap by half.

    Returns:
        For each window: its columns (input tokens, next tokens), and the index of the first prediction that no earlier
        window has made.
    """
    ids = opened.tokenizer.encode_source(text)
    if len(ids) < 2:
        raise ValueError(f"{text!r} has {len(ids)} tokens: expected at least two, of which the second is predicted.")
    context = (opened.context or len(ids)) + 1  # plus one: the last token is predicted but not an input
    windows, done = [], 1
    while done < len(ids):
        # `done` tokens are scored (or not predictable). Start so that about half a context precedes the next token.
        first = 0 if done == 1 else min(done - 1, max(0, done - context // 2))
        window = ids[first : first + context]
        # Input is all but the last token, targets are shifted by one. Skip the targets that are already scored.
        windows.append(((window[:-1], window[1:]), done - 1 - first))
        done = first + len(window)
    return windows


def _score_targets(
    opened: LoadedModel, model: Seq2Seq, texts: Sequence[str], sources: Sequence[str] | None
) -> list[Score]:
    if sources is None or len(sources) != len(texts):
        given = 0 if sources is None else len(sources)
        raise ConfigError(
            f"an encoder-decoder scores a text given its source: {len(texts)} texts need {len(texts)} sources, got "
            f"{given}. Pass one source per text."
        )
    tokenizer = opened.tokenizer
    end = list(opened.eos_ids or [])[:1]

    pairs = []
    for text, source in zip(texts, sources, strict=True):
        # Models of this library were trained to predict an end token. Pretrained tokenizers add special tokens
        # themselves.
        ids = [*tokenizer.encode(text), *end] if opened.pretrained is None else tokenizer.encode_source(text)
        if not ids:
            raise ValueError("the text is empty: there is nothing to predict. Pass at least one word or character.")
        # The decoder reads the start token and all tokens but the last, and predicts all tokens.
        pairs.append((tokenizer.encode_source(source), [opened.target_start[0], *ids[:-1]], ids))
    compute = functools.partial(_target_likelihoods, model, opened.params)
    limits = model.config.longest_source, model.config.max_length
    rows = run_pairs(pairs, compute, limits=limits, most=scored_at_once(model))
    rows = [finite(opened, number, row) for number, row in enumerate(rows)]
    return [Score(float(row.sum(dtype=np.float64)), len(row)) for row in rows]


@functools.partial(jax.jit, static_argnames="model")
def _target_likelihoods(
    model: Seq2Seq, params: Any, source: jax.Array, lengths: jax.Array, tokens: jax.Array, targets: jax.Array
) -> jax.Array:
    """Return the log-probability (R, T) of each target token. Compiled once per model and batch shape."""
    logits = model.apply({"params": params}, source, tokens, source_mask=Mask.lengths(lengths))
    return _target_log_probs(logits, targets)


def finite(opened: LoadedModel, number: int, row: np.ndarray, what: str = "text") -> np.ndarray:
    """Return the result of a text or image if it is finite; raise ValueError otherwise."""
    if not np.isfinite(row).all():
        raise ValueError(
            f"the model computed numbers of {what} {number} that are not finite: the weights in {opened.directory} are "
            f"{opened.model.config.param_dtype}, and activations may exceed its range. Convert the model to another "
            f"dtype (python -m transformer convert ... --dtype float32) and use the result."
        )
    return row


def _run(
    opened: LoadedModel,
    texts: Sequence[Columns],
    compute: Callable[[Batch], jax.Array],
    numbers: Sequence[int] | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """Call `run_batches` and raise ValueError if a result is not finite.

    Args:
        opened: the model.
        texts: columns of each text or window.
        compute: see `run_batches`.
        numbers: number of the text of each entry, for the error message; None: the entries are the texts.
        **options: options of `run_batches`.
    """
    options |= {"longest": opened.model.config.longest_source}  # equals max_length for a model without an encoder
    rows = run_batches(texts, compute, **options)
    for number, row in enumerate(rows):
        if not np.isfinite(row).all():
            # Possibly caused by another text in the same row, so compute this text alone.
            (alone,) = run_batches(texts[number : number + 1], compute, **options)
            rows[number] = finite(opened, number if numbers is None else numbers[number], alone)
    return rows


def _target_log_probs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return log softmax(logits)[target] = logits[target] - logsumexp(logits): (R, T, V), (R, T) -> (R, T).

    Equal to indexing `log_softmax`, but without its (R, T, V) result.
    """
    # logsumexp subtracts the maximum first, so that exp does not overflow.
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


_OTHERS = {VisionEncoder: "images", SpeechToText: "sound", SpeechEncoder: "sound", SeriesEncoder: "series"}
"""Models that do not read text, and their inputs."""


def text_model(opened: LoadedModel) -> Any:
    """Return the model for inference, with a kernel for any length.

    Raises:
        ConfigError: the model does not read text.
    """
    model = opened.model
    read = next((what for kind, what in _OTHERS.items() if isinstance(model, kind)), None)
    if read is not None:
        option = " On the command line, pass --image." if read == "images" else ""
        option = " In Python, classify_series classifies them." if isinstance(model, SeriesClassifier) else option
        what = f"{opened.directory} contains a {type(model).__name__}"
        raise ConfigError(f"{what}, which reads {read}, not text.{option}")
    return decoding_model(model)


def encode_texts(
    opened: LoadedModel, texts: Sequence[str], limit: int | None = None, *, truncate: bool = True
) -> list[Columns]:
    """Return token ids and token types of each text; with `truncate`, at most the context length and `limit`."""
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
                f"text {number} has the token type {max(types)}, but the model has only {known} types: tokenizer.json "
                f"belongs to another model. Download both again."
            )
        if not ids:
            raise ValueError(f"text {number} is empty ({text!r}). Pass at least one word or character.")
        if truncate and len(ids) > limit:
            warnings.warn(f"text {number} has {len(ids)} tokens and is truncated to {limit}.", stacklevel=3)
            body = tokenizer.encode(text) if both else ids
            ids, types = truncated(ids, body, limit, tokenizer.truncation_side), types[:limit]
        encoded.append((ids, types))
    return encoded
