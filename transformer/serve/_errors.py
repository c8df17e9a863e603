"""Errors in the form of OpenAI's interface."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

RETRY_AFTER = "1"
"""seconds that a client should wait if the queue is full"""


class APIError(Exception):
    """An answer with an error: HTTP status and message, and optionally the wrong field and a code."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def values(self) -> dict[str, Any]:
        """The error as JSON values."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the HTTP answer."""
        headers = {"Retry-After": RETRY_AFTER} if self.status in (429, 503) else {}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return json_response(self.values, self.status, headers)


def json_response(values: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return JSON as an HTTP answer. Non-ASCII characters are escaped, because half a surrogate pair is not UTF-8."""
    return Response(json.dumps(values), status, headers, media_type="application/json")
