"""DeiT: ViT with a distillation token, and a second classifier on it."""

from __future__ import annotations

from transformer.nn.models._vision import DistilledVisionClassifier, VisionClassifier
from transformer.zoo._family import Family, variants
from transformer.zoo.families._vit import VIT_CONSTANTS, VIT_LAYER, vit_base, vit_classifier, vit_fields, vit_rules

_CLASSIFIERS = ("classifier", "cls_classifier", "distillation_classifier")

_VARIANTS = {
    "deit-tiny-distilled-patch16-224": (5_910_800, 192, 768, 3),
    "deit-small-distilled-patch16-224": (22_436_432, 384, 1536, 6),
    "deit-base-distilled-patch16-224": (87_338_192, 768, 3072, 12),
}

DEIT = Family(
    name="deit",
    title="DeiT",
    citation="Touvron et al. 2020, arXiv 2012.12877",
    heads={
        "DeiTForImageClassificationWithTeacher": vit_classifier(
            DistilledVisionClassifier, output="cls_classifier", distillation_output="distillation_classifier"
        ),
        "DeiTForImageClassification": vit_classifier(VisionClassifier, output="classifier"),
        "DeiTModel": vit_base("deit.", _CLASSIFIERS),
    },
    constants=VIT_CONSTANTS,
    fields=vit_fields(distillation_token=True),
    rules=vit_rules("deit.", VIT_LAYER),
    prefix="deit.",
    variants=variants(
        "facebook/", _VARIANTS, ("hidden_size", "intermediate_size", "num_attention_heads"), num_labels=1000
    ),
)
