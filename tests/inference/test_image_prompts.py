"""Prompts with images: their tokens, generation, and conversations."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from vision_parts import MARKERS, TOKENS, marker, picture, write_vision_model

from transformer.chat import Chat
from transformer.chat._image_prompts import expanded
from transformer.config import ConfigError
from transformer.generate import Sampling, _streaming, generate
from transformer.generate._streaming import TokenStream
from transformer.inference import encode_with_images, image_prompts, open_model

GREEDY = Sampling(temperature=0.0)
FAMILIES = ("gemma3", "paligemma", "llava", "qwen2_vl", "qwen2_5_vl")


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: open_model(write_vision_model(folder / name, name)) for name in FAMILIES}


@pytest.mark.parametrize(
    ("family", "prompt", "text"),
    [
        (
            "gemma3",
            "A <start_of_image> is",
            "<bos>A \n\n<start_of_image>" + 4 * "<image_soft_token>" + "<end_of_image>\n\n is",
        ),
        ("paligemma", "A is", 4 * "<image>" + "<bos>A is\n"),
        ("paligemma", "A<image> is", "A" + 4 * "<image>" + "<bos> is\n"),
        ("llava", "A <image>\nis", "<bos>A " + 4 * "<image>" + "\nis"),
        ("llava", "is", "<bos>" + 4 * "<image>" + "is"),
        ("qwen2_vl", "is", "<bos><|vision_start|>" + 6 * "<|image_pad|>" + "<|vision_end|>is"),
    ],
)
def test_a_marker_is_expanded(opened, family, prompt, text):
    ids, pixels = encode_with_images(opened[family], prompt, [picture(1)])
    assert "".join(opened[family].tokenizer._library.id_to_token(i) for i in ids).replace("▁", " ") == text
    assert pixels[0].shape == {"gemma3": (12, 12, 3), "qwen2_vl": (12, 18, 3)}.get(family, (6, 6, 3))


def test_line_breaks_around_an_image_merge_with_the_text(opened):
    ids, _ = encode_with_images(opened["gemma3"], "A\n<start_of_image>", [picture(1)])
    assert opened["gemma3"].tokenizer._library.id_to_token(ids[2]) == "\n\n\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_images_must_equal_the_number_of_markers(opened, family):
    name = marker(family)
    with pytest.raises(ConfigError, match=rf"2.*\({re.escape(name)}\).*1"):
        encode_with_images(opened[family], f"{name}{name}A", [picture(1)])
    with pytest.raises(ConfigError, match=r"1 image markers .* but 0 images"):
        encode_with_images(opened[family], f"{name}A", [])


def test_rejects_other_special_tokens_in_a_prompt(opened):
    with pytest.raises(ConfigError, match="'<end_of_image>'"):
        encode_with_images(opened["gemma3"], "A <end_of_image>", [picture(1)])


def test_generate_checks_images_before_it_computes(opened):
    one = opened["llava"]
    ids, pixels = encode_with_images(one, "is", [picture(1)])
    call = {"max_new_tokens": 2}
    with pytest.raises(ValueError, match=r"prompt 0 has 4 image tokens .* but 0 images need 0"):
        generate(one.model, one.params, [ids], **call)
    with pytest.raises(ValueError, match=r"must be arrays .* of shape \(6, 6, 3\), got \(3, 6, 6\)"):
        generate(one.model, one.params, [ids], images=[[pixels[0].transpose(2, 0, 1)]], **call)
    with pytest.raises(ValueError, match="one list of images for each of the 1 prompts, got 2"):
        generate(one.model, one.params, [ids], images=[pixels, pixels], **call)
    with pytest.raises(ValueError, match="images can't be used with slots or a draft"):
        generate(one.model, one.params, [ids], images=[pixels], slots=1, **call)


def test_text_offsets_account_for_expanded_images():
    images = SimpleNamespace(marker="<i>", expansion="[image]")
    text = "ab<i>cd<i><i>ef"
    breaks = [place for place, character in enumerate(text) if character in "abcdef"]
    found, moved = expanded(text, [2, 7, 10], breaks, images)
    assert found == "ab[image]cd[image][image]ef"
    assert "".join(found[place] for place in moved) == "abcdef"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_equals_its_single_call_and_its_stream(opened, family):
    """Rows of different lengths, with two images, one and none; the stream reads each prompt in one call."""
    one, name = opened[family], marker(family)
    given = [
        encode_with_images(one, f"A{name}is{name} B", [picture(1), picture(2, 9, 30)]),
        encode_with_images(one, f"{name} is it, is it, is it?", [picture(2)]),
        (one.tokenizer.encode_source("is it"), []),
    ]
    options = {"max_new_tokens": 6, "sampling": GREEDY}
    together = generate(
        one.model, one.params, [ids for ids, _ in given], images=[pixels for _, pixels in given], **options
    )
    stream = TokenStream(one.model, one.params)
    for (ids, pixels), expected in zip(given, together, strict=True):
        assert generate(one.model, one.params, [ids], images=[pixels], **options) == [expected]
        got = [token for piece in stream.generate(ids, images=pixels or None, **options) for token in piece.tokens]
        assert got == expected
    first = [
        next(stream.generate(given[1][0], images=pixels, **options)).log_probabilities[0]
        for pixels in (given[1][1], given[0][1][:1])
    ]
    assert abs(first[0] - first[1]) > 2e-5  # the picture matters, also for equal tokens


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("llava", marks=pytest.mark.slow)])
@pytest.mark.programs(20, reason="a stream makes its cache outside of jit")
def test_a_stream_reads_an_image_once(opened, family, monkeypatch):
    one, read = opened[family], []
    compute = _streaming.read_part

    def record(model, params, part, before, count, cache, pixels):
        read.append((int(count[0]), pixels is not None))
        return compute(model, params, part, before, count, cache, pixels)

    monkeypatch.setattr(_streaming, "read_part", record)
    stream = TokenStream(one.model, one.params)
    question = f"A{marker(family)}is it"
    for prompt, image in ((question, 1), (question + ", is it?", 1), (question + ", is it?", 2)):
        ids, pixels = encode_with_images(one, prompt, [picture(image)])
        read.clear()
        list(stream.generate(ids, images=pixels, max_new_tokens=1, sampling=GREEDY))
        assert [has_pixels for _, has_pixels in read] == [(prompt, image) != (question + ", is it?", 1)]
        assert (read[0][0] == len(ids)) == read[0][1]


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", pytest.param("llava", marks=pytest.mark.slow)])
@pytest.mark.programs(11, reason="the package computes single operations outside of jit")
def test_holds_a_conversation_about_an_image(opened, family):
    one = opened[family]
    chat = Chat(one.model, one.params, one.tokenizer, images=image_prompts(one))
    user = {"role": "user", "content": [{"type": "image", "image": picture(1)}, {"type": "text", "text": "is it?"}]}
    ids = chat.encode([user], add_generation_prompt=True).ids
    assert ids.count(one.model.config.input.token_id) == (6 if family == "qwen2_5_vl" else 4)
    first = chat.reply([user], max_new_tokens=5)
    turns = [user, first.message, {"role": "user", "content": "B?"}]
    cached = chat.reply(turns, max_new_tokens=5)  # reads only the new message
    fresh = Chat(one.model, one.params, one.tokenizer, images=image_prompts(one)).reply(turns, max_new_tokens=5)
    assert cached.tokens == fresh.tokens
    np.testing.assert_allclose(cached.log_probabilities, fresh.log_probabilities, atol=1e-4)
    other = [{**user, "content": [{"type": "image", "image": picture(3)}, user["content"][1]]}, *turns[1:]]
    changed = chat.reply(other, max_new_tokens=5)  # the same tokens, but another image
    assert abs(changed.log_probabilities[0] - fresh.log_probabilities[0]) > 2e-5


def test_a_marker_in_a_message_is_text(opened):
    one = opened["gemma3"]
    chat = Chat(one.model, one.params, one.tokenizer, images=image_prompts(one))
    text = {"type": "text", "text": f"A {MARKERS['gemma3'][0]} {TOKENS['gemma3']}"}
    content = [{"type": "image", "image": picture(1)}, text]
    encoded = chat.encode([{"role": "user", "content": content}])
    assert encoded.ids.count(one.model.config.image_tokens.token_id) == 4
    assert encoded.text.count("<end_of_image>") == 1


def test_images_of_a_conversation_are_checked(opened):
    one = opened["llava"]
    content = [{"type": "image", "image": picture(1)}]
    other = "{% for part in messages[0].content %}{{ part.text or 'a picture' }}{% endfor %}"
    for template, message in (
        ("{{ messages[0].role }}", r"message 0 has an image.*role user"),
        (other, r"0.*\(<image>\).*1"),
    ):
        chat = Chat(one.model, one.params, one.tokenizer, images=image_prompts(one), template=template)
        with pytest.raises(ConfigError, match=message):
            chat.encode([{"role": "user", "content": content}])
    with pytest.raises(ConfigError, match="a part of type image must be"):
        chat.encode([{"role": "user", "content": [{"type": "image"}]}])
    only_text = Chat(one.model, one.params, one.tokenizer)
    with pytest.raises(ConfigError, match="1 images, but this model reads only text"):
        only_text.encode([{"role": "user", "content": content}])
