"""Tests of attention maps: order of the layers, masked cells, and labels on both axes."""

import warnings

import jax
import numpy as np
import pytest
from matplotlib.image import imread
from numeric_parts import random_params

from transformer.config import Execution, LayerKind, StackOptions, TransformerConfig
from transformer.nn.models import CausalLM, Seq2Seq
from transformer.viz import _attention_maps as module
from transformer.viz import _style
from transformer.viz._attention_maps import save_attention_maps
from transformer.viz._attention_weights import AttentionMap, attention_maps

SIZES = {"vocab_size": 11, "d_model": 6, "num_heads": 3, "feed_forward.d_ff": 5}


@pytest.fixture
def figures(monkeypatch):
    """The drawn figures by file name."""
    drawn = {}

    class Canvas(_style.FigureCanvasAgg):
        def print_png(self, path, **options):
            super().print_png(path, **options)
            drawn[str(path).rpartition("/")[2]] = self.figure

    monkeypatch.setattr(_style, "FigureCanvasAgg", Canvas)
    return drawn


def start(model, *rows):
    return random_params(model, *rows)["params"]


def watch(model, params, *rows):
    """Return what a model sows for these inputs."""
    model = model.clone(execution=Execution(sow_weights=True))
    run = jax.jit(lambda params, *rows: model.apply({"params": params}, *rows, mutable=["intermediates"]))
    return jax.device_get(run(params, *rows)[1]["intermediates"])


def heads_of(figure):
    """Return the axes of the heads, without the color bar."""
    return [axes for axes in figure.axes if axes.get_title(loc="left").startswith("head")]


def words_on(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def random_map(stack="decoder", kind="self", *, layer=0, heads=3, queries=5, keys=5):
    hidden = ~np.tri(queries, keys, dtype=bool) if (stack, kind) == ("decoder", "self") else np.zeros((queries, keys))
    weights = np.random.default_rng(0).random((heads, queries, keys)) * ~hidden.astype(bool)
    weights /= weights.sum(-1, keepdims=True)
    return AttentionMap(stack, layer, kind, weights.astype(np.float32), hidden.astype(bool))


@pytest.mark.programs(15, reason="masks of the maps are computed outside of jit")
def test_layers_are_in_data_flow_order():
    """Each kind of layer has its own window, and the second repetition of the period attends uniformly."""
    kinds = {"stack.prefix": (1,), "stack.period": (2, 3), "stack.suffix": (4,)}
    pattern = {name: tuple(LayerKind(window=size) for size in sizes) for name, sizes in kinds.items()}
    model = CausalLM(TransformerConfig(num_layers=6, **SIZES, **pattern))
    tokens = np.arange(7)[None]
    params = start(model, tokens)
    repeated = params["decoder"]["layers"]
    for slot in repeated.values():
        query = jax.tree.map(np.array, slot["self_attention"]["query"])
        for leaf in query.values():
            leaf[1] = 0
        slot["self_attention"]["query"] = query
    sown = watch(model, params, tokens)

    maps = attention_maps(sown, model.config)

    assert [(one.stack, one.layer, one.kind) for one in maps] == [("decoder", i, "self") for i in range(6)]
    for one, window in zip(maps, (1, 2, 3, 2, 3, 4), strict=True):
        assert one.weights.shape == (3, 7, 7)
        distance = np.subtract.outer(np.arange(7), np.arange(7))
        np.testing.assert_array_equal(one.hidden, (distance < 0) | (distance >= window))
        assert (one.weights[:, one.hidden] == 0).all()
        assert (one.weights[:, ~one.hidden] > 0).all()
        np.testing.assert_allclose(one.weights.sum(-1), 1.0, rtol=1e-5)
    spread = [np.ptp(one.weights[:, -1][:, ~one.hidden[-1]], axis=-1).max() for one in maps]
    assert max(spread[3], spread[4]) < 1e-6 < min(spread[1], spread[2], spread[5])


@pytest.mark.programs(18, reason="masks of the maps are computed outside of jit")
def test_a_seq2seq_has_three_attention_kinds():
    model = Seq2Seq(TransformerConfig(stack=StackOptions(num_encoder_layers=1, num_decoder_layers=2), **SIZES))
    source, target = np.arange(5)[None], np.arange(3)[None]
    sown = watch(model, start(model, source, target), source, target)

    maps = attention_maps(sown, model.config)

    assert [(one.stack, one.layer, one.kind, one.weights.shape) for one in maps] == [
        ("encoder", 0, "self", (3, 5, 5)),
        ("decoder", 0, "self", (3, 3, 3)),
        ("decoder", 0, "cross", (3, 3, 5)),
        ("decoder", 1, "self", (3, 3, 3)),
        ("decoder", 1, "cross", (3, 3, 5)),
    ]
    assert [one.hidden.any() for one in maps] == [False, True, False, True, False]


def test_rejects_a_batch_or_empty_weights():
    model = CausalLM(TransformerConfig(num_layers=1, **SIZES))
    tokens = np.zeros((2, 3), np.int32)
    sown = watch(model, start(model, tokens), tokens)
    with pytest.raises(ValueError, match="one example, got a batch of 2"):
        attention_maps(sown, model.config)
    with pytest.raises(ValueError, match=r"sow_weights=True.*mutable=\['intermediates'\]"):
        attention_maps({}, model.config)


def test_every_head_has_its_words_on_both_axes(tmp_path, figures):
    source, target = ["one", " ", "two\n"], ["<bos>", "<eos>", "$5$", "", "a b\x1b"]
    maps = [
        random_map("encoder", layer=11, queries=3, keys=3),
        random_map("decoder", "cross", queries=5, keys=3),
    ]
    paths = save_attention_maps(maps, tmp_path / "new", source=source, target=target)

    assert [path.name for path in paths] == ["encoder_self_layer12.png", "decoder_cross_layer1.png"]
    assert all(path.stat().st_size for path in paths)
    for name, rows in (("encoder_self_layer12.png", "encoder"), ("decoder_cross_layer1.png", "decoder")):
        heads = heads_of(figures[name])
        assert len(heads) == 3
        for axes in heads:
            assert words_on(axes.xaxis) == ["one", "␣", "two⏎"]
            assert words_on(axes.yaxis) == (
                ["one", "␣", "two⏎"] if rows == "encoder" else ["<bos>", "<eos>", "$5$", "∅", "a␣b\\x1b"]
            )
            assert axes.images[0].get_clim() == (0, 1)
            assert axes.yaxis_inverted()  # the first query is at the top
    texts = [text.get_text() for text in figures["decoder_cross_layer1.png"].texts]
    assert texts[0] == "decoder, layer 1 of 1: cross-attention"
    assert "rows: queries (decoder), columns: keys (encoder)" in texts


def test_cells_show_their_weight(tmp_path, figures):
    one = random_map(heads=2)
    save_attention_maps([one], tmp_path, target=list("abcde"))
    for head, axes in enumerate(heads_of(figures["decoder_self_layer1.png"])):
        shown = axes.images[0].get_array()
        np.testing.assert_array_equal(np.ma.getmaskarray(shown), one.hidden)
        np.testing.assert_array_equal(shown.filled(0), one.weights[head])


def test_masked_cells_differ_from_weight_0(tmp_path):
    """With equal weights, masked or zero, only the image with masked cells has the color of masked cells."""
    weights = np.eye(4, dtype=np.float32)[None]
    pictures = {}
    for name, hidden in (("hidden", ~np.tri(4, dtype=bool)), ("zero", np.zeros((4, 4), bool))):
        (path,) = save_attention_maps(
            [AttentionMap("decoder", 0, "self", weights, hidden)], tmp_path / name, target=list("abcd")
        )
        pictures[name] = (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    color = [int(module._HIDDEN[i : i + 2], 16) for i in (1, 3, 5)]
    counts = {name: (pixels == color).all(-1).sum() for name, pixels in pictures.items()}
    assert counts["hidden"] > 2000
    assert counts["zero"] < 100


@pytest.mark.parametrize(("length", "pages"), [(8, 1), pytest.param(90, 4, marks=pytest.mark.slow)])
def test_words_that_do_not_fit_continue_on_further_pages(tmp_path, figures, length, pages):
    words = [f"w{i}" for i in range(length)]
    paths = save_attention_maps([random_map(heads=3, queries=length, keys=length)], tmp_path, target=words)
    assert len(paths) == pages
    named = {name: [words_on(axes.xaxis) for axes in heads_of(figure)] for name, figure in figures.items()}
    assert len(named["decoder_self_layer1.png"]) == 3
    assert named.pop("decoder_self_layer1.png")[0] == (words if pages == 1 else words[::2])
    assert all(shown == [words] for shown in named.values())
    for figure in figures.values():
        width, height = figure.get_size_inches()
        assert max(width, height) <= 36
        for axes in heads_of(figure):
            box = axes.get_position()
            assert 0 < box.x0 < box.x1 < 1
            assert 0 < box.y0 < box.y1 < 1


def test_every_character_can_be_drawn(tmp_path, figures):
    """There is no formula, no placeholder for a character, and no warning."""
    words = ["$x", "$\\frac$", "你好", "ё", "ñ", "\U0001f9d9", "\t", "é" * 30]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_attention_maps([random_map(queries=8, keys=8)], tmp_path, target=words)
    shown = words_on(heads_of(figures["decoder_self_layer1.png"])[0].xaxis)
    assert shown[:2] == ["$x", "$\\frac$"]
    assert shown[2] in ("你好", "\\u4f60\\u597d")
    assert shown[3:5] == ["ё", "ñ"]
    assert shown[6:] == ["⇥", "é" * 15 + "…"]


def test_too_many_plots_are_rejected_before_drawing(tmp_path, figures):
    words = [f"w{i}" for i in range(200)]
    maps = [random_map(heads=2, queries=200, keys=200)] * 10
    message = r"too large: expected at most 200 million pixels in total, got \d+ million in 30 images.*--html"
    with pytest.raises(ValueError, match=message):
        save_attention_maps(maps, tmp_path / "new", target=words)
    assert not figures
    assert not (tmp_path / "new").exists()


def test_too_few_words_are_refused(tmp_path):
    with pytest.raises(ValueError, match="each of the 5 queries and 5 keys of the decoder self-attention, got 2 and 2"):
        save_attention_maps([random_map()], tmp_path, target=["a", "b"])
