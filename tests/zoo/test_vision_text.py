"""Refusals of config.json of families that read images together with text."""

import json

import pytest
from golden import case as golden_case

from transformer.nn.models import VisionLanguageModel
from transformer.zoo import ENTRIES, choose_family
from transformer.zoo._pretrained import find_family


def read(family, **changes):
    """Read the config.json of a golden case with changed fields; a dict changes an inner object."""
    values = json.loads(json.dumps(next(iter(golden_case.cases(family).values())).values))
    for name, value in changes.items():
        values[name] = values[name] | value if isinstance(value, dict) else value
    entry = ENTRIES[family]
    return entry.read(values, next(iter(entry.heads.values())))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma3", {"mm_tokens_per_image": 5}, "mm_tokens_per_image is 5, but only the square of a divisor"),
        ("gemma3", {"mm_tokens_per_image": 16}, "mm_tokens_per_image is 16, more than sliding_window"),
        ("gemma3", {"text_config": {"final_logit_softcapping": 3.0}}, "in text_config, final_logit_softcapping is 3.0"),
        ("gemma3", {"vision_config": {"model_type": "clip_vision_model"}}, "only siglip_vision_model is supported"),
        ("gemma3", {"text_config": None}, "text_config is missing, the object that describes the decoder (supported: "),
        ("gemma3", {"image_token_index": 37}, "image_token_index is 37, but only an id of the vocabulary"),
        ("paligemma", {"projection_dim": 13}, "projection_dim is 13, but only the width of the decoder, 12"),
        ("paligemma", {"text_config": {"model_type": "llama"}}, "'llama', but only gemma, gemma2 is supported"),
        ("llava", {"vision_feature_layer": [-2, -1]}, "vision_feature_layer is [-2, -1], but only the output of one"),
        ("llava", {"vision_feature_layer": -4}, "vision_feature_layer is -4"),
        ("llava", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
        ("llava", {"multimodal_projector_bias": False}, "multimodal_projector_bias is False"),
        ("llava", {"vision_config": {"patch_size": [2, 3]}}, "in vision_config, patch_size is [2, 3]"),
        ("llava", {"wonder": 3}, "wonder is not known"),
        ("qwen2_vl", {"image_token_id": 37}, "image_token_id is 37, but only an id of the vocabulary"),
        (
            "qwen2_vl",
            {"text_config": {"rope_parameters": {"rope_theta": 9.0}}},
            "mrope_section in rope_parameters must be",
        ),
        ("qwen2_vl", {"text_config": {"model_type": "llama"}}, "is 'llama', but only qwen2_vl_text is supported"),
        ("qwen2_vl", {"text_config": 3}, "text_config must be an object, got 3"),
        ("qwen2_vl", {"vision_config": 3}, "vision_config must be an object, got 3"),
        ("qwen2_vl", {"vision_config": {"hidden_size": 9}}, "hidden_size of vision_config is 9, but only the width of"),
        ("qwen2_vl", {"vision_config": {"window_size": 9}}, "in vision_config, window_size is not known"),
        ("qwen2_vl", {"vision_config": {"hidden_act": "wonder"}}, "hidden_act of vision_config is 'wonder'"),
        ("qwen2_vl", {"vision_config": {"num_heads": 3}}, "embed_dim of vision_config is 16, but"),
        (
            "qwen2_5_vl",
            {"vision_config": {"patch_size": [3, 4]}},
            "patch_size of vision_config is [3, 4], but only equal",
        ),
        ("qwen2_5_vl", {"vision_config": {"rope_parameters": {"rope_theta": 9.0}}}, "only axial of 10000 is supported"),
        (
            "qwen2_5_vl",
            {"vision_config": {"window_size": 5}},
            "window_size (5) must be at least patch_size x merge (6)",
        ),
    ],
)
def test_unsupported_values_are_named(family, changes, message):
    with pytest.raises(ValueError, match=r"config.json of") as error:
        read(family, **changes)
    assert message in str(error.value)
    read(family)


def test_published_files_of_qwen_have_the_decoder_at_the_top():
    values = json.loads(json.dumps(next(iter(golden_case.cases("qwen2_5_vl").values())).values))
    entry = ENTRIES["qwen2_5_vl"]
    head = next(iter(entry.heads.values()))
    expected = entry.read(values, head)
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = values | text | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling, "tie_word_embeddings": False}
    assert entry.read(flat, head) == expected


def test_an_unknown_decoder_is_named_with_the_supported_families():
    model = VisionLanguageModel(read("llava").replace(**{"norm.kind": "layer_norm", "feed_forward.gated": False}))
    with pytest.raises(ValueError, match="can't be saved as any supported architecture") as error:
        choose_family(model)
    text = str(error.value)
    expected = "its decoder must be one of llama; compared with llama, norm.kind is 'layer_norm', 'rms_norm' is needed"
    assert f"The closest: LLaVA 1.5 has no counterpart for this model: {expected}" in text
    assert "Tried: " in text
    for title in ("Gemma 3", "PaliGemma", "LLaVA 1.5"):
        assert title in text.partition("Tried: ")[2], title
    assert "text_config is missing" not in text


def test_an_unknown_vision_language_model_names_supported_ones():
    values = {"model_type": "llava_next", "text_config": {}, "vision_config": {}}
    with pytest.raises(ValueError, match=r"model_type.*'llava_next'") as error:
        find_family(values)
    assert "llava" in str(error.value).partition("Supported")[2]
    assert "gpt2" not in str(error.value)
