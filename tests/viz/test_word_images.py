"""Tests of the attention of words to an image: what does not fit, and the page in a browser."""

import numpy as np
import pytest
from browser import Browser

from transformer.config import Patches
from transformer.viz import save_word_images, save_word_page

PATCHES = Patches(image_height=6, image_width=9, patch_size=3, class_token=False)
WORDS = [" red", " <b>", " car."]
GENERATOR = np.random.default_rng(0)
WEIGHTS = GENERATOR.random((2, 2, 3, 6)).astype(np.float32) / 6
ROLLOUT = GENERATOR.random((2, 3, 6)).astype(np.float32) / 6
IMAGE = GENERATOR.random((6, 9, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": np.zeros((9, 6, 3))}, "expected an image of shape"),
        ({"words": []}, "at least one word"),
        ({"words": ["a"] * 2}, "for 2 words and 6 patches"),
        ({"rollout": np.full_like(ROLLOUT, np.inf)}, "must be finite"),
        ({"weights": np.full_like(WEIGHTS, np.nan)}, "must be finite"),
    ],
)
def test_rejects_weights_that_do_not_fit(tmp_path, change, message):
    given = {"image": IMAGE, "weights": WEIGHTS, "rollout": ROLLOUT, "words": WORDS, **change}
    arrays = [given.pop(name) for name in ("image", "weights", "rollout")]
    with pytest.raises(ValueError, match=message):
        save_word_images(*arrays, tmp_path / "a", patches=PATCHES, **given)
    with pytest.raises(ValueError, match=message):
        save_word_page(tmp_path / "a.html", *arrays, patches=PATCHES, title="t", **given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_pointing_at_a_word_shows_its_patches(tmp_path):
    path = save_word_page(tmp_path / "a.html", IMAGE, WEIGHTS, ROLLOUT, words=WORDS, patches=PATCHES, title="t")
    (tmp_path / "chromium").mkdir()
    browser = Browser(tmp_path / "chromium")
    page = browser.page(width=390, height=800).open(path)

    def check(word, weights):
        best = int(weights.argmax())
        place = f"row {best // 3 + 1}, column {best % 3 + 1}: "
        summary = page.text("#summary")
        assert summary.startswith(f"\u201c{word}\u201d")
        assert place in summary
        assert abs(float(summary.rpartition(": ")[2].rstrip(".")) - weights.max()) < 2e-3

    check("red", WEIGHTS[1, :, 0].mean(0))
    page.hover("#tokens button:nth-child(2)")
    check("<b>", WEIGHTS[1, :, 1].mean(0))
    page.focus("#tokens button:nth-child(3)")
    check("car.", WEIGHTS[1, :, 2].mean(0))
    page.click("#views label", 2)
    check("car.", ROLLOUT[1, 2])
    page.hover("canvas", at=(0.1, 0.1))
    check("car.", ROLLOUT[1, 2])
    assert page.js("document.documentElement.scrollWidth") == 390
    assert page.complaints() == []
    browser.close()
