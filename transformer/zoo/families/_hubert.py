"""HuBERT: the model of wav2vec 2.0, with another pretraining."""

from __future__ import annotations

from transformer.zoo._family import Family, Variant
from transformer.zoo._fields import LARGE, layer_sizes
from transformer.zoo.families._wav2vec2 import (
    OLD_WEIGHT_NORM,
    SPEECH_CONSTANTS,
    STABLE,
    speech_fields,
    speech_heads,
    speech_rules,
)

_EXTRA_LARGE = layer_sizes(1280, 5120, 48, 16)

HUBERT = Family(
    name="hubert",
    title="HuBERT",
    citation="Hsu et al. 2021, arXiv 2106.07447",
    heads=speech_heads("Hubert"),
    constants=SPEECH_CONSTANTS,
    fields=speech_fields(optional=True),
    rules=lambda config: speech_rules(config, "hubert."),
    prefix="hubert.",
    old_names=OLD_WEIGHT_NORM,
    variants={
        "hubert-base-ls960": Variant(
            hub="facebook/hubert-base-ls960", parameters=94_370_944, fields={}, architecture="HubertModel"
        ),
        "hubert-large-ls960-ft": Variant(
            hub="facebook/hubert-large-ls960-ft", parameters=315_470_496, fields=LARGE | STABLE
        ),
        "hubert-xlarge-ls960-ft": Variant(
            hub="facebook/hubert-xlarge-ls960-ft", parameters=962_537_120, fields=_EXTRA_LARGE | STABLE
        ),
    },
)
