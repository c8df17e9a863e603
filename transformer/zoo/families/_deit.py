"""DeiT: ViT with a distillation token, and a second classifier on it."""

from __future__ import annotations

from transformer.nn.models._vision import DistilledVisionClassifier, VisionClassifier
from transformer.zoo._family import Family, Variant
from transformer.zoo.families._vit import VIT_CONSTANTS, VIT_LAYER, vit_base, vit_classifier, vit_fields, vit_rules


def _variant(name: str, parameters: int, width: int, heads: int) -> Variant:
    fields = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width, "num_labels": 1000}
    return Variant(hub=f"facebook/{name}", parameters=parameters, fields=fields)


_CLASSIFIERS = ("classifier", "cls_classifier", "distillation_classifier")

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
    rules=lambda config: vit_rules("deit.", VIT_LAYER),
    prefix="deit.",
    variants={
        "deit-tiny-distilled-patch16-224": _variant("deit-tiny-distilled-patch16-224", 5_910_800, 192, 3),
        "deit-small-distilled-patch16-224": _variant("deit-small-distilled-patch16-224", 22_436_432, 384, 6),
        "deit-base-distilled-patch16-224": _variant("deit-base-distilled-patch16-224", 87_338_192, 768, 12),
    },
)
