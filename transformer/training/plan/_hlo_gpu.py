"""Count the cost of programs that XLA's GPU compiler compiled: library calls, and collectives between hosts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from transformer.training.plan._hlo import Program, convolution_flops
from transformer.training.plan._hlo_text import Operation, replica_groups

_MATRIX_LIBRARY = re.compile(r'custom_call_target="__cublas\$')
_CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv')
_KERNEL = re.compile(r'custom_call_target="(?:__cudnn\$fmha|__gpu\$xla\.gpu\.triton|mosaic_gpu)')


class GpuProgram(Program):
    """A program for GPUs on one or several hosts, parsed from its text.

    Args:
        hlo: the text.
        hosts: host of each device of the program, in the order of its mesh.

    Raises:
        ValueError: the text has no ENTRY computation.
    """

    def __init__(self, hlo: str, hosts: Sequence[int]):
        # S(1) marks memory that collectives use. It is a part of the GPU's memory, not of the chip's as for TPUs.
        super().__init__(hlo.replace("S(1)", ""))
        self._hosts = hosts

    def _is_kernel(self, one: Operation) -> bool:
        return _KERNEL.search(one.rest) is not None

    def _known_kernel(self, name: str, one: Operation, expert_shards: int) -> None:
        return None

    def _collective(self, name, own, one, num_devices, fused):
        """Return kind of a collective, whether it uses the network, bytes of its result, and bytes sent; None for
        others.

        Of a group on several hosts, every host has g devices, which share what their host sends. A ring enters and
        leaves each host once, and NCCL uses g rings over the network cards of g devices, so a device sends 1 / g of
        the bytes that it passes on in its host. In an all-to-all each device sends the parts for other hosts itself.
        """
        found = super()._collective(name, own, one, num_devices, fused)
        if found is None:
            return None
        kind, _, result_bytes, sent = found
        groups = [[self._hosts[device] for device in group] for group in replica_groups(one, num_devices)]
        if all(len(set(group)) == 1 for group in groups):
            return kind, False, result_bytes, sent
        size = len(groups[0])
        together = max(1, size // max(len(set(group)) for group in groups))
        if kind == "all-to-all":
            return kind, True, result_bytes, sent * (size - together) // (size - 1)
        return kind, True, result_bytes, sent if kind == "collective-permute" else -(-sent // together)

    def _flops(self, name: str, one: Operation) -> int:
        if one.kind == "custom-call" and _MATRIX_LIBRARY.search(one.rest):
            return self._library_flops(name, one)
        if one.kind == "custom-call" and _CONVOLUTION.search(one.rest):
            return self._convolution_flops(name, one)
        return super()._flops(name, one)

    def _library_flops(self, name: str, one: Operation) -> int:
        """Count the FLOPs of a matrix multiplication of cuBLAS, whose contracted axes are in its JSON options."""
        left = self._inside[name][one.operands[0]].arrays[0].shape
        axes = re.search(r'lhs_contracting_dimensions\\?":\[([^\]]*)\]', one.rest)[1]
        contracted = math.prod(left[int(axis)] for axis in re.findall(r"\d+", axes))
        return 2 * math.prod(one.arrays[0].shape) * contracted

    def _convolution_flops(self, name: str, one: Operation) -> int:
        """Count the FLOPs of a convolution of cuDNN, or of one of its two derivatives, which have as many.

        Each operation is written with the labels of the convolution that it belongs to: the derivative with respect to
        the input computes the input (its result) from the outputs, and that of the kernel the kernel.
        """
        first, second = (self._inside[name][operand].arrays[0].shape for operand in one.operands[:2])
        result = one.arrays[0].shape
        if "BackwardInput" in one.rest:
            return convolution_flops(one.rest, result, second, first)
        if "BackwardFilter" in one.rest:
            return convolution_flops(one.rest, first, result, second)
        return convolution_flops(one.rest, first, second, result)
