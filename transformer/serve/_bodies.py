"""Read the bodies of requests: limits of size and time, and the fields of OpenAI's interface."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest

from transformer.config._checks import ConfigError
from transformer.generate._sampling import Sampling
from transformer.serve._constraints import FIELDS, TextForm, text_form
from transformer.serve._errors import APIError
from transformer.serve._http import unknown_field

MOST_BYTES = 4 * 2**20
"""maximum size of a body"""
LARGE_BODY = 2**17
"""size of a body from which it is parsed in a thread"""
MOST_BRACKETS = 250_000
"""maximum number of lists and objects of a body, which cost more than texts and numbers"""
BODY_SECONDS = 30.0
"""time in which a body must arrive"""
MOST_CHOICES = 16
"""maximum number of texts of one call: prompts times `n`"""
MOST_STOPS = 16
"""maximum number of stop strings"""

_PARSER = ThreadPoolExecutor(1, "parser")
_FILTERS = ("temperature", "top_k", "top_p", "min_p")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_COMMON = {"model", "stream", "stream_options", "n", "seed", "stop", "stop_token_ids", *_FILTERS, *_PENALTIES, *FIELDS}
_CHAT = _COMMON | {"messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "tools"}
_CHAT |= {"tool_choice", "reasoning_effort", "chat_template_kwargs"}
_TEXT = _COMMON | {"prompt", "max_tokens", "logprobs", "parse_special", "add_special_tokens"}
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}
_WITHOUT_EFFECT |= {"prompt_cache_key", "verbosity"}
_ONLY = {"logit_bias": {}, "best_of": 1, "echo": False, "suffix": "", "modalities": ["text"]}
"""fields that are not supported, and the one value that they may have"""


@dataclass(frozen=True)
class Body:
    """The checked fields that chat and text completions share."""

    stream: bool
    include_usage: bool
    n: int
    seed: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    max_tokens: int | None
    top: int | None
    """number of alternatives of each token; None: no log-probabilities"""
    form: TextForm | None
    """form that the text must have; None: any text"""


async def read_json(request: HTTPRequest) -> dict[str, Any]:
    """Return the body as a JSON object; raise APIError if it is not JSON, too large, or arrives too slowly."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # so that a page of another site can't send it without a preflight request
        raise APIError(415, f"the content type must be application/json, got {kind[:80]!r}.")
    too_large = APIError(413, f"the body must have at most {MOST_BYTES} bytes. Send a smaller one.")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > MOST_BYTES:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > MOST_BYTES:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise APIError(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds.") from None
    except ClientDisconnect:
        raise APIError(400, "the client has left.") from None
    content = b"".join(parts)
    if content.count(b"[") + content.count(b"{") > MOST_BRACKETS:  # nothing else runs while they are parsed
        raise APIError(413, f"the body must have at most {MOST_BRACKETS} characters [ and {{. Send a smaller one.")
    try:
        if size < LARGE_BODY:
            values = json.loads(content)
        else:  # one at a time in a thread, so that others are answered between two of them
            values = await asyncio.get_running_loop().run_in_executor(_PARSER, json.loads, content)
    except (ValueError, RecursionError):
        raise APIError(400, "the body is not valid JSON.") from None
    if not isinstance(values, dict):
        raise APIError(400, f"the body must be a JSON object, got {type(values).__name__}.")
    return {name: value for name, value in values.items() if value is not None}


def check_fields(values: Mapping[str, Any], *, is_chat: bool) -> Body:
    """Check the fields of a chat or text completion other than its prompt and its sampling; raise APIError."""
    known = _CHAT if is_chat else _TEXT
    for name, value in values.items():
        if name in known or name in _WITHOUT_EFFECT:
            continue
        if name not in _ONLY:
            raise unknown_field(name, known)
        if value != _ONLY[name]:
            raise APIError(400, f"{name} is not supported, except as {json.dumps(_ONLY[name])}. Remove it.", name)
    limits = [name for name in ("max_completion_tokens", "max_tokens") if name in values]
    options = _typed(values, "stream_options", dict, {})
    return Body(
        stream=_typed(values, "stream", bool, False),
        include_usage=_typed(options, "include_usage", bool, False),
        n=integer(values, "n", 1, 1, MOST_CHOICES),
        seed=integer(values, "seed", secrets.randbits(32), -(2**63), 2**63 - 1) % 2**32,
        stop=_stops(values),
        stop_ids=tuple(_typed(values, "stop_token_ids", list, [])),
        max_tokens=integer(values, limits[0], None, 1, 2**31) if limits else None,
        top=_chat_top(values) if is_chat else integer(values, "logprobs", None, 0, 5),
        form=text_form(values),
    )


def sampling_of(values: Mapping[str, Any], default: Sampling, suppress: Sequence[int]) -> Sampling:
    """Return the sampling that a body asks for; fields that it lacks are those of `default`."""
    given = {name: values[name] for name in (*_FILTERS, *_PENALTIES) if name in values}
    # JSON has one type of numbers: JavaScript writes 1.0 as 1.
    given = {name: float(value) if name != "top_k" and _is_small(value) else value for name, value in given.items()}
    filters = {name: getattr(default, name) for name in (*_FILTERS, *_PENALTIES)} | given
    if default.temperature == 0 and "temperature" not in given and any(name in given for name in _FILTERS[1:]):
        filters["temperature"] = 1.0
    if filters["top_k"] in (0, -1):  # other servers write "no filter" like this
        filters["top_k"] = None
    try:
        return Sampling(**filters, suppress=tuple(suppress))
    except ConfigError as error:
        name = next((name for name in given if str(error).startswith(name)), None)
        raise APIError(400, str(error)[:300], name) from None


def text_prompts(values: Mapping[str, Any], field: str = "prompt") -> list[str | list[int]]:
    """Return the prompts of a text completion, or the texts of another field: texts, or lists of token ids."""
    prompt = values.get(field)
    kinds = set(map(type, prompt)) if isinstance(prompt, list) else set()
    if isinstance(prompt, str) or kinds == {int}:
        return [prompt]
    if kinds == {str} or (kinds == {list} and all(set(map(type, one)) == {int} for one in prompt)):
        return prompt
    raise APIError(400, f"{field} must be a text, a list of texts, or lists of token ids that are not empty.", field)


def prompt_options(values: Mapping[str, Any]) -> dict[str, bool]:
    """Return the options of `Tokenizer.encode_prompt` that a body sets."""
    return {name: _typed(values, name, bool, True) for name in ("parse_special", "add_special_tokens")}


def template_switches(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template that a body sets."""
    switches = dict(_typed(values, "chat_template_kwargs", dict, {}))
    if "reasoning_effort" in values:
        switches["reasoning_effort"] = _typed(values, "reasoning_effort", str, "")
    # These are arguments of the renderer, not variables.
    for name in ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"):
        if name in switches:
            raise APIError(400, f"chat_template_kwargs can't set {name}. Remove it.", "chat_template_kwargs")
    return switches


def tools_of(values: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools that the template describes to the model; nothing can force a call of them."""
    choice = values.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise APIError(400, "tool_choice must be auto or none: nothing can force a call.", "tool_choice")
    tools = _typed(values, "tools", list, [])
    return tools if tools and choice == "auto" else None


def _chat_top(values: Mapping[str, Any]) -> int | None:
    wanted = _typed(values, "logprobs", bool, False)
    top = integer(values, "top_logprobs", 0, 0, 20)
    if top and not wanted:
        raise APIError(400, "top_logprobs needs logprobs: true.", "top_logprobs")
    return top if wanted else None


def _stops(values: Mapping[str, Any]) -> tuple[str, ...]:
    stop = values.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    valid = isinstance(stop, list) and all(isinstance(one, str) and 0 < len(one) <= 1000 for one in stop)
    if not valid or len(stop) > MOST_STOPS:
        raise APIError(400, f"stop must be at most {MOST_STOPS} texts of 1 to 1000 characters.", "stop")
    return tuple(stop)


def _typed(values: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = values.get(name, default)
    if type(value) is not kind:
        names = {bool: "true or false", dict: "an object", list: "a list", str: "a text"}
        raise APIError(400, f"{name} must be {names[kind]}, got {json.dumps(value)[:80]}.", name)
    return value


def integer(values: Mapping[str, Any], name: str, default: Any, least: int, most: int) -> Any:
    value = values.get(name, default)
    if name in values and (type(value) is not int or not least <= value <= most):
        raise APIError(400, f"{name} must be an integer from {least} to {most}, got {json.dumps(value)[:80]}.", name)
    return value


def _is_small(value: object) -> bool:
    """Return whether a value is an integer that a float can represent exactly."""
    return type(value) is int and abs(value) <= 2**53
