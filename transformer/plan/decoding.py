"""Generation over a mesh, compiled for a topology: the program that `generate` runs, without running it."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from transformer.config import ConfigError
from transformer.generate.decoding import Rows, decode
from transformer.generate.sampling import Choice, Sampling
from transformer.plan.chips import Topology
from transformer.plan.compiling import compile_program
from transformer.plan.hlo import Collective, Program
from transformer.plan.programs import shard_bytes
from transformer.plan.roofline import Estimate, estimate
from transformer.sharding import BATCH_AXES, check_model, make_mesh, mesh_sizes, state_shardings
from transformer.training.recipe import Recipe, build_model
from transformer.training.state import abstract_state, count_parameters

USUAL_ROWS = 8
"""rows of a generation that is not told"""


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
        ConfigError: not three whole numbers, or more tokens than the model has positions.
    """
    data = recipe.data
    if text is not None:
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*){2}", text):
            raise ConfigError(
                f"--decode takes ROWS:PROMPT:NEW, how many texts at once, tokens of each that are read and that are "
                f"written, such as 8:1024:256, got {text!r}."
            )
        wanted = Generation(*map(int, text.split(":")))
    elif recipe.task == "seq2seq":
        wanted = Generation(USUAL_ROWS, data.max_source_length, data.max_target_length)
    else:
        half = max(1, data.sequence_length // 2)
        wanted = Generation(USUAL_ROWS, half, half)
    longest = recipe.model.max_length
    length = wanted.new if recipe.task == "seq2seq" else wanted.prompt + wanted.new
    if longest is not None and max(length, wanted.prompt) > longest:
        raise ConfigError(
            f"--decode {wanted}: the model has {longest} positions (model.max_length). Give fewer tokens."
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
    remedies: list[str]
    """what would help where it does not fit"""
    seconds: float
    """that lowering and compiling took"""

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows, prompts read; 0 where it does not fit."""
        return self.generation.rows / self.token.seconds if self.token else 0.0


def make_decode_plan(recipe: Recipe, generation: Generation, topology: Topology, devices: list[Any]) -> DecodePlan:
    """Compiles the reading of prompts and the loop over new tokens for devices of a topology.

    Parameters lie as in training, rows are split over data, fsdp and expert, heads of the cache over tensor.

    Raises:
        ConfigError: pmap, or a model or rows that do not fit the mesh.
    """
    begun = time.perf_counter()
    if recipe.parallel.kind != "mesh":
        raise ConfigError("generation is planned over a mesh. Leave --parallel.kind out.")
    if recipe.task == "classifier":
        raise ConfigError("a classifier writes no text. Leave --decode out.")
    devices = recipe.parallel.choose(devices)
    sizes = mesh_sizes(recipe.parallel.sizes, len(devices))
    check_model(recipe.model, sizes)
    ways = math.prod(sizes[axis] for axis in BATCH_AXES)
    if generation.rows % ways:
        raise ConfigError(
            f"--decode {generation}: rows must be a multiple of the {ways} parts that they are split into (data x fsdp "
            f"x expert). Give {-(-generation.rows // ways) * ways} rows, or --parallel.tensor {len(devices)}."
        )
    mesh = make_mesh(sizes, devices)
    shapes = abstract_state(recipe).params
    params = jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, state_shardings(shapes, mesh))
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES if ways > 1 else None))

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rows if shape else NamedSharding(mesh, PartitionSpec()))

    batch, pairs = generation.rows, recipe.task == "seq2seq"
    read = Rows(array(batch, generation.prompt), array(batch))
    prompts = Rows(array(batch, 1), array(batch)) if pairs else read
    model = build_model(recipe)
    slots = prompts.tokens.shape[1] + generation.new
    keys, choice = (
        array(batch, dtype=jax.random.key(0).dtype),
        Choice.of(Sampling(temperature=0.0), model.config.vocab_size),
    )
    with jax.set_mesh(mesh):
        lowered = decode.lower(
            model,
            params,
            prompts,
            read if pairs else None,
            keys,
            choice,
            array(),
            array(),
            cache_slots=slots,
            new_slots=generation.new,
        )
    fit, text = compile_program(lowered, {"parameters": shard_bytes(params)}, topology)
    prefill = token = talk = None
    if text is not None:
        program = Program(text)
        first = program.cost(mesh.size, unknown_turns=0)
        step = program.cost(mesh.size, begin=program.open_loop())
        prefill, token = (
            estimate(
                topology.chip,
                mesh.size,
                model_flops=cost.flops * mesh.size,
                flops=cost.flops,
                hbm_bytes=cost.hbm_bytes,
                wire_bytes=cost.wire_bytes,
            )
            for cost in (first, step)
        )
        talk = step.collectives
    split = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    return DecodePlan(
        **dataclasses.asdict(fit),
        mesh=f"mesh: {split}" if split else f"one {topology.unit}",
        generation=generation,
        num_parameters=count_parameters(params),
        cache_bytes=_cache_bytes(recipe, model, generation, slots, sizes),
        prefill=prefill,
        token=token,
        collectives=talk,
        remedies=[] if fit.fits else _remedies(recipe, generation, sizes),
        seconds=time.perf_counter() - begun,
    )


def _cache_bytes(recipe, model, generation, slots, sizes) -> int:
    """Bytes of one device of keys and values, of a source's too, where rows and heads are split."""
    cache = jax.eval_shape(lambda: model.init_cache(generation.rows, slots))
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    config = recipe.model
    if recipe.task == "seq2seq":
        size = config.kv_heads * (config.size_of_head + config.size_of_value) * jnp.dtype(config.dtype).itemsize
        whole += generation.rows * generation.prompt * size * config.decoder_layers
    heads = sizes["tensor"] if config.kv_heads % sizes["tensor"] == 0 else 1
    return whole // (math.prod(sizes[axis] for axis in BATCH_AXES) * heads)


def _remedies(recipe: Recipe, generation: Generation, sizes) -> list[str]:
    found = []
    if recipe.model.param_dtype == "float32":
        found.append("--model.param-dtype bfloat16: parameters of half the size")
    if sizes["data"] > 1 and recipe.model.num_heads % (sizes["data"] * sizes["tensor"]) == 0:
        found.append(f"--parallel.tensor {sizes['data'] * sizes['tensor']} --parallel.data 1: parameters split as well")
    if generation.rows > 1 and generation.rows // 2 % math.prod(sizes[axis] for axis in BATCH_AXES) == 0:
        fewer = dataclasses.replace(generation, rows=generation.rows // 2)
        found.append(f"--decode {fewer}: fewer rows at once")
    return [*found, "more chips, or a kind with more memory: another --topology"]
