"""The fields of a body that constrain a text: OpenAI's `response_format`, and vLLM's `guided_json`, `guided_regex`."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HTTPRequest

from transformer.config._limited import Cancellation
from transformer.data.tokenizers._base import Tokenizer
from transformer.inference._grammars import GrammarConstraint, Grammars
from transformer.serve._errors import APIError
from transformer.serve._http import Workers

FIELDS = ("response_format", "guided_json", "guided_regex")
"""at most one of them has an effect in a body"""
MOST_GRAMMAR = 64 * 2**10
"""maximum size of a schema or an expression, in characters: reading one takes time in the number of its parts"""
AT_A_TIME = 4
"""maximum number of schemas and expressions that are compiled at a time: one that takes long holds up no others"""


@dataclass(frozen=True)
class TextForm:
    """The form that a text must have."""

    field: str
    """the field of the body"""
    schema: Any = None
    """a JSON schema, if `pattern` is None"""
    pattern: str | None = None
    """a regular expression"""


def text_form(values: Mapping[str, Any]) -> TextForm | None:
    """Return the form that a body asks for; None: any text."""
    forms = [form for form in (_read(name, values[name]) for name in FIELDS if name in values) if form is not None]
    if len(forms) > 1:
        raise APIError(400, f"{forms[0].field} and {forms[1].field} exclude each other. Remove one.", forms[1].field)
    return forms[0] if forms else None


def _read(name: str, value: object) -> TextForm | None:
    if name == "guided_regex":
        if not isinstance(value, str):
            raise APIError(400, f"guided_regex must be a text, got {_short(value)}.", name)
        return _of_size(TextForm(name, pattern=value), value)
    if name == "response_format":
        return _response_format(value)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            message = "guided_json must be a JSON schema or its text, got a text that is not JSON."
            raise APIError(400, message, name) from None
    return _of_schema(name, value)


def _response_format(value: object) -> TextForm | None:
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        message = f"the type of response_format must be text, json_object or json_schema, got {_short(value)}"
        raise APIError(400, f"{message}.", name)
    described = value.get("json_schema", {})
    if kind == "json_schema" and (not isinstance(described, dict) or "schema" not in described):
        raise APIError(400, f"response_format needs json_schema with a schema, got {_short(described)}.", name)
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    inside = set(described) - {"name", "description", "strict", "schema"} if kind == "json_schema" else set()
    if unknown := sorted((set(value) - known) | inside):
        raise APIError(400, f"unknown field {unknown[0][:80]!r} in response_format. Remove it.", name)
    if kind == "json_schema":
        return _of_schema(name, described["schema"])
    return TextForm(name, schema={"type": "object"}) if kind == "json_object" else None


def _of_schema(name: str, schema: object) -> TextForm:
    if not isinstance(schema, dict | bool):
        raise APIError(400, f"a JSON schema must be an object, true or false, got {_short(schema)}.", name)
    return _of_size(TextForm(name, schema=schema), json.dumps(schema))


def _of_size(form: TextForm, content: str) -> TextForm:
    if len(content) > MOST_GRAMMAR:
        message = f"{form.field} must have at most {MOST_GRAMMAR} characters, got {len(content)}. Simplify it."
        raise APIError(400, message, form.field)
    return form


def _short(value: object) -> str:
    return json.dumps(value)[:80]


class Constraints:
    """Makes the constraints of texts, for the tokenizer of one model, which is read when it is needed first.

    At most `queue` calls wait until their schema or expression is compiled.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, queue: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._grammars: Grammars | None = None
        self._reading = threading.Lock()
        full = f"{queue} calls with a schema or an expression wait already"
        self._workers = Workers("grammar", AT_A_TIME, queue, full)

    def close(self) -> None:
        """Cancel the calls that wait, and end the processes that compile."""
        self._workers.close()
        if self._grammars is not None:
            self._grammars.close()

    async def make(self, request: HTTPRequest, form: TextForm | None, count: int) -> list[GrammarConstraint | None]:
        """Return constraints for `count` texts.

        Raise APIError if the form is invalid, not supported or too costly, if too many calls wait, or the client has
        left.
        """
        if form is None:
            return [None] * count
        cancellation = Cancellation()
        try:
            first = await self._workers.run(request, self._first, form, cancellation)
        except (ValueError, ModuleNotFoundError) as error:
            raise APIError(400, " ".join(str(error).split())[:500], form.field) from None
        finally:
            cancellation.cancel()
        return [first, *(first.copy() for _ in range(count - 1))]

    def _first(self, form: TextForm, cancellation: Cancellation) -> GrammarConstraint:
        with self._reading:
            if self._grammars is None:
                self._grammars = Grammars(self._tokenizer, self._vocab_size)
        if form.pattern is None:
            made = self._grammars.json_schema(form.schema, cancellation)
        else:
            made = self._grammars.regex(form.pattern, cancellation)
        made.allowed()  # some grammars are found to be unusable only here
        return made
