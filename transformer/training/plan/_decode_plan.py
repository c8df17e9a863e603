"""Plan text generation over a mesh: compile the program of `generate` for a topology, without running it."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from transformer.config._checks import ConfigError
from transformer.generate._decoding import Batch
from transformer.generate._loop import decode
from transformer.generate._prompts import decoding_model
from transformer.generate._sampling import SamplerParams, Sampling
from transformer.nn import _sharding as meshes
from transformer.nn.models._base import count_parameters
from transformer.training._flops import matrix_flops
from transformer.training._memory import shard_bytes
from transformer.training._recipe import Recipe, build_model
from transformer.training._state import abstract_state
from transformer.training.plan._compile import compile_program
from transformer.training.plan._contract import Topology
from transformer.training.plan._hlo import Cost
from transformer.training.plan._hlo_text import Collective
from transformer.training.plan._roofline import Estimate, estimate
from transformer.training.plan._train_plan import MORE
from transformer.training.tasks._table import TASKS

USUAL_ROWS = 8
"""default number of rows of a generation"""

LOOP = f"jit({decode.__name__})/while"
"""JAX's name of the loop over new tokens in the compiled program"""


@dataclass(frozen=True)
class Generation:
    """Sizes of a generation."""

    rows: int
    """batch size"""
    prompt: int
    """number of tokens of each prompt"""
    new: int
    """number of new tokens per prompt"""

    def __str__(self):
        return f"{self.rows}:{self.prompt}:{self.new}"


def parse_generation(text: str | None, recipe: Recipe) -> Generation:
    """Parse a generation such as "8:1024:256" (ROWS:PROMPT:NEW).

    For None the lengths are those that the recipe trains on: of sources and targets or, for a language model, half of
    the sequence length each.

    Raises:
        ConfigError: the model does not generate text, the text is not three positive integers, or there are more tokens
            than the model has positions.
    """
    data = recipe.data
    _check_writes(recipe)
    if text is not None:
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*){2}", text):
            raise ConfigError(
                f"--shape must be ROWS:PROMPT:NEW (batch size, prompt tokens and new tokens per row), such as "
                f"8:1024:256, got {text!r}."
            )
        wanted = Generation(*map(int, text.split(":")))
    elif _pairs(recipe):
        wanted = Generation(USUAL_ROWS, data.max_source_length, data.max_target_length)
    else:
        half = max(1, data.sequence_length // 2)
        wanted = Generation(USUAL_ROWS, half, half)
    pairs, model = _pairs(recipe), recipe.model
    for length, longest in (
        (wanted.new if pairs else wanted.prompt + wanted.new, model.max_length),
        (wanted.prompt if pairs else 0, model.longest_source),
    ):
        if longest is not None and length > longest:
            raise ConfigError(
                f"--shape {wanted}: the model has only {longest} positions (model.position.max_length, and for sources "
                f"model.position.source_max_length). Pass fewer tokens."
            )
    return wanted


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """Memory and estimated speed of a generation on a topology. Bytes are per device.

    `fits`, `memory` by kind, its total `needed_bytes`, `available_bytes`, and `host_memory` are those of `Fit`.
    """

    fits: bool
    mesh: str
    """mesh axes larger than 1"""
    generation: Generation
    num_parameters: int
    """number of parameters of the model"""
    memory: dict[str, int]
    cache_bytes: int
    """bytes of the KV cache, which are part of the temporaries"""
    token_bytes: int
    """bytes that a decoding step reads from and writes to the HBM; 0 without an estimate"""
    launches: int
    """number of kernels, copies and collectives that a decoding step starts; 0 without an estimate"""
    least_token_bytes: int
    """bytes that a decoding step must read at least: the parameters that it multiplies with, once and in the dtype of
    the computation, and the whole KV cache. With experts, all of them."""
    needed_bytes: int
    available_bytes: int
    host_memory: dict[str, int] = dataclasses.field(default_factory=dict)
    prefill: Estimate | None
    """estimate of the prefill (reading the prompts); None if it does not fit or is not available"""
    token: Estimate | None
    """estimate of one decoding step, which adds a token to every row"""
    collectives: list[Collective] | None
    """collectives of one decoding step; None if not available"""
    loops_known: bool
    """whether the number of iterations of every loop is known; otherwise loops over experts count at their maximum"""
    unavailable: str
    """why there is no estimate although the program fits; otherwise empty"""
    remedies: list[str]
    """changes that would help if the program does not fit"""
    seconds: float
    """time for lowering and compilation"""

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of all rows, without the prefill; 0 without an estimate."""
        return self.generation.rows / self.token.seconds if self.token else 0.0


def make_decode_plan(
    recipe: Recipe, generation: Generation, topology: Topology, devices: list[Any], *, paged: bool = False
) -> DecodePlan:
    """Compile the prefill and the loop over new tokens for devices of a topology.

    Parameters are sharded as in training. Rows are split over the mesh axes data, fsdp and expert; the heads of the KV
    cache are split over tensor. With `paged`, the cache has pages, all of which are counted as read.

    Raises:
        ConfigError: parallel.kind is pmap, or the model or the rows do not fit the mesh.
    """
    started = time.perf_counter()
    recipe = dataclasses.replace(recipe, lora=None)  # generation uses the merged parameters
    devices = recipe.parallel.choose(devices)
    sizes = _checked_sizes(recipe, generation, len(devices))
    mesh = meshes.make_mesh(sizes, devices, recipe.parallel.dcn)
    lowered, params = _lowered(recipe, generation, mesh, paged)
    fit, text = compile_program(lowered, {"parameters": shard_bytes(params)}, topology)
    costs, unavailable = (None, "") if not fit.fits else _costs(text, topology, list(mesh.devices.flat))
    prefill = token = None
    if costs is not None:
        prefill = _estimate(topology, len(devices), costs[0], 0)
        # Every row multiplies all matrices once per new token, in whatever operations the compiler has put this.
        token = _estimate(topology, len(devices), costs[1], matrix_flops(recipe, generation.rows, 0))
    split = meshes.describe_sizes(sizes, recipe.parallel.dcn)
    return DecodePlan(
        **dataclasses.asdict(fit),
        mesh=f"mesh: {split}" if split else f"one {topology.unit}",
        generation=generation,
        num_parameters=count_parameters(params),
        cache_bytes=(cache := _cache_bytes(recipe, generation, mesh)),
        token_bytes=0 if costs is None else costs[1].hbm_bytes,
        launches=0 if costs is None else costs[1].launches,
        least_token_bytes=_read_bytes(recipe, params) + cache,
        prefill=prefill,
        token=token,
        collectives=None if costs is None else costs[1].collectives,
        loops_known=costs is not None and all(cost.loops_known for cost in costs),
        unavailable=unavailable,
        remedies=[] if fit.fits else _remedies(recipe, generation, sizes),
        seconds=time.perf_counter() - started,
    )


def _checked_sizes(recipe: Recipe, generation: Generation, num_devices: int) -> dict[str, int]:
    """Return the sizes of the mesh axes of a generation; raise ConfigError if something does not fit the mesh."""
    if recipe.parallel.kind != "mesh":
        raise ConfigError("a plan of generation needs a mesh. Remove --parallel.kind.")
    _check_writes(recipe)
    sizes = meshes.mesh_sizes(recipe.parallel.sizes, num_devices)
    meshes.check_model(recipe.model, sizes)
    ways = meshes.num_row_shards(sizes)
    if generation.rows % ways:
        raise ConfigError(
            f"--shape {generation}: the number of rows must be a multiple of {ways}, because they are split over the "
            f"mesh (data x fsdp x expert). Pass {-(-generation.rows // ways) * ways} rows, or --parallel.tensor "
            f"{num_devices}."
        )
    return sizes


def _pairs(recipe: Recipe) -> bool:
    return TASKS[recipe.task].source  # the prompt is read by an encoder, and the decoder starts with a begin token


def _check_writes(recipe: Recipe) -> None:
    task = TASKS[recipe.task]
    if not task.writes:
        raise ConfigError(
            f"a {task.model.__name__} does not generate text, so `plan decode` has nothing to plan. Use `plan train`."
        )


def _lowered(recipe: Recipe, generation: Generation, mesh: Mesh, paged: bool) -> tuple[jax.stages.Lowered, PyTree]:
    """Lower the program for a mesh; return it with the shapes and shardings of the parameters."""
    shapes = abstract_state(recipe).params
    params = jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, meshes.state_shardings(shapes, mesh))
    rows = NamedSharding(mesh, PartitionSpec(meshes.BATCH_AXES if meshes.num_row_shards(mesh.shape) > 1 else None))

    whole = NamedSharding(mesh, PartitionSpec())

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rows if shape else whole)

    batch, pairs = generation.rows, _pairs(recipe)
    read = Batch(array(batch, generation.prompt), array(batch))
    model = decoding_model(build_model(recipe))
    # Concrete arrays, so created outside the mesh below, which would place them on devices that don't exist.
    keys, choice = jax.random.key(0).dtype, SamplerParams.of(Sampling(temperature=0.0), model.config.vocab_size)
    with jax.set_mesh(mesh):
        lowered = decode.lower(
            model,
            params,
            Batch(array(batch, 1), array(batch)) if pairs else read,
            read if pairs else None,
            array(batch, dtype=keys),
            choice,
            jax.ShapeDtypeStruct((1,), jnp.int32, sharding=whole),
            array(),
            cache_slots=_slots(recipe, generation),
            new_slots=generation.new,
            paged=paged,
        )
    return lowered, params


def _slots(recipe: Recipe, generation: Generation) -> int:
    """Return the number of positions of the cache; in a translation the begin token takes one."""
    return generation.new + (1 if _pairs(recipe) else generation.prompt)


def _costs(text: str | None, topology: Topology, devices: list[Any]) -> tuple[tuple[Cost, Cost] | None, str]:
    """Return the costs per device of the prefill and of one decoding step, or None and the reason."""
    if text is None:
        return None, "the compiler can't print this program"
    program = topology.program(text, devices)
    loop = program.loop(LOOP)
    if loop is None:
        return None, "the compiled program has no recognizable loop over new tokens"
    # The prefill is the whole program without this loop; a decoding step is one iteration of the loop.
    costs = tuple(
        program.cost(len(devices), begin=begin, without=loop if begin is None else None, at_most=True)
        for begin in (None, loop)
    )
    if not all(cost.loops_bounded for cost in costs):
        return None, "the number of iterations of a loop is not known"
    return costs, ""


def _estimate(topology: Topology, num_devices: int, cost: Cost, at_least: int) -> Estimate:
    """Estimate the time of a cost per device, with at least so many FLOPs of all devices: the compiler turns some
    multiplications into other operations than dot.
    """
    flops = max(cost.flops, at_least // num_devices)
    return estimate(topology.chip, num_devices, model_flops=flops * num_devices, flops=flops, **cost.parts)


def _cache_bytes(recipe: Recipe, generation: Generation, mesh: Mesh) -> int:
    """Return the bytes per device of the KV cache, for translations including the keys and values of the source."""
    model = build_model(recipe)
    with jax.set_mesh(mesh):  # the dtype of a cache depends on the platform
        cache = jax.eval_shape(lambda: model.init_cache(generation.rows, _slots(recipe, generation)))
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    config = recipe.model
    if _pairs(recipe):
        # Cross-attention: keys (G, H) and values (G, Hv) of every source token, in every layer of the decoder.
        size = config.kv_heads * (config.size_of_head + config.size_of_value) * jnp.dtype(config.dtype).itemsize
        whole += generation.rows * generation.prompt * size * config.decoder_layers
    # MLA caches one latent per token, which all heads share; it can't be split by heads.
    tensor = mesh.shape["tensor"]
    heads = tensor if config.attention.mla is None and config.kv_heads % tensor == 0 else 1
    return whole // (meshes.num_row_shards(mesh.shape) * heads)


def _read_bytes(recipe: Recipe, params: PyTree) -> int:
    """Return the bytes per device of the parameters that a decoding step reads, in the dtype of the computation.

    A step reads a few rows of an input embedding, and all of it only if it is the output head too. The compiler
    converts parameters of a larger dtype once, before the loop over new tokens.
    """
    unread = {"encoder", "source_embedding"} | (set() if recipe.model.embedding.tie else {"embedding"})
    computed = jnp.dtype(recipe.model.dtype)

    def as_read(leaf):
        larger = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > computed.itemsize
        return leaf.update(dtype=computed) if larger else leaf

    return shard_bytes({name: jax.tree.map(as_read, tree) for name, tree in params.items() if name not in unread})


def _remedies(recipe: Recipe, generation: Generation, sizes: Mapping[str, int]) -> list[str]:
    """Return options that reduce the memory of a generation on a mesh of these sizes, each with its effect."""
    found = []
    if recipe.model.parameters.dtype == "float32":
        found.append("--model.parameters.dtype bfloat16: halves the size of the parameters")
    if sizes["data"] > 1 and recipe.model.num_heads % (sizes["data"] * sizes["tensor"]) == 0:
        found.append(
            f"--parallel.tensor {sizes['data'] * sizes['tensor']} --parallel.data 1: splits the parameters too"
        )
    if generation.rows > 1 and generation.rows // 2 % meshes.num_row_shards(sizes) == 0:
        fewer = dataclasses.replace(generation, rows=generation.rows // 2)
        found.append(f"--shape {fewer}: smaller batch")
    return [*found, MORE]
