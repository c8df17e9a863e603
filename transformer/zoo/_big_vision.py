"""Weights of big_vision (https://github.com/google-research/big_vision): ViT and SigLIP in .npz files.

The files have no config: sizes are those of the arrays, everything else is fixed by the code of big_vision
(models/vit.py and models/proj/image_text/). Names of older files are those before Flax Linen, which numbered all
modules of a block together.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from transformer.config._execution import Execution
from transformer.config._model import Images, TransformerConfig
from transformer.config._parts import HeadTransform, Patches
from transformer.config._positions import LearnedOptions
from transformer.nn.models._dual import DualEncoder
from transformer.nn.models._vision import VisionClassifier, VisionEmbedder
from transformer.zoo._family import abstract_params, stack_places
from transformer.zoo._pretrained import check_dtype, usual_dtype
from transformer.zoo.weights._conversion import check_complete, load_params, parameter_dtypes, parameter_shapes
from transformer.zoo.weights._header import TensorInfo, WeightsError
from transformer.zoo.weights._npz import NpzFile
from transformer.zoo.weights._rules import SAME, EachTensor, Rule, Shape, link, row, uncovered

_NORMS = {"attention_norm": "LayerNorm_0", "feed_forward_norm": "LayerNorm_1"}
_ATTENTION = {name: name for name in ("query", "key", "value", "out")}
_DENSE = {"up": "Dense_0", "down": "Dense_1"}
_BEFORE_LINEN = {
    "MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0",
    "LayerNorm_2": "LayerNorm_1",
    "MlpBlock_3": "MlpBlock_0",
}
_PREFIXES = ("params/", "opt/target/")
"""Prefixes of the parameters in files with a whole training state."""


class BigVisionFile(NpzFile):
    """An .npz file of big_vision, with the names of its current code and one array for each layer."""

    def __init__(self, path: str | os.PathLike):
        super().__init__(path)
        prefix = next((one for one in _PREFIXES if any(name.startswith(one) for name in self.tensors)), "")
        stored = {name: info for name, info in self.tensors.items() if name.startswith(prefix)}
        self.tensors, self._places = {}, {}
        for name, info in stored.items():
            current = _current(name.removeprefix(prefix))
            # Scanned layers are stacked along the first axis.
            layers = range(info.shape[0]) if "/encoderblock/" in current and info.shape else [None]
            for layer in layers:
                one = current if layer is None else current.replace("/encoderblock/", f"/encoderblock_{layer}/")
                if one in self.tensors:
                    raise self._error(f"two arrays are the parameter {one!r}")
                shape = info.shape if layer is None else info.shape[1:]
                self.tensors[one] = TensorInfo(one, info.dtype, shape, info.file, 0)
                self._places[one] = (name, layer)
        self._stored = stored

    def read(self, name: str) -> np.ndarray:
        """Read one array, or the part of one layer."""
        own, (stored, layer) = self.tensors, self._places[name]
        self.tensors = self._stored
        try:
            array = super().read(stored)
        finally:
            self.tensors = own
        return array if layer is None else array[layer]

    def shape(self, name: str, rank: int) -> Shape:
        """Return the shape of an array that must exist; raise WeightsError if it does not, or has another rank."""
        found = self.tensors.get(name)
        if found is None or len(found.shape) != rank or 0 in found.shape:
            got = "no such array" if found is None else f"the shape {found.shape}"
            raise self._error(f"array {name!r} of rank {rank} is needed for the sizes of the model, got {got}")
        return found.shape


def _current(name: str) -> str:
    """Return the current name of a parameter."""
    parts = [_BEFORE_LINEN.get(part, part) for part in name.split("/")]
    if "encoderblock" not in name:
        parts = name.split("/")
    current = (
        "/".join(parts).replace("Transformer/posembed_input/", "").replace("Transformer/pos_embedding", "pos_embedding")
    )
    # The attention pooling of the first large models had no module of its own.
    return re.sub(
        r"^(img/)?(probe$|MlpBlock_0/|MultiHeadDotProductAttention_0/|LayerNorm_0/)", r"\1MAPHead_0/\2", current
    )


_ZERO_FIRST = EachTensor(
    lambda shape: (1, shape[0] - 1, shape[1]),
    lambda tensor, shape: np.concatenate([np.zeros_like(tensor[0, :1]), tensor[0]]),
    lambda table: table[None, 1:],
)
"""A position table without a row for the class token, whose row is 0, in an array (1, N, D)."""


def describe(file: BigVisionFile) -> tuple[type, TransformerConfig, list[Rule]]:
    """Return the class and the config of the model in a file, and the rules of its parameters."""
    if any(name.startswith("img/") for name in file.tensors):
        return _two_towers(file)
    image, rules = _image(file, "", "")
    options: dict[str, Any] = {"output.pooling": image["pooling"]}
    if "head/kernel" in file.tensors:
        options["output.num_classes"] = file.shape("head/kernel", 2)[1]
        rules += _linear("head", "output")
    if "pre_logits/kernel" in file.tensors:
        options["output.transform"] = HeadTransform(activation="tanh", norm=False)
        rules += _linear("pre_logits", "head_transform/dense")
    config = TransformerConfig(**_sizes(image), **_FIXED, input=image["patches"], **options)
    return VisionClassifier if config.output.num_classes else VisionEmbedder, config, rules


_ENCODER = {
    "feed_forward.activation": "gelu_tanh",
    "norm.kind": "layer_norm",
    "norm.epsilon": 1e-6,
    "position": LearnedOptions(),
}
"""What the code of big_vision fixes: Flax's GELU is the approximation by tanh, and its epsilon is 1e-6."""
_FIXED = _ENCODER | {"embedding.scale": False}
"""The same of a whole model."""


def _sizes(stack: Mapping[str, Any]) -> dict[str, int]:
    return {name: stack[name] for name in ("d_model", "num_layers", "num_heads", "feed_forward.d_ff")}


def _two_towers(file: BigVisionFile) -> tuple[type, TransformerConfig, list[Rule]]:
    image, rules = _image(file, "img/", "image/")
    if image["pooling"] != "attention" or "img/head/kernel" in file.tensors:
        raise file._error("the image tower must be that of SigLIP: attention pooling, without a head")
    vocab_size, _ = file.shape("txt/Embed_0/embedding", 2)
    _, length, _ = file.shape("txt/pos_embedding", 3)
    text, more = _stack(file, "txt/Encoder_0/", "text/encoder/")
    images = Images(
        encoder=TransformerConfig(
            **_sizes(image), **_ENCODER, input=image["patches"], **{"output.pooling": "attention"}
        ),
        features=file.shape("txt/head/kernel", 2)[1],
        projections="text",
        similarity="sigmoid",
    )
    options = {"vocab_size": vocab_size, "position.max_length": length, "input": images, "output.pooling": "last"}
    rules += [
        *more,
        Rule("txt/Embed_0/embedding", "text/embedding/embedding"),
        Rule("txt/pos_embedding", "text/encoder/position_table", row(1)),
        *_linear("txt/head", "text_projection"),
        Rule("t", "logit_scale"),
        Rule("b", "logit_bias"),
    ]
    return DualEncoder, TransformerConfig(**_sizes(text), **_FIXED, **options), rules


def _image(file: BigVisionFile, theirs: str, ours: str) -> tuple[dict[str, Any], list[Rule]]:
    """Return the sizes of an image tower, and its rules."""
    height, width, channels, _ = file.shape(f"{theirs}embedding/kernel", 4)
    if f"{theirs}pos_embedding" not in file.tensors:
        raise file._error("it has no pos_embedding: models with sine-cosine positions are not supported")
    _, positions, _ = file.shape(f"{theirs}pos_embedding", 3)
    class_token = f"{theirs}cls" in file.tensors
    # Files since 2022 have no position for the class token.
    with_class = class_token and math.isqrt(positions) ** 2 != positions
    side = math.isqrt(positions - with_class)
    if height != width or side**2 != positions - with_class:
        raise file._error(
            f"patches and images must be square, got patches of {height} x {width} pixels and {positions} positions"
        )
    stack, rules = _stack(file, f"{theirs}Transformer/", f"{ours}encoder/")
    sides = {"image_height": side * height, "image_width": side * width}
    patches = Patches(**sides, patch_size=height, channels=channels, class_token=class_token)
    table = row(1) if with_class == class_token else _ZERO_FIRST
    rules += [
        *_linear(f"{theirs}embedding", f"{ours}patch_embedding"),
        Rule(f"{theirs}pos_embedding", f"{ours}encoder/position_table", table),
        Rule(f"{theirs}cls", f"{ours}class_token", row(2)),
    ]
    head, pool, pooling = f"{theirs}MAPHead_0/", f"{ours}attention_pooling/", "first" if class_token else "mean"
    if any(name.startswith(head) for name in file.tensors):
        pooling = "attention"
        rules += [
            Rule(f"{head}probe", f"{pool}query", row(2)),
            *_renamed(head, pool, {"feed_forward_norm": "LayerNorm_0"}, ("scale", "bias")),
            *_renamed(f"{head}MultiHeadDotProductAttention_0/", f"{pool}cross_attention/", _ATTENTION),
            *_renamed(f"{head}MlpBlock_0/", f"{pool}feed_forward/", _DENSE),
        ]
    return stack | {"patches": patches, "pooling": pooling}, rules


def _stack(file: BigVisionFile, theirs: str, ours: str) -> tuple[dict[str, int], list[Rule]]:
    """Return the sizes of a stack of layers, and its rules."""
    block = f"{theirs}encoderblock_"
    numbers = [name.removeprefix(block).partition("/")[0] for name in file.tensors if name.startswith(block)]
    layers = len(set(numbers))
    if set(numbers) != {str(layer) for layer in range(layers)} or not layers:
        raise file._error(f"the layers {theirs}encoderblock_0, 1, ... are incomplete, got {sorted(set(numbers))!r:.80}")
    width, heads, _ = file.shape(f"{block}0/MultiHeadDotProductAttention_0/query/kernel", 3)
    _, d_ff = file.shape(f"{block}0/MlpBlock_0/Dense_0/kernel", 2)
    layer, own = f"{block}{{layer}}/", f"{ours}{{layer}}/"
    rules = _renamed(layer, own, _NORMS, ("scale", "bias"))
    rules += _renamed(f"{layer}MultiHeadDotProductAttention_0/", f"{own}self_attention/", _ATTENTION)
    rules += _renamed(f"{layer}MlpBlock_0/", f"{own}feed_forward/", _DENSE)
    rules += _renamed(theirs, ours, {"final_norm": "encoder_norm"}, ("scale", "bias"))
    return {"d_model": width, "num_layers": layers, "num_heads": heads, "feed_forward.d_ff": d_ff}, rules


def _renamed(
    theirs: str, ours: str, names: Mapping[str, str], parts: tuple[str, ...] = ("kernel", "bias")
) -> list[Rule]:
    return [
        Rule(f"{theirs}{name}/{part}", f"{ours}{path}/{part}", SAME) for path, name in names.items() for part in parts
    ]


def _linear(theirs: str, ours: str) -> list[Rule]:
    return _renamed("", "", {ours: theirs})


def load_big_vision(
    path: str | os.PathLike, *, dtype: str | None = None, execution: Execution = Execution()
) -> tuple[Any, dict[str, Any]]:
    """Load a ViT or SigLIP from an .npz file of big_vision.

    The model is a `VisionClassifier`, a `VisionEmbedder` without a head, or a `DualEncoder` (SigLIP). Images are (B,
    height, width, channels) with values from -1 to 1. `transformer.save` writes it in Hugging Face format, if
    transformers has such a model: a ViT with a class token, and SigLIP.

    Args:
        path: the file.
        dtype: dtype of parameters and activations; None: the dtype of most numbers in the file.
        execution: execution options of the model.

    Returns:
        The model and its parameters, without the outer "params".

    Raises:
        FileNotFoundError: there is no such file.
        WeightsError: the file is damaged or incomplete, or has arrays that the model does not have. The message lists
            all of them; nothing is loaded.
        ConfigError: an unknown dtype, or sizes that do not describe a model.
    """
    file = BigVisionFile(path)
    kind, config, rules = describe(file)
    dtype = check_dtype(dtype) if dtype is not None else usual_dtype(file.tensors)
    model = kind(config.replace(dtype=dtype, **{"parameters.dtype": dtype}), execution)
    expected = abstract_params(model)
    shapes = parameter_shapes(expected)
    links = link(rules, shapes, stack_places(model))
    if faults := uncovered(links, shapes):
        raise WeightsError(f"{path} has no arrays for these parameters of the model: {', '.join(faults[:20])}.")
    check_complete(file, links, shapes)
    dtypes = parameter_dtypes(expected)
    return model, load_params(file, links, shapes, dtypes, lambda path, array: jax.device_put(array))
