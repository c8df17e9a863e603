"""The attention of an answer over HTTP, as the page of `inspect`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, Response

from transformer.chat._prompts import ChatPrompts
from transformer.data.tokenizers._long_texts import check_length
from transformer.generate._prompts import common_prefix, decoding_model
from transformer.inference._loaded_model import LoadedModel
from transformer.inference._text_attention import sown_weights
from transformer.serve._bodies import read_json, template_switches
from transformer.serve._errors import APIError
from transformer.serve._http import Workers, unknown_field
from transformer.viz._attention_page import Panel, attention_page
from transformer.viz._attention_weights import attention_maps

MOST_WEIGHTS = 16_000_000
"""maximum number of weights of an answer: layers times heads times the square of the tokens"""
LENGTH_STEP = 64
"""lengths for which a program is compiled are multiples of this number"""
MOST_WAITING = 4
"""maximum number of calls that wait"""
_FIELDS = {"model", "messages", "prompt", "answer", "chat_template_kwargs", "reasoning_effort"}


@dataclass(kw_only=True)
class AnswerAttention:
    """Computes the attention of answers, one at a time, in a thread, while the server continues to generate texts."""

    opened: LoadedModel
    chat: ChatPrompts | None
    longest: int
    """maximum number of tokens of prompt and answer"""
    _workers: Workers = field(
        default_factory=lambda: Workers("attention", 1, MOST_WAITING, "too many calls for attention wait")
    )

    def close(self) -> None:
        """Cancel the calls that wait."""
        self._workers.close()

    async def answer(self, request: HTTPRequest, check_model: Callable[[Any], None]) -> Response:
        """Answer a request with the page of `inspect`; raise APIError if it is invalid, too long, or one too many."""
        values = await read_json(request)
        if unknown := next((name for name in values if name not in _FIELDS), None):
            raise unknown_field(unknown, _FIELDS)
        check_model(values.get("model"))
        page = await self._workers.run(request, self._page, values)
        # Opened as a page of its own, it has no access to this server.
        return HTMLResponse(page, headers={"Content-Security-Policy": "sandbox", "X-Content-Type-Options": "nosniff"})

    def _page(self, values: Mapping[str, Any]) -> str:
        try:
            before, ids = self._tokens(values)
        except (ValueError, TypeError) as error:
            raise APIError(400, str(error)[:500]) from None
        config = self.opened.model.config
        if len(ids) <= before:
            raise APIError(400, "the answer has no tokens. Send the conversation with its last answer.")
        # Padding at the end does not change the weights before it: one program is compiled for many lengths.
        padded = [*ids, *[0] * (-len(ids) % LENGTH_STEP)][: max(self.longest, len(ids))]
        weights = config.num_layers * config.num_heads * len(padded) ** 2
        if len(ids) > self.longest or weights > MOST_WEIGHTS:
            most = min(self.longest, int((MOST_WEIGHTS / (config.num_layers * config.num_heads)) ** 0.5))
            most = most if most == self.longest else most // LENGTH_STEP * LENGTH_STEP
            raise APIError(400, f"attention is shown for at most {most} tokens of this model, got {len(ids)}.")
        seen = sown_weights(decoding_model(self.opened.model), self.opened.params, [padded])
        if not seen:
            raise APIError(400, "this model has no attention layer, so there is nothing to show.")
        name, count = self.opened.directory.resolve().name, len(ids)
        maps = [
            replace(one, weights=one.weights[:, :count, :count], hidden=one.hidden[:count, :count])
            for one in attention_maps(seen, config)
        ]
        return attention_page(
            [Panel(name=name, maps=maps, layers={"decoder": config.num_layers})],
            title=f"Attention of {name}",
            target=self.opened.tokenizer.tokens(ids),
            written_from=before,
            facts={"Tokens": f"{len(ids)}, of which {len(ids) - before} are the answer"},
        )

    def _tokens(self, values: Mapping[str, Any]) -> tuple[int, list[int]]:
        """Return the number of tokens before the answer, and all token ids."""
        if self.chat is None or "prompt" in values:
            texts = values.get("prompt"), values.get("answer")
            if not all(isinstance(text, str) for text in texts):
                raise APIError(400, f"prompt and answer must be texts, got {json.dumps(texts)[:80]}.", "prompt")
            check_length(self.opened.tokenizer, ["".join(texts)], self.longest)
            encode = self.opened.tokenizer.encode_prompt
            before, ids = list(encode(texts[0])), list(encode("".join(texts)))
        else:
            messages, switches = values.get("messages"), template_switches(values)
            last = messages[-1] if isinstance(messages, list) and messages else None
            if not isinstance(last, dict) or last.get("role") != "assistant":
                raise APIError(400, "messages must be a list that ends with the answer of the assistant.", "messages")
            before = list(self.chat.encode(messages[:-1], add_generation_prompt=True, **switches).ids)
            ids = list(self.chat.encode(messages, continue_final_message=True, **switches).ids)
        # A token may join the end of the prompt with the start of the answer.
        return common_prefix(before, ids), ids
