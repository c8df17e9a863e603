"""Translations, and other texts of an encoder-decoder, over HTTP: text completions by beam search."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse

from transformer.data.tokenizers._long_texts import TooManyTokensError, check_length
from transformer.generate._batches import beam_search_all
from transformer.generate._beam import MOST_ALPHA, USUAL, Beam, Hypothesis
from transformer.inference._generation_settings import longest_target, recommended_beam
from transformer.inference._loaded_model import LoadedModel
from transformer.inference._translate import text_of
from transformer.serve._answers import Answer
from transformer.serve._bodies import MOST_CHOICES, integer, read_json, text_prompts
from transformer.serve._errors import APIError, json_response
from transformer.serve._http import Handler, unknown_field
from transformer.serve._requests import Delta, Token
from transformer.serve._threads import Job, ThreadService

BEAM_SIZES = (1, 2, 4, 8)
"""beam sizes that a client can choose: each is another program"""
TOGETHER = 4
"""maximum number of sources that are searched together, also of several calls with the same options; between them the
search can end early"""
_FIELDS = {"prompt", "model", "n", "best_of", "num_beams", "length_penalty", "max_tokens", "stream", "stream_options"}
_WITHOUT_EFFECT = {"user", "seed"}
_ONLY = {"temperature": 0, "top_p": 1, "logprobs": None, "echo": False, "suffix": "", "stop": []}
"""fields of sampling that beam search does not have, and the one value that they may have"""


@dataclass(kw_only=True)
class TranslationService(ThreadService):
    """An encoder-decoder behind the HTTP interface: the completion of a text is its translation, as by `translate`."""

    opened: LoadedModel
    longest: int
    """maximum number of tokens of a source"""

    @functools.cached_property
    def _beam(self) -> Beam:
        """Beam search of calls that say nothing."""
        return recommended_beam(self.opened)

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of a source."""
        return self.longest

    @property
    def page_mode(self) -> Literal["text"]:
        """Texts that are translated one by one."""
        return "text"

    def endpoints(self) -> dict[str, Handler]:
        """Return the handler of text completions."""
        return {"/v1/completions": self._completion}

    def warm_up(self, report: Callable[[int, int], None]) -> None:
        """Compile the program for a short source and the usual beam size. Others are compiled when they are needed."""
        self._search([[0]], self._beam, None)
        report(1, 1)

    async def _completion(self, request: HTTPRequest) -> Response:
        values = await read_json(request)
        self.check_model(values.get("model", self.name))
        beam, most = _beam_of(values, self._beam)
        most = longest_target(self.opened, most)
        texts = text_prompts(values)
        if len(texts) * beam.n_best > MOST_CHOICES:
            raise APIError(400, f"a call can have at most {MOST_CHOICES} texts: prompts times n.", "prompt")
        stream, options = values.get("stream", False), values.get("stream_options", {})
        if type(stream) is not bool or not isinstance(options, dict):
            raise APIError(400, "stream must be true or false, and stream_options an object.", "stream")

        job = Job(
            (beam, most), lambda: self._encode(texts), lambda rows: self._translated(rows, beam, most), _one, TOGETHER
        )
        sources, found = await self.compute(request, job)
        lengths = [len(source) for source in sources]
        best = [one for hypotheses in found for one in hypotheses]
        tokenizer = self.opened.tokenizer
        answer = Answer(self.name, tokenizer, is_chat=False, prompts=lengths, n=beam.n_best, top=None)
        del answer.choices[len(best) :]  # a vocabulary of fewer than n tokens
        deltas = [self._delta(one) for one in best]
        for choice, delta in zip(answer.choices, deltas, strict=True):
            choice.add(delta)
        self.counters.prompt_tokens += sum(lengths)
        self.counters.generated_tokens += answer.usage["completion_tokens"]
        self.counters.finished.update(delta.finish for delta in deltas)
        if not stream:
            return json_response(answer.whole())
        parts = [answer.part(number, delta) for number, delta in enumerate(deltas)]
        parts += [answer.usage_part()] if options.get("include_usage") is True else []
        events = [*(f"data: {json.dumps(part)}\n\n" for part in parts), "data: [DONE]\n\n"]
        return StreamingResponse(iter(events), headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")

    def _encode(self, texts: list[str | list[int]]) -> list[list[int]]:
        """Return the token ids of each source."""
        config, sources = self.opened.model.config, []
        size = config.embedding.source_vocab_size or config.vocab_size
        for number, text in enumerate(texts):
            if isinstance(text, str):
                try:
                    text.encode()
                    check_length(self.opened.tokenizer, [text], self.longest)
                    ids = list(self.opened.tokenizer.encode_source(text)) if text.strip() else []
                except TooManyTokensError as error:
                    message = f"prompt {number}: {error}"
                    raise APIError(400, message, "prompt", "context_length_exceeded") from None
                except ValueError as error:
                    raise APIError(400, f"prompt {number} can't be encoded: {error}"[:500], "prompt") from None
            else:
                ids = text
            if not ids or not all(0 <= one < size for one in ids):
                message = f"prompt {number} must have at least one token, with ids from 0 to {size - 1}."
                raise APIError(400, message, "prompt")
            if len(ids) > self.longest:
                message = f"prompt {number} has {len(ids)} tokens, but a source can have at most {self.longest}."
                raise APIError(400, f"{message} Shorten it.", "prompt", "context_length_exceeded")
            sources.append(ids)
        return sources

    def _delta(self, found: Hypothesis) -> Delta:
        tokens = [Token(one, 0.0, []) for one in found.tokens]
        return Delta(text_of(self.opened, found), tokens, finish="stop" if found.ended else "length")

    def _translated(self, sources: Sequence[list[int]], beam: Beam, most: int | None) -> list[list[Hypothesis]]:
        found = []
        for start in range(0, len(sources), TOGETHER):
            if self.closing:
                raise APIError(503, "the server is shutting down.")
            found += self._search(sources[start : start + TOGETHER], beam, most)
        return found

    def _search(self, sources: list[list[int]], beam: Beam, most: int | None) -> list[list[Hypothesis]]:
        opened = self.opened
        begin, eos_id, suppress = opened.target_start, opened.eos_ids, opened.suppressed
        options = {"begin": begin, "eos_id": eos_id, "suppress": suppress, "beam": beam, "max_new_tokens": most}
        return beam_search_all(opened.model, opened.params, sources, **options)


def _one(source: list[int]) -> int:
    """Return the size of a source in a group: sources are counted, not their tokens."""
    return 1


def _beam_of(values: Mapping[str, Any], recommended: Beam) -> tuple[Beam, int | None]:
    """Return the beam search that a body asks for, and its maximum number of new tokens.

    Fields that it lacks are those of `recommended`. Unknown fields and invalid values are an APIError.
    """
    for name, value in values.items():
        if name in _ONLY and value != _ONLY[name]:
            only = json.dumps(_ONLY[name])
            raise APIError(400, f"{name} must be {only}: this model translates by beam search. Remove it.", name)
        if name not in (_FIELDS | _WITHOUT_EFFECT | set(_ONLY)):
            raise unknown_field(name, _FIELDS)
    n = integer(values, "n", 1, 1, max(BEAM_SIZES))
    sizes = {name: integer(values, name, None, 1, max(BEAM_SIZES)) for name in ("num_beams", "best_of")}
    given = {name: size for name, size in sizes.items() if size is not None}
    if len(set(given.values())) > 1:
        raise APIError(400, "num_beams and best_of are names of the same value. Send one of them.", "num_beams")
    name, size = next(iter(given.items()), ("num_beams", max(recommended.size, next(s for s in BEAM_SIZES if s >= n))))
    if size not in (*BEAM_SIZES, recommended.size) or n > size:
        sizes_text = ", ".join(map(str, BEAM_SIZES))
        raise APIError(400, f"{name} must be one of {sizes_text}, and at least n ({n}), got {size}.", name)
    given: dict[str, Any] = {"size": size, "n_best": n}
    if "length_penalty" in values:
        alpha = values["length_penalty"]
        if type(alpha) not in (int, float) or not 0 <= alpha <= MOST_ALPHA:
            message = f"length_penalty must be a number from 0 to {MOST_ALPHA}, got {json.dumps(alpha)[:80]}."
            raise APIError(400, message, "length_penalty")
        given |= {"alpha": float(alpha), "norm": USUAL.norm}
    beam = dataclasses.replace(recommended, **given)
    return beam, integer(values, "max_tokens", None, 1, 2**31 - 1)
