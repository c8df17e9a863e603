"""Generation over a mesh, compiled for a topology: the program that `generate` runs, without running it."""

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

from transformer.config._checks import ConfigError
from transformer.generate._decoding import Batch, decode
from transformer.generate._prompts import decoding_model
from transformer.generate._sampling import SamplerParams, Sampling
from transformer.nn._sharding import (
    BATCH_AXES,
    check_model,
    make_mesh,
    mesh_sizes,
    row_ways,
    state_shardings,
    told_sizes,
)
from transformer.nn.models._base import count_parameters
from transformer.training._flops import matrix_flops
from transformer.training._memory import shard_bytes
from transformer.training._recipe import Recipe, build_model
from transformer.training._state import abstract_state
from transformer.training._tasks import TASKS
from transformer.training.plan._compiling import compile_program
from transformer.training.plan._hlo import Collective, Cost, Program
from transformer.training.plan._roofline import Estimate, estimate
from transformer.training.plan._topologies import Topology

USUAL_ROWS = 8
"""rows of a generation that is not told"""

LOOP = f"jit({decode.__name__})/while"
"""what JAX calls the loop over new tokens in the compiled program"""


@dataclass(frozen=True)
class Generation:
    """What is to be written: `rows` texts at once, each of `prompt` tokens that are read and `new` that are written."""

    rows: int
    prompt: int
    new: int

    def __str__(self):
        return f"{self.rows}:{self.prompt}:{self.new}"


def parse_generation(text: str | None, recipe: Recipe) -> Generation:
    """The generation of "8:1024:256"; None: the lengths that the recipe trains on, an even share of running text.

    Raises:
        ConfigError: a model that writes no text, not three whole numbers, or more tokens than the model has positions.
    """
    data = recipe.data
    _check_writes(recipe)
    if text is not None:
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*){2}", text):
            raise ConfigError(
                f"--decode takes ROWS:PROMPT:NEW, how many texts at once, tokens of each that are read and that are "
                f"written, such as 8:1024:256, got {text!r}."
            )
        wanted = Generation(*map(int, text.split(":")))
    elif TASKS[recipe.task].source:
        wanted = Generation(USUAL_ROWS, data.max_source_length, data.max_target_length)
    else:
        half = max(1, data.sequence_length // 2)
        wanted = Generation(USUAL_ROWS, half, half)
    pairs, model = TASKS[recipe.task].source, recipe.model
    for length, longest in (
        (wanted.new if pairs else wanted.prompt + wanted.new, model.max_length),
        (wanted.prompt if pairs else 0, model.longest_source),
    ):
        if longest is not None and length > longest:
            raise ConfigError(
                f"--decode {wanted}: the model has {longest} positions (model.max_length, and of sources "
                f"model.embedding.source_max_length). Give fewer tokens."
            )
    return wanted


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """What compiling a generation for a topology tells. Bytes are those of one device."""

    fits: bool
    """whether the compiler found room for it"""
    mesh: str
    """the axes that split something"""
    generation: Generation
    num_parameters: int
    """numbers in them"""
    memory: dict[str, int]
    """bytes by kind"""
    cache_bytes: int
    """of keys and values, inside the temporaries"""
    needed_bytes: int
    """in all"""
    available_bytes: int
    """that the compiler may use; where it fits, the HBM of a device"""
    prefill: Estimate | None
    """reading the prompts; None: does not fit, or not available"""
    token: Estimate | None
    """one more token of every row"""
    collectives: list[Collective] | None
    """of one more token; None: not available"""
    loops_known: bool
    """whether all is counted as often as the loops turn; else loops over experts count as often as they can turn"""
    unavailable: str
    """why there is no estimate though it fits, or an empty text"""
    remedies: list[str]
    """what would help where it does not fit"""
    seconds: float
    """that lowering and compiling took"""

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows, prompts read; 0 where there is no estimate."""
        return self.generation.rows / self.token.seconds if self.token else 0.0


def make_decode_plan(recipe: Recipe, generation: Generation, topology: Topology, devices: list[Any]) -> DecodePlan:
    """Compiles the reading of prompts and the loop over new tokens for devices of a topology.

    Parameters lie as in training, rows are split over data, fsdp and expert, heads of the cache over tensor.

    Raises:
        ConfigError: pmap, or a model or rows that do not fit the mesh.
    """
    begun = time.perf_counter()
    recipe = dataclasses.replace(recipe, lora=None)  # generation uses the merged parameters
    devices = recipe.parallel.choose(devices)
    sizes = _checked_sizes(recipe, generation, len(devices))
    lowered, params = _lowered(recipe, generation, make_mesh(sizes, devices))
    fit, text = compile_program(lowered, {"parameters": shard_bytes(params)}, topology)
    costs, unavailable = (None, "") if not fit.fits else _costs(text, len(devices))
    prefill = token = None
    if costs is not None:
        prefill = _estimate(topology, len(devices), costs[0], 0)
        token = _estimate(topology, len(devices), costs[1], matrix_flops(recipe, generation.rows, 0))
    split = told_sizes(sizes)
    return DecodePlan(
        **dataclasses.asdict(fit),
        mesh=f"mesh: {split}" if split else f"one {topology.unit}",
        generation=generation,
        num_parameters=count_parameters(params),
        cache_bytes=_cache_bytes(recipe, generation, sizes),
        prefill=prefill,
        token=token,
        collectives=None if costs is None else costs[1].collectives,
        loops_known=costs is not None and all(cost.loops_known for cost in costs),
        unavailable=unavailable,
        remedies=[] if fit.fits else _remedies(recipe, generation, sizes),
        seconds=time.perf_counter() - begun,
    )


def _checked_sizes(recipe: Recipe, generation: Generation, num_devices: int) -> dict[str, int]:
    """Sizes of the mesh axes that a generation runs over."""
    if recipe.parallel.kind != "mesh":
        raise ConfigError("generation is planned over a mesh. Leave --parallel.kind out.")
    _check_writes(recipe)
    sizes = mesh_sizes(recipe.parallel.sizes, num_devices)
    check_model(recipe.model, sizes)
    ways = row_ways(sizes)
    if generation.rows % ways:
        raise ConfigError(
            f"--decode {generation}: rows must be a multiple of the {ways} parts that they are split into (data x fsdp "
            f"x expert). Give {-(-generation.rows // ways) * ways} rows, or --parallel.tensor {num_devices}."
        )
    return sizes


def _check_writes(recipe: Recipe) -> None:
    task = TASKS[recipe.task]
    if not task.writes:
        raise ConfigError(f"a {task.model.__name__} writes no text. Leave --decode out.")


def _lowered(recipe: Recipe, generation: Generation, mesh: Mesh) -> tuple[jax.stages.Lowered, Any]:
    """The program before it is compiled, and shapes of the parameters as they lie on the mesh."""
    shapes = abstract_state(recipe).params
    params = jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, state_shardings(shapes, mesh))
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES if row_ways(mesh.shape) > 1 else None))

    whole = NamedSharding(mesh, PartitionSpec())

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rows if shape else whole)

    batch, pairs = generation.rows, TASKS[recipe.task].source
    read = Batch(array(batch, generation.prompt), array(batch))
    model = decoding_model(build_model(recipe))
    # Real arrays, so made here: in the mesh below they would be put on devices that are not there.
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
        )
    return lowered, params


def _slots(recipe: Recipe, generation: Generation) -> int:
    """Positions of the cache; of a translation one stands before what is written."""
    return generation.new + (1 if TASKS[recipe.task].source else generation.prompt)


def _costs(text: str | None, num_devices: int) -> tuple[tuple[Cost, Cost] | None, str]:
    """What a device does to read the prompts, and for a token of each row; or None, and why."""
    if text is None:
        return None, "the compiler can't print this program"
    program = Program(text)
    loop = program.loop(LOOP)
    if loop is None:
        return None, "the loop over new tokens is not to be found in the compiled program"
    costs = tuple(
        program.cost(num_devices, begin=begin, without=loop if begin is None else None, at_most=True)
        for begin in (None, loop)
    )
    if not all(cost.loops_bounded for cost in costs):
        return None, "the turns of a loop are not known"
    return costs, ""


def _estimate(topology: Topology, num_devices: int, cost: Cost, at_least: int) -> Estimate:
    """Of a cost on one device; `at_least`: FLOPs of all devices, some of which may not be written as products."""
    flops = max(cost.flops, at_least // num_devices)
    return estimate(
        topology.chip,
        num_devices,
        model_flops=flops * num_devices,
        flops=flops,
        hbm_bytes=cost.hbm_bytes,
        wire_bytes=cost.wire_bytes,
    )


def _cache_bytes(recipe: Recipe, generation: Generation, sizes: Mapping[str, int]) -> int:
    """Bytes of one device of keys and values, of a source's too, where rows and heads are split."""
    model = build_model(recipe)
    cache = jax.eval_shape(lambda: model.init_cache(generation.rows, _slots(recipe, generation)))
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    config = recipe.model
    if TASKS[recipe.task].source:
        size = config.kv_heads * (config.size_of_head + config.size_of_value) * jnp.dtype(config.dtype).itemsize
        whole += generation.rows * generation.prompt * size * config.decoder_layers
    # A latent is one head, which is whole on every device.
    heads = sizes["tensor"] if config.attention.mla is None and config.kv_heads % sizes["tensor"] == 0 else 1
    return whole // (row_ways(sizes) * heads)


def _remedies(recipe: Recipe, generation: Generation, sizes: Mapping[str, int]) -> list[str]:
    """Flags that lower the memory of a generation on a mesh of these sizes, each with what it does."""
    found = []
    if recipe.model.param_dtype == "float32":
        found.append("--model.param-dtype bfloat16: parameters of half the size")
    if sizes["data"] > 1 and recipe.model.num_heads % (sizes["data"] * sizes["tensor"]) == 0:
        found.append(f"--parallel.tensor {sizes['data'] * sizes['tensor']} --parallel.data 1: parameters split as well")
    if generation.rows > 1 and generation.rows // 2 % row_ways(sizes) == 0:
        fewer = dataclasses.replace(generation, rows=generation.rows // 2)
        found.append(f"--decode {fewer}: fewer rows at once")
    return [*found, "more chips, or a kind with more memory: another --topology"]
