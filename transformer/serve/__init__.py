"""Serve a language model: an engine that generates many texts together, and OpenAI's HTTP interface for it.

The interface needs the packages starlette and uvicorn, the extra `serve`.
"""

from transformer.serve._engine import Engine, EngineClosedError, QueueFullError
from transformer.serve._requests import Delta, Request, Ticket, Token

__all__ = ["Delta", "Engine", "EngineClosedError", "QueueFullError", "Request", "Ticket", "Token"]
