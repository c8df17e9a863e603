"""`transformer-zoo score`: log-likelihood and perplexity of texts."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from transformer.cli._models import ModelCommand
from transformer.cli._streams import decode_argument


@dataclass(frozen=True, kw_only=True)
class ScoreTexts(ModelCommand):
    """Print the perplexity, log-likelihood (nats) and number of tokens of each text, and the text, separated by tabs.

    An encoder-decoder scores a text given its source: pass one --source for each --text.
    """

    text: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """text to score; - reads one text per line from stdin; None: stdin"""
    source: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """encoder-decoder: source of the text; one per text"""


def main(command: ScoreTexts) -> None:
    from transformer.cli._texts import read_prompts, shown, warn_of_unknown
    from transformer.inference._score import score

    texts = read_prompts(command.text, lines=True, option="--text")
    opened = command.load()
    sources = [decode_argument(source) for source in command.source]
    warn_of_unknown(opened, texts, normalize=False)
    warn_of_unknown(opened, sources)
    scores = score(opened, texts, sources or None)
    results, lines = [], []
    for text, one in zip(texts, scores, strict=True):
        found = {"log_likelihood": one.log_likelihood, "tokens": one.tokens, "perplexity": one.perplexity}
        results.append({"text": text, **found})
        lines.append(f"{one.perplexity:.4g}\t{one.log_likelihood:.4f}\t{one.tokens}\t{shown(text)}")
    command.answer_of(opened, lines, results=results)
