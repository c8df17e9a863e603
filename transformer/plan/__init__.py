"""Whether a recipe fits a TPU that is not there, told by the TPU compiler (libtpu)."""

from transformer.plan.chips import CHIPS, Chip, CompilerError, Topology, parse_topology, topology_devices
from transformer.plan.decoding import DecodePlan, Generation, make_decode_plan, parse_generation
from transformer.plan.flops import Flops, batch_shapes, step_flops, without_data
from transformer.plan.hlo import Collective, Cost, Program
from transformer.plan.measuring import Measured, measure, present_topology
from transformer.plan.planning import Plan, make_plan
from transformer.plan.roofline import Estimate, estimate
from transformer.plan.searching import Candidate, Tried, ranked, search

__all__ = [
    "CHIPS",
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
    "Topology",
    "Tried",
    "batch_shapes",
    "estimate",
    "make_decode_plan",
    "make_plan",
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
