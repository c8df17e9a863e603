"""The slots of the engine: the state of the running texts on the device, and the pages of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from transformer.generate._layers import Params, copied_for_decoding
from transformer.generate._lookup import PromptLookup
from transformer.generate._pages import PageAllocator
from transformer.generate._penalties import History
from transformer.generate._row_steps import Steps, advance
from transformer.generate._rows import (
    MOST_ENDS,
    MOST_STEPS,
    PAGE_SIZE,
    NewRow,
    RowMasks,
    RowSampling,
    blank_rows,
    read_part,
    read_widths,
    start_row,
)
from transformer.generate._speculative import Draft, Proposer
from transformer.nn.models._causal_lm import CausalLM
from transformer.serve._lockstep import Lockstep
from transformer.serve._placement import Placement
from transformer.serve._requests import Request


class SlotPages:
    """The pages of each slot, and which prompts share them.

    Prompts share whole chunks only: a chunk is read by one call of one program, so its keys and values are the same bit
    by bit whoever reads it.

    Args:
        slots: number of slots R.
        positions: maximum number of tokens of a slot.
        num_pages: P, number of pages of the pool.
        chunk: number of tokens per call that reads a prompt, a multiple of `PAGE_SIZE`.
        shared_length: maximum number of tokens of a prompt that shares pages; None: unlimited. The keys and values
            of a longer prompt are not those of another prompt with the same beginning, because rotary scaling
            depends on the length.
    """

    def __init__(self, slots: int, positions: int, num_pages: int, chunk: int, shared_length: int | None = None):
        self._allocator = PageAllocator(num_pages, PAGE_SIZE)
        self._chunk, self._shared_length = chunk, shared_length
        self._pages: list[list[int]] = [[] for _ in range(slots)]
        self.num_pages = num_pages
        self.table = np.zeros((slots, self._allocator.pages_for(positions)), np.int32)
        """(R, M), pages of each slot; entries after the last page of a slot are not meaningful"""

    @property
    def num_free(self) -> int:
        """Number of pages that no slot uses."""
        return self._allocator.num_free

    def admit(self, slot: int, prompt: Sequence[int], num_tokens: int, spare: int) -> int | None:
        """Give a free slot the pages of a prompt and of its first new tokens, `num_tokens` together.

        For the growth of other slots, `spare` pages must stay free. Return the number of tokens at the beginning of the
        prompt that were read before; None: too few pages are free.
        """
        known = self._allocator.match(prompt) if self._shares(prompt) else []
        per_chunk = self._chunk // PAGE_SIZE
        whole = len(known) // per_chunk * per_chunk
        self._allocator.release(known[whole:])
        needed = self._allocator.pages_for(num_tokens) - whole
        if needed + spare > self.num_free:
            self._allocator.release(known[:whole])
            return None
        self._pages[slot] = known[:whole] + self._allocator.allocate(needed)
        self._write(slot)
        return whole * PAGE_SIZE

    def missing(self, slot: int, num_tokens: int) -> int:
        """Return how many pages a slot lacks for this number of tokens."""
        return max(0, self._allocator.pages_for(num_tokens) - len(self._pages[slot]))

    def grow(self, slot: int, num_tokens: int) -> None:
        """Give a slot the pages for this number of tokens; raise OutOfPagesError if too few are free."""
        if missing := self.missing(slot, num_tokens):
            self._pages[slot] += self._allocator.allocate(missing)
            self._write(slot)

    def share(self, slot: int, prompt: Sequence[int], done: int) -> None:
        """Let other prompts use the whole chunks of the first `done` tokens of the prompt in a slot."""
        whole = done // self._chunk * self._chunk
        if self._shares(prompt):
            self._allocator.register(prompt[:whole], self._pages[slot])

    def release(self, slot: int, *, forget: bool = False) -> None:
        """Take all pages from a slot; with `forget`, no prompt may use their contents any more."""
        if forget:
            self._allocator.forget(self._pages[slot])
        self._allocator.release(self._pages[slot])
        self._pages[slot] = []

    def _shares(self, prompt: Sequence[int]) -> bool:
        return self._shared_length is None or len(prompt) <= self._shared_length

    def _write(self, slot: int) -> None:
        # A new array: a call of the device may still read the old one.
        self.table = self.table.copy()
        self.table[slot, : len(self._pages[slot])] = self._pages[slot]


class Slots:
    """The running texts on the device: R slots of at most `positions` tokens, with a pool of P (`num_pages`) pages.

    The model is one that `decoding_model` has prepared. The ids `suppressed` (S,) are never generated.

    Raises:
        ConfigError: the mesh does not fit the model, or the weights can't be sharded.
    """

    def __init__(
        self,
        model: CausalLM,
        params: Params,
        *,
        slots: int,
        positions: int,
        num_pages: int,
        suppressed: np.ndarray,
        draft: Draft | PromptLookup | None = None,
        mesh: Mesh | None = None,
    ):
        self._placement = Placement(model, mesh)
        self.lockstep = Lockstep(self._placement.is_shared)
        self._model, self._params = self._unstacked(model, params)
        self._proposer, self._draft_params = Proposer.of(draft), None
        self._text_size = positions if isinstance(draft, PromptLookup) else None
        if isinstance(draft, Draft):
            small, self._draft_params = self._unstacked(self._proposer.draft, draft.params)
            self._proposer = dataclasses.replace(self._proposer, source=small)
        kept = {"draft": self._proposer.draft, "text_size": self._text_size}
        with self._placement.context():
            self._rows = blank_rows(self._model, slots, num_pages, PAGE_SIZE, **kept)
        self._suppressed, self._slots = suppressed, slots
        # On the devices, so that texts without a constraint and without known tokens cost no transfer.
        self._nothing_known = self._placement.everywhere(np.full((slots, MOST_STEPS), -1, np.int32))
        self._no_masks = self._placement.everywhere(RowMasks.blank(slots, model.config.vocab_size))
        self._logits: jax.Array | None = None
        self.widths = read_widths(positions)
        self.chunk = self.widths[-1]
        self.width = self._proposer.tokens + 1
        """maximum number of tokens per slot and step"""
        self.pages = SlotPages(slots, positions, num_pages, self.chunk, model.config.unscaled_length)

    def read(self, slot: int, prompt: Sequence[int], done: int) -> int:
        """Read the next part of a prompt after its first `done` tokens; return its length."""
        part = np.asarray(prompt[done : done + self.chunk], np.int32)
        width = next(width for width in self.widths if width >= len(part))
        # Padding repeats the last token, so that a row reads only its own entries of the embedding table.
        tokens = np.pad(part, (0, width - len(part)), mode="edge")[None]
        before, count = np.array([[done], [len(part)]], np.int32)
        given = {"table": self.pages.table[slot][None], "tokens": tokens, "before": before, "count": count}
        given["length"] = np.array([len(prompt)], np.int32)
        self._call("read", given)
        return len(part)

    def start(self, slot: int, request: Request) -> None:
        """Start the text of a request in the slot whose prompt was read last."""
        leaves = jax.tree.leaves(self._new_row(request))
        self._call("start", {"slot": np.int32(slot)} | {f"row_{i}": leaf for i, leaf in enumerate(leaves)})

    def advance(
        self, keep: np.ndarray, known: Mapping[int, list[int]], masks: RowMasks | None, steps: int, until_free: bool
    ) -> Steps:
        """Make at most `steps` steps, each of which generates 1 to `width` tokens per slot.

        The slots of `keep` (R,) continue; `known` are the next tokens of slots that are computed again. `masks` of None
        allow all tokens. With `until_free`, return as soon as a text has ended.
        """
        given = {"table": self.pages.table, "keep": keep, "limit": np.int32(steps), "until_free": np.bool_(until_free)}
        if known:
            given["known"] = np.full((self._slots, MOST_STEPS), -1, np.int32)
            for slot, tokens in known.items():
                given["known"][slot, : len(tokens)] = tokens[:MOST_STEPS]
        if masks is not None and masks.constrained.any():
            given |= {"constrained": masks.constrained, "allowed": masks.allowed}
        return jax.device_get(self._call("advance", given))

    def follow(self) -> None:
        """Make the calls of process 0, in another process, until it stops."""
        self.lockstep.follow(self._make)

    def _call(self, name: str, arrays: dict[str, np.ndarray]) -> Steps | None:
        self.lockstep.send(name, arrays)
        return self._make(name, arrays)

    def _make(self, name: str, arrays: dict[str, np.ndarray]) -> Steps | None:
        """Make a call on the devices: "read", "start" or "advance", with arrays that all processes have."""
        with self._placement.context():
            return {"read": self._read, "start": self._start, "advance": self._advance}[name](**arrays)

    def _read(self, **arrays: np.ndarray) -> None:
        draft = {"draft": self._proposer.draft, "draft_params": self._draft_params}
        self._logits, self._rows = read_part(self._model, self._params, self._rows, *arrays.values(), **draft)

    def _start(self, slot: np.ndarray, **leaves: np.ndarray) -> None:
        template = jax.tree.structure(self._new_row(Request(prompt=[0], max_tokens=1)))
        row = template.unflatten([leaves[f"row_{i}"] for i in range(len(leaves))])
        self._rows = start_row(self._rows, slot, row, self._logits)

    def _advance(
        self,
        table: np.ndarray,
        keep: np.ndarray,
        limit: np.ndarray,
        until_free: np.ndarray,
        known: np.ndarray | None = None,
        constrained: np.ndarray | None = None,
        allowed: np.ndarray | None = None,
    ) -> Steps:
        masks = self._no_masks if constrained is None else RowMasks(constrained, allowed)
        known = self._nothing_known if known is None else known
        given = self._rows, table, keep, known, masks, self._suppressed, limit, until_free
        proposals = {"proposer": self._proposer, "draft_params": self._draft_params}
        self._rows, out = advance(self._model, self._params, *given, **proposals)
        return out

    def _new_row(self, request: Request) -> NewRow:
        vocab_size = self._model.config.vocab_size
        text = None if self._text_size is None else np.zeros((self._text_size,), np.int32)
        if text is not None:
            text[: len(request.prompt)] = request.prompt
        in_prompt = np.zeros((vocab_size,), bool)
        in_prompt[np.asarray(request.prompt)] = True
        return NewRow(
            left=np.int32(request.max_tokens),
            keys=np.uint32(request.seed),
            ends=np.array([*request.ends, *[-1] * (MOST_ENDS - len(request.ends))], np.int32),
            sampling=RowSampling.of(request.sampling, vocab_size, top=request.top > 0),
            history=History(in_prompt, np.int32(0)),
            lengths=np.int32(len(request.prompt)),
            proposes=np.bool_(request.constraint is None),  # a constraint allows what is known for one token only
            text=text,
        )

    def _unstacked(self, model: CausalLM, params: Params) -> tuple[CausalLM, Params]:
        """Return the model and its parameters with unstacked layers, which are copied once, on the devices."""
        params = self._placement.sharded(params)
        with self._placement.context():
            model, params = copied_for_decoding(model, params)
        return model, self._placement.sharded(params)
