"""Tests of the report of runs in a real browser, on the screen of a phone."""

import pytest
from browser import Browser

from transformer.viz._report_page import RunReport, report_page

pytestmark = pytest.mark.slow

RECIPE = {
    "training.learning_rate_schedule": "cosine",
    "data.directory": "/a/long/path/to/the/data/of/a/run/with_many_parts/train-00000-of-00010.parquet",
    "optimizer.betas": [0.9, 0.95],
    "model.attention.num_key_value_heads": 4,
}
COMMAND = "python train.py number_words --workdir runs/number_words-with-a-long-name/again --training.steps 300"


def run(name):
    records = [
        {
            "step": step,
            "train/loss": 5 * 0.97**step,
            "perf/peak_memory_bytes": 123_456_789.0,
            "train/learning_rate": 1e-4,
        }
        for step in range(1, 200)
    ]
    records += [{"step": step, "eval/loss": 5 * 0.97**step} for step in (100, 199)]
    return RunReport(
        name=name,
        status="finished, 199 steps",
        facts={"device": "1 x NVIDIA H100 80GB HBM3, jax 0.10.2", "speed": "123,456 target tokens/s while training"},
        records=records,
        outcome="trained in 3.1 minutes. Nächster Schritt: Donaudampfschifffahrtsrecht",
        samples=[(199, "seven hundred forty-two -> setecientos cuarenta y dos")],
        recipe=RECIPE,
        versions={"jax": "0.10.2", "tensorflow-datasets": "4.9.9"},
        calls=[COMMAND],
        commands={"Repeat the run in a new workdir:": COMMAND},
    )


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.mark.parametrize("width", [320, 390])
@pytest.mark.parametrize("names", [["number_words"], ["number_words", "shakespeare_no_attention"]], ids=["one", "two"])
def test_the_page_fits_a_phone(browser, tmp_path, width, names):
    """The page is as wide as the screen, also with everything open, and no word is broken."""
    path = tmp_path / "page.html"
    path.write_text(report_page([run(name) for name in names], title=" and ".join(names), made=COMMAND))
    page = browser.page(width=width, height=740, phone=True).open(path, drawn="true")
    page.js("for (const part of document.querySelectorAll('details')) part.open = true")
    assert page.js("document.documentElement.scrollWidth") == width
    assert page.broken_words() == []
    narrow = page.js("[...document.querySelectorAll('pre')].every((e) => e.scrollWidth <= e.clientWidth)")
    assert narrow, "a command needs no scrolling"
    if len(names) == 1:
        boxes = page.js("[...document.querySelectorAll('.scroll')].map((e) => e.scrollWidth - e.clientWidth)")
        assert max(boxes) == 0, "a table of one run needs no scrolling"


def test_a_word_wider_than_the_screen_breaks(browser, tmp_path):
    """The test above can see a broken word; and such a word makes the page no wider."""
    path = tmp_path / "page.html"
    path.write_text(report_page([RunReport(name="a", status="", outcome="x" * 100)], title="t"))
    page = browser.page(width=320, height=740, phone=True).open(path, drawn="true")
    assert page.broken_words() == ["x" * 100]
    assert page.js("document.documentElement.scrollWidth") == 320


def test_the_arrow_keys_read_the_values(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(report_page([run("a")], title="t"))
    page = browser.page().open(path, drawn="true")
    assert "log scale" in page.text("figcaption")
    page.focus("figure")
    page.press("Home")
    assert page.text("output").startswith("step 1: train 4.85; eval ")
    assert page.complaints() == []
