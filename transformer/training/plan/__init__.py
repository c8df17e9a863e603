"""Estimate the memory and speed of a recipe on a TPU or GPU that you don't have, with XLA's compiler for it."""

from transformer.training._chips import CHIPS, Chip, Tpu
from transformer.training._completion import without_data
from transformer.training._flops import Flops, batch_shapes, step_flops
from transformer.training._gpus import GPUS, Gpu
from transformer.training.plan._contract import CompilerError, Topology
from transformer.training.plan._decode_plan import DecodePlan, Generation, make_decode_plan, parse_generation
from transformer.training.plan._gpu_topology import GpuTopology
from transformer.training.plan._hlo import Cost, Program
from transformer.training.plan._hlo_text import Collective
from transformer.training.plan._measurement import Measured, measure, present_topology
from transformer.training.plan._roofline import Estimate, estimate
from transformer.training.plan._search import BatchTried, Candidate, Tried, largest_batch, ranked, search
from transformer.training.plan._serve_plan import ServePlan, make_serve_plan
from transformer.training.plan._topologies import parse_topology, topology_devices
from transformer.training.plan._tpu_topology import TpuTopology
from transformer.training.plan._train_plan import Plan, make_plan

__all__ = [
    "CHIPS",
    "GPUS",
    "BatchTried",
    "Candidate",
    "Chip",
    "Collective",
    "CompilerError",
    "Cost",
    "DecodePlan",
    "Estimate",
    "Flops",
    "Generation",
    "Gpu",
    "GpuTopology",
    "Measured",
    "Plan",
    "Program",
    "ServePlan",
    "Topology",
    "Tpu",
    "TpuTopology",
    "Tried",
    "batch_shapes",
    "estimate",
    "largest_batch",
    "make_decode_plan",
    "make_plan",
    "make_serve_plan",
    "measure",
    "parse_generation",
    "parse_topology",
    "present_topology",
    "ranked",
    "search",
    "step_flops",
    "topology_devices",
    "without_data",
]
