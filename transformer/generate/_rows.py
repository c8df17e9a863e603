"""Rows with their own settings: a fixed number of slots that decode together, each filled and emptied at any time.

`_continuous.py` runs one call to its end, with the same settings for all rows. Here every row has its own sampling, end
tokens and limit, as a server needs, and the host decides between two short calls which rows enter and leave. The number
of compiled programs is fixed: one per width in `read_widths`, one that starts a row in a slot, and one that generates
tokens. Keys and values are stored in pages of a pool, which the host assigns to the rows.

The tokens of a row do not depend on the other slots: prompts are read one at a time, in parts that begin at
multiples of `CHUNK`, and all slots decode in one program of fixed shapes, in which no row reads another one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from transformer.generate._constraints import WORD, only_allowed
from transformer.generate._decoding import last_logits, read_tokens
from transformer.generate._generation import row_keys
from transformer.generate._layers import Cache, Params
from transformer.generate._penalties import History, Penalties, penalized
from transformer.generate._sampling import SamplerParams, Sampling, choose
from transformer.nn._axes import Array, Bool, Float, Int, Leaf, Lengths, PRNGKey
from transformer.nn._paged import PagedKVCache, paged_cache
from transformer.nn._partitioning import constrain, has_mesh
from transformer.nn.models._causal_lm import CausalLM

Tree = TypeVar("Tree")
PAGE_SIZE = 16
"""number of tokens per page: a text wastes half a page on average"""
CHUNK = 128
"""largest number of prompt tokens that one call reads, and the unit in which rows share a prefix: with longer parts,
more of a common prefix is read again"""
MOST_STEPS = 16
"""maximum number of tokens per row in one call of `advance`"""
MOST_TOP = 20
"""maximum number of alternatives of a token whose log-probabilities are returned"""
MOST_ENDS = 8
"""maximum number of end tokens of a row"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSampling:
    """The sampling settings of R rows, or of one row without the leading axis."""

    greedy: Leaf
    """(R,), always take the most probable token"""
    is_sorted: Leaf
    """(R,), a filter needs sorted logits"""
    temperature: Leaf
    """(R,)"""
    top_k: Leaf
    """(R,)"""
    top_p: Leaf
    """(R,)"""
    log_min_p: Leaf
    """(R,)"""
    penalties: Penalties
    """(R,) each"""
    top: Leaf
    """(R,), whether log-probabilities of alternatives are wanted"""

    @staticmethod
    def of(sampling: Sampling, vocab_size: int, top: bool) -> RowSampling:
        """Return the settings of one row. Values that filter nothing represent absent filters."""
        given = SamplerParams.of(sampling, vocab_size)
        penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        return RowSampling(
            greedy=np.bool_(given.temperature is None),
            is_sorted=np.bool_(given.candidates is not None),
            temperature=np.float32(1) if given.temperature is None else given.temperature,
            top_k=np.int32(vocab_size) if given.top_k is None else given.top_k,
            # Not 1: the sum of the probabilities before an improbable token can be rounded to 1.
            top_p=np.float32(math.inf) if given.top_p is None else given.top_p,
            log_min_p=np.float32(-math.inf) if given.log_min_p is None else given.log_min_p,
            penalties=Penalties(*(np.float32(value) for value in penalties)),
            top=np.bool_(top),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class NewRow:
    """What a row brings into its slot, besides its pages: the fields without the leading axis R."""

    left: Leaf
    """(R,), number of tokens that the row may still generate"""
    keys: PRNGKey | np.uint32
    """(R,), random key of each row; of a new row the seed"""
    ends: Leaf
    """(R, MOST_ENDS), tokens that end the row; -1: none"""
    sampling: RowSampling
    history: History
    """(R, V) each; the counts of a new row can be 0 without an axis"""
    lengths: Leaf
    """(R,), number of tokens of each row whose keys and values are in its pages"""
    proposes: Leaf
    """(R,), whether the row proposes tokens (speculative decoding)"""
    text: Leaf | None = None
    """(R, S), tokens of each row, if proposals are looked up in them; entries after the last token are not read"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows(NewRow):
    """The state of R slots between two calls; a slot that does not run is free."""

    logits: Leaf
    """(R, V), for the next token of each row"""
    running: Leaf
    """(R,), whether the row still generates tokens"""
    pools: list[Leaf]
    """(P, Q, C, W) each, pools of pages of all layers"""
    draft_pools: list[Leaf]
    """(P, Q, C, W) each, pools of all layers of a draft model, with the page tables of the model"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowMasks:
    """The tokens that R rows may generate next."""

    constrained: Leaf
    """(R,), whether the row has a constraint"""
    allowed: Leaf
    """(R, ceil(V / 32)), bits of the allowed tokens as in `Constraint.allowed`; of rows without a constraint all"""

    @staticmethod
    def blank(slots: int, vocab_size: int) -> RowMasks:
        """Return the masks of R rows without constraints, on the host."""
        words = -(-vocab_size // WORD)
        return RowMasks(np.zeros((slots,), bool), np.full((slots, words), 2**32 - 1, np.uint32))


def read_widths(positions: int) -> tuple[int, ...]:
    """Return the numbers of tokens that one call reads into a cache of this many positions: powers of two."""
    return tuple(1 << n for n in range(4, CHUNK.bit_length()) if 1 << n <= positions)


def row_cache(
    model: CausalLM,
    pools: list[Leaf],
    table: Int[Array, "B M"],
    lengths: Lengths,
    counts: Lengths,
    text_lengths: Lengths | None = None,
) -> Cache:
    """Return the cache of B rows, with `lengths` tokens in the pages of `table`, for the next call of the model.

    Of the tokens of the call, the first `counts` of each row are stored. `text_lengths` are those of the texts of which
    the call reads a part, for rotary scaling that depends on it; None: the texts end with the tokens of the call.
    """
    rows, pages = table.shape
    shapes = jax.eval_shape(lambda: paged_cache(model, rows=rows, pages_per_row=pages, num_pages=1, page_size=1))
    left = iter(pools)

    def filled(node):
        given = {"pages": next(left), "page_table": table, "length": lengths, "chunk_length": counts}
        given |= {"text_length": text_lengths}
        return dataclasses.replace(node, **given) if _is_paged(node) else node

    return jax.tree.map(filled, shapes, is_leaf=_is_paged)


def pools_of(cache: Cache) -> list[Leaf]:
    """Return the pools of pages of all layers, (P, Q, C, W) each, of a paged cache, a tree."""
    return [node.pages for node in jax.tree.leaves(cache, is_leaf=_is_paged) if _is_paged(node)]


def _is_paged(node: object) -> bool:
    return isinstance(node, PagedKVCache)


@functools.partial(jax.jit, static_argnames=("model", "slots", "num_pages", "page_size", "draft", "text_size"))
def blank_rows(
    model: CausalLM,
    slots: int,
    num_pages: int,
    page_size: int,
    *,
    draft: CausalLM | None = None,
    text_size: int | None = None,
) -> Rows:
    """Return R free slots and a pool of P pages of Q tokens, for a model with unstacked layers.

    A draft model with unstacked layers gets pools of the same size. `text_size` S is the number of tokens of a row that
    are kept for lookups; None: none.
    """

    def blank_pools(model: CausalLM) -> list[Leaf]:
        return pools_of(paged_cache(model, rows=1, pages_per_row=1, num_pages=num_pages, page_size=page_size))

    vocab_size = model.config.vocab_size
    one = RowSampling.of(Sampling(temperature=0.0), vocab_size, top=False)
    rows = Rows(
        logits=jnp.zeros((slots, vocab_size), jnp.float32),
        running=jnp.zeros((slots,), bool),
        left=jnp.zeros((slots,), jnp.int32),
        keys=jax.random.split(jax.random.key(0), slots),
        ends=jnp.full((slots, MOST_ENDS), -1, jnp.int32),
        sampling=jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (slots,)), one),
        history=History(jnp.zeros((slots, vocab_size), bool), jnp.zeros((slots, vocab_size), jnp.int32)),
        lengths=jnp.zeros((slots,), jnp.int32),
        pools=blank_pools(model),
        proposes=jnp.zeros((slots,), bool),
        text=None if text_size is None else jnp.zeros((slots, text_size), jnp.int32),
        draft_pools=[] if draft is None else blank_pools(draft),
    )
    return stored(rows)


@functools.partial(jax.jit, static_argnames=("model", "draft"), donate_argnames="rows")
def read_part(
    model: CausalLM,
    params: Params,
    rows: Rows,
    table: Int[Array, "1 M"],
    tokens: Int[Array, "1 T"],
    before: Int[Array, " 1"],
    count: Int[Array, " 1"],
    length: Int[Array, " 1"],
    *,
    draft: CausalLM | None = None,
    draft_params: Params | None = None,
) -> tuple[Float[Array, "1 V"], Rows]:
    """Read the first `count` of T tokens of a prompt into its pages, after the first `before` tokens.

    The other tokens are padding, which is not stored. Rotary scaling can depend on `length`, the number of tokens of
    the whole prompt. A draft model reads the tokens too.

    Return the logits after the last token, and the slots.
    """

    def read(model: CausalLM, params: Params, pools: list[Leaf]) -> tuple[Float[Array, "1 T D"], list[Leaf]]:
        # All parts of a prompt are rotated by its whole length, as if they were read in one call.
        cache = row_cache(model, pools, table, before, count, length if model.config.reads_lengths else None)
        hidden, cache = read_tokens(model, params, tokens, cache)
        return hidden, pools_of(cache)

    hidden, pools = read(model, params, rows.pools)
    draft_pools = rows.draft_pools if draft is None else read(draft, draft_params, rows.draft_pools)[1]
    logits = last_logits(model, params, hidden, count)
    return whole(logits), stored(dataclasses.replace(rows, pools=pools, draft_pools=draft_pools))


@functools.partial(jax.jit, donate_argnames="rows")
def start_row(rows: Rows, slot: Int[Array, ""], new: NewRow, logits: Float[Array, "1 V"]) -> Rows:
    """Start a row in a free slot, with its logits after the prompt (1, V)."""

    def put(whole, part):
        return whole.at[slot].set(part)

    (key,) = row_keys(new.keys[None], jnp.zeros((1,), int))  # as `generate` with one prompt
    brought = vars(dataclasses.replace(new, keys=key))
    filled = {name: jax.tree.map(put, getattr(rows, name), part) for name, part in brought.items()}
    logits = put(rows.logits, logits[0].astype(jnp.float32))
    return stored(dataclasses.replace(rows, **filled, logits=logits, running=put(rows.running, True)))


def stored(rows: Rows) -> Rows:
    """Return the slots with the sharding that they keep between calls: pools are split by heads, the rest is whole."""
    if not has_mesh():
        return rows

    def split(pools):
        return [constrain(pool, "batch", "length", "kv_heads", "head_dim") for pool in pools]

    pools, draft_pools = split(rows.pools), split(rows.draft_pools)
    rest = whole(dataclasses.replace(rows, pools=[], draft_pools=[]))
    return dataclasses.replace(rest, pools=pools, draft_pools=draft_pools)


def whole(tree: Tree) -> Tree:
    """Return a tree of arrays that all devices of the current mesh have; unchanged without a mesh."""
    return jax.lax.with_sharding_constraint(tree, PartitionSpec()) if has_mesh() else tree


def choose_in_rows(
    logits: Float[Array, "R V"],
    keys: PRNGKey,
    rows: RowSampling,
    history: History,
    masks: RowMasks,
    suppressed: Int[Array, " S"],
) -> Int[Array, " R"]:
    """Sample one token per row as `choose` does, with the settings of each row; (R,), -1 for a row that failed."""
    # What no row needs is not computed. Whether it is computed for other rows does not change the token of a row.
    allowed = masks.allowed
    logits = jax.lax.cond(masks.constrained.any(), lambda: only_allowed(logits, allowed), lambda: logits)
    penalties = rows.penalties
    penalized_rows = (penalties.repetition != 1) | (penalties.presence != 0) | (penalties.frequency != 0)
    columns = jax.tree.map(lambda leaf: leaf[:, None], rows)
    logits = jax.lax.cond(penalized_rows.any(), lambda: penalized(logits, history, columns.penalties), lambda: logits)
    logits = logits.at[:, suppressed].set(-jnp.inf)
    greedy = choose(logits, keys, SamplerParams(None, None, None, None))

    def drawn(given: SamplerParams, wanted: Bool[Array, " R"], otherwise: Int[Array, " R"]) -> Int[Array, " R"]:
        return jax.lax.cond(
            wanted.any(), lambda: jnp.where(wanted, choose(logits, keys, given), otherwise), lambda: otherwise
        )

    plain = SamplerParams(columns.temperature, None, None, columns.log_min_p)
    filters = columns.temperature, columns.top_k, columns.top_p, columns.log_min_p
    with_sorting = SamplerParams(*filters, candidates=logits.shape[1])
    tokens = drawn(plain, ~rows.greedy & ~rows.is_sorted, greedy)
    return drawn(with_sorting, ~rows.greedy & rows.is_sorted, tokens)
