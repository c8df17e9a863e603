"""Tests of `inspect image --prompt`: the attention of generated words to an image."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from attention_page_parts import data_of
from matplotlib.image import imread
from vision_parts import picture, write_vision_model

from transformer.__main__ import main
from transformer.inference import encode_with_images, image_attention, open_model
from transformer.nn import ImagePatches
from transformer.viz import attention_maps, attention_rollout

FAMILIES = ("gemma3", "paligemma", "llava", "qwen2_5_vl")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    picture(1).save(folder / "a.png")
    return folder, {name: write_vision_model(folder / name, name) for name in FAMILIES}


@pytest.mark.programs(29, reason="masks and maps of attention are computed outside of jit")
@pytest.mark.default_cases(2)
@pytest.mark.parametrize("family", ["qwen2_5_vl", *FAMILIES[:3]])
def test_each_word_has_the_weights_of_the_query_that_predicts_it(models, family):
    folder, paths = models
    opened = open_model(paths[family])
    found = image_attention(opened, str(folder / "a.png"), "A is", max_new_tokens=6)
    config = opened.model.config
    dynamic, fixed = config.dynamic_images, config.image_tokens
    assert found.patches.grid == ((2, 3) if dynamic else (2, 2))  # Gemma 3: 4 x 4 patches, pooled 2 x 2
    assert found.patches.patch_size == (dynamic.multiple if dynamic else fixed.patches.patch_size * fixed.pool)
    assert found.weights.shape == (config.num_layers, config.num_heads, len(found.words), found.patches.count)
    assert "".join(found.words) == found.text
    ids, pixels = encode_with_images(opened, "A is", [str(folder / "a.png")])
    execution = dataclasses.replace(opened.model.execution, attention="reference", sow_weights=True)
    model = opened.model.clone(execution=execution)
    prefix = {"prefix_lengths": np.array([len(ids)])} if family == "paligemma" else {}
    # The first word needs only the prompt: its first token is predicted by the last token of the prompt.
    images = ImagePatches.of([pixels], dynamic) if dynamic else np.asarray(pixels[0])[None, None]
    apply = jax.jit(functools.partial(model.apply, mutable=["intermediates"]))
    _, seen = apply({"params": opened.params}, np.array([ids]), images=images, **prefix)
    maps = attention_maps({"decoder": seen["intermediates"]["decoder"]}, config)
    keys = np.flatnonzero(np.array(ids) == config.input.token_id)
    one = image_attention(opened, str(folder / "a.png"), "A is", max_new_tokens=1)
    assert len(one.words) == 1
    for layer, shown in enumerate(maps):
        np.testing.assert_allclose(one.weights[layer, :, 0], shown.weights[:, -1, keys], atol=1e-5)
    for layer, shown in enumerate(attention_rollout(maps)):
        np.testing.assert_allclose(one.rollout[layer, 0], shown.weights[0, -1, keys], atol=1e-5)


@pytest.mark.programs(12, reason="masks and maps of attention are computed outside of jit")
def test_pictures_and_a_page_are_written(models, tmp_path, capsys):
    folder, paths = models
    words = [
        "inspect",
        "image",
        str(paths["gemma3"]),
        str(folder / "a.png"),
        "--prompt",
        "A",
        "--max-new-tokens",
        "5",
    ]
    page = tmp_path / "a.html"
    assert main([*words, "--output", str(tmp_path), "--html", str(page), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [name.rpartition("/")[2] for name in found["paths"]]
    assert names[:3] == ["image_words.png", "image_words_rollout.png", "image_words_layer1.png"]
    assert all(imread(name)[..., :3].std() > 0 for name in found["paths"])
    data = data_of(page.read_text())
    assert len(data["words"]) == len(found["words"]) > 0
    assert (data["rows"], data["columns"]) == (2, 2)
    assert data["patch"] == 6
    assert len(data["layers"]) == len(data["rollout"]) == len(names) - 2


def test_a_prompt_is_required(models, capsys):
    folder, paths = models
    assert main(["inspect", "image", str(paths["llava"]), str(folder / "a.png")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "contains a vision-language model" in err
