"""Numbers that show what a formula does, computed with the zoo's own functions."""

from transformer.viz.studies.memory import MemoryRow, forward_and_backward, memory_study, temporary_bytes
from transformer.viz.studies.padding import PaddingRow, number_word_lengths, pack, padding_study, text_lengths
from transformer.viz.studies.positions import CodesRow, PositionStudy, RepeatRow, SimilarityRow, position_study
from transformer.viz.studies.scale import ScaleRow, scale_study, softmax_gradient

__all__ = [
    "CodesRow",
    "MemoryRow",
    "PaddingRow",
    "PositionStudy",
    "RepeatRow",
    "ScaleRow",
    "SimilarityRow",
    "forward_and_backward",
    "memory_study",
    "number_word_lengths",
    "pack",
    "padding_study",
    "position_study",
    "scale_study",
    "softmax_gradient",
    "temporary_bytes",
    "text_lengths",
]
