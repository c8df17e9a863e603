"""Evaluation of causal models on the tasks of lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness).

`HarnessModel` is the model that the harness calls. Tokenization, truncation and stop sequences follow the harness's own
backend for transformers (lm_eval/models/huggingface.py, version 0.4.13), so that the results are comparable.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer.chat._template import ChatTemplate, ChatTemplateError
from transformer.chat._template_files import find_template, json_object
from transformer.config._checks import ConfigError, nearest
from transformer.data.tokenizers._pretrained import PretrainedTokenizer
from transformer.generate._generation import generate
from transformer.generate._prompts import bucket, decoding_model
from transformer.generate._sampling import Sampling
from transformer.inference._loaded_model import LoadedModel, Params
from transformer.inference._text_batches import Batch, Columns, round_up, run_batches, scored_at_once, slots_at_once
from transformer.nn._sharding import batch_sharding, num_row_shards
from transformer.nn.models._causal_lm import CausalLM

DEFAULT_LENGTH = 2048
"""Context length of a model that documents none; the value of the harness."""
DEFAULT_NEW_TOKENS = 256
"""Maximum number of new tokens of a task that sets none; the value of the harness."""
ALTERNATIVES = 4
"""Continuations that share all tokens but the last are scored in one row, at most this many per row."""
FIRST_ROUND = 32
"""New tokens of the first call of `generate`. Each further call doubles them, until all texts contain a stop string."""
ROWS = 8, 64
"""Least and most rows that are generated at the same time."""
LENGTH_OPTIONS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the maximum number of new tokens in a task, in the order of priority."""
BOOTSTRAP = 1000
"""Resamplings for the standard errors of measures without a formula, such as perplexity."""
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "early_stopping": False, "use_cache": True}
"""Options of transformers that are accepted with these values, which change nothing."""

Result = TypeVar("Result")
Pair = tuple[list[int], list[int]]
"""Token ids of a context and of its continuation."""


class HarnessModel:
    """The interface of a model for lm-evaluation-harness: scores and continuations of a `CausalLM`.

    It needs no other package; `harness_model` combines it with the base class of the harness. Requests are objects
    with `args`, as those of the harness.

    In the texts of a task, and in rendered chat templates, names of special tokens are special tokens, as in the
    harness. Only a tokenizer that comes from files knows such names.

    Args:
        opened: the model.
        mesh: mesh with the axes of `make_mesh` on which the parameters are placed: rows of a batch are split over it.
            None: the default device.
        max_length: context length in tokens; None: that of the model, or `DEFAULT_LENGTH`.
        batch_size: number of rows that are generated at the same time; None: by their length.
        seed: random seed of sampled continuations.

    Raises:
        ConfigError: the model is not a `CausalLM`, has no tokenizer, or an argument is out of range.
    """

    def __init__(
        self,
        opened: LoadedModel,
        *,
        mesh: Mesh | None = None,
        max_length: int | None = None,
        batch_size: int | None = None,
        seed: int = 1234,
    ):
        super().__init__()
        if opened.kind.writes != "continuation":
            raise ConfigError(
                f"{opened.directory} contains a {type(opened.model).__name__}, but tasks need a causal language model. "
                f"Pass one."
            )
        table = opened.model.config.max_length
        if max_length is not None and not 1 < max_length <= (table or max_length):
            limit = "" if table is None else f" and at most {table}, the length of the position table"
            raise ConfigError(f"max_length must be at least 2{limit}, got {max_length}. Change it.")
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}. Change it.")
        self.opened, self.mesh, self._rows, self._seed = opened, mesh, batch_size, seed
        self.max_length, self.max_gen_toks = max_length or opened.context or DEFAULT_LENGTH, DEFAULT_NEW_TOKENS
        self._model, self._text = decoding_model(opened.model), _Tokens(opened)

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness caches tokenized requests."""
        return str(self.opened.directory).replace("/", "__")

    @property
    def eot_token_id(self) -> int | None:
        """The end token."""
        return self._text.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: the start token, or else the end token."""
        return self._text.prefix_id

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the text of the chat template; None for False. A name selects one of several templates."""
        if chat_template is False or chat_template is None:
            return None
        return self._template(chat_template).source

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text. If the template refuses a system message, it is left out.

        Raises:
            ChatTemplateError: the model has no chat template, or it refuses the messages.
        """
        template = self._template(True)
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            return template.render(chat_history, **options)
        except ChatTemplateError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            return template.render(others, **options)

    def _template(self, name: bool | str) -> ChatTemplate:
        wanted = name if isinstance(name, str) and name else None
        return find_template(self._text.files, wanted, place=str(self.opened.directory))

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would generate it.

        Args:
            requests: `args` are (context, continuation).
            disable_tqdm: ignored; there is no progress bar.

        Raises:
            ValueError: a continuation has no tokens, or is longer than the context length.
        """
        pairs = [self._text.encode_pair(*request.args) for request in requests]
        return self._remembered("loglikelihood", requests, self._scores(pairs))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text. Long texts are split into windows.

        The first window begins with the prefix token. Later windows have the full context length; their first tokens
        are only context if the text ends before that.

        Args:
            requests: `args` are (text,).
            disable_tqdm: ignored.
        """
        windows, owners = [], []
        for number, request in enumerate(requests):
            for window in rolling_windows(self._text.encode(request.args[0]), self.prefix_token_id, self.max_length):
                windows.append(window)
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._scores(windows), strict=True):
            totals[owner] += score
        return self._remembered("loglikelihood_rolling", requests, totals)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context, up to a stop string, an end token or the maximum length.

        Args:
            requests: `args` are (context, options). `until` is a stop string or a list of them; `LENGTH_OPTIONS` the
                maximum number of tokens; `do_sample`, `temperature`, `top_k`, `top_p`, `min_p` and
                `repetition_penalty` are options of sampling. Without `do_sample` or a temperature, decoding is greedy.
            disable_tqdm: ignored.

        Raises:
            ValueError: an unknown option, or no room for a context.
        """
        plans = [self._plan(number, *request.args) for number, request in enumerate(requests)]
        groups = defaultdict(list)
        for number, plan in enumerate(plans):
            groups[plan["sampling"], plan["new_tokens"]].append(number)
        texts = [""] * len(plans)
        for (sampling, new_tokens), numbers in groups.items():
            # Longest first: too little memory fails in the first batch, and a batch has contexts of similar lengths.
            numbers.sort(key=lambda number: -len(plans[number]["ids"]))
            while numbers:
                rows = self._rows_at_once(bucket(len(plans[numbers[0]]["ids"])) + bucket(new_tokens))
                chosen, numbers = numbers[:rows], numbers[rows:]
                for number, text in self._continue({n: plans[n] for n in chosen}, sampling, new_tokens):
                    texts[number] = text
        return self._remembered("generate_until", requests, texts)

    def _plan(self, number: int, context: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the token ids, sampling, number of new tokens and stop strings of a request."""
        sampling, new_tokens, stop, total = self._options(options)
        room = self.max_length - new_tokens
        if room < 1:
            raise ValueError(
                f"a task asks for {new_tokens} new tokens: expected fewer than {self.max_length}, the context length "
                f"of {self.opened.directory}. Set a smaller max_gen_toks in its generation_kwargs."
            )
        ids = self._text.encode_context(context)[-room:]
        if not ids:
            raise ValueError("a task has an empty context for a model without a start token. Change its doc_to_text.")
        if total is not None:
            new_tokens = max(total - len(ids), 0)
        return {"ids": ids, "sampling": sampling, "new_tokens": new_tokens, "stop": stop, "seed": self._seed + number}

    def _options(self, options: Mapping[str, Any]) -> tuple[Sampling, int, list[str], int | None]:
        """Return sampling, number of new tokens, stop strings, and the total length of context and continuation."""
        left = {name: value for name, value in options.items() if value is not None}
        given = [left.pop(name) for name in LENGTH_OPTIONS if name in left]
        total = left.pop("max_length", None)
        until = left.pop("until", [])
        stop = [until] if isinstance(until, str) else list(until)
        if (end := self._text.eos_name) and end not in stop:
            stop.append(end)
        temperature = float(left.pop("temperature", 0.0))
        samples = left.pop("do_sample", temperature > 0)
        chosen: dict[str, Any] = {"temperature": (temperature or 1.0) if samples else 0.0}
        for name in ("top_k", "top_p", "min_p"):
            value = left.pop(name, None)
            if samples and value:
                chosen[name] = int(value) if name == "top_k" else float(value)
        penalty = left.pop("repetition_penalty", self._text.repetition_penalty)
        chosen["repetition_penalty"] = float(penalty)
        if unknown := [name for name, value in left.items() if name not in NEUTRAL or value != NEUTRAL[name]]:
            raise ValueError(
                f"a task has the generation option {unknown[0]}={left[unknown[0]]!r:.60}, which is not supported. "
                f"Remove it from generation_kwargs."
            )
        new_tokens = int(given[0]) if given else self.max_gen_toks
        return Sampling(**chosen, suppress=self.opened.suppressed), new_tokens, stop, total

    def _rows_at_once(self, slots: int) -> int:
        """Return the number of rows with this many cache slots to generate at the same time."""
        return self._rows or int(np.clip(slots_at_once() // slots, *ROWS))

    def _continue(
        self, plans: Mapping[int, dict[str, Any]], sampling: Sampling, new_tokens: int
    ) -> Iterator[tuple[int, str]]:
        """Yield (number, text) of each request. Calls `generate` for some tokens at a time, until all texts end."""
        done: dict[int, list[int]] = {number: [] for number in plans}
        active, size, left = list(plans), FIRST_ROUND, new_tokens
        while active and left:
            size = min(size, left)
            pieces = self._generate([plans[n] for n in active], [done[n] for n in active], size, sampling)
            for number, piece in zip(active, pieces, strict=True):
                done[number] += piece
            whole = [number for number, piece in zip(active, pieces, strict=True) if len(piece) == size]
            active = [number for number in whole if not self._stopped(done[number], plans[number]["stop"])]
            left, size = left - size, 2 * size
        for number, ids in done.items():
            text = self._text.decode(ids)
            for stop in plans[number]["stop"]:
                text = text.split(stop)[0] if stop else text
            yield number, text

    def _stopped(self, ids: Sequence[int], stop: Sequence[str]) -> bool:
        text = self._text.decode(ids)
        return any(one and one in text for one in stop)

    def _generate(
        self, plans: Sequence[dict[str, Any]], before: Sequence[list[int]], new_tokens: int, sampling: Sampling
    ) -> list[list[int]]:
        """Return the next tokens of each row, without an end token: fewer than `new_tokens` if there was one."""
        rows = [plan["ids"] + ids for plan, ids in zip(plans, before, strict=True)]
        # One seed per row: `generate` derives its keys from the position too, so that another call continues.
        seeds = [plan["seed"] % 2**32 for plan in plans]
        shards = 1 if self.mesh is None else num_row_shards(self.mesh.shape)
        missing = -(-round_up(len(rows)) // shards) * shards - len(rows)  # few compiled shapes, split evenly
        rows, seeds = rows + rows[-1:] * missing, seeds + seeds[-1:] * missing
        options = {"max_new_tokens": new_tokens, "sampling": sampling, "eos_id": self.opened.eos_ids}
        with self._on_mesh():
            return generate(self._model, self.opened.params, rows, seed=seeds, **options)[: len(plans)]

    def _scores(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Return (log-likelihood, is greedy) of each continuation.

        A pair that exceeds the context length loses tokens on the left. Continuations that differ only in the last
        token, such as A, B, C and D, share a row.
        """
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        kept = []
        for number, (context, continuation) in enumerate(pairs):
            if not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"continuation {number} has {len(continuation)} tokens: expected 1 to {self.max_length}, the "
                    f"context length of {self.opened.directory}. Change the task, or pass a larger max_length."
                )
            kept.append((context + continuation)[-(self.max_length + 1) :])
            alike[tuple(kept[-1][:-1])].append(number)
        rows: dict[int, list[tuple[Columns, list[int]]]] = defaultdict(list)
        for tokens, numbers in alike.items():
            for start in range(0, len(numbers), ALTERNATIVES):
                members = numbers[start : start + ALTERNATIVES]
                width = 1 if len(members) == 1 else ALTERNATIVES
                # Column k has the next token of each position, and in its last position the last token of member k.
                targets = [[*tokens[1:], kept[member][-1]] for member in members]
                targets += targets[-1:] * (width - len(members))
                rows[width].append(((tokens, *targets), members))
        results: list[Any] = [None] * len(pairs)
        for entries in rows.values():
            found = self._run([columns for columns, _ in entries])
            for (_, members), values in zip(entries, found, strict=True):
                for k, number in enumerate(members):
                    part = values[-len(pairs[number][1]) :, k]  # (continuation, 2)
                    results[number] = float(part[:, 0].sum(dtype=np.float64)), bool(part[:, 1].all())
        return results

    def _run(self, texts: Sequence[Columns]) -> list[np.ndarray]:
        """Return log-probabilities and greedy flags of the targets of each text, (T, alternatives, 2)."""
        compute = functools.partial(_target_scores, self._model, self.opened.params)
        options = {"longest": self._model.config.max_length, "most": scored_at_once(self._model)}
        with self._on_mesh():
            found = run_batches(texts, lambda batch: compute(self._placed(batch)), each_token=True, **options)
        return [self.opened.finite(number, values) for number, values in enumerate(found)]

    def _placed(self, batch: Batch) -> Batch:
        """Return the batch with its rows split over the mesh; empty rows are added if they can't be split evenly."""
        if self.mesh is None:
            return batch
        rows, packed = len(batch.columns[0]), batch.segments is not None
        missing = -rows % num_row_shards(self.mesh.shape)

        def place(array: np.ndarray | None, fill: int = 0) -> Any:
            if array is None:
                return None
            widths = [(0, missing)] + [(0, 0)] * (array.ndim - 1)
            return jax.device_put(np.pad(array, widths, constant_values=fill), batch_sharding(self.mesh, array.ndim))

        return Batch(
            tuple(place(column) for column in batch.columns),
            batch.starts,
            batch.lengths if packed else place(batch.lengths, 1),  # 1, so that each row has a visible key
            place(batch.segments),
            place(batch.positions),
        )

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def _remembered(self, kind: str, requests: Sequence[Any], results: list[Result]) -> list[Result]:
        """Store the results in the harness's cache, if it uses one."""
        if (hook := getattr(self, "cache_hook", None)) is not None:
            for request, result in zip(requests, results, strict=True):
                hook.add_partial(kind, request.args, result)
        return results


@functools.partial(jax.jit, static_argnames="model")
def _target_scores(model: CausalLM, params: Params, batch: Batch) -> jax.Array:
    """Return, for K targets per position, (R, T, K, 2): the log-probability, and 1 if it is the most likely token."""
    tokens, *columns = batch.columns
    targets = jnp.stack(columns, axis=-1)  # (R, T, K)
    logits = model.apply({"params": params}, tokens, positions=batch.positions, mask=batch.mask)
    logits = logits.astype(jnp.float32)
    # log softmax(logits)[target] = logits[target] - logsumexp(logits), without an array (R, T, V) of probabilities.
    chosen = jnp.take_along_axis(logits, targets, axis=-1) - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    greedy = logits.argmax(-1, keepdims=True) == targets
    return jnp.stack([chosen, greedy.astype(jnp.float32)], axis=-1)


def rolling_windows(tokens: Sequence[int], prefix: int, length: int) -> Iterator[Pair]:
    """Yield windows (context, continuation) of at most `length` predictions, each with at least one token of context.

    Each token is predicted once; the context of the first one is `prefix`. The last window has the full length too: its
    first tokens are context only.
    """
    text = [prefix, *tokens]
    for start in range(0, len(tokens), length):
        end = min(start + length, len(tokens))
        # In `text`, the tokens start..end-1 have the indices start+1..end. The input are `length` tokens up to end-1.
        begin = 0 if end <= length else end - length
        yield text[begin : start + 1], text[start + 1 : end + 1]


class _Tokens:
    """Conversion of the texts of tasks to token ids and back, as in the harness."""

    def __init__(self, opened: LoadedModel):
        self._tokenizer = tokenizer = opened.tokenizer
        self._library = tokenizer.library_copy() if isinstance(tokenizer, PretrainedTokenizer) else None
        self.bos_id, self.eos_id = tokenizer.bos_id, tokenizer.eos_id
        prefix = self.eos_id if self.bos_id is None else self.bos_id
        if prefix is None:
            raise ConfigError(
                f"the tokenizer of {opened.directory} has no start token and no end token, one of which the first "
                f"token of a text follows. Name one in tokenizer_config.json (bos_token or eos_token)."
            )
        self.prefix_id: int = prefix
        # Special tokens of this package's own tokenizers have no spelling: no text can contain them.
        self.bos_name, self.eos_name, self.prefix_name = (
            self._library.id_to_token(i) if self._library is not None and i is not None else None
            for i in (self.bos_id, self.eos_id, prefix)
        )
        given = json_object(self.files, "generation_config.json", "")
        self.repetition_penalty = given.get("repetition_penalty") or 1.0
        self.decode: Callable[[Sequence[int]], str] = tokenizer.decode

    @property
    def files(self) -> Mapping[str, bytes]:
        """Contents of the tokenizer's files by name."""
        return self._tokenizer.files if isinstance(self._tokenizer, PretrainedTokenizer) else {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that the tokenizer adds, unless it begins with one."""
        return self._encode(text, special=not (self.prefix_name and text.startswith(self.prefix_name)))

    def encode_context(self, text: str) -> list[int]:
        """Return the ids of a context that is continued; only the start token counts as its beginning."""
        return self._encode(text, special=not (self.bos_name and text.startswith(self.bos_name)))

    def encode_pair(self, context: str, continuation: str) -> Pair:
        """Return the ids of a context and its continuation.

        Both are encoded as one text, and then divided after as many ids as the context has alone: a token at the
        boundary may contain characters of both. Spaces at the end of the context belong to the continuation. A context
        without other characters is an empty one.
        """
        if context == "":
            ids = self._encode(continuation, special=False)
            return (ids[:1], ids[1:]) if ids[:1] == [self.prefix_id] else ([self.prefix_id], ids)
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        before = self.encode(context)
        # Without a start token, an empty context has no ids, and the first token of the text would have no prediction.
        return before or [self.prefix_id], self.encode(context + continuation)[len(before) :]

    def _encode(self, text: str, special: bool) -> list[int]:
        if self._library is None:
            return self._tokenizer.encode_source(text)
        return self._library.encode(text, add_special_tokens=special).ids


@functools.cache
def _harness_class() -> type:
    check_harness()
    from lm_eval.api.model import LM

    return type("HarnessModel", (HarnessModel, LM), {})


def harness_model(opened: LoadedModel, **options: Any) -> Any:
    """Return a `HarnessModel` that is also an `lm_eval.api.model.LM`, which the harness requires.

    Raises:
        ConfigError: the harness is not installed, or the model can't be evaluated; see `HarnessModel`.
    """
    return _harness_class()(opened, **options)


def evaluate_tasks(
    model: Any,
    tasks: Sequence[str],
    *,
    include_path: str | None = None,
    limit: float | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool | str = False,
    system: str | None = None,
    log_samples: bool = False,
) -> dict[str, Any]:
    """Evaluate a model with lm-evaluation-harness, and return its results.

    Args:
        model: result of `harness_model`.
        tasks: names of tasks or groups.
        include_path: directory with further tasks as YAML files.
        limit: number of examples per task, or their fraction if below 1; None: all.
        num_fewshot: number of examples in the context; None: that of the task.
        apply_chat_template: whether to render contexts with the chat template, or the name of a template.
        system: system message.
        log_samples: whether the results contain every request and its result.

    Raises:
        ConfigError: a task is not found.
    """
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        where = "" if include_path is None else f" or in {include_path}"
        raise ConfigError(
            f"lm-evaluation-harness has no task {unknown[0]!r}{where}.{nearest(unknown[0], manager.all_tasks)} List "
            f"all names with: python -m lm_eval ls tasks."
        )
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with _without_subprocesses(), contextlib.redirect_stdout(sys.stderr):
        return evaluator.simple_evaluate(
            model,
            bootstrap_iters=BOOTSTRAP,
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
            apply_chat_template=apply_chat_template,
            fewshot_as_multiturn=bool(apply_chat_template),
            system_instruction=system,
            log_samples=log_samples,
        )


@contextlib.contextmanager
def _without_subprocesses() -> Iterator[None]:
    """Make the harness compute standard errors in this process: a fork of a process with JAX can deadlock."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before


def check_harness() -> None:
    """Raise ConfigError if lm-evaluation-harness is not installed."""
    try:
        import lm_eval.api.model
        import lm_eval.evaluator  # noqa: F401
    except ModuleNotFoundError as error:
        missing = "" if (error.name or "").startswith("lm_eval") else f" (module {error.name} not found)"
        raise ConfigError(
            f"tasks need lm-evaluation-harness, which is not installed{missing}. Install it: pip install "
            f"'transformer-zoo[evaluate]'."
        ) from None


def table(results: Mapping[str, Any], column: Literal["results", "groups"] = "results") -> str:
    """Return the table of results, or of groups of tasks, that the harness prints."""
    from lm_eval.utils import make_table

    return make_table(results, column).rstrip()
