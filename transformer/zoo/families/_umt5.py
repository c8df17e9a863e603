"""umT5: T5 1.1 with a separate relative position bias in each layer."""

from __future__ import annotations

from transformer.config._positions import T5BiasOptions
from transformer.zoo._family import Family, Variant
from transformer.zoo._fields import Unread
from transformer.zoo.families._t5 import T5_CONSTANTS, T5_COPIES, T5_IGNORED, t5_fields, t5_heads, t5_rules


def _variant(size: str, parameters: int, width: int, inner: int, layers: int, heads: int) -> Variant:
    sizes = {"d_model": width, "d_kv": 64, "d_ff": inner, "num_layers": layers, "num_heads": heads}
    fields = {"vocab_size": 256_384, "tie_word_embeddings": False} | sizes
    return Variant(hub=f"google/umt5-{size}", parameters=parameters, fields=fields)


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
    variants={
        "umt5-small": _variant("small", 306_601_984, 512, 1024, 8, 6),
        "umt5-base": _variant("base", 592_043_520, 768, 2048, 12, 12),
        "umt5-xl": _variant("xl", 3_768_356_864, 2048, 5120, 24, 32),
        "umt5-xxl": _variant("xxl", 12_972_531_712, 4096, 10_240, 24, 64),
    },
)
