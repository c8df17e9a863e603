"""A model that is sharded over a mesh: the answers of one device, with each device storing its part."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from chat_parts import drawn_params, write_chat_model
from inference_parts import write_models
from serve_parts import answers, prompts, tiny_parts

from transformer.__main__ import main
from transformer.cli._parallel import Parallel
from transformer.config import ConfigError, LayerKind, MoE, StackOptions
from transformer.generate import Draft, PromptLookup, Sampling
from transformer.generate._row_steps import advance
from transformer.inference import open_model
from transformer.nn import make_mesh
from transformer.nn.models import CausalLM
from transformer.nn.quantization._int8 import quantized_shapes
from transformer.serve import Engine, Request
from transformer.serve._placement import Placement

SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.8),
    Sampling(temperature=1.2, top_k=5, top_p=0.9),
    Sampling(temperature=0.0, repetition_penalty=1.3),
]


def mesh_of(**sizes):
    count = sizes.get("tensor", 1) * sizes.get("expert", 1)
    return make_mesh(sizes, jax.devices()[:count])


@pytest.fixture(scope="module")
def dense():
    return tiny_parts()


@pytest.fixture(scope="module")
def answers_of_one_device(dense):
    return served(dense, None)[0]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def experts(dense):
    layers = StackOptions(period=(LayerKind(moe=MoE(num_experts=4, top_k=2)),))
    model = CausalLM(dense[0].config.replace(num_heads=4, stack=layers))
    return model, drawn_params(model, 0.4), dense[2]


def served(parts, mesh, **options):
    """Return the answers of an engine, and the engine."""
    engine = Engine(*parts, slots=3, positions=64, mesh=mesh, cache_tokens=96, **options)
    engine.start()
    rows = [*prompts(3, seed=3, longest=20), [9, 8, 7] * 5]
    given = zip(rows, SAMPLINGS, strict=True)
    found, _ = answers(
        engine, [Request(prompt=row, max_tokens=25, sampling=sampling, seed=3) for row, sampling in given]
    )
    engine.close()
    return found, engine


def shards(array):
    """Return the shape of the part of an array that a device stores, and the number of devices."""
    return array.sharding.shard_shape(array.shape), len(array.sharding.device_set)


@pytest.mark.programs(7, reason="reads and writes with a draft, also texts that are computed again")
def test_answers_on_a_mesh_equal_one_device(dense, answers_of_one_device):
    draft = Draft(model=dense[0], params=dense[1], tokens=2)
    found, engine = served(dense, mesh_of(tensor=2), draft=draft)
    assert found == answers_of_one_device
    assert engine.metrics.accepted_tokens > 0
    for pools in (engine._device._rows.pools, engine._device._rows.draft_pools):  # keys and values of 2 heads
        assert [(pool.shape, *shards(pool)) for pool in pools] == [((6, 16, 4, 16), (6, 16, 2, 16), 2)] * 2
    kernel = engine._device._params["decoder"]["prefix_0"]["feed_forward"]["up"]["kernel"]
    assert (kernel.shape, *shards(kernel)) == ((32, 48), (32, 24), 2)


@pytest.mark.slow
def test_answers_of_experts_on_a_mesh_equal_one_device(experts):
    wanted, _ = served(experts, None)
    found, engine = served(experts, mesh_of(tensor=2, expert=2), draft=PromptLookup(tokens=2))
    assert found == wanted
    kernel = engine._device._params["decoder"]["prefix_1"]["feed_forward"]["experts"]["up"]["kernel"]
    assert (kernel.shape, *shards(kernel)) == ((4, 32, 48), (2, 32, 24), 4)


def test_experts_stay_on_their_devices(experts):
    """Each device computes with its own experts, and the outputs are summed; no kernel is gathered."""
    model, params, _ = experts
    placement = Placement(model, mesh_of(tensor=2, expert=2))
    with placement.context():
        apply = jax.jit(lambda params, tokens: model.apply({"params": params}, tokens))
        text = apply.lower(placement.sharded(params), np.zeros((1, 3), np.int32)).compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text


def test_a_second_request_compiles_nothing(dense):
    engine = Engine(*dense, slots=2, positions=32, mesh=mesh_of(tensor=2))
    engine.warm_up()
    engine.start()
    compiled = []
    event = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **facts: compiled.append(name == event))
    answers(engine, [Request(prompt=row, max_tokens=9, sampling=SAMPLINGS[1]) for row in prompts(3, longest=20)])
    engine.close()
    assert not any(compiled)
    assert advance._cache_size()


def test_rejects_unsupported_models_and_options(dense, monkeypatch):
    model, params, tokenizer = dense
    with monkeypatch.context() as changed:
        changed.setattr(jax, "process_count", lambda: 2)
        assert not Placement(model, mesh_of(tensor=2)).is_shared  # a copy of its own
        with pytest.raises(ConfigError, match=r"tensor 2 and .* must be 8, the devices of all 2 processes, got 2"):
            Parallel(tensor=2, coordinator="auto").mesh()
        assert Parallel(tensor=2, coordinator="auto").mesh(copies=True).devices.size == 2
        changed.setattr(jax, "local_devices", lambda: jax.devices()[:4])
        with pytest.raises(ConfigError, match=r"must be 8, .*, or at most 4, the devices of one process, got 6"):
            Parallel(tensor=6, coordinator="auto").mesh(copies=True)
        changed.setattr(jax, "process_count", lambda: 3)
        devices = [SimpleNamespace(process_index=i) for i in range(2)]
        with pytest.raises(ConfigError, match="needs those of all 3 processes, got those of 2"):
            Placement(model, SimpleNamespace(devices=np.array(devices), shape={"tensor": 2}))
    with pytest.raises(ConfigError, match="shards a model over tensor and expert only, got fsdp 2"):
        Placement(model, make_mesh({"fsdp": 2}, jax.devices()[:2]))
    with pytest.raises(ConfigError, match=r"model.num_heads \(2\).*parallel.tensor \(4\)"):
        Engine(*dense, mesh=mesh_of(tensor=4))
    encoded = quantized_shapes(params, bits=8, group_size=32)
    with pytest.raises(ConfigError, match="quantized weights are not sharded over a mesh"):
        Engine(model, encoded, tokenizer, slots=1, positions=32, mesh=mesh_of(tensor=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parallel.tensor", "0"], "--parallel.tensor must be at least 1, got 0"),
        (["--parallel.tensor", "4", "--parallel.expert", "4"], "need 16 devices, but there are 8"),
        (["--parallel.tensr", "2"], "serve has no option --parallel.tensr. Did you mean '--parallel.tensor'?"),
        (["--parallel.tensor", "8"], "must be a multiple of parallel.tensor (8)"),
    ],
)
def test_rejects_invalid_options(options, message, chat_model, capsys):
    assert main(["serve", str(chat_model), *options]) == 2
    assert message in capsys.readouterr().err


def test_rejects_an_unsupported_model_kind(tmp_path, capsys):
    assert main(["serve", str(write_models(tmp_path)["translator"]), "--parallel.expert", "2"]) == 2
    assert "--draft, --lookup and --parallel need a causal model" in capsys.readouterr().err


def test_pretrained_weights_are_sharded_while_loading(chat_model):
    model = open_model(chat_model, mesh=mesh_of(tensor=2))
    kernel = next(leaf for leaf in jax.tree.leaves(model.params) if leaf.ndim == 4)  # layers, embed, heads, head size
    assert shards(kernel)[1] == 2
    assert shards(kernel)[0] != kernel.shape
