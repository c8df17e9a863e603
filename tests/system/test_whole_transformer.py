"""The claims of the teaching text S2 'the whole Transformer', each shown with this code.

Each test is named after the row that it shows; docs/mathematics.md ends with the table of all rows.
"""

import functools

import flax.linen as nn
import jax
import numpy as np
import pytest
from teaching_texts import KEYS, SMALL, B, D, T, X, captured, softmax, start

from transformer.config import Execution, LayerKind, transformer_base
from transformer.data.tokenizers._vocabularies import WordTokenizer
from transformer.generate import Sampling, generate
from transformer.nn._attention import MultiHeadAttention
from transformer.nn._masks import Mask
from transformer.nn._positions import Sinusoidal
from transformer.nn.layers._norms import LayerNorm
from transformer.nn.models import CausalLM, Classifier, Seq2Seq
from transformer.viz._attention_maps import save_attention_maps
from transformer.viz._attention_weights import attention_maps

# The sizes in the text: L = 6, d_model = 512, h = 8, d_k = d_v = 64. The target is shorter than the source.
SOURCE, TARGET = (jax.device_put(np.array([tokens], np.int32)) for tokens in ([3, 1, 4, 1, 5, 9], [2, 6, 5, 3]))
PAPER = transformer_base(vocab_size=11)
ONE_LAYER = Seq2Seq(PAPER.replace(num_layers=1, **{"stack.prefix": (LayerKind(),)}))


def recorded(module, params, *inputs, **options):
    """Return all module calls of a forward pass in order: {path: (first input, output)}."""
    calls = {}

    def note(call, args, kwargs, context):
        out = call(*args, **kwargs)
        if context.method_name == "__call__":
            calls["/".join(context.module.path)] = (args[0] if args else None, out)
        return out

    with nn.intercept_methods(note):
        module.apply(params, *inputs, **options)
    return calls


@functools.cache
def paper(deterministic=True):
    """Return parameters of one encoder and one decoder layer of the paper, and all calls inside them."""
    params = start(ONE_LAYER, SOURCE, TARGET)["params"]
    # Scale the parameters to about their initial size, so that the softmax is not one-hot.
    params = jax.tree.map(lambda leaf: np.asarray(leaf) / np.float32(8 if leaf.ndim > 1 else 1), params)
    rngs = None if deterministic else {"dropout": KEYS[7]}
    order = []

    @jax.jit
    def run(params, rngs):
        calls = recorded(ONE_LAYER, {"params": params}, SOURCE, TARGET, deterministic=deterministic, rngs=rngs)
        order.extend(calls)  # jax.jit returns a sorted dictionary
        return calls

    calls = jax.device_get(run(params, rngs))
    return params, {path: calls[path] for path in order}


def assert_dropped(out, whole):
    """Check inverted dropout: a tenth of the entries is 0, the others are divided by 0.9."""
    assert (out == 0).mean() == pytest.approx(0.1, abs=0.03)
    np.testing.assert_allclose(out, np.where(out == 0, 0, whole / 0.9), rtol=1e-5)


def test_s2_1_embeddings_are_rows_of_a_table_times_sqrt_d_model():
    """A lookup in (vocab, d_model), multiplied by sqrt(d_model); source and target share one table."""
    params, calls = paper()
    table = params["embedding"]["embedding"]
    assert table.shape == (11, 512)
    np.testing.assert_allclose(calls["encoder"][0][0], table[np.asarray(SOURCE)[0]] * np.sqrt(512), rtol=1e-6)
    np.testing.assert_allclose(calls["decoder"][0][0], table[np.asarray(TARGET)[0]] * np.sqrt(512), rtol=1e-6)


def test_s2_2_sinusoids_are_added_and_a_tenth_dropped():
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(same): a matrix (L, d) is added; then dropout 0.1."""
    length, d = 6, 512
    literal, stable = np.zeros((2, length, d))
    for pos in range(length):
        for i in range(d // 2):
            angle = pos / 10_000 ** (2 * i / d)
            literal[pos, 2 * i : 2 * i + 2] = np.sin(angle), np.cos(angle)
            angle = pos * np.exp(-(2 * i / d) * np.log(10_000))
            stable[pos, 2 * i : 2 * i + 2] = np.sin(angle), np.cos(angle)
    np.testing.assert_allclose(stable, literal, atol=1e-12)
    encoding = jax.jit(Sinusoidal().encoding, static_argnums=1)(np.arange(length)[None], d)
    np.testing.assert_allclose(encoding, literal[None], atol=1e-6)

    _, calls = paper()
    embeddings, first = calls["encoder"][0], calls["encoder/prefix_0"][0]
    np.testing.assert_allclose(first[0], embeddings[0] + literal, rtol=1e-5, atol=1e-5)
    _, calls = paper(deterministic=False)
    assert_dropped(calls["encoder/prefix_0"][0], first)


@pytest.mark.parametrize("kind", ["self", "multi-head", "causal", "cross"])
def test_s2_3_four_kinds_of_attention_are_one_formula(kind):
    """Softmax((Q K^T + Mask) / sqrt(d_k)) V; cross-attention takes keys and values from a context of any length."""
    heads, size = (1, D) if kind == "self" else (2, 5)
    x, context = (jax.device_put(array) for array in (np.asarray(X)[:1], np.asarray(X)[1:2, :3]))
    context = context if kind == "cross" else None
    attention = MultiHeadAttention(num_heads=heads, head_dim=size, use_bias=False)
    params = start(attention, x)
    mask = Mask.causal() if kind == "causal" else None
    _, weights = captured(attention, params, x, context=context, mask=mask)
    out = np.asarray(jax.jit(attention.apply)(params, x, context, mask=mask)[0])

    y = x if context is None else context
    w = {name: np.asarray(part["kernel"]) for name, part in params["params"].items()}
    weights, x, y = np.asarray(weights), np.asarray(x), np.asarray(y)
    q, k, v = (np.einsum("td,dnh->nth", a[0], w[n]) for n, a in (("query", x), ("key", y), ("value", y)))
    hidden = np.triu(np.ones((T, y.shape[1])), 1) * (kind == "causal")
    expected = softmax((q @ k.transpose(0, 2, 1) + np.where(hidden, -np.inf, 0)[None]) / np.sqrt(size))
    assert weights.shape == (1, heads, T, 3 if kind == "cross" else T)
    np.testing.assert_allclose(weights[0], expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(out[0], np.einsum("nth,nhd->td", expected @ v, w["out"]), rtol=1e-3, atol=1e-4)


def test_s2_3_the_encoder_gives_keys_and_values_and_the_decoder_queries():
    """Four queries from the decoder attend to six keys and values from the encoder output."""
    _, calls = paper()
    memory, cross = calls["encoder"][1][0], "decoder/prefix_0/cross_attention"
    np.testing.assert_array_equal(calls[f"{cross}/key"][0], memory)
    np.testing.assert_array_equal(calls[f"{cross}/value"][0], memory)
    np.testing.assert_array_equal(calls[f"{cross}/query"][0], calls["decoder/prefix_0/attention_norm"][1])
    shapes = {name: calls[f"{cross}/{name}"][1].shape for name in ("query", "key", "value", "out")}
    assert shapes == {"query": (1, 4, 8, 64), "key": (1, 6, 8, 64), "value": (1, 6, 8, 64), "out": (1, 4, 512)}


def test_s2_4_all_heads_in_parallel_with_the_sizes_of_the_text():
    """(6, 512) -> (6, 8, 64) -> (8, 6, 64), heads first -> (6, 512) -> W_O, with the batch axis in front."""
    params, calls = paper()
    own, path = params["encoder"]["prefix_0"]["self_attention"], "encoder/prefix_0/self_attention"
    shapes = {name: own[name]["kernel"].shape for name in own}
    assert shapes == dict.fromkeys(("query", "key", "value"), (512, 8, 64)) | {"out": (8, 64, 512)}
    assert calls[path][0].shape == (1, 6, 512)
    rows = {name: np.asarray(calls[f"{path}/{name}"][1][0]) for name in ("query", "key", "value")}
    assert {array.shape for array in rows.values()} == {(6, 8, 64)}
    q, k, v = (array.transpose(1, 0, 2) for array in rows.values())
    assert q.shape == (8, 6, 64)
    weights = softmax(q @ k.transpose(0, 2, 1) / 8)
    assert weights.shape == (8, 6, 6)
    joined = (weights @ v).transpose(1, 0, 2).reshape(6, 512)
    np.testing.assert_allclose(calls[f"{path}/out"][0][0].reshape(6, 512), joined, rtol=1e-3, atol=1e-4)
    out = joined @ own["out"]["kernel"].reshape(8 * 64, 512) + own["out"]["bias"][None]
    np.testing.assert_allclose(calls[path][1][0][0], out, rtol=1e-3, atol=1e-3)


SUBLAYERS = {"attention_norm": "self_attention", "cross_attention_norm": "cross_attention"}
SUBLAYERS |= {"feed_forward_norm": "feed_forward"}


def test_s2_5_add_and_norm():
    """LayerNorm(x + Dropout(Sublayer(x))) around each sublayer, with mean and variance per token, gamma and beta."""
    params, calls = paper()
    _, noisy = paper(deterministic=False)
    for number, (norm, sublayer) in enumerate(SUBLAYERS.items()):
        path = "decoder/prefix_0/"
        gamma, beta = (params["decoder"]["prefix_0"][norm][name] for name in ("scale", "bias"))
        assert gamma.shape == beta.shape == (512,)

        def result(calls, path):
            return calls[path][1][0] if path.endswith("attention") else calls[path][1]

        added = calls[path + sublayer][0] + result(calls, path + sublayer)
        np.testing.assert_allclose(calls[path + norm][0], added, rtol=1e-5, atol=1e-5)
        token = np.asarray(added[0, 2], np.float64)
        expected = (token - token.mean()) / np.sqrt(token.var() + 1e-6) * gamma + beta
        np.testing.assert_allclose(calls[path + norm][1][0, 2], expected, rtol=1e-3, atol=1e-4)

        dropped = noisy[f"{path}Dropout_{number}"][1]
        assert_dropped(dropped, result(noisy, path + sublayer))
        np.testing.assert_allclose(noisy[path + norm][0], noisy[path + sublayer][0] + dropped, rtol=1e-5, atol=1e-5)


def test_s2_5_layer_norm_gives_each_token_mean_0_and_variance_1():
    """With the initial gamma 1 and beta 0, for every mean and variance of the input token."""
    x = np.asarray(X) * np.arange(1, T + 1, dtype=np.float32)[None, :, None] + 5
    norm = LayerNorm()
    y = np.asarray(jax.jit(lambda key, x: norm.apply(norm.init(key, x), x))(KEYS[0], x))
    np.testing.assert_allclose(y.mean(-1), np.zeros((B, T)), atol=1e-5)
    np.testing.assert_allclose(y.var(-1), np.ones((B, T)), rtol=1e-4)


def test_s2_6_feed_forward():
    """max(0, x W_1 + b_1) W_2 + b_2, inner width d_ff = 2048, two biases."""
    params, calls = paper()
    own = params["encoder"]["prefix_0"]["feed_forward"]
    w_1, b_1, w_2, b_2 = (np.asarray(own[part][leaf]) for part in ("up", "down") for leaf in ("kernel", "bias"))
    assert [w_1.shape, b_1.shape, w_2.shape, b_2.shape] == [(512, 2048), (2048,), (2048, 512), (512,)]
    x, out = (np.asarray(array[0]) for array in calls["encoder/prefix_0/feed_forward"])
    expected = np.maximum(0, x @ w_1 + b_1[None]) @ w_2 + b_2[None]
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-3)


def test_s2_7_six_layers_of_encoder_and_decoder():
    """N = 6 each; a decoder layer is causal self-attention, cross-attention, feed-forward, each with Add & Norm."""
    shapes = jax.eval_shape(Seq2Seq(PAPER).init, KEYS[0], SOURCE, TARGET)["params"]
    for stack in ("encoder", "decoder"):
        assert {leaf.shape[0] for leaf in jax.tree.leaves(shapes[stack]["layers"])} == {6}
    _, calls = paper()
    sublayers = [name for norm, sublayer in SUBLAYERS.items() for name in (sublayer, norm)]
    within = [path.removeprefix("decoder/prefix_0/") for path in calls if path.startswith("decoder/prefix_0/")]
    assert [name for name in within if name in sublayers] == sublayers


SIX = SMALL.replace(**{"stack.prefix": ()}, num_layers=6)


def test_s2_7_a_classifier_uses_the_encoder():
    """Six layers, the mean of their output over the non-padding tokens, and a linear map to classes."""
    model = Classifier(SIX.replace(**{"output.num_classes": 3}))
    tokens, mask = np.array([[1, 2, 3, 4, 0]]), Mask.lengths(jax.device_put(np.array([4])))
    params = jax.device_get(start(model, tokens))
    logits = np.asarray(jax.jit(model.apply)(params, tokens, mask=mask))
    assert logits.shape == (1, 3)
    hidden = jax.jit(functools.partial(model.apply, method="hidden"))(params, tokens[:, :4])
    head = params["params"]["output"]
    np.testing.assert_allclose(
        logits[0], np.asarray(hidden)[0].mean(0) @ head["kernel"] + head["bias"], rtol=1e-3, atol=1e-4
    )


def test_s2_7_a_decoder_without_an_encoder_is_legal():
    """A decoder without encoder has no cross-attention and no parameters for it; it is causal."""
    model, tokens, other = CausalLM(SIX), np.array([[1, 2, 3, 4]]), np.array([[1, 2, 9, 4]])
    params = start(model, tokens)
    layer = params["params"]["decoder"]["layers"]["slot_0"]
    assert set(layer) == {"attention_norm", "self_attention", "feed_forward_norm", "feed_forward"}
    assert layer["feed_forward"]["up"]["kernel"].shape[0] == 6
    run = jax.jit(model.apply)
    changed = np.abs(np.asarray(run(params, tokens)) - np.asarray(run(params, other))).max((0, 2)) > 0
    assert changed.tolist() == [False, False, True, True]


def test_s2_8_head_and_generation():
    """A linear map d_model -> vocab and a softmax; the most likely token is appended to the input."""
    model, prompt, new = CausalLM(SMALL.replace(**{"embedding.tie": False})), [3, 1, 4], 5
    params = jax.device_get(start(model, np.array([prompt]))["params"])
    params["decoder"]["final_norm"] = {
        "scale": np.ones(D, np.float32),
        "bias": np.zeros(D, np.float32),
    }  # a random bias would determine the token
    run = jax.jit(functools.partial(model.apply, method="hidden"))
    text = list(prompt)
    for length in range(3, 3 + new):
        hidden = np.asarray(run({"params": params}, np.array([text + [0] * (3 + new - length)])))
        assert params["output"]["kernel"].shape == (D, 13)
        probabilities = softmax(np.asarray(hidden[0, length - 1] @ params["output"]["kernel"]))
        assert probabilities.sum() == pytest.approx(1)
        text.append(int(probabilities.argmax()))
    logits = jax.jit(functools.partial(model.apply, method="head"))({"params": params}, hidden)
    np.testing.assert_allclose(softmax(np.asarray(logits))[0, length - 1], probabilities, rtol=1e-4)
    written = generate(model, jax.device_put(params), [prompt], max_new_tokens=new, sampling=Sampling(temperature=0.0))
    assert written == [text[3:]]
    assert len(set(written[0])) > 1


def test_s2_9_a_sentence_of_six_words_through_the_sizes():
    """'Me gusta la pizza de Pepperoni': 6 -> (6, 512) -> (6, 8, 64) -> (6, 512) -> (6, 2048) -> (6, 512) -> words."""
    sentence = "Me gusta la pizza de Pepperoni"
    tokenizer = WordTokenizer(sorted(set(sentence.split())))
    tokens = jax.device_put(np.array([tokenizer.encode(sentence)]))
    assert tokenizer.tokens(np.asarray(tokens)[0]) == sentence.split()
    model, calls = CausalLM(transformer_base(vocab_size=tokenizer.vocab_size)), {}

    def run(key):
        calls.update(recorded(model, model.init(key, tokens), tokens))

    jax.eval_shape(run, KEYS[0])  # only the shapes of the model with six layers
    layer = "decoder/layers/slot_0"
    sizes = {name: calls[f"{layer}/self_attention/{name}"][1].shape for name in ("query", "key", "value", "out")}
    assert tokens.shape == (1, 6)
    assert calls["embedding"][1].shape == (1, 6, 512)
    assert sizes == dict.fromkeys(("query", "key", "value"), (1, 6, 8, 64)) | {"out": (1, 6, 512)}
    assert calls[f"{layer}/feed_forward/up"][1].shape == (1, 6, 2048)
    assert calls[f"{layer}/feed_forward_norm"][1].shape == (1, 6, 512)
    assert calls[""][1].shape == (1, 6, tokenizer.vocab_size)


@pytest.mark.programs(11, reason="attention_maps computes the maps outside of jax.jit")
def test_s2_9_see_which_word_attends_to_which(tmp_path):
    """'La sopa se cocinó en la olla y estaba rica': one map per layer, 10 x 10 words per head, rows sum to 1."""
    words = ["La", "sopa", "se", "cocinó", "en", "la", "olla", "y", "estaba", "rica"]
    tokens = np.arange(10)[None]
    model = Classifier(SMALL.replace(num_layers=2, **{"output.num_classes": 2}), Execution(sow_weights=True))
    params = start(model, tokens)
    _, seen = jax.jit(functools.partial(model.apply, mutable=["intermediates"]))(params, tokens)
    maps = attention_maps(seen["intermediates"], model.config)
    assert [(one.stack, one.layer, one.kind) for one in maps] == [("encoder", 0, "self"), ("encoder", 1, "self")]
    for one in maps:
        assert one.weights.shape == (2, 10, 10)
        np.testing.assert_allclose(one.weights.sum(-1), np.ones((2, 10)), rtol=1e-5)
    paths = save_attention_maps(maps, tmp_path, source=words)
    assert [path.name for path in paths] == ["encoder_self_layer1.png", "encoder_self_layer2.png"]
    assert all(path.stat().st_size > 5_000 for path in paths)
