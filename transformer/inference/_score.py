"""Log-likelihood of texts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError
from transformer.data.tokenizers._byte_counts import bytes_after_first
from transformer.inference._loaded_model import LoadedModel, Params
from transformer.inference._text_batches import Batch, Columns, run_pairs, scored_at_once
from transformer.inference._text_inputs import run_texts, text_model
from transformer.nn._masks import Mask
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._seq2seq import Seq2Seq

FIRST_CHARACTERS = 1000
"""Characters of a text that determine its first token."""


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
    if opened.kind.writes == "translation":
        return _score_targets(opened, model, texts, sources)
    if opened.kind.writes != "continuation":
        raise ConfigError(
            f"{opened.directory} contains a model of the class {type(model).__name__}. Only a language model or an "
            f"encoder-decoder can score texts. Pass one of these."
        )
    if sources is not None:
        raise ConfigError("sources are only for encoder-decoder models, but this is a causal model. Omit the sources.")

    windows = [(number, *window) for number, text in enumerate(texts) for window in _windows(opened, text)]
    numbers, columns = [number for number, _, _ in windows], [columns for _, columns, _ in windows]
    compute = functools.partial(_likelihoods, model, opened.params)
    rows = run_texts(opened, columns, compute, numbers, each_token=True, most=scored_at_once(model))
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
def _likelihoods(model: CausalLM, params: Params, batch: Batch) -> jax.Array:
    """Return the log-probability (R, T) of the token after each token. Compiled once per model and batch shape."""
    tokens, targets = batch.columns
    # (R, T, V). Row t predicts the token after t.
    logits = model.apply({"params": params}, tokens, positions=batch.positions, mask=batch.mask)
    return _target_log_probs(logits, targets)


def _windows(opened: LoadedModel, text: str) -> list[tuple[Columns, int]]:
    """Split the tokens of a text into windows that overlap by half.

    Each has its columns (input tokens, next tokens), and the index of the first prediction that no earlier one made.
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
        # Models of this library were trained to predict an end token; pretrained tokenizers add special tokens.
        ids = [*tokenizer.encode(text), *end] if opened.pretrained is None else tokenizer.encode_source(text)
        if not ids:
            raise ValueError("the text is empty: there is nothing to predict. Pass at least one word or character.")
        # The decoder reads the start token and all tokens but the last, and predicts all tokens.
        pairs.append((tokenizer.encode_source(source), [opened.target_start[0], *ids[:-1]], ids))
    compute = functools.partial(_target_likelihoods, model, opened.params)
    limits = model.config.longest_source, model.config.max_length
    rows = run_pairs(pairs, compute, limits=limits, most=scored_at_once(model))
    rows = [opened.finite(number, row) for number, row in enumerate(rows)]
    return [Score(float(row.sum(dtype=np.float64)), len(row)) for row in rows]


@functools.partial(jax.jit, static_argnames="model")
def _target_likelihoods(
    model: Seq2Seq, params: Params, source: jax.Array, lengths: jax.Array, tokens: jax.Array, targets: jax.Array
) -> jax.Array:
    """Return the log-probability (R, T) of each target token. Compiled once per model and batch shape."""
    logits = model.apply({"params": params}, source, tokens, source_mask=Mask.lengths(lengths))
    return _target_log_probs(logits, targets)


def _target_log_probs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return log softmax(logits)[target] = logits[target] - logsumexp(logits): (R, T, V), (R, T) -> (R, T).

    Equal to indexing `log_softmax`, but without its (R, T, V) result.
    """
    # logsumexp subtracts the maximum first, so that exp does not overflow.
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
