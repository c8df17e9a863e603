"""Embeddings of texts over HTTP."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from transformer.data.tokenizers._long_texts import TooManyTokensError, check_length
from transformer.inference._embed import embed_encoded, encode_sentences
from transformer.inference._loaded_model import LoadedModel
from transformer.inference._sentences import SentenceSettings
from transformer.inference._text_batches import Columns, slots_at_once
from transformer.serve._bodies import read_json, text_prompts
from transformer.serve._errors import APIError, json_response
from transformer.serve._http import Handler, unknown_field
from transformer.serve._threads import Job, ThreadService

MOST_INPUTS = 2048
"""maximum number of texts of one call"""
MOST_INPUT_TOKENS = 300_000
"""maximum number of tokens of one call"""
_FIELDS = {"input", "model", "encoding_format", "dimensions", "user"}


@dataclass(kw_only=True)
class EmbeddingService(ThreadService):
    """A model behind the HTTP interface that embeds texts as `inference.embed`.

    The texts of several calls are computed together: `embed_encoded` packs them into batches of few shapes.
    """

    opened: LoadedModel
    settings: SentenceSettings
    longest: int
    """maximum number of tokens of a text"""

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of a text."""
        return self.longest

    def endpoints(self) -> dict[str, Handler]:
        """Return the handler of embeddings."""
        return {"/v1/embeddings": self._embeddings}

    def warm_up(self, report: Callable[[int, int], None]) -> None:
        """Compile the program for one short text. Longer ones are compiled when they are needed, for few shapes."""
        embed_encoded(self.opened, [([0], [0])], self.settings)
        report(1, 1)

    async def _embeddings(self, request: HTTPRequest) -> Response:
        values = await read_json(request)
        self.check_model(values.get("model", self.name))
        format = _checked_format(values)
        texts = text_prompts(values, "input")
        if len(texts) > MOST_INPUTS:
            raise APIError(400, f"a call can have at most {MOST_INPUTS} texts, got {len(texts)}.", "input")

        job = Job(None, lambda: self._encode(texts), self._vectors, _tokens, slots_at_once())
        rows, vectors = await self.compute(request, job)
        count = sum(map(_tokens, rows))
        size = values.get("dimensions", vectors.shape[1])
        if size != vectors.shape[1]:
            raise APIError(400, f"dimensions must be {vectors.shape[1]}, the size of this model.", "dimensions")
        self.counters.prompt_tokens += count
        data = [
            {"object": "embedding", "index": number, "embedding": _encoded(vector, format)}
            for number, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return json_response({"object": "list", "data": data, "model": self.name, "usage": usage})

    def _encode(self, texts: list[str | list[int]]) -> list[Columns]:
        """Return token ids and token types of texts, or of token ids."""
        if isinstance(texts[0], str):
            try:
                for text in texts:
                    check_length(self.opened.tokenizer, [text], self.longest)
                check_length(self.opened.tokenizer, texts, MOST_INPUT_TOKENS, usual=1)
                rows = encode_sentences(self.opened, texts, self.settings, truncate=False)
            except TooManyTokensError as error:
                raise APIError(400, str(error), "input", "context_length_exceeded") from None
            except (ValueError, TypeError) as error:
                raise APIError(400, str(error)[:500], "input") from None
        else:
            config = self.opened.model.config
            size = config.embedding.source_vocab_size or config.vocab_size
            if not all(0 <= one < size for ids in texts for one in ids):
                raise APIError(400, f"token ids must be from 0 to {size - 1}.", "input")
            rows = [(ids, [0] * len(ids)) for ids in texts]
        lengths = [len(ids) for ids, _ in rows]
        if max(lengths) > self.longest:
            message = f"text {lengths.index(max(lengths))} has {max(lengths)} tokens, but a text can have at most"
            raise APIError(400, f"{message} {self.longest}. Shorten it.", "input", "context_length_exceeded")
        if sum(lengths) > MOST_INPUT_TOKENS:
            raise APIError(400, f"a call can have at most {MOST_INPUT_TOKENS} tokens. Send fewer texts.", "input")
        return rows

    def _vectors(self, rows: list[Columns]) -> np.ndarray:
        try:
            return embed_encoded(self.opened, rows, self.settings)
        except ValueError:  # its message names the directory
            raise APIError(500, "the model computed values that are not finite.") from None


def _tokens(row: Columns) -> int:
    """Return the number of tokens of a text."""
    return len(row[0])


def _checked_format(values: Mapping[str, Any]) -> str:
    """Return the encoding of the vectors; raise APIError for unknown fields and formats."""
    for name in values:
        if name not in _FIELDS:
            raise unknown_field(name, _FIELDS)
    format = values.get("encoding_format", "float")
    if format not in ("float", "base64"):
        raise APIError(400, "encoding_format must be float or base64.", "encoding_format")
    return format


def _encoded(vector: np.ndarray, format: str) -> list[float] | str:
    """Return a vector as numbers, or as base64 of float32 numbers, the least significant byte first."""
    if format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
