"""Plan a server: the bytes of weights and pages, the texts that fit, and upper bounds of the speed, by arithmetic."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import PyTree

from transformer.config._checks import ConfigError
from transformer.generate._prompts import decoding_model
from transformer.generate._rows import PAGE_SIZE
from transformer.nn._paged import LANES, paged_cache
from transformer.nn._sharding import check_model, describe_sizes, mesh_sizes, parameter_spec
from transformer.nn.models._base import count_parameters
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._kinds import kind_of
from transformer.nn.quantization._int8 import GROUP_SIZE, quantized_shapes
from transformer.training._flops import matrix_flops
from transformer.training._recipe import Recipe, build_model
from transformer.training._state import abstract_state, parameter_paths
from transformer.training.plan._contract import Topology

USUAL_LENGTH = 2048
"""default number of tokens of a text, prompt and answer together"""
USABLE = 0.9
"""share of the usable memory for weights and pages; the rest is for activations, logits and programs"""


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """Sizes and upper bounds of the speed of a server on a topology. Bytes are per device."""

    mesh: str
    """mesh axes larger than 1"""
    num_parameters: int
    """number of parameters of the model"""
    bits: Literal[4, 8] | None
    """bits of quantized weights; None: weights are stored in the dtype of the computation"""
    dtype: str
    """dtype of the computation and of the pages"""
    weight_bytes: int
    """bytes of the weights"""
    available_bytes: int
    """bytes for weights and pages"""
    page_size: int
    """number of tokens per page"""
    page_bytes: int
    """bytes of a page in all layers"""
    pages: int
    """number of pages that fit; 0 if the weights do not fit"""
    length: int
    """number of tokens of a text"""
    slots: int
    """number of texts of this length that fit"""
    tokens_per_second: float
    """upper bound of the new tokens per second, if `slots` texts are generated together"""
    single_tokens_per_second: float
    """upper bound of the new tokens per second of one text alone"""
    memory_seconds: float
    """least time to read weights and pages in a decoding step of all texts"""
    compute_seconds: float
    """least time of its matrix multiplications"""
    prompt_flops: int
    """FLOPs per prompt token of the matrix multiplications in the layers, on all devices"""
    prompt_tokens_per_second: float
    """upper bound of the prompt tokens per second"""

    @property
    def fits(self) -> bool:
        """Whether the weights and one text fit."""
        return self.slots > 0


def parse_length(text: str, recipe: Recipe) -> int:
    """Parse the value of `--length`, the number of tokens of a text; ConfigError if it is too large, or no number."""
    if not re.fullmatch(r"[1-9]\d*", text):
        raise ConfigError(f"--length must be the number of tokens of a text, such as {USUAL_LENGTH}, got {text!r}.")
    longest = recipe.model.max_length
    if longest is not None and int(text) > longest:
        raise ConfigError(f"--length {text}: the model has only {longest} positions. Pass at most {longest}.")
    return int(text)


def make_serve_plan(recipe: Recipe, length: int, topology: Topology, bits: Literal[4, 8] | None = None) -> ServePlan:
    """Compute the plan of a server for a causal model; nothing is compiled.

    A decoding step must read the weights that it multiplies with, and the pages of all texts, once. So it takes at
    least these bytes divided by the bandwidth of the HBM, and at least its FLOPs divided by the peak of the chip
    (roofline model, Williams et al. 2009). Texts have their full length. Communication is not counted.

    Args:
        recipe: the recipe of the model. Of `parallel`, only the axes tensor and expert are used.
        length: number of tokens of a text.
        topology: the devices.
        bits: bits of quantized weights, as in `quantize`; None: none.

    Raises:
        ConfigError: the model is no causal language model with a KV cache, the axes do not fit the devices or the
            model, or quantized weights would be sharded.
    """
    recipe = dataclasses.replace(recipe, lora=None)
    model = build_model(recipe)
    is_causal = kind_of(model).writes == "continuation"
    if not is_causal or recipe.model.has_linear_attention:
        got = "linear attention" if is_causal else f"a {type(model).__name__}"
        raise ConfigError(f"plan serve needs a CausalLM with a KV cache, got {got}. Pass another recipe.")
    sizes = _sizes(recipe, topology, bits)
    devices = math.prod(sizes.values())
    shapes = abstract_state(recipe).params
    computed = jnp.dtype(recipe.model.dtype)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, computed), shapes)
    params = params if bits is None else quantized_shapes(params, bits, GROUP_SIZE)
    weights = _bytes(params, sizes, recipe)
    page = _page_bytes(decoding_model(model), sizes, topology.platform)
    available = int(USABLE * topology.usable_bytes)
    pages = max(0, available - weights) // page
    each = -(-length // PAGE_SIZE)
    slots = pages // each
    chip = topology.chip
    bandwidth, peak = chip.hbm_bandwidth / chip.devices, devices * chip.flops / chip.devices

    def seconds(texts):
        """Return the least times of a decoding step: for the memory, and for the computation."""
        read = _bytes(params, sizes, recipe, texts)
        return (read + texts * each * page) / bandwidth, matrix_flops(recipe, texts, 0, shapes) / peak

    flops = matrix_flops(recipe, 1, 0, {"decoder": shapes["decoder"]})
    memory, compute = seconds(slots)
    alone = 1 / max(seconds(1)) if slots else 0.0
    return ServePlan(
        mesh=f"mesh: {describe_sizes(sizes)}" if devices > 1 else f"one {topology.unit}",
        num_parameters=count_parameters(shapes),
        bits=bits,
        dtype=recipe.model.dtype,
        weight_bytes=weights,
        available_bytes=available,
        page_size=PAGE_SIZE,
        page_bytes=page,
        pages=pages,
        length=length,
        slots=slots,
        tokens_per_second=slots / max(memory, compute),
        single_tokens_per_second=alone,
        memory_seconds=memory,
        compute_seconds=compute,
        prompt_flops=flops,
        prompt_tokens_per_second=peak / flops,
    )


def _sizes(recipe: Recipe, topology: Topology, bits: int | None) -> dict[str, int]:
    """Return the sizes of the mesh axes; raise ConfigError if they do not fit the devices or the model."""
    asked = {axis: recipe.parallel.sizes[axis] for axis in ("tensor", "expert")}
    devices = topology.num_chips * topology.chip.devices
    if math.prod(asked.values()) != devices:
        raise ConfigError(
            f"a server shards a model over tensor and expert, whose sizes must multiply to the {devices} devices of "
            f"{topology}, got tensor {asked['tensor']} and expert {asked['expert']}. Pass --parallel.tensor "
            f"{devices}, or a topology of one chip such as {topology.smallest}."
        )
    sizes = mesh_sizes(asked, devices)
    check_model(recipe.model, sizes)
    if bits is not None and devices > 1:
        raise ConfigError(f"quantized weights are not sharded, got {devices} devices. Remove --quantize int{bits}.")
    return sizes


def _bytes(params: PyTree, sizes: Mapping[str, int], recipe: Recipe, texts: int | None = None) -> int:
    """Return the bytes per device of the parameters (None: all), that a decoding step of so many texts must read.

    A step reads a few rows of an input embedding, and all of it only if it is the output head too. Of the experts of a
    layer, it reads at most `top_k` for each text.
    """
    total = 0
    for name, leaf in zip(parameter_paths(params), jax.tree.leaves(params), strict=True):
        size = leaf.size * leaf.dtype.itemsize
        if texts is not None and name.startswith("embedding/") and not recipe.model.embedding.tie:
            continue
        if texts is not None and "/experts/" in name:
            moe = next(layer.kind.moe for layer in recipe.model.layers() if f"/{layer.path}/" in name)
            size = size * min(texts * moe.top_k, moe.num_experts) // moe.num_experts
        entries = parameter_spec(name, leaf.shape, sizes)
        axes = [axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry or ())]
        total += size // math.prod(sizes[axis] for axis in axes)
    return total


def _page_bytes(model: CausalLM, sizes: Mapping[str, int], platform: str) -> int:
    """Return the bytes per device of one page in all layers, as a device of this platform stores it."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    with jax.sharding.use_abstract_mesh(mesh):  # heads are stored so that the mesh can split them
        one = {"rows": 1, "pages_per_row": 1, "num_pages": 1, "page_size": PAGE_SIZE}
        cache = jax.eval_shape(lambda: paged_cache(model, **one, lanes=LANES.get(platform, 1)))
    pools = [leaf for leaf in jax.tree.leaves(cache) if leaf.ndim >= 4]
    split = [sizes["tensor"] if pool.shape[-2] % sizes["tensor"] == 0 else 1 for pool in pools]
    size = jnp.dtype(model.config.dtype).itemsize  # on a CPU, the cache of a 16-bit model has float32
    return sum(pool.size * size // parts for pool, parts in zip(pools, split, strict=True))
