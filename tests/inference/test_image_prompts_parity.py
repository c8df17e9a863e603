"""Comparison of prompts with images with the processors of Hugging Face transformers: ids, pixels and logits."""

import json

import numpy as np
import pytest
from vision_parts import NAMED, PREPROCESSING, marker, picture, write_vision_model

from transformer.chat import Chat
from transformer.generate import Sampling, generate
from transformer.inference import encode_with_images, image_prompts, open_model
from transformer.nn import ImagePatches

pytestmark = pytest.mark.parity

PROCESSORS = {
    "gemma3": "Gemma3",
    "paligemma": "PaliGemma",
    "llava": "Llava",
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
}
SPECIFIC = {
    "gemma3": {"image_seq_length": 4},
    "paligemma": {},
    "llava": {"patch_size": 3, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "qwen2_vl": {},
    "qwen2_5_vl": {},
}


@pytest.fixture(scope="module", params=list(PROCESSORS))
def pair(request, tmp_path_factory):
    """(family, our model, processor of the reference)."""
    transformers = pytest.importorskip("transformers")
    family = request.param
    directory = write_vision_model(tmp_path_factory.mktemp("model") / family, family)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory, **NAMED[family])
    kind = PREPROCESSING[family]["image_processor_type"] + "Pil"
    settings = {name: value for name, value in PREPROCESSING[family].items() if name != "image_processor_type"}
    images = getattr(transformers, kind)(**settings)
    if family == "paligemma":
        images.image_seq_length = 4
    template = json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]
    cls = getattr(transformers, f"{PROCESSORS[family]}Processor")
    if family.startswith("qwen"):  # its check of the type of a video processor, which is not used, needs torchvision
        cls = type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda self, name, value: type(value)})
    processor = cls(images, tokenizer, chat_template=template, **SPECIFIC[family])
    return family, open_model(directory), processor


PROMPTS = ("MARKER is it?", "A\nMARKER\n\nis MARKER\n B", "MARKERMARKERA")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_ids_and_pixels_equal_transformers(pair, prompt):
    family, opened, processor = pair
    prompt = prompt.replace("MARKER", marker(family))
    images = [picture(i, 15 + 7 * i, 20) for i in range(prompt.count(marker(family)))]
    theirs = processor(images=[images], text=[prompt], return_tensors="np")
    ids, pixels = encode_with_images(opened, prompt, images)
    assert ids == theirs["input_ids"][0].tolist()
    expected = theirs["pixel_values"]
    if "image_grid_thw" not in theirs:
        np.testing.assert_allclose(np.stack(pixels), expected.transpose(0, 2, 3, 1), atol=1e-5)
        return
    # Patches of all images, (channels, frames, height, width) each, with the same image in both frames.
    got = ImagePatches.of([pixels], opened.model.config.dynamic_images)
    rows = np.concatenate([got.values[0, i, : np.prod(grid)] for i, grid in enumerate(got.grid[0])])
    rows = rows.reshape(-1, 3, 3, 3)
    np.testing.assert_array_equal(got.grid[0], theirs["image_grid_thw"][:, 1:])
    for frame in range(2):
        patches = expected.reshape(-1, 3, 2, 3, 3)[:, :, frame].transpose(0, 2, 3, 1)
        np.testing.assert_allclose(rows, patches, atol=1e-5)


def test_a_prompt_without_markers_equals_transformers(pair):
    family, opened, processor = pair
    if family != "paligemma":
        pytest.skip("an error of the reference")
    theirs = processor(images=[picture(1)], text=["A is"], return_tensors="np")
    assert encode_with_images(opened, "A is", [picture(1)])[0] == theirs["input_ids"][0].tolist()


def test_a_conversation_equals_transformers(pair):
    family, opened, processor = pair
    if family == "paligemma":
        pytest.skip("not a model for conversations")
    content = [{"type": "image", "image": picture(1)}, {"type": "text", "text": "is it?"}]
    messages = [
        {"role": "user", "content": [*content, {"type": "image", "image": picture(2)}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A"}]},
        {"role": "user", "content": [{"type": "text", "text": "B"}]},
    ]
    theirs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="np", add_generation_prompt=True
    )
    chat = Chat(opened.model, opened.params, opened.tokenizer, images=image_prompts(opened))
    assert chat.encode(messages, add_generation_prompt=True).ids == theirs["input_ids"][0].tolist()


def test_generation_equals_transformers(pair):
    """From a prompt and a picture to tokens: preprocessing, encoding and generation together."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    family, opened, processor = pair
    prompt = f"{marker(family)} is it?"
    cls = getattr(transformers, f"{PROCESSORS[family]}ForConditionalGeneration")
    model = cls.from_pretrained(opened.directory, dtype=torch.float32, attn_implementation="eager").eval()
    given = processor(images=[[picture(1)]], text=[prompt], return_tensors="pt")
    given.pop("labels", None)
    out = model.generate(**given, max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None)
    ids, pixels = encode_with_images(opened, prompt, [picture(1)])
    greedy = Sampling(temperature=0.0)
    got = generate(opened.model, opened.params, [ids], images=[pixels], max_new_tokens=12, sampling=greedy)
    assert got[0] == out[0, len(ids) :].tolist()
