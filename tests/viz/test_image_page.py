"""Tests of the page that draws attention on an image: its data, its safety, and its use in a real browser."""

import base64
import re

import numpy as np
import pytest
from attention_page_parts import data_of
from browser import Browser

from transformer.config import Patches
from transformer.viz import AttentionMap, attention_rollout, save_image_page

PATCHES = Patches(image_height=6, image_width=9, patch_size=3, registers=1)
HOSTILE = "</script><img src=x onerror=window.caught=1>"


def random_maps(patches=PATCHES, layers=2, heads=3):
    rng, size = np.random.default_rng(0), patches.positions
    shape = heads, size, size
    return [
        AttentionMap("encoder", layer, "self", rng.dirichlet(np.full(size, 0.3), shape[:2]).astype(np.float32), none)
        for layer, none in enumerate([np.zeros(shape[1:], bool)] * layers)
    ]


def saved(path, patches=PATCHES, **options):
    maps = random_maps(patches)
    image = np.random.default_rng(1).random((patches.image_height, patches.image_width, patches.channels))
    return save_image_page(path, image, maps, patches=patches, title="A page", **options), maps


def weights_of(entry, positions):
    """Unpack the weights of a map, (heads, queries, positions)."""
    shape = entry["heads"], entry["queries"]
    scales = np.frombuffer(base64.b64decode(entry["scales"]), "<u2").reshape(*shape, 1) / 65535
    return scales * np.frombuffer(base64.b64decode(entry["weights"]), np.uint8).reshape(*shape, positions) / 255


def test_the_page_contains_the_weights(tmp_path):
    pooling = np.full((2, 1, PATCHES.positions), 1 / PATCHES.positions, np.float32)
    path, maps = saved(tmp_path / "new" / "a.html", pooling=pooling)
    data = data_of(path.read_text())
    assert (data["rows"], data["columns"], data["tokens"]) == (2, 3, ["class token", "register 1"])
    for entries, expected in ((data["layers"], maps), (data["rollout"], attention_rollout(maps))):
        for entry, one in zip(entries, expected, strict=True):
            np.testing.assert_allclose(weights_of(entry, PATCHES.positions), one.weights, atol=0.003)
    np.testing.assert_allclose(weights_of(data["pooling"], PATCHES.positions), pooling, atol=0.003)


def test_the_page_fetches_nothing_and_escapes_texts(tmp_path):
    path, _ = saved(tmp_path / "a.html", facts={"Image": HOSTILE})
    page = path.read_text(encoding="ascii")
    assert HOSTILE not in page
    assert data_of(page)["facts"] == [["Image", HOSTILE]]
    assert "default-src 'none'" in page
    assert not re.search(r"https?:", page)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": np.zeros((6, 6, 3))}, "expected an image of shape"),
        ({"maps": []}, "there is nothing to show"),
        ({"patches": Patches(image_height=6, image_width=9, patch_size=3)}, "expected the weights of 7 positions"),
        ({"pooling": np.full((1, 1, 8), np.nan, np.float32)}, "must be finite"),
    ],
)
def test_rejects_weights_that_do_not_fit(tmp_path, change, message):
    given = {"image": np.zeros((6, 9, 3)), "maps": random_maps(), "patches": PATCHES, **change}
    with pytest.raises(ValueError, match=message):
        save_image_page(tmp_path / "a.html", given.pop("image"), given.pop("maps"), title="t", **given)
    assert not (tmp_path / "a.html").exists()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def strongest(page):
    """Return row and column, from 0, and the weight of the patch that the page names."""
    found = re.search(r"the patch in row (\d+), column (\d+): ([\d.]+)", page.text("#summary"))
    return int(found[1]) - 1, int(found[2]) - 1, float(found[3])


def check(page, row):
    """Check the strongest patch of a query, and the red of every patch in the picture."""
    parts = row[PATCHES.extra_tokens :].reshape(2, 3)
    best = np.unravel_index(parts.argmax(), parts.shape)
    *place, weight = strongest(page)
    assert tuple(place) == best
    np.testing.assert_allclose(weight, parts.max(), atol=0.003)
    red = page.js(
        """(() => { const c = document.querySelector('canvas'), x = c.getContext('2d');
        return [0, 1].map((r) => [0, 1, 2].map((k) => {
            const p = x.getImageData((k + 0.5) * c.width / 3, (r + 0.5) * c.height / 2, 1, 1).data;
            return p[0] - p[1]; })); })()"""
    )
    np.testing.assert_allclose(np.array(red) / np.max(red), parts / parts.max(), atol=0.03)


@pytest.mark.slow
def test_pointing_at_a_patch_shows_its_attention(browser, tmp_path):
    path, maps = saved(tmp_path / "a.html", facts={"Image": HOSTILE})
    page = browser.page().open(path)
    assert page.text("#summary").startswith("The class token attends most")
    check(page, maps[1].weights[0, 0])
    page.hover("canvas", at=(0.5, 0.75))  # row 1, column 1
    assert page.text("#summary").startswith("The patch in row 2, column 2 attends most")
    check(page, maps[1].weights[0, 2 + 4])
    page.focus("#layer")
    page.press("Home")
    check(page, maps[0].weights[0, 2 + 4])
    page.focus("#head")
    page.press("End")
    check(page, maps[0].weights[2, 2 + 4])
    page.click("#views label", 1)
    check(page, maps[0].weights[:, 2 + 4].mean(0))
    page.click("#views label", 2)
    assert "depends most" in page.text("#summary")
    check(page, attention_rollout(maps)[0].weights[0, 2 + 4])
    page.focus("canvas")
    page.press("ArrowUp", "ArrowRight")
    check(page, attention_rollout(maps)[0].weights[0, 2 + 2])
    page.click("#tokens button", 1)
    check(page, attention_rollout(maps)[0].weights[0, 1])
    assert page.js("window.caught") is None
    # `check` reads the pixels of the canvas, and Chromium warns of that.
    assert [one for one in page.complaints() if "getImageData" not in str(one)] == []
    assert page.requests()[0] == path.as_uri()
    assert all(url.startswith("data:") for url in page.requests()[1:])


@pytest.mark.slow
def test_without_a_class_token_the_mean_of_all_patches_is_first(browser, tmp_path):
    patches = Patches(image_height=6, image_width=9, patch_size=3, class_token=False)
    pooling = np.eye(6, dtype=np.float32)[None, 4:5]
    path, _ = saved(tmp_path / "a.html", patches, pooling=pooling)
    page = browser.page(width=320, height=740, phone=True).open(path)
    assert page.text("#summary").startswith("The mean over all patches attends most")
    page.tap("canvas", at=(0.1, 0.1))
    assert page.text("#summary").startswith("The patch in row 1, column 1")
    page.tap("#views label", 3)
    assert page.text("#summary") == "The pooling attends most to the patch in row 2, column 2: 1.000."
    assert page.js("document.documentElement.scrollWidth") == 320
    assert page.broken_words() == []
