"""Studies that measure a formula, computed with the library's own functions."""

from transformer.viz.studies._memory import MemoryRow, forward_and_backward, memory_study, temporary_bytes
from transformer.viz.studies._padding import PaddingRow, number_word_lengths, pack, padding_study, text_lengths
from transformer.viz.studies._positions import CodesRow, PositionStudy, RepeatRow, SimilarityRow, position_study
from transformer.viz.studies._scale import ScaleRow, scale_study, softmax_gradient
from transformer.viz.studies._sizes import Size, sizes, sizes_table

__all__ = [
    "CodesRow",
    "MemoryRow",
    "PaddingRow",
    "PositionStudy",
    "RepeatRow",
    "ScaleRow",
    "SimilarityRow",
    "Size",
    "forward_and_backward",
    "memory_study",
    "number_word_lengths",
    "pack",
    "padding_study",
    "position_study",
    "scale_study",
    "sizes",
    "sizes_table",
    "softmax_gradient",
    "temporary_bytes",
    "text_lengths",
]
