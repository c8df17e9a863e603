"""`transformer-zoo serve`: a model over HTTP, with OpenAI's interface."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass

from transformer.cli._services import ServiceCommand, ServiceSettings, check_sizes, make_service, report_compilation
from transformer.cli._speculation import SpeculationOptions

KEY_VARIABLE = "TRANSFORMER_API_KEY"
"""environment variable with the API key, which other users of the machine can't see, unlike a command line"""


@dataclass(frozen=True, kw_only=True)
class Serve(SpeculationOptions, ServiceCommand):
    """Serve a model over HTTP, with OpenAI's interface: /v1/chat/completions and /v1/completions of a causal model,
    /v1/completions of an encoder-decoder (translations), /v1/embeddings of an encoder, /v1/models, /health, and
    /metrics for Prometheus.

    Many texts are generated together. On Ctrl-C or SIGTERM, the server finishes running requests and exits. Process 0
    of several processes listens.
    """

    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = 8000
    """port to listen on; 0: a free one"""
    cache_tokens: int | None = None
    """size of the paged KV cache in tokens, shared by all requests; None: --slots times --max-tokens"""
    api_key: str | None = None
    """key that clients must send; None: the environment variable TRANSFORMER_API_KEY, or no key"""
    allow_anyone: bool = False
    """allow a public --host without an API key"""
    json: bool = False
    """print the address and the sizes as JSON when the server is ready"""


def main(command: Serve) -> None:
    slots, max_tokens, cache_tokens = command.slots, command.max_tokens, command.cache_tokens
    check_sizes(port=command.port, slots=slots, max_tokens=max_tokens, cache_tokens=cache_tokens)
    command.check_speculation()
    key = command.api_key if command.api_key is not None else os.environ.get(KEY_VARIABLE)
    from transformer.serve._server import check_address

    local_only = check_address(command.host, key, command.allow_anyone) and key is None
    settings = ServiceSettings(
        slots=slots, max_tokens=max_tokens, api_key=key, local_only=local_only, cache_tokens=cache_tokens
    )
    with command.parallel.together("Restart the server: all processes with the same command."):
        _serve(command, settings)


def _serve(command: Serve, settings: ServiceSettings) -> None:
    """Load the model and serve it until the process is asked to end, or follow process 0."""
    from transformer.serve._server import run
    from transformer.serve._slots import PAGE_SIZE
    from transformer.training._processes import is_first

    mesh = command.parallel.mesh()
    opened = command.load_sharded(mesh)
    service = make_service(opened, dataclasses.replace(settings, mesh=mesh, draft=command.open_draft()))
    if not is_first():
        service.engine.follow()
        return
    service.warm_up(report_compilation)

    def ready(url: str) -> None:
        load = service.load
        found = {"slots": load.slots, "max_tokens": service.most_tokens}
        found |= {} if load.pages is None else {"cache_tokens": load.pages * PAGE_SIZE}
        command.answer_of(opened, (), url=url, model=service.name, **found)
        sys.stdout.flush()
        print(f"serving {service.name} at {url}", file=sys.stderr, flush=True)

    run(service, command.host, command.port, ready)
