"""Pages of a paged KV cache on the host: which are free, how many rows use each, and which contain a known prefix."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np


class OutOfPagesError(RuntimeError):
    """Fewer pages are free than a row needs: end a row or preempt it (release its pages), then try again."""


class PageAllocator:
    """Assigns the pages of a pool to rows, and lets rows with the same beginning share pages.

    A page that several rows use is counted once for each of them and is free when all have released it. A full page can
    be registered under the tokens of its row up to its end. It then keeps its contents after its release and can be
    found again (`match`), until it is allocated for other tokens: the page that was released first is allocated first.
    Only full pages are shared, and full pages are never written to (Kwon et al. 2023, arXiv 2309.06180, section 4.3).

    Not thread-safe. It does not touch the pool itself, which is a `PagedKVCache`.
    """

    def __init__(self, num_pages: int, page_size: int, first_page: int = 0):
        """Create an allocator for pages `first_page` to `first_page + num_pages - 1`, all of them free.

        Args:
            num_pages: number of pages.
            page_size: number of tokens per page.
            first_page: first page; for a pool that a mesh splits, each part needs an allocator.

        Raises:
            ValueError: a size below 1, or a negative first page.
        """
        if num_pages < 1 or page_size < 1 or first_page < 0:
            raise ValueError(
                f"an allocator needs at least 1 page of at least 1 token and a first page of at least 0, got "
                f"{num_pages} pages of {page_size} tokens from page {first_page}. Pass larger numbers."
            )
        self.page_size = page_size
        self._users = dict.fromkeys(range(first_page, first_page + num_pages), 0)
        # Free pages in the order in which they are allocated. Values are not used: this is an ordered set.
        self._free = collections.OrderedDict.fromkeys(self._users)
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Number of pages that no row uses."""
        return len(self._free)

    def users(self, page: int) -> int:
        """Return the number of rows that use a page."""
        return self._users[page]

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that a row of this many tokens needs."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages with one user each. Their old contents are no longer found by `match`.

        Raises:
            OutOfPagesError: fewer pages are free; then none is allocated.
        """
        if count > len(self._free):
            raise OutOfPagesError(
                f"{count} pages are needed, but only {len(self._free)} of {len(self._users)} are free. Release the "
                f"pages of a row, or create a larger pool."
            )
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._users[page] = 1
            if (key := self._key_of.pop(page, None)) is not None:
                del self._page_of[key]
        return pages

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the pages that contain the longest known prefix of a row, each with one user more.

        At least the last token of the row is not part of it, because a model must read one token to compute logits.

        Args:
            tokens: token ids of the row.

        Returns:
            Pages in the order of the tokens; the row begins with `len(pages) * page_size` tokens in the cache.
        """
        pages = []
        for key in self._keys(tokens[: len(tokens) - 1]):
            page = self._page_of.get(key)
            if page is None:
                break
            self._free.pop(page, None)
            self._users[page] += 1
            pages.append(page)
        return pages

    def register(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Let `match` find the full pages of a row.

        Args:
            tokens: token ids of the row whose keys and values are in the cache.
            pages: pages of the row, in the order of the tokens.

        Raises:
            ValueError: there are fewer pages than the tokens fill, or a page is not in use.
        """
        if len(pages) < len(tokens) // self.page_size:
            raise ValueError(
                f"{len(tokens)} tokens fill {len(tokens) // self.page_size} pages of {self.page_size}, got "
                f"{len(pages)} pages. Pass all pages of the row."
            )
        for key, page in zip(self._keys(tokens), pages, strict=False):
            self._check_used(page)
            # Another row may have computed the same tokens in the meantime: the first page stays the known one.
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key], self._key_of[page] = page, key

    def forget(self, pages: Sequence[int]) -> None:
        """Do not let `match` find these pages any more, for example because their contents are not finite."""
        for page in pages:
            if (key := self._key_of.pop(page, None)) is not None:
                del self._page_of[key]

    def release(self, pages: Sequence[int]) -> None:
        """Remove one user from each page. Later pages become free first: a prefix is the most useful part of a row.

        Raises:
            ValueError: a page has fewer users than times it is named; then none is released.
        """
        for page, times in collections.Counter(pages).items():
            self._check_used(page, times)
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free[page] = None
                if page not in self._key_of:  # nothing to find in it: allocate it before those with known contents
                    self._free.move_to_end(page, last=False)

    def _check_used(self, page: int, times: int = 1) -> None:
        if self._users.get(page, 0) < times:
            raise ValueError(
                f"page {page} has {self._users.get(page, 0)} users, but {times} are released or register it. Pass "
                f"pages that `allocate` or `match` returned for this row, and release each of them once."
            )

    def _keys(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """Yield a key for each full page: a hash of all tokens up to its end, since its keys depend on all of them."""
        # A cryptographic hash: with a weaker one, somebody could choose a prompt that is given another prompt's pages.
        so_far = hashlib.sha256()
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            so_far.update(np.asarray(tokens[end - self.page_size : end], np.int64).tobytes())
            yield so_far.digest()
