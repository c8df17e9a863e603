"""The page of the server for a browser: a chat, or texts that are completed, in one file without other sources."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Literal

from starlette.responses import HTMLResponse

_FOLDER = Path(__file__).parent


def page_response(mode: Literal["chat", "text"]) -> HTMLResponse:
    """Return the page, a conversation, or for "text" one that completes or translates texts one by one."""
    # Its policy allows no script and no connection but its own.
    parts = {kind: (_FOLDER / f"chat_page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")}
    hashes = {kind: base64.b64encode(hashlib.sha256(parts[kind].encode()).digest()).decode() for kind in ("css", "js")}
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['js']}'; style-src 'sha256-{hashes['css']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    page = parts["html"].replace("{{mode}}", mode)
    page = page.replace("{{style}}", parts["css"]).replace("{{script}}", parts["js"])
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return HTMLResponse(page, headers=headers | {"Referrer-Policy": "no-referrer"})
