"""Orbax checkpoints of gemma (https://github.com/google-deepmind/gemma), presented as directories of Hugging Face.

Gemma 1, 2 and 3 are published in this format: the parameter tree of the Flax modules, either nested, or with one
dictionary of names such as "transformer/layer_0/attn/q_einsum". There is no config: the shapes contain the sizes, and
the norms distinguish the three generations. Windows, scalings and the scale of the scores are in the code of gemma;
they are taken from the published variant with these sizes, or from a config.json in the directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transformer.zoo.families._gemma2 import GEMMA2
from transformer.zoo.families._gemma3 import GEMMA3
from transformer.zoo.families._gemma3_images import GEMMA3_IMAGES
from transformer.zoo.weights._files import CONFIG_FILE, MAX_CONFIG_BYTES, WeightFiles
from transformer.zoo.weights._header import TensorInfo
from transformer.zoo.weights._orbax import Keys, OrbaxArrays, arrays_directory
from transformer.zoo.weights._rules import Shape

_IMAGES = re.compile(r"(SigLiPFromPatches_0|vision_encoder)/.*|embedder/mm_.*")
"""Arrays of the encoder of images in Gemma 3, which is not read."""
_LAYER = re.compile(r"layer_(\d{1,3})/.*")
_PADDED_VOCABULARY, _VOCABULARY = 256_128, 256_000
"""Rows of the embedding of Gemma 1 and 2 in this format, and tokens of their tokenizer: the last rows are unused."""
_ARCHITECTURES = {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
_NORMS = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn/_query_norm": "self_attn.q_norm",
    "attn/_key_norm": "self_attn.k_norm",
}
_NORMS_OF = {"gemma": ("pre_attention_norm", "pre_ffw_norm"), "gemma2": tuple(_NORMS)[:4], "gemma3_text": tuple(_NORMS)}
"""Norms of a layer, by generation."""


def is_orbax(source: str | os.PathLike) -> bool:
    """Return whether a directory contains an Orbax checkpoint, and no weights in the Hugging Face format."""
    other = any((Path(source) / name).exists() for name in ("model.safetensors", "model.safetensors.index.json"))
    return not other and arrays_directory(source) is not None


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a model, from the shapes of its arrays: V, D, F, L, N, K and H."""

    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    transposed: bool
    """whether `gating_einsum` is (2, F, D) instead of (2, D, F)"""

    def shapes(self, family: str) -> dict[str, Shape]:
        """Return the shapes of all arrays by name."""
        width, heads = self.width, (self.heads, self.width, self.head_dim)
        own = {f"{name}/scale": (width,) for name in _NORMS_OF[family]}
        own |= {name: (self.head_dim,) for name in own if name.startswith("attn/")}
        if self.kv_heads == self.heads:
            own["attn/qkv_einsum/w"] = (3, *heads)
        else:
            own |= {"attn/q_einsum/w": heads, "attn/kv_einsum/w": (2, self.kv_heads, *heads[1:])}
        own["attn/attn_vec_einsum/w"] = (self.heads, self.head_dim, width)
        own["mlp/gating_einsum"] = (2, self.inner, width) if self.transposed else (2, width, self.inner)
        own["mlp/linear"] = (self.inner, width)
        layers = {f"layer_{layer}/{name}": shape for layer in range(self.layers) for name, shape in own.items()}
        return {"embedder/input_embedding": (self.vocabulary, width), "final_norm/scale": (width,)} | layers


class GemmaOrbaxFiles(WeightFiles):
    """An Orbax checkpoint of gemma, presented with the config and the tensors of the Hugging Face format.

    Raises FileNotFoundError, or WeightsError if it is damaged or not one of Gemma 1 to 3, or its config is unknown; the
    message lists all arrays that are missing, left over or of another shape.
    """

    def __init__(self, directory: str | os.PathLike):
        self.directory = Path(directory)
        place = arrays_directory(directory)
        if place is None:
            raise FileNotFoundError(f"no Orbax checkpoint in {directory}. Pass a directory that contains _METADATA.")
        self._stored = OrbaxArrays(place)
        self._keys = self._names()
        arrays = {name: self._stored.arrays[keys] for name, keys in self._keys.items()}
        family, sizes = self._sizes({name: info.shape for name, info in arrays.items()})
        self._check(sizes.shapes(family), {name: info.shape for name, info in arrays.items()})
        self.config = self._config(family, sizes)
        self._parts = _tensors(sizes, family)
        self.tensors = {
            name: TensorInfo(name, arrays[part.array].dtype, part.shape, place, 0) for name, part in self._parts.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Read one tensor, see `WeightFiles.read`."""
        self._info(name)
        part = self._parts[name]
        return part.convert(self._stored.read(self._keys[part.array]))

    def _names(self) -> dict[str, Keys]:
        """Return the keys of the arrays by their name in the nested tree of the model, without those of images."""
        stored = self._stored.arrays
        training = {keys[0] for keys in stored} >= {"params", "step"}
        names: dict[str, Keys] = {}
        for keys in stored:
            name = "/".join(keys)
            if training and not name.startswith("params/"):
                continue  # the state of the optimizer
            name = name.removeprefix("params/").removeprefix("transformer/")
            name = re.sub(r"(mlp/(gating_einsum|linear))/w$", r"\1", name)
            if _IMAGES.fullmatch(name):
                continue
            if name in names:
                raise self._error(f"two arrays are {name}")
            names[name] = keys
        return names

    def _sizes(self, shapes: Mapping[str, Shape]) -> tuple[str, _Sizes]:
        """Return the family and the sizes of the model; a missing array is reported, because it has no sizes."""
        first = "layer_0/attn/qkv_einsum/w" if "layer_0/attn/qkv_einsum/w" in shapes else "layer_0/attn/kv_einsum/w"
        ranks = {"embedder/input_embedding": 2, first: 4, "layer_0/attn/attn_vec_einsum/w": 3}
        ranks |= {"layer_0/mlp/gating_einsum": 3, "layer_0/mlp/linear": 2}
        if any(name.startswith("stacked_layers") for name in shapes):
            raise self._error("its layers are stacked, which is not supported. Save it with one array per layer")
        wrong = [f"{name} is missing" for name in ranks if name not in shapes]
        wrong += [
            f"{name}: expected {rank} axes, got shape {shapes[name]}"
            for name, rank in ranks.items()
            if name in shapes and len(shapes[name]) != rank
        ]
        if wrong:
            raise self._error(*wrong, remedy="\nExpected the parameters of Gemma 1, 2 or 3, as gemma saves them.")
        (vocabulary, width), (inner, _) = shapes["embedder/input_embedding"], shapes["layer_0/mlp/linear"]
        heads, head_dim, _ = shapes["layer_0/attn/attn_vec_einsum/w"]
        layers = 1 + max(int(found[1]) for name in shapes if (found := _LAYER.fullmatch(name)))
        if inner == width:
            raise self._error(f"mlp/linear is square ({width}), so the order of gating_einsum is unknown")
        # The first generation whose norms include those of all layers: one that a layer lacks is then missing.
        own = {name for name in _NORMS if any(one.endswith(f"/{name}/scale") for one in shapes)}
        family = next(family for family, norms in _NORMS_OF.items() if own <= {*norms})
        transposed = shapes["layer_0/mlp/gating_einsum"][1] == inner
        return family, _Sizes(vocabulary, width, inner, layers, heads, shapes[first][1], head_dim, transposed)

    def _check(self, expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
        """Raise WeightsError for arrays that are missing, left over or of another shape."""
        problems = [f"{name} is missing" for name in expected if name not in found]
        problems += [f"{name} belongs to no part of the model" for name in found if name not in expected]
        problems += [
            f"{name}: expected shape {shape}, got {found[name]}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ]
        if problems:
            raise self._error(*problems)

    def _config(self, family: str, sizes: _Sizes) -> dict[str, Any]:
        """Return the config.json of the directory, or the fields that the shapes and the published variants imply."""
        if os.path.lexists(self.directory / CONFIG_FILE):
            try:
                return self._json(CONFIG_FILE, dict, MAX_CONFIG_BYTES)
            except ValueError as error:
                raise self._error(str(error)) from None
        fields = {
            "model_type": family,
            "architectures": [_ARCHITECTURES[family]],
            "vocab_size": _rows(sizes.vocabulary),
            "hidden_size": sizes.width,
            "intermediate_size": sizes.inner,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        }
        if family == "gemma":  # the shapes say everything
            return fields
        named = next((one for one in published(family) if one.items() >= _size_fields(fields).items()), None)
        if named is None:
            shown = ", ".join(f"{name} {value}" for name, value in _size_fields(fields).items())
            raise self._error(
                f"no published model of the family {family} has these sizes ({shown}), and arrays do not contain "
                f"windows, rotary scaling and the scale of scores",
                remedy=f"\nAdd a {CONFIG_FILE} of this family in the Hugging Face format to the directory.",
            )
        return dict(named) | fields


def _size_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that identify a published model."""
    return {name: fields[name] for name in ("hidden_size", "num_hidden_layers", "intermediate_size")}


def published(family: str) -> list[Mapping[str, Any]]:
    """Return the fields of config.json of the published models of Gemma 2 or of the text models in Gemma 3."""
    if family == "gemma2":
        return [variant.fields for variant in GEMMA2.variants.values()]
    images = [variant.fields["text_config"] for variant in GEMMA3_IMAGES.variants.values()]
    return [*(variant.fields for variant in GEMMA3.variants.values()), *images]


def _rows(vocabulary: int) -> int:
    return _VOCABULARY if vocabulary == _PADDED_VOCABULARY else vocabulary


@dataclass(frozen=True)
class _Part:
    """A tensor of the Hugging Face format: the array that contains it, its shape, and how to cut it out."""

    array: str
    shape: Shape
    convert: Callable[[np.ndarray], np.ndarray]


def _tensors(sizes: _Sizes, family: str) -> dict[str, _Part]:
    """Return the tensors of the Hugging Face format by name."""
    rows = _rows(sizes.vocabulary)
    parts = {
        "model.embed_tokens.weight": _Part("embedder/input_embedding", (rows, sizes.width), lambda array: array[:rows]),
        "model.norm.weight": _Part("final_norm/scale", (sizes.width,), _same),
    }
    for layer in range(sizes.layers):
        ours, theirs = f"layer_{layer}/", f"model.layers.{layer}."
        for name in _NORMS_OF[family]:
            renamed = "post_attention_layernorm" if (family, name) == ("gemma", "pre_ffw_norm") else _NORMS[name]
            size = sizes.head_dim if name.startswith("attn/") else sizes.width
            parts[f"{theirs}{renamed}.weight"] = _Part(f"{ours}{name}/scale", (size,), _same)
        parts |= {f"{theirs}self_attn.{name}": part for name, part in _heads(sizes, f"{ours}attn/").items()}
        parts |= {f"{theirs}mlp.{name}": part for name, part in _feed_forward(sizes, f"{ours}mlp/").items()}
    return parts


def _heads(sizes: _Sizes, ours: str) -> dict[str, _Part]:
    """Return the tensors of attention."""
    kv = (sizes.kv_heads * sizes.head_dim, sizes.width)
    whole = (sizes.heads * sizes.head_dim, sizes.width)
    if sizes.kv_heads == sizes.heads:
        parts = {f"{name}_proj.weight": _Part(f"{ours}qkv_einsum/w", whole, _head(i)) for i, name in enumerate("qkv")}
    else:
        parts = {f"{name}_proj.weight": _Part(f"{ours}kv_einsum/w", kv, _head(i)) for i, name in enumerate("kv")}
        parts["q_proj.weight"] = _Part(f"{ours}q_einsum/w", whole, _matrix)
    # (N, H, D) -> (D, N H)
    out = _Part(f"{ours}attn_vec_einsum/w", whole[::-1], lambda array: array.reshape(-1, array.shape[2]).T)
    return parts | {"o_proj.weight": out}


def _feed_forward(sizes: _Sizes, ours: str) -> dict[str, _Part]:
    """Return the tensors of the feed-forward layer."""

    def into(index: int) -> Callable[[np.ndarray], np.ndarray]:  # (2, D, F) or (2, F, D) -> (F, D)
        return lambda array: array[index] if sizes.transposed else array[index].T

    shape = (sizes.inner, sizes.width)
    return {
        "gate_proj.weight": _Part(f"{ours}gating_einsum", shape, into(0)),
        "up_proj.weight": _Part(f"{ours}gating_einsum", shape, into(1)),
        "down_proj.weight": _Part(f"{ours}linear", shape[::-1], lambda array: array.T),
    }


def _same(array: np.ndarray) -> np.ndarray:
    return array


def _matrix(array: np.ndarray) -> np.ndarray:
    """Convert (N, D, H) to (N H, D)."""
    return array.transpose(0, 2, 1).reshape(-1, array.shape[1])


def _head(index: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return the conversion of one of several maps, (2 or 3, N, D, H), to (N H, D)."""
    return lambda array: _matrix(array[index])
