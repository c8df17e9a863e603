"""Whether a recipe fits a TPU that is not there, told by the TPU compiler (libtpu)."""

from transformer.plan.chips import CHIPS, Chip, CompilerError, Topology, parse_topology, topology_devices
from transformer.plan.flops import Flops, batch_shapes, step_flops, without_data
from transformer.plan.planning import Plan, make_plan
from transformer.plan.roofline import Collective, Estimate, collectives, estimate

__all__ = [
    "CHIPS",
    "Chip",
    "Collective",
    "CompilerError",
    "Estimate",
    "Flops",
    "Plan",
    "Topology",
    "batch_shapes",
    "collectives",
    "estimate",
    "make_plan",
    "parse_topology",
    "step_flops",
    "topology_devices",
    "without_data",
]
