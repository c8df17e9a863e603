"""Tests of the attention page: weights, safety against injected text, network access, and size."""

import base64
import hashlib
import math
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import jax
import numpy as np
import pytest
from attention_page_parts import Elements, data_of, group_of, random_map, translation, weights_of
from golden import case as golden_case
from golden import ours
from numeric_parts import random_params

from transformer.config import (
    MLA,
    ALiBiOptions,
    AttentionOptions,
    Execution,
    LayerKind,
    QKNorm,
    RotaryOptions,
    StackOptions,
    T5BiasOptions,
    TransformerConfig,
)
from transformer.nn.models import CausalLM, DualEncoder, Forecaster, ImagePatches, Seq2Seq
from transformer.viz import _attention_page as module
from transformer.viz._attention_page import Panel, attention_page, quantize, save_attention_page
from transformer.viz._attention_weights import AttentionMap, attention_maps, attention_rollout
from transformer.zoo import load_pretrained

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"vocab_size": 11, "d_model": 8, "num_heads": 4, "feed_forward.d_ff": 5}
HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)</script>{{program}}&quot;\u2028"


def words(count):
    return [f"w{i}" for i in range(count)]


def example(batch):
    """Return the first example of a batch, without the padding of its patches."""
    if not isinstance(batch, ImagePatches):
        return batch[:1]
    count = math.prod(batch.grid[0].tolist())
    return ImagePatches(batch.values[:1, :count], batch.grid[:1])


def page_of(*panels, source=0, target=0, **options):
    """Return a page with one panel per list of maps."""
    named = [Panel(name=f"panel {i}", maps=maps) for i, maps in enumerate(panels)]
    return attention_page(named, title="A page", source=words(source), target=words(target), **options)


def watch(model, *inputs, params=None):
    """Return what a model sows for these inputs, computed with the reference kernel."""
    params = random_params(model, *inputs)["params"] if params is None else params
    model = model.clone(execution=Execution(sow_weights=True))
    run = jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs, mutable=["intermediates"]))
    return jax.device_get(run(params, *inputs)[1]["intermediates"])


def check_same(data, maps):
    """Check that the page has these weights, within 1/510 of the largest weight of each row, and the same mask."""
    for one in maps:
        shown = weights_of(data, one.stack, one.kind, one.layer)
        np.testing.assert_array_equal(np.isnan(shown), np.broadcast_to(one.hidden, shown.shape))
        off = np.abs(np.nan_to_num(shown) - one.weights).max(-1)
        assert (off <= one.weights.max(-1) / 510 + 2e-5).all()


class TestData:
    def test_the_page_contains_the_weights(self):
        maps = translation(source=6, target=7)
        data = data_of(page_of(maps, source=6, target=7))
        check_same(data, maps)
        assert data["words"] == {"encoder": words(6), "decoder": words(7)}
        assert len(data["masks"]) == 2, "causal, and causal with a window: each pattern is stored once"

    @pytest.mark.parametrize("largest", [1.0, 0.3, 1e-3, 1e-9])
    def test_small_weights_keep_their_digits(self, largest):
        """Each row has its own scale, so that small weights over many keys are not rounded to a few levels."""
        weights = np.random.default_rng(0).random((2, 3, 400)).astype(np.float32) * largest
        scales, levels = quantize(weights)
        off = np.abs(scales[..., None] / 65535 * (levels / 255) - weights)
        assert off.max() <= largest / 510 + 1 / 65535

    def test_a_fully_masked_row_is_zeros(self):
        hidden = np.array([[True, True], [False, False]])
        weights = np.array([[[0, 0], [0.5, 0.5]]], np.float32)
        shown = weights_of(data_of(page_of([AttentionMap("encoder", 0, "self", weights, hidden)], source=2)), *SELF)
        np.testing.assert_allclose(shown, [[[np.nan, np.nan], [0.5, 0.5]]], atol=1e-4)

    def test_layers_that_do_not_attend_are_counted(self):
        maps = [random_map(layer=1), random_map(layer=3)]
        panel = Panel(name="a", maps=maps, layers={"decoder": 6})
        group = group_of(data_of(attention_page([panel], title="t", target=words(5))), "decoder", "self")
        assert (group["depth"], [one["layer"] for one in group["layers"]]) == (6, [1, 3])
        assert [one["layer"] for one in group["rollout"]] == [1, 3]

    def test_panels_are_side_by_side(self):
        pair = [random_map(seed=1)], [random_map(seed=2)]
        data = data_of(page_of(*pair, target=5))
        assert [panel["name"] for panel in data["panels"]] == ["panel 0", "panel 1"]
        for number, (one,) in enumerate(pair):
            shown = np.nan_to_num(weights_of(data, "decoder", "self", 0, number))
            np.testing.assert_allclose(shown, one.weights, atol=1 / 400)

    def test_reports_errors_of_its_description(self):
        texts, facts = {"Prompt": "a b", "Generated": "c"}, {"Command": "python -m transformer inspect x"}
        data = data_of(page_of([random_map()], target=5, written_from=3, texts=texts, facts=facts))
        assert (data["title"], dict(data["texts"]), dict(data["facts"])) == ("A page", texts, facts)
        assert data["writtenFrom"] == 3


SELF = ("encoder", "self", 0)


class TestRollout:
    def test_the_rollout_is_the_product_of_the_layers(self):
        maps = [random_map(layer=i, queries=6, keys=6) for i in range(3)]
        rollout = attention_rollout(maps)
        expected = np.eye(6)
        for one, found in zip(maps, rollout, strict=True):
            expected = (0.5 * one.weights.mean(0) + 0.5 * np.eye(6)) @ expected
            np.testing.assert_allclose(found.weights, expected[None], atol=1e-6)
            np.testing.assert_array_equal(found.hidden, one.hidden)
            assert (found.kind, found.stack, found.layer) == ("rollout", "decoder", one.layer)

    @pytest.mark.parametrize("total", [1.0, 0.4])
    def test_rollout_rows_sum_to_one(self, total):
        """This also holds with attention sinks, and for the stored weights."""
        maps = [random_map("encoder", layer=i, queries=7, keys=7, total=total) for i in range(4)]
        for one in attention_rollout(maps):
            np.testing.assert_allclose(one.weights.sum(-1), 1.0, atol=1e-5)
            shown = weights_of(data_of(page_of(maps, source=7)), "encoder", "self", one.layer, part="rollout")
            np.testing.assert_allclose(shown.sum(-1), 1.0, atol=7 / 510)

    def test_the_rollout_of_a_window_widens_with_every_layer(self):
        rollout = attention_rollout([random_map(layer=i, queries=8, keys=8, window=2) for i in range(3)])
        distance = np.subtract.outer(np.arange(8), np.arange(8))
        for layer, one in enumerate(rollout):
            np.testing.assert_array_equal(one.hidden, (distance < 0) | (distance > layer + 1))
            assert (one.weights[:, one.hidden] == 0).all()
            assert (one.weights[:, ~one.hidden] > 0).all()

    def test_the_rollout_covers_one_stack(self):
        maps = translation(source=3, target=4)
        with pytest.raises(ValueError, match="a rollout needs the maps of one stack"):
            attention_rollout(maps)
        decoder = [one for one in maps if one.stack == "decoder"]
        assert [one.layer for one in attention_rollout(decoder)] == [0, 1, 2], "cross-attention is ignored"


class TestPage:
    def test_the_page_is_valid_ascii_with_three_scripts_and_styles(self):
        page = page_of([random_map()], target=5)
        assert page.isascii()
        assert not re.findall(r"\{\{\w+\}\}", page)
        elements = Elements(page)
        assert [attributes.get("type") for attributes, _ in elements.named("script")] == ["application/json", None]
        assert len(elements.named("style")) == 1
        ids = re.findall(r'byId\("([\w-]+)"\)', page)
        assert set(ids) <= {attributes.get("id") for _, attributes, _ in elements.found}

    def test_the_page_fetches_nothing(self):
        """There is no external URL, and the policy forbids requests that a later change might add."""
        page = page_of(translation(3, 4), source=3, target=4)
        elements = Elements(page)
        for tag, attributes, _ in elements.found:
            for name in ("src", "href", "action", "data", "poster", "srcset"):
                assert attributes.get(name, "data:,").startswith("data:"), (tag, attributes)
        assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|WebSocket|sendBeacon|import\(", page)
        (policy,) = [a["content"] for a, _ in elements.named("meta") if a.get("http-equiv")]
        directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
        assert directives["default-src"] == "'none'"
        for tag, directive in (("script", "script-src"), ("style", "style-src")):
            (text,) = [text for attributes, text in elements.named(tag) if "type" not in attributes]
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert directives[directive] == f"'sha256-{digest}'"

    def test_texts_are_escaped(self):
        """A text of the user never ends an element and is never interpreted as part of the page."""
        panel = Panel(name=HOSTILE, maps=[random_map(queries=2, keys=2)])
        page = attention_page(
            [panel], title=HOSTILE, target=[HOSTILE, "ok"], texts={"Prompt": HOSTILE}, facts={HOSTILE: HOSTILE}
        )
        elements = Elements(page)
        assert not elements.named("img")
        assert len(elements.named("script")) == 2
        ((_, title),) = elements.named("title")
        assert title == HOSTILE
        data = data_of(page)
        assert data["title"] == data["texts"][0][1] == data["facts"][0][0] == data["panels"][0]["name"] == HOSTILE
        spelled = HOSTILE.replace("\u2028", "\\u2028").replace(" ", "␣")
        assert data["words"]["decoder"] == [spelled, "ok"], "invisible characters are escaped"
        assert page.count(page.split("<script>")[1][:200]) == 1, "a placeholder in a text is not filled in"

    def test_a_page_of_60_tokens_12_layers_and_12_heads_is_small(self):
        """Encoder, decoder and cross-attention of two checkpoints fit into one page."""
        maps = translation(60, 60, layers=12, heads=12)
        page = page_of(maps, maps, source=60, target=60)
        assert len(page) < 5_000_000
        decoder = [one for one in maps if (one.stack, one.kind) == ("decoder", "self")]
        assert len(page_of(decoder, target=60)) < 500_000, "masked cells are not stored"

    def test_colors_are_monotonic(self):
        """The lightness changes monotonically in even steps, so that the order is visible in print and to color-blind
        readers.
        """
        for theme in re.findall(r"--map: ([^;]+);", Path(module.__file__).with_name("attention_page.css").read_text()):
            stops = [[int(stop.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5)] for stop in theme.split(",")]
            linear = np.where(
                np.array(stops) <= 0.04045, np.array(stops) / 12.92, ((np.array(stops) + 0.055) / 1.055) ** 2.4
            )
            luminance = linear @ [0.2126, 0.7152, 0.0722]
            lightness = 116 * np.cbrt(luminance)
            steps = np.abs(np.diff(lightness))
            assert (np.sign(np.diff(luminance)) == np.sign(luminance[-1] - luminance[0])).all()
            assert steps.max() < 2.2 * steps.min()

    def test_every_file_of_the_package_is_in_a_wheel(self):
        patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
        for path in (ROOT / "transformer").rglob("*"):
            if path.is_dir() or path.suffix in (".py", ".pyc"):
                continue
            package = ".".join(path.relative_to(ROOT).parent.parts)
            assert any(fnmatch(path.name, pattern) for pattern in patterns.get(package, [])), path


class TestRefusals:
    def test_rejects_an_empty_page(self):
        for panels in ([], [Panel(name="a", maps=[])]):
            with pytest.raises(ValueError, match="there is nothing to show"):
                attention_page(panels, title="t")

    def test_rejects_a_wrong_number_of_words(self):
        with pytest.raises(ValueError, match="5 queries and 5 keys of the decoder self-attention, got 4 and 4"):
            page_of([random_map()], target=4)
        with pytest.raises(ValueError, match="5 queries and 5 keys of the decoder cross-attention, got 5 and 3"):
            page_of([random_map(kind="cross")], source=3, target=5)

    @pytest.mark.parametrize(
        ("weight", "message"), [(np.nan, "not finite"), (1.5, "0 to 1, got 0 to 1.5"), (-0.1, "Pass softmax weights")]
    )
    def test_rejects_missing_weights(self, weight, message):
        weights = np.zeros((1, 2, 2), np.float32)
        weights[0, 1, 0] = weight
        with pytest.raises(ValueError, match=message):
            page_of([AttentionMap("encoder", 0, "self", weights, np.zeros((2, 2), bool))], source=2)

    def test_rejects_too_many_weights(self, monkeypatch):
        monkeypatch.setattr(module, "MOST_WEIGHTS", 74)
        with pytest.raises(ValueError, match=r"expected at most 74, got 75 .* Shorten"):
            page_of([random_map()], target=5)


class TestModels:
    @pytest.mark.programs(15, reason="masks of the maps are computed outside of jit")
    def test_shows_grouped_heads_and_windows(self, tmp_path):
        """Layers without attention are mixed with layers with attention, at each position of the pattern."""
        blind, local = LayerKind(self_attention=False), LayerKind(window=3)
        pattern = {"stack.prefix": (blind, local), "stack.period": (LayerKind(), blind), "stack.suffix": (blind,)}
        model = CausalLM(
            TransformerConfig(num_layers=7, attention=AttentionOptions(num_kv_heads=2), **SIZES, **pattern)
        )
        maps = attention_maps(watch(model, np.arange(6)[None]), model.config)
        assert [one.layer for one in maps] == [1, 2, 4]
        assert all(one.weights.shape == (4, 6, 6) for one in maps)
        path = save_attention_page(
            tmp_path / "new" / "page.html",
            [Panel(name="m", maps=maps, layers={"decoder": 7})],
            title="t",
            target=words(6),
        )
        data = data_of(path.read_text())
        check_same(data, maps)
        assert group_of(data, "decoder", "self")["depth"] == 7

    @pytest.mark.programs(12, reason="masks of the maps are computed outside of jit")
    def test_layers_after_layers_without_attention_keep_their_numbers(self):
        model = CausalLM(
            TransformerConfig(
                num_layers=4,
                **SIZES,
                stack=StackOptions(period=(LayerKind(self_attention=False),), suffix=(LayerKind(),)),
            )
        )
        maps = attention_maps(watch(model, np.arange(3)[None]), model.config)
        assert [one.layer for one in maps] == [3]

    @pytest.mark.programs(18, reason="masks of the maps are computed outside of jit")
    def test_shows_an_encoder_decoder(self):
        model = Seq2Seq(TransformerConfig(stack=StackOptions(num_encoder_layers=2, num_decoder_layers=1), **SIZES))
        maps = attention_maps(watch(model, np.arange(5)[None], np.arange(3)[None]), model.config)
        data = data_of(page_of(maps, source=5, target=3))
        check_same(data, maps)
        assert [(g["stack"], g["kind"], len(g["layers"]), len(g["rollout"])) for g in data["panels"][0]["groups"]] == [
            ("encoder", "self", 2, 2),
            ("decoder", "self", 1, 1),
            ("decoder", "cross", 1, 0),
        ]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "changes",
        [
            {"position": ALiBiOptions()},
            {"position": T5BiasOptions()},
            {"attention.softcap": 2.0},
            {"attention.sinks": True},
            {"attention.qk_norm": QKNorm()},
            {"dtype": "bfloat16"},
            {
                "attention.mla": MLA(kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4),
                "position": RotaryOptions(),
            },
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_shows_every_score_variant(self, changes):
        model = CausalLM(TransformerConfig(num_layers=2, **SIZES, **changes))
        params = random_params(model, np.arange(6)[None])["params"]
        maps = attention_maps(watch(model, np.arange(6)[None], params=params), model.config)
        check_same(data_of(page_of(maps, target=6)), maps)
        sums = np.stack([one.weights.sum(-1) for one in maps])
        if "attention.sinks" in changes:
            assert (sums < 1 - 1e-4).all(), "the sinks get the rest"
        else:
            np.testing.assert_allclose(sums, 1.0, atol=1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize("family", golden_case.families())
    def test_shows_every_family(self, family, tmp_path):
        """The drawn mask is the mask of the model: visible cells have positive weight, masked cells have none."""
        name = next(iter(golden_case.cases(family)))
        found = load_pretrained(ours.write(tmp_path / "theirs", golden_case.golden(family)[name]))
        inputs, _ = ours.inputs_of(found.model, golden_case.cases(family)[name], "none")
        inputs = [example(array) for array in inputs]
        row = 1 if isinstance(found.model, Forecaster) else None
        sown, config = watch(found.model, *inputs, params=found.params), found.model.config
        if isinstance(found.model, DualEncoder):
            with pytest.raises(ValueError, match=r"intermediates\['text'\]"):
                attention_maps(sown, config)
            self.check(attention_maps(sown["image"], config.image_encoder))
            sown = sown["text"]
        self.check(attention_maps(sown, config, row))

    def check(self, maps):
        for one in maps:
            assert (one.weights[:, one.hidden] == 0).all()
            assert (one.weights[:, ~one.hidden] > 0).all()
        lengths = {one.stack: one.weights.shape[1] for one in maps}
        labels = {"source": words(lengths.get("encoder", 0)), "target": words(lengths.get("decoder", 0))}
        check_same(data_of(attention_page([Panel(name="m", maps=maps)], title="t", **labels)), maps)
