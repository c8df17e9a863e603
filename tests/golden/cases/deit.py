"""Tiny models of DeiT."""

from golden.case import Family
from golden.sizes import ENCODER

deit = Family("DeiT", ENCODER | {"image_size": 9, "patch_size": 3, "num_labels": 5})

CASES = {
    "teacher": deit.case("ForImageClassificationWithTeacher"),
    "classifier": deit.case("ForImageClassification", qkv_bias=False, num_channels=1),
    "base": deit.case("Model", num_labels=2),
}
