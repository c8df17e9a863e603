"""Random attention maps, and functions that read the data of a page as a browser reads it."""

import base64
import json
from html.parser import HTMLParser

import numpy as np

from transformer.viz._attention_weights import AttentionMap


def random_map(stack="decoder", kind="self", *, layer=0, heads=3, queries=5, keys=5, window=None, total=1.0, seed=0):
    """Return softmax weights of random scores, sharp in some heads; each row sums to `total`."""
    distance = np.subtract.outer(np.arange(queries), np.arange(keys))
    hidden = np.zeros((queries, keys), bool)
    if kind == "self" and window is not None:
        hidden |= np.abs(distance) >= window
    if (stack, kind) == ("decoder", "self"):
        hidden |= distance < 0
    rng = np.random.default_rng([seed, layer, kind == "self", stack == "encoder"])
    scores = rng.normal(size=(heads, queries, keys)) * rng.uniform(0.3, 5.0, size=(heads, 1, 1))
    weights = np.exp(np.where(hidden, -np.inf, scores))
    weights *= total / weights.sum(-1, keepdims=True)
    return AttentionMap(stack, layer, kind, weights.astype(np.float32), hidden)


def translation(source, target, *, layers=3, heads=4, seed=0):
    """Return the maps of an encoder-decoder whose second decoder layer has an attention window."""
    sizes = {"heads": heads, "seed": seed}
    maps = [random_map("encoder", layer=i, queries=source, keys=source, **sizes) for i in range(layers)]
    for i in range(layers):
        window = 2 if i == 1 else None
        maps.append(random_map("decoder", layer=i, queries=target, keys=target, window=window, **sizes))
        maps.append(random_map("decoder", "cross", layer=i, queries=target, keys=source, **sizes))
    return maps


class Elements(HTMLParser):
    """Parse the elements of a page with their attributes, and the text inside scripts and styles."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.found = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes), ""))

    def handle_endtag(self, tag):
        self.found.append(("", {}, ""))

    def handle_data(self, text):
        if self.found and self.found[-1][0] in ("script", "style", "title"):
            tag, attributes, before = self.found[-1]
            self.found[-1] = tag, attributes, before + text

    def named(self, tag):
        return [(attributes, text) for name, attributes, text in self.found if name == tag]


def data_of(page):
    """Return the JSON data that the program of the page reads."""
    (text,) = [text for attributes, text in Elements(page).named("script") if attributes.get("id") == "data"]
    return json.loads(text)


def group_of(data, stack, kind, panel=0):
    (group,) = [one for one in data["panels"][panel]["groups"] if (one["stack"], one["kind"]) == (stack, kind)]
    return group


def weights_of(data, stack, kind, layer, panel=0, part="layers"):
    """Return the weights (N, T, S) stored in the page, NaN for masked cells."""
    (entry,) = [one for one in group_of(data, stack, kind, panel)[part] if one["layer"] == layer]
    rows, columns = len(data["words"][stack]), len(data["words"]["encoder" if kind == "cross" else stack])
    visible = np.ones(rows * columns, bool)
    if entry["mask"] is not None:
        bits = np.frombuffer(base64.b64decode(data["masks"][entry["mask"]]), np.uint8)
        visible = np.unpackbits(bits, count=rows * columns) == 0
    scales = np.frombuffer(base64.b64decode(entry["scales"]), "<u2").reshape(entry["heads"], rows, 1) / 65535
    weights = np.full((entry["heads"], rows * columns), np.nan)
    levels = np.frombuffer(base64.b64decode(entry["weights"]), np.uint8)
    weights[:, visible] = levels.reshape(entry["heads"], -1) / 255
    return weights.reshape(entry["heads"], rows, columns) * scales
