"""SigLIP: encoders of texts and images, trained with a sigmoid per pair; images are pooled by attention."""

from __future__ import annotations

from math import isqrt

from transformer.config._model import TransformerConfig
from transformer.config._parts import Patches
from transformer.nn.models._dual import DualEncoder
from transformer.zoo._family import Family, Head, variants
from transformer.zoo._fields import LARGE, Codec, FieldError, Fields, Fixed, Unread, layer_sizes
from transformer.zoo.families._clip import DUAL_CONSTANTS, TwoConfigs, dual_rules, encoder_fields, text_fields
from transformer.zoo.families._vit import PatchSizes
from transformer.zoo.weights._rules import MERGED, VECTOR, Fused, Reshaped, Rule, linear, modules, row


class PatchGrid(Codec):
    """Size and number of patches; the position table is a square, interpolated for every image (NaFlex)."""

    names = ("num_patches", "patch_size", "num_channels")

    def read(self, values: Fields, changes: Fields) -> Fields:
        count, size = values.get("num_patches", 256), values.get("patch_size", 16)
        side = isqrt(count) if type(count) is int and count > 0 else 0
        if not side or side**2 != count:
            raise FieldError(f"num_patches is {count!r}, but only the square of a whole number is supported")
        if type(size) is not int:
            raise FieldError(f"patch_size is {size!r}, but only square patches, one number, are supported")
        sides = {"image_height": side * size, "image_width": side * size, "channels": values.get("num_channels", 3)}
        return {"input": Patches(**sides, patch_size=size, class_token=False, resize_positions=True)}

    def write(self, config: TransformerConfig) -> Fields:
        patches = config.patches
        if patches is None:
            return {}
        return {"num_patches": patches.count, "patch_size": patches.patch_size, "num_channels": patches.channels}


def _rules(config: TransformerConfig) -> list[Rule]:
    head, ours = "vision_model.head.", "image/attention_pooling/"
    parts = tuple(f"{ours}cross_attention/{name}" for name in ("query", "key", "value"))
    names = {"feed_forward_norm": "layernorm", "feed_forward/up": "mlp.fc1", "feed_forward/down": "mlp.fc2"}
    return [
        *dual_rules(),
        *linear("text_model.head", "text_projection"),
        Rule(f"{head}probe", f"{ours}query", row(2)),
        Rule(f"{head}attention.in_proj_weight", tuple(f"{part}/kernel" for part in parts), Fused()),
        Rule(f"{head}attention.in_proj_bias", tuple(f"{part}/bias" for part in parts), Fused(each=VECTOR)),
        *linear(f"{head}attention.out_proj", f"{ours}cross_attention/out", MERGED),
        *modules(head, ours, names),
        Rule("logit_scale", "logit_scale"),
        Rule("logit_bias", "logit_bias"),
    ]


def _grid_rules(config: TransformerConfig) -> list[Rule]:
    """Return the rules of SigLIP 2: patches are rows of a matrix, and their positions are not part of the encoder."""
    embeddings = "vision_model.embeddings."
    return [
        *(rule for rule in _rules(config) if not str(rule.tensors).startswith(embeddings)),
        *linear(f"{embeddings}patch_embedding", "image/patch_embedding", Reshaped(3, transposed=True)),
        Rule(f"{embeddings}position_embedding.weight", "image/position_table"),
    ]


def _two_configs(patches: Codec, kinds: tuple[str, str]) -> TwoConfigs:
    """Return the configs of both encoders; `patches` reads the sizes of images, and `kinds` are their model types."""
    return TwoConfigs(
        text=(
            *encoder_fields(768, 12, 3072, "gelu_pytorch_tanh", 1e-6, ("projection_size",)),
            *text_fields(32_000, 64),
        ),
        image=(*encoder_fields(768, 12, 3072, "gelu_pytorch_tanh", 1e-6), Fixed("vision_use_head", (True,)), patches),
        constants={"projections": "text", "similarity": "sigmoid"},
        encoder={"output.pooling": "attention"},
        kinds=kinds,
        features="projection_size",
    )


SO400M = layer_sizes(1152, 4304, 27, 16)

_GEMMA = {"vocab_size": 256_000}
"""SigLIP 2 reads texts with the tokenizer of Gemma."""


def _both(image: Fields, layers: Fields, text: Fields) -> Fields:
    return {"text_config": layers | text, "vision_config": layers | image}


_384 = {"image_size": 384, "patch_size": 14}
_VARIANTS = {
    "siglip-base-patch16-224": (203_155_970, _both({"image_size": 224}, {}, {})),
    "siglip-base-patch16-384": (203_447_810, _both({"image_size": 384}, {}, {})),
    "siglip-large-patch16-256": (652_150_786, _both({"image_size": 256}, LARGE, {})),
    "siglip-large-patch16-384": (652_478_466, _both({"image_size": 384}, LARGE, {})),
    "siglip-so400m-patch14-384": (877_960_498, _both(_384, SO400M, {})),
    "siglip2-base-patch16-224": (375_187_970, _both({"image_size": 224}, {}, _GEMMA)),
    "siglip2-large-patch16-256": (881_526_786, _both({"image_size": 256}, LARGE, _GEMMA)),
    "siglip2-so400m-patch14-384": (1_136_008_498, _both(_384, SO400M, _GEMMA)),
}

SIGLIP = Family(
    name="siglip",
    title="SigLIP",
    citation="Zhai et al. 2023, arXiv 2303.15343",
    heads={"SiglipModel": Head(model=DualEncoder)},
    constants=DUAL_CONSTANTS,
    fields=(
        _two_configs(PatchSizes(class_token=False), ("siglip_text_model", "siglip_vision_model")),
        Unread(("initializer_factor", "initializer_range", "tie_word_embeddings")),
    ),
    rules=_rules,
    ignored=(r"(text|vision)_model\.embeddings\.position_ids",),
    variants=variants("google/", _VARIANTS),
)

_NAFLEX = {
    "siglip2-base-patch16-naflex": (375_234_050, _both({}, {}, _GEMMA)),
    "siglip2-so400m-patch16-naflex": (1_135_670_962, _both({}, SO400M, _GEMMA)),
}

SIGLIP2 = Family(
    name="siglip2",
    title="SigLIP 2 NaFlex",
    citation="Tschannen et al. 2025, arXiv 2502.14786",
    heads={"Siglip2Model": Head(model=DualEncoder)},
    constants=DUAL_CONSTANTS,
    fields=(
        _two_configs(PatchGrid(), ("siglip2_text_model", "siglip2_vision_model")),
        Unread(("initializer_factor", "initializer_range", "tie_word_embeddings")),
    ),
    rules=_grid_rules,
    ignored=SIGLIP.ignored,
    variants=variants("google/", _NAFLEX),
)
