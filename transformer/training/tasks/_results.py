"""What the report at the end of training found; a part of the summary of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformer.training.tasks._evaluation import EvalLoss
from transformer.training.tasks._translation import CorpusScore, Score


@dataclass(frozen=True, kw_only=True)
class Results:
    """Scores, measures and texts of a trained model on unseen data."""

    exact_match: dict[str, Score] = field(default_factory=dict)
    """exact-match score by group of unseen examples; "" is the group of all"""
    group_name: str = "group"
    """name of these groups"""
    basics: Score | None = None
    """exact-match score on the split "basics", if the data has one"""
    corpus: CorpusScore | None = None
    """BLEU and chrF of unseen examples, if the data is text in natural languages"""
    split: str = ""
    """split of the data that contains the unseen examples"""
    held_out: EvalLoss | None = None
    """measures on that split, for numeric data"""
    baseline: EvalLoss | None = None
    """measures of the baseline on that split: a forecast that repeats the last step"""
    translations: tuple[tuple[str, str, str], ...] = ()
    """(source, correct target, output) of some unseen examples; the source of a caption is the path of its image"""
    text: str = ""
    """a generated text (language models)"""
    prompt: str = ""
    """prompt for trying the model"""
