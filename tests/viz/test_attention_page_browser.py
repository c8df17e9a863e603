"""Tests of the attention page in a real browser, with pointer, keyboard and touch."""

import csv
import io
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from attention_page_parts import data_of, random_map, translation, weights_of
from browser import Browser

from transformer.viz._attention_page import Panel, attention_page, save_attention_page

pytestmark = pytest.mark.slow

SOURCE = ["seven", "hundred", "forty", "two", "."]
TARGET = ["<bos>", "siete", "cientos", "cuarenta", "y", "dos"]
HOSTILE = "</script><img src=x onerror=window.caught=1><script>window.caught=1</script>"
OPTIONS = {"source": SOURCE, "target": TARGET, "written_from": 1}
TITLE = ".caption p"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages by name: `one` model, `two` models side by side, and a `large` page."""
    folder = tmp_path_factory.mktemp("pages")
    maps = [translation(len(SOURCE), len(TARGET), seed=seed) for seed in (0, 1)]
    texts, facts = {"Prompt": "seven hundred", "Generated": HOSTILE}, {"Command": "python -m transformer inspect"}
    shown = {"one": maps[:1], "two": maps}
    paths = {
        name: save_attention_page(
            folder / f"{name}.html",
            [Panel(name=f"step {i}", maps=part) for i, part in enumerate(parts)],
            title="A page",
            texts=texts,
            facts=facts,
            **OPTIONS,
        )
        for name, parts in shown.items()
    }
    deep = [random_map(layer=i, heads=12, queries=60, keys=60) for i in range(12)]
    words = [f"word{i}" for i in range(60)]
    paths["large"] = save_attention_page(
        folder / "large.html", [Panel(name="deep", maps=deep)], title="A large page", target=words, texts=texts
    )
    return paths


@pytest.fixture
def one(browser, pages):
    """Open the page of one model; return it with its data."""
    return browser.page().open(pages["one"]), data_of(pages["one"].read_text())


def choose(page, kind, layer, head):
    """Select a map with the controls; layer and head are counted from 1."""
    page.click("#kinds label", ["encoder self", "decoder self", "decoder cross"].index(kind))
    for name, value in (("layer", layer), ("head", head)):
        page.focus(f"#{name}")
        page.press("Home", *["ArrowRight"] * (value - 1))


def numbers(page, side="query", panel=0):
    """Return the weights shown below the words; None for a word without a weight."""
    words = f"document.querySelectorAll('.panel')[{panel}].querySelectorAll('.words[data-side={side}] .weight')"
    return [float(text) if text else None for text in page.js(f"[...{words}].map((e) => e.textContent)")]


def same(shown, weights):
    """Check that each weight is shown with two or three decimals, and no weight for masked cells."""
    assert [number is None for number in shown] == list(np.isnan(weights))
    np.testing.assert_allclose(np.array(shown, float), weights, atol=0.0051)


def test_the_page_renders_quickly_without_requests(browser, pages, capsys):
    for name, path in pages.items():
        page = browser.page().open(path)
        times = page.js("({...document.documentElement.dataset})")
        with capsys.disabled():
            print(f"\n{name}: first picture after {times['firstPicture']} ms, all after {times['complete']} ms", end="")
        assert int(times["firstPicture"]) < 30_000  # generous, for a busy machine
        assert page.complaints() == []
        assert page.requests() == [path.as_uri()]


def test_text_in_the_page_is_not_executed(one):
    page, _ = one
    assert page.texts("#texts dd")[1] == HOSTILE
    assert page.js("window.caught") is None
    assert page.js("document.images.length") == 0


def test_the_policy_blocks_code_injected_later(browser, pages):
    """The browser blocks an inline handler, a script and a URL that are added later."""
    page = browser.page().open(pages["one"])
    page.js("document.body.insertAdjacentHTML('beforeend', '<img src=\"http://127.0.0.1:9/x\" onerror=\"caught=1\">')")
    page.js("document.body.append(Object.assign(document.createElement('script'), {textContent: 'caught = 1'}))")
    page.wait("performance.now() > 0")
    assert page.js("window.caught") is None
    assert any("Content Security Policy" in str(one) for one in page.complaints())


@pytest.mark.parametrize(("kind", "stack"), [("encoder self", "encoder"), ("decoder self", "decoder")])
def test_pointing_at_a_word_shows_its_weights(one, kind, stack):
    page, data = one
    choose(page, kind, layer=2, head=3)
    weights = weights_of(data, stack, "self", 1)[2]
    for query in (3, 1):
        page.hover(".words[data-side=query] .word", query)
        same(numbers(page), weights[query])
        best = np.nanargmax(weights[query])
        words = data["words"][stack]
        assert page.text(".summary").startswith(
            f"“{words[query]}” ({query + 1}) attends to “{words[best]}” ({best + 1}) "
        )
        assert "Its weights sum to 1.00." in page.text(".summary")
    shades = page.js("[...document.querySelectorAll('.word')].map((e) => getComputedStyle(e).backgroundColor)")
    seen = ~np.isnan(weights[1])
    assert len({shade for shade, visible in zip(shades, seen, strict=False) if visible}) > 1
    hatched = page.js("[...document.querySelectorAll('.word')].map((e) => e.classList.contains('hid'))")
    np.testing.assert_array_equal(hatched[: len(seen)], ~seen)


def test_cross_attention_names_both_lengths(one):
    page, data = one
    choose(page, "decoder cross", layer=1, head=4)
    weights = weights_of(data, "decoder", "cross", 0)[3]
    page.hover(".words[data-side=query] .word", 2)
    same(numbers(page, "key"), weights[2])
    assert set(numbers(page)) == {None}
    page.hover(".words[data-side=key] .word", 3)
    same(numbers(page), weights[:, 3])
    best = weights[:, 3].argmax()
    assert page.text(".summary").startswith(f"“two” (4) receives most attention from “{TARGET[best]}” ({best + 1}) ")


def test_pointing_at_the_large_map_shows_a_weight(one):
    page, data = one
    choose(page, "decoder cross", layer=3, head=1)
    weights = weights_of(data, "decoder", "cross", 2)[0]
    found = set()
    for across, down in ((0.15, 0.5), (0.25, 0.7), (0.3, 0.9)):
        page.hover(".map canvas", at=(across, down))
        tip = page.text(".tip")
        _, query, _, key, weight = re.fullmatch(r"“(.+)” \((\d)\) attends to “(.+)” \((\d)\): ([\d.]+)", tip).groups()
        np.testing.assert_allclose(float(weight), weights[int(query) - 1, int(key) - 1], atol=0.0051)
        found.add((query, key))
    assert len(found) == 3
    assert page.js("document.querySelector('.tip').hidden") is False


def test_a_small_map_opens_the_large_one(one):
    page, data = one
    page.click("#kinds label", 0)
    page.click(".thumb[aria-label='layer 1, head 2']")
    assert page.text(TITLE) == "Encoder self-attention, layer 1 of 3, head 2"
    assert page.texts(".slide output") == ["1 of 3", "2 of 4"]
    page.hover(".words[data-side=query] .word", 4)
    same(numbers(page), weights_of(data, "encoder", "self", 0)[1, 4])


def test_sliders_change_layer_and_head(one):
    page, data = one
    choose(page, "encoder self", layer=1, head=1)
    before = page.js("document.querySelector('.map canvas').toDataURL()")
    page.focus("#layer")
    page.press("ArrowRight")
    assert page.text(TITLE) == "Encoder self-attention, layer 2 of 3, head 1"
    assert page.js("document.querySelector('#layer').getAttribute('aria-valuetext')") == "2 of 3"
    assert page.js("document.querySelector('.map canvas').toDataURL()") != before
    page.focus("#head")
    page.press("End")
    assert page.text(TITLE) == "Encoder self-attention, layer 2 of 3, head 4"
    page.hover(".words[data-side=query] .word", 0)
    same(numbers(page), weights_of(data, "encoder", "self", 1)[3, 0])


def test_shows_mean_and_rollout(one):
    page, data = one
    choose(page, "decoder self", layer=3, head=1)
    page.click("#views label", 1)
    assert page.text(TITLE).endswith("layer 3 of 3, mean of the heads")
    page.hover(".words .word", 4)
    same(numbers(page), weights_of(data, "decoder", "self", 2).mean(0)[4])
    page.click("#views label", 2)
    assert page.text(TITLE).endswith("layer 3 of 3, rollout")
    page.hover(".words .word", 5)
    same(numbers(page), weights_of(data, "decoder", "self", 2, part="rollout")[0, 5])
    assert "depends on" in page.text(".summary")
    page.click("#kinds label", 2)
    assert page.text(TITLE).endswith("mean of the heads"), "cross-attention has no rollout"
    assert page.js("document.querySelector('#rollout input').disabled")


def test_colors_can_scale_to_the_largest_weight(one):
    page, data = one
    page.click("#views label", 1)
    before = page.js("document.querySelector('.map canvas').toDataURL()")
    page.click("#stretch")
    assert page.js("document.querySelector('.map canvas').toDataURL()") != before
    mean = weights_of(data, "decoder", "cross", 2).mean(0)
    assert page.text("#most") == f"{mean.max():.2f}"


def test_the_keyboard_changes_layer_and_head(one):
    page, data = one
    choose(page, "decoder cross", layer=2, head=2)
    page.focus(".thumb[aria-selected=true]")
    page.press("ArrowUp", "ArrowRight")
    assert page.text(TITLE) == "Decoder cross-attention, layer 1 of 3, head 3"
    assert page.js("document.activeElement.getAttribute('aria-label')") == "layer 1, head 3"
    assert page.text("#live") == "Decoder cross-attention, layer 1 of 3, head 3"
    weights = weights_of(data, "decoder", "cross", 0)[2]
    page.focus(".words[data-side=query] .word[tabindex='0']")
    page.press("Home", "ArrowRight", "ArrowRight")
    same(numbers(page, "key"), weights[2])
    assert page.text("#live").startswith("“cientos” (3) attends to ")
    page.focus(".map")
    page.press("ArrowDown", "ArrowDown", "ArrowRight")
    found = re.fullmatch(r"“cuarenta” \(4\) attends to “hundred” \(2\): ([\d.]+)\.", page.text("#live"))
    assert found, page.text("#live")
    np.testing.assert_allclose(float(found[1]), weights[3, 1], atol=0.0051)
    page.press("Escape")
    assert set(numbers(page, "key")) == {None}


def test_everything_can_be_reached_by_tab_and_has_a_name(one):
    page, _ = one
    named = """[...document.querySelectorAll('button, input, [tabindex="0"]')].filter((e) => e.tabIndex >= 0).map((e) =>
        e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label')?.textContent.trim())"""
    names = page.js(named)
    assert all(names), names
    page.focus("#theme")
    stops = []
    for _ in range(14):
        page.press("Tab")
        stops.append(
            page.js("['id', 'className', 'name', 'tagName'].map((n) => document.activeElement[n]).find(Boolean)")
        )
    assert {"kind", "view", "layer", "head", "stretch", "map", "thumb"} <= set(stops), stops
    assert sum("word" in stop for stop in stops) == 2, "a list of words is one tab stop"
    assert stops.count("thumb") == 1


def test_supports_light_and_dark_colors(browser, pages):
    page = browser.page(dark=True).open(pages["one"])
    paper = "getComputedStyle(document.body).backgroundColor"
    picture = "document.querySelector('.map canvas').toDataURL()"
    dark = page.js(paper), page.js(picture)
    assert dark[0] == "rgb(20, 23, 28)"
    page.click("#theme")
    light = page.js(paper), page.js(picture)
    assert light[0] == "rgb(255, 255, 255)"
    assert light[1] != dark[1]
    other = browser.page().open(pages["one"])
    assert other.js(paper) == light[0]
    other.prefer("dark")
    other.wait(f"{paper} === 'rgb(20, 23, 28)'")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_words_are_legible(browser, pages, dark):
    """All texts have a contrast of at least 4.5 (WCAG 2, AA), also on the colors of the map."""
    page = browser.page(dark=dark).open(pages["one"])
    pairs = page.js(
        """[...document.querySelectorAll('body *')]
        .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
        .filter((e) => e.checkVisibility() && !['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(e.tagName))
        .filter((e) => !e.closest('.hid, #rollout'))
        .map((e) => {
            let under = e;
            while (under && getComputedStyle(under).backgroundColor === 'rgba(0, 0, 0, 0)') under = under.parentElement;
            const paper = getComputedStyle(under ?? document.body).backgroundColor;
            return [e.textContent.slice(0, 30), getComputedStyle(e).color, paper];
        })"""
    )

    def luminance(color):
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return np.dot(linear, [0.2126, 0.7152, 0.0722])

    assert len(pairs) > 40
    for text, ink, paper in pairs:
        low, high = sorted([luminance(ink), luminance(paper)])
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ink, paper)


@pytest.mark.parametrize("name", ["one", "two", "large"])
def test_the_page_fits_a_phone(browser, pages, name):
    """Nothing is wider than the screen; a tap selects, and targets are large enough for a finger."""
    page = browser.page(width=375, height=740, phone=True).open(pages[name])
    for kind in range(len(page.texts("#kinds label"))):
        page.tap("#kinds label", kind)
        assert page.js("document.documentElement.scrollWidth") <= 375
    page.tap(".words[data-side=query] .word", 1)
    assert page.js("document.querySelectorAll('.words[data-side=query] .word')[1].ariaSelected") == "true"
    page.tap(".thumb[aria-label='layer 1, head 2']")
    assert "layer 1 of" in page.text(TITLE)
    assert page.text(TITLE).endswith("head 2")
    page.tap(".map canvas", at=(0.6, 0.6))
    assert page.text(".tip")
    small = page.js("""[...document.querySelectorAll('button, .word, #kinds label')].filter((e) => e.checkVisibility())
        .map((e) => e.getBoundingClientRect()).filter((b) => b.width < 24 || b.height < 24).length""")
    assert small == 0


def test_two_panels_show_the_same_word(browser, pages):
    page = browser.page().open(pages["two"])
    data = data_of(pages["two"].read_text())
    choose(page, "decoder cross", layer=2, head=3)
    page.hover(".panel:nth-child(2) .words[data-side=query] .word", 4)
    for panel in (0, 1):
        same(numbers(page, "key", panel), weights_of(data, "decoder", "cross", 1, panel)[2, 4])
    tops = page.js("[...document.querySelectorAll('.map')].map((e) => e.getBoundingClientRect().top)")
    assert tops[0] == tops[1], "side by side"
    assert page.texts("h2") == ["step 0", "step 1"]


def test_a_panel_without_the_layer_shows_a_note(browser, tmp_path):
    maps = [random_map(layer=i, heads=2) for i in (0, 2)]
    panels = [Panel(name="deep", maps=maps), Panel(name="flat", maps=maps[:1])]
    (tmp_path / "page.html").write_text(attention_page(panels, title="t", target=list("abcde")))
    page = browser.page().open(tmp_path / "page.html")
    assert page.js("[...document.querySelectorAll('.missing')].map((e) => e.checkVisibility())") == [False, True]
    assert page.texts(".missing")[1] == "flat does not have this layer or head."
    assert page.texts(".note")[0] == "Layer 2 has no self-attention."
    page.focus("#layer")
    page.press("Home")
    assert page.js("[...document.querySelectorAll('.missing')].map((e) => e.checkVisibility())") == [False, False]


def test_keys_skip_heads_missing_from_a_model(browser, tmp_path):
    panels = [Panel(name=name, maps=[random_map(heads=heads)]) for name, heads in (("narrow", 2), ("wide", 4))]
    (tmp_path / "page.html").write_text(attention_page(panels, title="t", target=list("abcde")))
    page = browser.page().open(tmp_path / "page.html")
    page.click(".panel:nth-child(1) .thumb[data-column='1']")
    assert page.text(TITLE).endswith("head 2")
    page.press("ArrowRight")
    assert page.text(TITLE).endswith("mean of the heads")
    page.press("ArrowLeft")
    assert page.text(TITLE).endswith("head 2")


def test_a_map_longer_than_a_canvas_may_be_is_drawn(browser, tmp_path):
    maps = [random_map("decoder", "cross", heads=1, queries=2_500, keys=3)]
    words = {"source": list("abc"), "target": [str(i) for i in range(2_500)]}
    (tmp_path / "page.html").write_text(attention_page([Panel(name="x", maps=maps)], title="t", **words))
    page = browser.page().open(tmp_path / "page.html")
    high, shown = page.js("(({height, clientHeight}) => [height, clientHeight])(document.querySelector('.map canvas'))")
    assert shown > 32_767 >= high


def test_pages_of_saved_files_render(browser, pages, tmp_path):
    """The saved files contain the displayed map."""
    page = browser.page().open(pages["one"])
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path), eventsEnabled=True)
    data = data_of(pages["one"].read_text())
    choose(page, "decoder self", layer=2, head=1)
    weights = weights_of(data, "decoder", "self", 1)[0]
    names = [tmp_path / f"decoder_self_layer2_head1.{kind}" for kind in ("svg", "csv")]
    for number, path in enumerate(names):
        page.click(".caption button", number)
        page.wait("new Promise((done) => setTimeout(() => done(true), 300))")
        assert path.stat().st_size
    rows = list(csv.DictReader(io.StringIO(names[1].read_text(encoding="utf-8"))))
    assert len(rows) == (~np.isnan(weights)).sum()
    for row in rows:
        query, key = int(row["query"]) - 1, int(row["key"]) - 1
        assert (row["query_word"], row["key_word"]) == (TARGET[query], TARGET[key])
        np.testing.assert_allclose(float(row["weight"]), weights[query, key], atol=1e-5)
    picture = ElementTree.parse(names[0]).getroot()
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["Decoder self-attention, layer 2 of 3, head 1", *TARGET, *TARGET]
    paths = list(picture.iter("{http://www.w3.org/2000/svg}path"))
    cells = {path.get("fill"): path.get("d").count("M") for path in paths if "v20h-20z" in path.get("d")}
    assert cells.pop("url(#hidden)") == np.isnan(weights).sum()
    assert sum(cells.values()) == len(rows)
