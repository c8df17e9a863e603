"""umT5: T5 1.1 with a separate relative position bias in each layer."""

from __future__ import annotations

from transformer.config._positions import T5BiasOptions
from transformer.zoo._family import Family, variants
from transformer.zoo._fields import Unread
from transformer.zoo.families._t5 import T5_CONSTANTS, T5_COPIES, T5_IGNORED, T5_SIZES, t5_fields, t5_heads, t5_rules

_VARIANTS = {
    "umt5-small": (306_601_984, 512, 64, 1024, 8, 6),
    "umt5-base": (592_043_520, 768, 64, 2048, 12, 12),
    "umt5-xl": (3_768_356_864, 2048, 64, 5120, 24, 32),
    "umt5-xxl": (12_972_531_712, 4096, 64, 10_240, 24, 64),
}

UMT5 = Family(
    name="umt5",
    title="umT5",
    citation="Chung et al. 2023, arXiv 2304.09151",
    heads=t5_heads("UMT5"),
    constants=T5_CONSTANTS | {"position": T5BiasOptions(per_layer=True)},
    fields=(*t5_fields(feed_forward="gated-gelu", scale_field=None), Unread(("scalable_attention",))),
    rules=t5_rules,
    ignored=T5_IGNORED,
    copies=T5_COPIES,
    variants=variants("google/", _VARIANTS, T5_SIZES, vocab_size=256_384, tie_word_embeddings=False),
)
