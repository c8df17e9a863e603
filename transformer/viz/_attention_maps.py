"""Heat maps of the attention weights of every layer and head, with the tokens on both axes."""

from __future__ import annotations

import math
import os
import unicodedata
from collections.abc import Sequence, Set
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from transformer.config._local_paths import local_path
from transformer.config._progress import counting
from transformer.viz._attention_weights import AttentionMap, labels_of, printable
from transformer.viz._output_files import files_in
from transformer.viz._style import save

MOST_PIXELS = 200_000_000
"""maximum number of pixels of all images of one text together; drawing them takes about a minute on one core"""

_DPI = 110
_LONGEST_LAYER, _LONGEST_HEAD = 22.0, 36.0  # maximum width and height of a page in inches: 2,420 and 3,960 pixels
_FONT_SIZE = 8.0
_LINE = 0.14  # inches per label
_COLORS, _INK, _HIDDEN, _HATCH = "Blues", "#333333", "#ececec", "#b5b5b5"


def save_attention_maps(
    maps: Sequence[AttentionMap],
    directory: str | os.PathLike,
    *,
    source: Sequence[str] = (),
    target: Sequence[str] = (),
    overwrite: bool = True,
) -> list[Path]:
    """Draw each attention map into a PNG file with all heads.

    If not all labels fit into that image, each head is also drawn into a separate file.

    Args:
        maps: attention maps, such as those of `attention_maps`.
        directory: directory for the files.
        source: labels of the encoder positions, one word per position.
        target: labels of the decoder positions.
        overwrite: replace existing files that this package did not write.

    Returns:
        The paths of the files, such as `decoder_cross_layer2.png` and `decoder_cross_layer2_head1.png`.

    Raises:
        ValueError: the numbers of labels and positions differ, or the images have more than `MOST_PIXELS` together.
        FileExistsError: without `overwrite`, a file exists that this package did not write.
    """
    directory = local_path(directory, "directory")
    fonts, missing = fonts_for([*map(printable, source), *map(printable, target)])
    words = {
        stack: [short_label(word, missing) for word in labels]
        for stack, labels in (("encoder", source), ("decoder", target))
    }
    total = {stack: 1 + max((one.layer for one in maps if one.stack == stack), default=0) for stack in words}
    planned: list[tuple[str, str, AttentionMap, list[int], list[str], list[str]]] = []
    pixels = 0.0
    for one in maps:
        queries, keys = labels_of(one, words)
        title = f"{one.stack}, layer {one.layer + 1} of {total[one.stack]}: {one.kind}-attention"
        for file, shown in _files(one, total[one.stack], queries, keys):
            planned.append((file, title, one, shown, queries, keys))
            pixels += math.prod(_Page(len(shown), queries, keys).size) * _DPI**2
    check_pixels(pixels, len(planned), "text")
    paths = files_in(directory, [file for file, *_ in planned], overwrite)
    add = counting("attention maps", len(planned))
    for path, (_, *page) in zip(paths, planned, strict=True):
        _draw(path, *page, fonts)
        add(1)
    return paths


def check_pixels(pixels: float, images: int, source: str) -> None:
    """Raise ValueError if images, which show a `source`, have more than `MOST_PIXELS` together."""
    if pixels > MOST_PIXELS:
        raise ValueError(
            f"the images are too large: expected at most {MOST_PIXELS / 1e6:,.0f} million pixels in total, got "
            f"{pixels / 1e6:,.0f} million in {images:,} images. Shorten the {source}, or write one page: --html FILE."
        )


def _files(one: AttentionMap, layers: int, queries: Sequence[str], keys: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return the files of a map with the heads that each shows: all, and single heads if labels are omitted."""
    heads = list(range(len(one.weights)))
    name = f"{one.stack}_{one.kind}_layer{one.layer + 1:0{len(str(layers))}}"
    files = [(f"{name}.png", heads)]
    if len(heads) > 1 and _Page(len(heads), queries, keys).stride > 1:
        files += [(f"{name}_head{head + 1:0{len(str(len(heads)))}}.png", [head]) for head in heads]
    return files


class _Page:
    """Layout of the heads on a page, in inches.

    The cells are as large as their labels, but shrink until the page has at most its maximum size. Then only every
    `stride`-th label is drawn.
    """

    left, right, top, bottom, gap, head = 0.42, 0.72, 0.5, 0.34, 0.3, 0.24

    def __init__(self, heads: int, queries: Sequence[str], keys: Sequence[str]):
        self.rows_labels, self.columns_labels = _margin(queries), _margin(keys)
        self.shape = len(queries), len(keys)
        self.cell = min(max(2.4 / max(self.shape), 0.2), 0.42)
        self.longest = _LONGEST_LAYER if heads > 1 else _LONGEST_HEAD
        while True:
            self.columns = min(range(1, heads + 1), key=lambda columns: self._ugliness(heads, columns))
            self.rows = -(-heads // self.columns)
            self.size = self._size(self.rows, self.columns)
            if max(self.size) <= self.longest or self.cell < 0.005:
                break
            self.cell *= 0.93
        self.stride = math.ceil(_LINE / self.cell)

    def _size(self, rows: int, columns: int) -> tuple[float, float]:
        width, height = self.panel
        return (
            self.left + columns * (width + self.gap) + self.right,
            self.top + rows * (height + self.gap) + self.bottom,
        )

    @property
    def panel(self) -> tuple[float, float]:
        """Width and height of one head with its labels."""
        return (
            self.rows_labels + max(self.shape[1] * self.cell, 0.5),
            self.head + self.columns_labels + self.shape[0] * self.cell,
        )

    def _ugliness(self, heads: int, columns: int) -> float:
        rows = -(-heads // columns)
        width, height = self._size(rows, columns)
        too_large = max(0.0, max(width, height) - self.longest)
        return abs(math.log(width / height / 1.5)) + 0.25 * (rows * columns - heads) + too_large

    def place(self, index: int) -> tuple[float, float, float, float]:
        """Return left, bottom, width and height of the cells of a head, as fractions of the page."""
        width, height = self.panel
        row, column = divmod(index, self.columns)
        left = self.left + column * (width + self.gap) + self.rows_labels
        top = self.top + row * (height + self.gap) + self.head + self.columns_labels
        across, down = self.shape[1] * self.cell, self.shape[0] * self.cell
        page_width, page_height = self.size
        return left / page_width, 1 - (top + down) / page_height, across / page_width, down / page_height


def _draw(
    path: Path,
    title: str,
    one: AttentionMap,
    heads: Sequence[int],
    queries: Sequence[str],
    keys: Sequence[str],
    fonts: list[str],
) -> None:
    page = _Page(len(heads), queries, keys)
    grid_width = page.size[0]
    note = f"rows: queries ({one.stack}), columns: keys ({'encoder' if one.kind == 'cross' else one.stack})"
    if page.stride > 1:
        named = "every 2nd word is labeled" if page.stride == 2 else f"every {page.stride}th word is labeled"
        note += f"; {named}" + (", more on the images of single heads" if len(heads) > 1 else "")
    legend = 1.7 if one.hidden.any() else 0.0
    page.size = max(grid_width, 0.3 + 0.1 * len(title), 0.3 + legend + 0.068 * len(note)), page.size[1]
    width, height = page.size

    figure = Figure(figsize=page.size, dpi=_DPI, facecolor="white")  # not pyplot, which has global state
    small = {"fontsize": _FONT_SIZE, "color": "#777777"}
    figure.text(0.14 / width, 1 - 0.14 / height, title, va="top", fontsize=12, color=_INK)
    for index, head in enumerate(heads):
        _, bottom, _, down = place = page.place(index)
        axes = figure.add_axes(place)
        _draw_head(axes, one.weights[head], one.hidden, queries, keys, page, fonts)
        axes.set_title(f"head {head + 1}", loc="left", fontsize=9, color=_INK, pad=5)
        if index % page.columns == 0:
            figure.text(0.14 / width, bottom + down / 2, "query", rotation=90, va="center", **small)
        if index < page.columns and page.shape[1] * page.cell > 0.8:
            axes.set_title("key", loc="right", pad=5, **small)
    figure.text(0.14 / width, 0.14 / height, note, **small)
    if legend:
        patch = Patch(facecolor=_HIDDEN, edgecolor=_HATCH, hatch="/////", linewidth=0, label="hidden by the mask")
        place = {"loc": "lower right", "bbox_to_anchor": (1 - 0.05 / width, 0.04 / height)}
        figure.legend(handles=[patch], **place, frameon=False, fontsize=_FONT_SIZE, labelcolor="#777777")
    _, bottom, _, down = page.place(0)
    tall = min(down, 2.4 / height)
    bar = figure.add_axes(((grid_width - 0.72) / width, bottom + down - tall, 0.12 / width, tall))
    bar = figure.colorbar(ScalarMappable(Normalize(0, 1), _COLORS), cax=bar, ticks=[0, 0.5, 1])
    bar.set_label("weight", fontsize=_FONT_SIZE, color=_INK, labelpad=1)
    bar.ax.tick_params(labelsize=_FONT_SIZE, colors=_INK, length=2)
    bar.outline.set_linewidth(0.4)
    save(figure, path)


def _draw_head(
    axes: Axes,
    weights: Float[np.ndarray, "T S"],
    hidden: Bool[np.ndarray, "T S"],
    queries: Sequence[str],
    keys: Sequence[str],
    page: _Page,
    fonts: list[str],
) -> None:
    axes.imshow(
        np.ma.masked_array(weights, hidden), cmap=_COLORS, vmin=0, vmax=1, aspect="auto", interpolation="nearest"
    )
    if hidden.any():
        axes.add_collection(
            PolyCollection(_runs(hidden), facecolors=_HIDDEN, edgecolors=_HATCH, linewidths=0, hatch="/////"),
            autolim=False,
        )
    axes.xaxis.tick_top()
    _name(axes.xaxis, keys, page.stride, fonts)
    _name(axes.yaxis, queries, page.stride, fonts)
    for label in axes.get_xticklabels():
        label.set_rotation(90 if max(map(_width, keys)) > 2 else 0)
    axes.tick_params(which="both", length=0, pad=2.5, labelcolor=_INK)
    axes.set_xticks(np.arange(1, len(keys)) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, len(queries)) - 0.5, minor=True)
    if page.cell >= 0.1:
        axes.grid(which="minor", color="#dfe3e8", linewidth=0.5)
    for spine in axes.spines.values():
        spine.set(color="#999999", linewidth=0.6)


def _name(axis: Axis, words: Sequence[str], stride: int, fonts: list[str]) -> None:
    places = range(0, len(words), stride)
    axis.set_ticks(list(places), [words[place] for place in places])
    for label in axis.get_ticklabels():
        label.set(fontfamily=fonts, fontsize=_FONT_SIZE, parse_math=False)  # a $ in a text does not start a formula


def _runs(hidden: Bool[np.ndarray, "T S"]) -> list[list[tuple[float, float]]]:
    """Return the corners of rectangles that cover each run of hidden cells in a row."""
    corners = []
    for row, cells in enumerate(hidden):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], cells, [False]]).astype(np.int8)))
        for start, end in edges.reshape(-1, 2) - 0.5:
            corners.append([(start, row - 0.5), (end, row - 0.5), (end, row + 0.5), (start, row + 0.5)])
    return corners


def short_label(word: str, missing: Set[int] = frozenset(), longest: int = 16) -> str:
    """Return the label of a word: shortened, with characters that no font has as escapes."""
    word = "".join(ascii(c)[1:-1] if ord(c) in missing else c for c in printable(word))
    return word if _width(word) <= longest else word[: longest - 1] + "…"


def _width(word: str) -> int:
    """Return the width of a word in terminal columns: two per wide East Asian character, none per combining one."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in word)


def _margin(words: Sequence[str]) -> float:
    return 0.08 + max(map(_width, words), default=0) * _FONT_SIZE * 0.64 / 72


def fonts_for(words: Sequence[str]) -> tuple[list[str], set[int]]:
    """Return font families that cover the characters of the words, and the characters that no installed font has."""
    families = ["DejaVu Sans"]
    missing = {ord(c) for word in words for c in word} - _glyphs(font_manager.findfont(families[0]))
    for entry in font_manager.fontManager.ttflist if missing else ():
        if entry.name.startswith("Last Resort"):
            continue  # this font has a placeholder for every character
        if found := missing & _glyphs(entry.fname):
            families.append(entry.name)
            missing -= found
    return families, missing


def _glyphs(file: str) -> set[int]:
    return set(font_manager.get_font(file).get_charmap())
