"""HuBERT: the model of wav2vec 2.0, with another pretraining."""

from __future__ import annotations

from transformer.zoo._family import Family, variants
from transformer.zoo.families import _wav2vec2 as wav2vec2

_VARIANTS = {
    "hubert-large-ls960-ft": (315_470_496, 1024, 4096, 24, 16),
    "hubert-xlarge-ls960-ft": (962_537_120, 1280, 5120, 48, 16),
}

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
        **variants("facebook/", {"hubert-base-ls960": (94_370_944,)}, (), architecture="HubertModel"),
        **variants("facebook/", _VARIANTS, **wav2vec2.STABLE),
    },
)
