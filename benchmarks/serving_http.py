"""Throughput and time to the first token over HTTP, at a number of concurrent requests; also of other servers.

Usage: python -m benchmarks.serving_http [--model DIR] [--requests 64] [--concurrent 1 16] [--slots 16] [--small]
                                         [--transformers .venv-parity/bin/transformers] [--llama-cpp PYTHON]

Each server runs in its own process and gets the same chat completions as streams: temperature 0, and lengths like those
of ShareGPT, from a fixed seed. These are log-normal with the means that Kwon et al. 2023 (arXiv 2309.06180, figure 11)
report, 161 tokens of the prompt and 338 of the answer, and at most half of --max-tokens each. Without --model, the
model is a Llama with random weights (--small: 2 layers and d_model 64) and one token per character, so that the
lengths of prompts are exact. A first round compiles and is not counted. Run on an idle machine. The last line is a JSON
object.

--llama-cpp is a Python with llama-cpp-python[server] and gguf, whose server gets the same weights as a GGUF file
(`llama_cpp_model.py`). It answers one request at a time.

--layers 22 --width 2048 --kv-heads 4 is the shape of TinyLlama (1.1 billion parameters, without its vocabulary).
"""

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import openai
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.machine import machine
from benchmarks.side_by_side import versions
from transformer import CausalLM, llama_decoder
from transformer.data.tokenizers._pretrained import PretrainedTokenizer
from transformer.zoo import save_pretrained

PROMPT_TOKENS, ANSWER_TOKENS, SPREAD = 161, 338, 1.0
"""mean lengths, and standard deviation of their logarithms"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
OURS = "transformer serve"
START_SECONDS = 600.0
"""time in which a server must answer /health"""


@dataclass(frozen=True)
class Ask:
    """One request: characters of the prompt, and maximum number of new tokens."""

    prompt: str
    tokens: int


@dataclass(frozen=True)
class Timed:
    """Seconds to the first token and to the end, and the number of tokens."""

    first: float
    whole: float
    tokens: int


def asks(count: int, longest: int, seed: int = 0) -> list[Ask]:
    """Return requests with log-normal lengths; the same seed gives the same requests."""
    random = np.random.default_rng(seed)

    def lengths(mean: float) -> np.ndarray:
        found = random.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count)  # exp(mu + sigma^2 / 2) is the mean
        return np.clip(found.round().astype(int), 4, longest // 2 - 8)

    letters = np.array(list("abcdefghijklmnopqrstuvwxyz "))
    prompts = ["".join(random.choice(letters, length)) for length in lengths(PROMPT_TOKENS)]
    return [Ask(prompt, int(tokens)) for prompt, tokens in zip(prompts, lengths(ANSWER_TOKENS), strict=True)]


def write_model(
    directory: Path,
    small: bool,
    longest: int,
    *,
    layers: int = 8,
    width: int = 512,
    kv_heads: int | None = None,
    dtype: str = "float32",
) -> None:
    """Write a Llama with random weights and heads of 64, and a tokenizer with one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    # Split into words, as by GPT-2: the library caches the first 10,000, which would otherwise be whole prompts.
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|end|>"])
    names = {"eos_token": "<|end|>", "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    files = {"tokenizer.json": library.to_str().encode(), "tokenizer_config.json": json.dumps(names).encode()}
    sizes = {"d_model": width, "num_layers": layers, "num_heads": width // 64, "feed_forward.d_ff": width * 11 // 4}
    sizes |= {"attention.num_kv_heads": kv_heads, "dtype": dtype, "parameters.dtype": dtype}
    sizes |= {"d_model": 64, "num_layers": 2, "num_heads": 2, "feed_forward.d_ff": 128} if small else {}
    model = CausalLM(llama_decoder(vocab_size=len(alphabet) + 1, **sizes))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    # Only letters, digits and signs are generated (the logits of other bytes are 0, those are larger): llama.cpp's
    # server generates more tokens than it is asked for until it has whole characters.
    visible = np.array([*("!" <= letter <= "~" for letter in alphabet), False])
    params["output"]["kernel"] = params["output"]["kernel"] * visible[None]
    fields = {"max_position_embeddings": longest, "eos_token_id": len(alphabet)}
    save_pretrained(model, params, directory, tokenizer=PretrainedTokenizer(files), family="llama", fields=fields)


@contextlib.contextmanager
def server(command: Sequence[str], port: int) -> Iterator[str]:
    """Run a server until it answers; yield its URL, and end it with SIGTERM.

    Raises:
        RuntimeError: it ends before, or does not answer in time; the message has its last line.
    """
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(process, port, command, Path(log.name))
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(process: subprocess.Popen, port: int, command: Sequence[str], log: Path) -> None:
    """Wait until a server answers /health; RuntimeError with the last line of its log if it ends or is too late."""
    deadline = time.monotonic() + START_SECONDS
    while not _answers(f"http://127.0.0.1:{port}/health"):
        if process.poll() is not None or time.monotonic() > deadline:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise RuntimeError(f"{shlex.join(command)} does not run: {lines[-1]}")
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except urllib.error.HTTPError:
        return True  # a server without this path
    except OSError:
        return False


def free_port() -> int:
    """Return a port that no server uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


async def ask_all(url: str, model: str, wanted: Sequence[Ask], concurrent: int) -> list[Timed]:
    """Send all requests, at most `concurrent` at a time."""
    gate = asyncio.Semaphore(concurrent)
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=600) as client:

        async def ask(one: Ask) -> Timed:
            async with gate:
                began, first, chunks, usage = time.perf_counter(), None, 0, None
                stream = await client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": one.prompt}],
                    max_tokens=one.tokens,
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                async for part in stream:
                    usage = part.usage or usage
                    if part.choices and (part.choices[0].delta.content or part.choices[0].finish_reason):
                        first, chunks = first or time.perf_counter(), chunks + 1
                        if part.choices[0].finish_reason == "length":
                            chunks = one.tokens  # of a server that does not report its usage
                end = time.perf_counter()
                return Timed((first or end) - began, end - began, usage.completion_tokens if usage else chunks)

        return await asyncio.gather(*map(ask, wanted))


def measure(url: str, model: str, wanted: Sequence[Ask], concurrent: int) -> dict[str, float]:
    """Return throughput, and quantiles of the time to the first token, after a round that compiles."""
    asyncio.run(ask_all(url, model, wanted[:concurrent], concurrent))
    began = time.perf_counter()
    found = asyncio.run(ask_all(url, model, wanted, concurrent))
    took = time.perf_counter() - began
    first = sorted(one.first for one in found)
    return {
        "tokens_per_second": sum(one.tokens for one in found) / took,
        "requests_per_second": len(found) / took,
        "first_token_p50": statistics.median(first),
        "first_token_p99": float(np.quantile(first, 0.99)),
        "tokens": sum(one.tokens for one in found),
    }


def table_row(name: str, concurrent: int | str, one: dict[str, float]) -> str:
    """Return a row of the table: throughput and the time to the first token of a server."""
    rates = f"{one['tokens_per_second']:,.1f} | {one['requests_per_second']:.2f}"
    times = f"{one['first_token_p50']:.3f} s | {one['first_token_p99']:.3f} s"
    return f"| {name} | {concurrent} | {rates} | {times} |"


def servers(options: argparse.Namespace, directory: Path, folder: Path) -> dict[str, tuple[list[str], int, str]]:
    """Return command, port and name of the model of each server."""
    port, most = free_port(), str(options.max_tokens)
    command = [sys.executable, "-m", "transformer", "serve", str(directory), "--port", str(port)]
    found = {OURS: ([*command, "--slots", str(options.slots), "--max-tokens", most], port, directory.resolve().name)}
    if options.transformers:
        port = free_port()
        command = [options.transformers, "serve", "--host", "127.0.0.1", "--port", str(port), "--continuous-batching"]
        found["transformers serve"] = (command, port, os.path.abspath(directory))
    if options.llama_cpp:
        port, file, threads = free_port(), folder / "llama.gguf", str(os.cpu_count())
        script = Path(__file__).with_name("llama_cpp_model.py")
        subprocess.run([options.llama_cpp, str(script), str(directory), str(file)], check=True)
        command = [options.llama_cpp, "-m", "llama_cpp.server", "--model", str(file), "--model_alias", "llama"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--n_ctx", most, "--interrupt_requests", "False"]
        command += ["--n_threads", threads, "--n_threads_batch", threads]
        found["llama_cpp.server"] = (command, port, "llama")
    return found


def compare(options: argparse.Namespace, directory: Path, folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Measure each server at each number of concurrent requests; print a row of a table for each."""
    wanted, found = asks(options.requests, options.max_tokens), {}
    print("\n| server | concurrent | tokens/s | requests/s | first token, p50 | first token, p99 |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, (command, port, model) in servers(options, directory, folder).items():
        try:
            with server(command, port) as url:
                for concurrent in options.concurrent:
                    one = measure(url, model, wanted, concurrent)
                    found.setdefault(name, {})[str(concurrent)] = one
                    print(table_row(name, concurrent, one), flush=True)
        except RuntimeError as error:
            print(f"| {name}: {error} | | | | | |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a model with a chat template")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrent", type=int, nargs="+", default=[16], help="requests that are sent at a time")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=1_024, help="of a request, prompt and answer together")
    parser.add_argument("--layers", type=int, default=8, help="layers of the random model")
    parser.add_argument("--width", type=int, default=512, help="d_model of the random model, a multiple of 64")
    parser.add_argument("--kv-heads", type=int, help="key/value heads of the random model; by default those of queries")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the random model")
    parser.add_argument("--small", action="store_true", help="use a tiny model, to test this program")
    parser.add_argument("--transformers", help="program of transformers to compare with, which needs its extra serving")
    parser.add_argument("--llama-cpp", help="Python with llama-cpp-python[server] and gguf to compare with")
    options = parser.parse_args()
    if min(options.requests, *options.concurrent, options.slots) < 1 or options.max_tokens < 32:
        parser.error("--requests, --concurrent and --slots must be at least 1, and --max-tokens at least 32.")
    if options.model and options.llama_cpp:
        parser.error("--llama-cpp is for the random model. Remove --model.")
    where = machine()
    print(where)
    facts: dict[str, Any] = {"machine": where, "versions": versions("jax", "flax"), "options": vars(options)}
    with tempfile.TemporaryDirectory() as folder:
        directory = options.model or Path(folder) / "llama"
        if options.model is None:
            shape = {"layers": options.layers, "width": options.width, "kv_heads": options.kv_heads}
            write_model(directory, options.small, options.max_tokens, **shape, dtype=options.dtype)
        found = compare(options, directory, Path(folder))
    if OURS not in found:
        sys.exit(1)
    rates = {name: {concurrent: one["tokens_per_second"] for concurrent, one in found[name].items()} for name in found}
    ratios = {
        peer: {concurrent: rates[OURS][concurrent] / rate for concurrent, rate in rates[peer].items()}
        for peer in rates
        if peer != OURS
    }
    print(json.dumps({"work": OURS, **facts, "ratios": ratios, "all": found}, default=str))


if __name__ == "__main__":
    main()
