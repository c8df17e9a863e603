"""Pretrained model families.

Each family is described as data in one module; shared functions load and save the models of all families.
"""

from transformer.zoo._big_vision import load_big_vision
from transformer.zoo._equivalents import with_equivalent, with_plain_embeddings
from transformer.zoo._family import Family, Head, Variant, abstract_params
from transformer.zoo._image_size import with_image_size
from transformer.zoo._pretrained import (
    Pretrained,
    build,
    choose_family,
    find_family,
    find_variant,
    load_pretrained,
    save_pretrained,
    verify,
)
from transformer.zoo.families import ENTRIES

__all__ = [
    "ENTRIES",
    "Family",
    "Head",
    "Pretrained",
    "Variant",
    "abstract_params",
    "build",
    "choose_family",
    "find_family",
    "find_variant",
    "load_big_vision",
    "load_pretrained",
    "save_pretrained",
    "verify",
    "with_equivalent",
    "with_image_size",
    "with_plain_embeddings",
]
