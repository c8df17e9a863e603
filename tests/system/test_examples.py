"""The examples are short, are linked in docs/reuse.md, document their usage, and produce the documented results."""

import ast
import importlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numeric_parts
import numpy as np
import pytest
from chat_parts import write_chat_model

ROOT = pathlib.Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
REUSE = (ROOT / "docs" / "reuse.md").read_text(encoding="utf-8")


def load(name):
    """Import an example."""
    return importlib.import_module(f"examples.{name}")


def source(name):
    return (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")


def test_examples_exist():
    assert len(NAMES) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_documents_its_command(name):
    text = source(name)
    assert len(text.splitlines()) < 60
    document = ast.get_docstring(ast.parse(text))
    usage = [line for line in document.splitlines() if line.startswith("Usage: ")]
    assert len(usage) == 1
    assert usage[0].split()[1:4] == ["python", "-m", f"examples.{name}"]
    assert "sys.path" not in text


@pytest.mark.parametrize("name", NAMES)
def test_a_page_links_every_example(name):
    assert f"(../examples/{name}.py)" in REUSE


@pytest.mark.programs(60, reason="the example itself calls modules outside of jax.jit")
def test_pure_function_equals_the_formula():
    module = load("pure_function")
    result = module.main()
    assert result["difference"] < 1e-5
    assert result["y"].shape == (module.BATCH, module.LENGTH, module.HEADS, module.SIZE)
    gradient, mapped = np.asarray(result["gradient"]), np.asarray(result["mapped"])
    np.testing.assert_array_equal(gradient[1, 4:], 0.0)  # padded keys
    assert (np.abs(gradient[1, :4]).max((1, 2)) > 0).all()
    np.testing.assert_allclose(mapped[0], result["y"], atol=1e-6)
    assert np.abs(mapped[1] - np.asarray(result["y"])).max() > 0.01
    assert "flax" not in {name.split(".")[0] for name in imported("pure_function")}


def imported(name):
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.programs(90, reason="the example itself calls modules outside of jax.jit")
def test_linen_module_learns_and_is_causal():
    result = load("linen_module").main()
    assert result["after"] < 0.5 * result["before"]
    attention = result["gradient"]["MultiHeadAttention_0"]
    assert {path: bool(np.abs(np.asarray(g["kernel"])).max() > 0) for path, g in attention.items()} == dict.fromkeys(
        ("query", "key", "value", "out"), True
    )
    changed = np.asarray(result["changed"])
    np.testing.assert_array_equal(changed[:, :20], 0.0)
    assert (np.abs(changed[:, 20:]).max((0, 2)) > 0).all()


def test_linen_module_hides_padding():
    module = load("linen_module")
    model, lengths = module.Forecaster(), np.array([7, 3])
    series = np.array(jax.jit(lambda: module.waves(jax.random.key(2), 2, 7))())
    params, apply = numeric_parts.random_params(model, series), jax.jit(model.apply)
    before = np.asarray(apply(params, series, lengths))
    series[1, 3:] = 9.0
    np.testing.assert_array_equal(np.asarray(apply(params, series, lengths))[1, :3], before[1, :3])


@pytest.mark.slow
def test_nnx_encoder_learns_and_ignores_padding():
    module = load("nnx_encoder")
    result = module.main()
    assert sum(result["losses"][-5:]) / 5 < 0.2 * result["losses"][0]
    x, lengths, real, answer = module.batch(jax.random.key(5))
    y = result["model"](x, lengths)
    assert jnp.square(y - answer).mean(where=real) < 0.2 * jnp.square(answer).mean(where=real)
    other = result["model"](jnp.where(real, x, 99.0), lengths)
    np.testing.assert_array_equal(jnp.where(real, y, 0.0), jnp.where(real, other, 0.0))


@pytest.mark.programs(150, reason="the example itself calls modules outside of jax.jit")
def test_scanned_block_equals_the_loop():
    result = load("scanned_block").main()
    assert result["difference"] < 1e-5
    assert result["sizes"].shape == (5,)
    kernel = result["params"]["layers"]["block"]["self_attention"]["query"]["kernel"]
    assert kernel.shape[0] == 5
    assert np.abs(np.asarray(kernel)[0] - np.asarray(kernel)[1]).max() > 0.01  # the layers have different parameters


@pytest.mark.programs(60, reason="the example itself calls modules outside of jax.jit")
def test_optax_loop_reaches_its_target_loss():
    result = load("optax_loop").main()
    assert result["losses"][0] > 2.0
    assert result["losses"][-1] < 0.05
    assert result["accuracy"] > 0.99


def test_export_names_a_missing_package(monkeypatch):
    """The error comes before the training."""
    module = load("export_stablehlo")
    monkeypatch.setitem(sys.modules, "flatbuffers", None)  # as if it were not installed
    monkeypatch.setattr(module, "train", lambda: pytest.fail("trained although the file cannot be written"))
    with pytest.raises(SystemExit, match=r"flatbuffers, which is not installed. Run: pip install flatbuffers"):
        module.main()


# Run in a separate process: the type checks of the tests require `int` for sizes that an exported program leaves open.
WRITER = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
import transformer
from examples import export_stablehlo

config = transformer.TransformerConfig(
    **{"embedding.source_vocab_size": 13}, vocab_size=11, d_model=8, num_layers=1, num_heads=2
)
model, tokens = transformer.Seq2Seq(config), jnp.zeros((1, 3), int)
params = jax.jit(model.init)(jax.random.key(0), tokens, tokens)["params"]
transformer.load = {"runs/mine": (model, params)}.get
loaded = export_stablehlo.main("runs/mine", sys.argv[1])
assert loaded["difference"] < 1e-5, loaded["difference"]
assert loaded["logits"](tokens, tokens[:, :2]).shape == (1, 2, 11)

result = export_stablehlo.main(folder=sys.argv[1])
assert result["difference"] < 1e-5, result["difference"]
np.save(f"{sys.argv[1]}/expected.npy", result["logits"](jnp.arange(10).reshape(2, 5)))
"""

# Reads the file without this library.
READER = """
import sys
import jax.numpy as jnp
import numpy as np
from jax import export

call = export.deserialize(bytearray(open("model.stablehlo", "rb").read())).call
np.save("logits.npy", call(jnp.arange(10).reshape(2, 5)))
assert "transformer" not in sys.modules and "flax" not in sys.modules
"""


@pytest.mark.slow
def test_export_is_readable_without_the_library(tmp_path):
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers: pip install flatbuffers")
    subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-c", READER], cwd=tmp_path, check=True)
    logits, expected = np.load(tmp_path / "logits.npy"), np.load(tmp_path / "expected.npy")
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    np.testing.assert_array_equal(logits.argmax(-1), [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]])  # it can count


def test_array_shapes_walks_through_the_sizes_of_the_paper():
    found = load("array_shapes").main()
    shapes = {size.place.rpartition("/")[2]: size.shape for size in found}
    assert shapes["query"] == shapes["key"] == shapes["value"] == (1, 6, 8, 64)
    assert [size.shape for size in found if size.axes == "B N T S"] == [(1, 8, 6, 6)]
    assert {size.repeats for size in found if "layers" in size.place} == {6}


@pytest.mark.slow
def test_gender_agreement_writes_its_plots(tmp_path, capsys):
    """All stages run; two training steps are too few to learn anything."""
    module = load("gender_agreement")
    text = " ".join(module.sentences())
    assert "La sopa se cocinó en la olla" not in text
    assert "La sopa se cocinó en el horno y estaba rica" in text
    assert "El guiso se cocinó en la olla y estaba rico" in text
    assert len(module.main(str(tmp_path), steps=2)) == 3
    assert len(list((tmp_path / "attention").glob("*.png"))) == 2
    assert "query = x W_Q" in capsys.readouterr().out


@pytest.mark.slow
def test_gender_agreement_learns_the_gender_of_the_dish(tmp_path):
    answers = load("gender_agreement").main(str(tmp_path))
    endings = {prompt.split()[1]: word[-1] for prompt, word in answers.items()}
    assert endings == {"sopa": "a", "carne": "a", "arroz": "o"}


@pytest.mark.slow
def test_ray_batch_answers_each_request_once(tmp_path):
    """Two workers; the first one to run is killed once, and Ray runs its task again."""
    pytest.importorskip("ray", reason="needs Ray: pip install ray")
    model = write_chat_model(tmp_path / "tiny")
    names = [f"request {i}" for i in range(13)]
    body = {"prompt": "Hello", "max_tokens": 5}
    lines = [json.dumps({"custom_id": name, "url": "/v1/completions", "body": body}) for name in names]
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text("\n".join(lines))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    script = [sys.executable, "-c", RAY, *map(str, (model, requests, answers, tmp_path / "killed"))]
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "killed").exists()
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(one["custom_id"] for one in found) == sorted(names)
    assert {one["response"]["status_code"] for one in found} == {200}
    assert not list(tmp_path.glob("answers.jsonl.*"))


# The worker ends itself the first time: it is killed before its shard is complete.
RAY = """
import os
import signal
import sys
from examples import ray_batch

*files, killed = sys.argv[1:]
answer = ray_batch.answer

def dies_once(model, requests, answers, shard, options):
    if shard == "1/2" and not os.path.exists(killed):
        open(killed, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return answer(model, requests, answers, shard, options)

ray_batch.answer = dies_once
assert sorted(ray_batch.run(*files, options=("--slots", "2", "--max-tokens", "64"))) == ["0/2", "1/2"]
"""


def test_the_documented_command():
    name = "array_shapes"  # computes nothing, so most of the time is that of the imports
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("words:  Me  gusta  la  pizza  de  Pepperoni")
    assert "1 x 8 x 6 x 6" in done.stdout
