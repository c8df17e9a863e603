"""HuBERT: the model of wav2vec 2.0, with another pretraining."""

from __future__ import annotations

from transformer.zoo._family import Family, Variant
from transformer.zoo._fields import LARGE, layer_sizes
from transformer.zoo.families import _wav2vec2 as wav2vec2

_EXTRA_LARGE = layer_sizes(1280, 5120, 48, 16)

HUBERT = Family(
    name="hubert",
    title="HuBERT",
    citation="Hsu et al. 2021, arXiv 2106.07447",
    heads=wav2vec2.speech_heads("Hubert"),
    constants=wav2vec2.SPEECH_CONSTANTS,
    fields=wav2vec2.speech_fields(optional=True),
    rules=lambda config: wav2vec2.speech_rules(config, "hubert."),
    prefix="hubert.",
    old_names=wav2vec2.OLD_WEIGHT_NORM,
    variants={
        "hubert-base-ls960": Variant(
            hub="facebook/hubert-base-ls960", parameters=94_370_944, fields={}, architecture="HubertModel"
        ),
        "hubert-large-ls960-ft": Variant(
            hub="facebook/hubert-large-ls960-ft", parameters=315_470_496, fields=LARGE | wav2vec2.STABLE
        ),
        "hubert-xlarge-ls960-ft": Variant(
            hub="facebook/hubert-xlarge-ls960-ft", parameters=962_537_120, fields=_EXTRA_LARGE | wav2vec2.STABLE
        ),
    },
)
