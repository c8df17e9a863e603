"""Whether a recipe fits a TPU that is not there, told by the TPU compiler (libtpu)."""

from transformer.chips import CHIPS, Chip
from transformer.plan.assumptions import without_data
from transformer.plan.decoding import DecodePlan, Generation, make_decode_plan, parse_generation
from transformer.plan.hlo import Collective, Cost, Program
from transformer.plan.measuring import Measured, measure, present_topology
from transformer.plan.planning import Plan, make_plan
from transformer.plan.roofline import Estimate, estimate
from transformer.plan.searching import Candidate, Tried, ranked, search
from transformer.plan.topologies import CompilerError, Topology, parse_topology, topology_devices
from transformer.training.flops import Flops, batch_shapes, step_flops

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
