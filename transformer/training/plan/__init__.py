"""Estimate the memory and speed of a recipe on a TPU that you don't have, with the TPU compiler (libtpu)."""

from transformer.training._chips import CHIPS, Chip
from transformer.training._completion import without_data
from transformer.training._flops import Flops, batch_shapes, step_flops
from transformer.training.plan._decode_plan import DecodePlan, Generation, make_decode_plan, parse_generation
from transformer.training.plan._hlo import Cost, Program
from transformer.training.plan._hlo_text import Collective
from transformer.training.plan._measurement import Measured, measure, present_topology
from transformer.training.plan._roofline import Estimate, estimate
from transformer.training.plan._search import BatchTried, Candidate, Tried, largest_batch, ranked, search
from transformer.training.plan._serve_plan import ServePlan, make_serve_plan
from transformer.training.plan._topologies import CompilerError, Topology, parse_topology, topology_devices
from transformer.training.plan._train_plan import Plan, make_plan

__all__ = [
    "CHIPS",
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
    "Measured",
    "Plan",
    "Program",
    "ServePlan",
    "Topology",
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
