"""Comparison of prompts with images with the processors of Hugging Face transformers: ids, pixels and logits."""

import json

import numpy as np
import pytest
from vision_parts import MARKERS, NAMED, PREPROCESSING, picture, write_vision_model

from transformer.chat import Chat
from transformer.generate import Sampling, generate
from transformer.inference import encode_with_images, image_prompts, open_model

pytestmark = pytest.mark.parity

PROCESSORS = {"gemma3": "Gemma3", "paligemma": "PaliGemma", "llava": "Llava"}
SPECIFIC = {
    "gemma3": {"image_seq_length": 4},
    "paligemma": {},
    "llava": {"patch_size": 3, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
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
    processor = cls(images, tokenizer, chat_template=template, **SPECIFIC[family])
    return family, open_model(directory), processor


PROMPTS = ("MARKER is it?", "A\nMARKER\n\nis MARKER\n B", "MARKERMARKERA")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_ids_and_pixels(pair, prompt):
    family, opened, processor = pair
    prompt = prompt.replace("MARKER", MARKERS[family][0])
    images = [picture(i, 15 + 7 * i, 20) for i in range(prompt.count(MARKERS[family][0]))]
    theirs = processor(images=[images], text=[prompt], return_tensors="np")
    ids, pixels = encode_with_images(opened, prompt, images)
    assert ids == theirs["input_ids"][0].tolist()
    np.testing.assert_allclose(np.stack(pixels), theirs["pixel_values"].transpose(0, 2, 3, 1), atol=1e-5)


def test_a_prompt_without_markers(pair):
    family, opened, processor = pair
    if family != "paligemma":
        pytest.skip("an error of the reference")
    theirs = processor(images=[picture(1)], text=["A is"], return_tensors="np")
    assert encode_with_images(opened, "A is", [picture(1)])[0] == theirs["input_ids"][0].tolist()


def test_a_conversation(pair):
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


def test_generation_from_text_and_files(pair):
    """From a prompt and a picture to tokens: preprocessing, encoding and generation together."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    family, opened, processor = pair
    prompt = f"{MARKERS[family][0]} is it?"
    cls = getattr(transformers, f"{PROCESSORS[family]}ForConditionalGeneration")
    model = cls.from_pretrained(opened.directory, dtype=torch.float32, attn_implementation="eager").eval()
    given = processor(images=[[picture(1)]], text=[prompt], return_tensors="pt")
    given.pop("labels", None)
    out = model.generate(**given, max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None)
    ids, pixels = encode_with_images(opened, prompt, [picture(1)])
    greedy = Sampling(temperature=0.0)
    got = generate(opened.model, opened.params, [ids], images=[pixels], max_new_tokens=12, sampling=greedy)
    assert got[0] == out[0, len(ids) :].tolist()
