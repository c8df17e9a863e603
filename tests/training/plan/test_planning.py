"""Planning: topologies, FLOPs counted from the model, collectives read from a program, and the output of `plan`."""

import dataclasses
import importlib.util
import json
import math
import re

import jax
import jax.numpy as jnp
import pytest

from transformer.__main__ import main
from transformer.cli._plan_print import train_lines
from transformer.config import (
    ConfigError,
    Execution,
    FeedForwardOptions,
    LayerKind,
    MoE,
    ParameterOptions,
    RotaryOptions,
    TransformerConfig,
)
from transformer.data import LabeledText, NumberWords, ParallelText, TextFile, TinyShakespeare, TokenizerConfig
from transformer.nn._sharding import ParallelConfig
from transformer.training import Recipe, TrainingConfig
from transformer.training._flops import batch_rows
from transformer.training._memory import remedies, times_smaller
from transformer.training._overrides import override
from transformer.training._parallel import MeshPlacement
from transformer.training._state import abstract_state
from transformer.training._step import make_train_step
from transformer.training.plan import (
    CHIPS,
    Chip,
    Collective,
    CompilerError,
    Cost,
    Flops,
    Plan,
    batch_shapes,
    estimate,
    parse_topology,
    step_flops,
    topology_devices,
    without_data,
)
from transformer.training.plan import _tpu_topology as tpu

TEXT = Recipe(
    name="text",
    model=TransformerConfig(
        vocab_size=97,
        d_model=48,
        num_heads=3,
        num_layers=2,
        feed_forward=FeedForwardOptions(d_ff=176),
        position=RotaryOptions(),
    ),
    data=TextFile(path="nowhere.txt", sequence_length=40, batch_size=24),
    execution=Execution(scan=False),
)
PAIRS = dataclasses.replace(
    TEXT, data=ParallelText(source_path="nowhere.tsv", max_source_length=44, max_target_length=29, batch_size=24)
)


def with_model(recipe, **changes):
    return dataclasses.replace(recipe, model=recipe.model.replace(**changes))


class TestTopology:
    @pytest.mark.parametrize("name", CHIPS)
    def test_the_example_topology_of_each_chip_is_valid(self, name):
        topology = parse_topology(f"{name}:{CHIPS[name].example}")
        assert str(topology) == f"{name}:{CHIPS[name].example}"
        assert topology.chip is CHIPS[name]

    def test_topologies_have_their_sizes(self):
        topology = parse_topology("v5p:2x3x5")
        assert (topology.shape, topology.num_chips, topology.unit, topology.hbm) == ((2, 3, 5), 30, "chip", 95)

    def test_supports_several_slices(self):
        topology = parse_topology("3*v5e:4x8")
        assert (str(topology), topology.slice_name, topology.num_chips) == ("3*v5e:4x8", "v5e:4x8", 96)
        assert topology.wraps == parse_topology("v5e:4x8").wraps
        assert parse_topology("1*v5e:4x8") == parse_topology("v5e:4x8")

    def test_memory_is_per_core_if_a_core_is_a_device(self):
        topology = parse_topology("v2:2x2")
        assert (topology.num_chips, topology.unit, topology.hbm) == (4, "core", 8)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("v5ee:4x4", r"TPU 'v5ee'.*'v5e:4x4'.*v5p:2x2x2"),
            ("abacus", r"TPU 'abacus'.*--topology 'abacus'"),
            ("v5e", r"v5e:AxB.*2.*got 'v5e'.*'v5e:4x4'"),
            ("v5e:4", "got 'v5e:4'"),
            ("v5e:2x2x2", "chips along 2 axes"),
            ("v5e:4x0", "got 'v5e:4x0'"),
            ("v5p:4x4", "v5p:AxBxC"),
            ("v5e:16x17", "v5e:16x17 has 272 chips, but a pod of v5e has only 256"),
            ("2*v5e:16x17", "v5e:16x17 has 272 chips, but a pod"),
            ("two*v5e:4x4", r"1.*got 'two'.*'2[*]v5e:4x4'"),
            ("2*v3:4x4", r"v3.*v3:4x4.*TPU.*v4.*v5e.*v5p"),
        ],
    )
    def test_an_invalid_topology_names_a_valid_one(self, text, message):
        with pytest.raises(ConfigError, match=message):
            parse_topology(text)


def test_reports_an_unsupported_topology(monkeypatch):
    def refuse(**options):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such layout\nand more")

    monkeypatch.setattr(tpu.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(tpu, "PROBE", "raise SystemExit(1)")  # an error, which occurs again in the caller
    monkeypatch.setattr(tpu.topologies, "get_topology_desc", refuse)
    with pytest.raises(CompilerError, match=r"not support the topology v5e:3x5\. Try v5e:4x4\. .*: no such layout$"):
        topology_devices(parse_topology("v5e:3x5"))


def test_a_compiler_that_crashes_is_an_error_that_names_the_version_to_install(monkeypatch):
    """Like libtpu 0.0.21.1 with jax 0.7.2, but in a subprocess, so that the tests continue."""
    monkeypatch.setattr(tpu.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(tpu, "PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    message = (
        rf"libtpu.* does not work with jax {re.escape(jax.__version__)}: compiling one matrix multiplication crashed "
        rf"\(SIGSEGV\)\. .*released with: pip install \"libtpu==[\d.*]+\"$"
    )
    with pytest.raises(CompilerError, match=message):
        topology_devices(parse_topology("v5e:5x7"))


class TestWithoutData:
    def test_reports_options_that_the_data_decides(self):
        data = ParallelText(source_path="nowhere.tsv", max_target_length=29)
        recipe, told = without_data(dataclasses.replace(with_model(TEXT, vocab_size=None), data=data))
        assert recipe.model.vocab_size == 8192
        assert (recipe.data.max_source_length, recipe.data.max_target_length) == (64, 29)
        assert told == ["a vocabulary of 8,192 (--model.vocab-size)", "sources of 64 tokens (--data.max-source-length)"]

    @pytest.mark.parametrize(
        ("data", "size"),
        [
            (TinyShakespeare(), 128),
            (TinyShakespeare(tokenizer=TokenizerConfig(kind="byte")), 259),
            (TinyShakespeare(tokenizer=TokenizerConfig(kind="word", vocab_size=701)), 701),
            (NumberWords(), 128),
        ],
    )
    def test_reads_vocabulary_sizes(self, data, size):
        recipe, _ = without_data(dataclasses.replace(with_model(TEXT, vocab_size=None), data=data))
        assert recipe.model.vocab_size == size

    def test_a_word_vocabulary_size_is_required(self):
        data = TinyShakespeare(tokenizer=TokenizerConfig(kind="word"))
        with pytest.raises(ConfigError, match=r"Pass --model\.vocab-size"):
            without_data(dataclasses.replace(with_model(TEXT, vocab_size=None), data=data))

    @pytest.mark.parametrize("recipe", [TEXT, PAIRS])
    def test_nothing_is_assumed_if_everything_is_given(self, recipe):
        assert without_data(recipe) == (recipe, [])


class TestFlops:
    @pytest.mark.default_cases(2)
    @pytest.mark.parametrize(
        ("recipe", "changes"),
        [
            (TEXT, {"num_layers": 1}),
            (
                TEXT,
                {
                    "num_layers": 1,
                    "embedding.tie": False,
                    "feed_forward.gated": True,
                    "attention.num_kv_heads": 1,
                    "attention.value_dim": 24,
                },
            ),
            (TEXT, {"stack.period": (LayerKind(), LayerKind(self_attention=False))}),
            (PAIRS, {"stack.num_encoder_layers": 2, "stack.num_decoder_layers": 1}),
        ],
        ids=["plain", "unlike", "without_attention", "pairs"],
    )
    def test_estimated_flops_equal_the_compiled_program(self, recipe, changes):
        """The rest of the program (norms, softmax, Adam) takes a few percent at this size."""
        recipe = with_model(recipe, **changes)
        lowered = jax.jit(make_train_step(recipe)).lower(abstract_state(recipe), batch_shapes(recipe))
        counted = step_flops(recipe).total
        assert 0.99 * counted < lowered.cost_analysis()["flops"] < 1.09 * counted

    def test_flops_equal_a_hand_calculation(self):
        """Width 2: four matrices 2 x 2, two matrices 2 x 8 and 5 rows of the embedding table, for 3 x 4 tokens."""
        model = TransformerConfig(
            vocab_size=5, d_model=2, num_heads=1, num_layers=1, parameters=ParameterOptions(use_bias=False)
        )
        recipe = dataclasses.replace(TEXT, model=model, data=TextFile(path="x", sequence_length=4, batch_size=3))
        flops = step_flops(recipe)
        assert flops.matrices == 3 * 2 * 12 * (4 * 4 + 2 * 16 + 5 * 2)
        assert flops.attention == 3 * 2 * 3 * 4 * 4 * (2 + 2)

    def test_only_selected_experts_count(self):
        routed = with_model(TEXT, **{"stack.period": (LayerKind(moe=MoE(num_experts=8, top_k=2, d_ff=88)),)})
        tokens, layers = 24 * 40, 2
        assert step_flops(routed).matrices - step_flops(TEXT).matrices == 6 * tokens * layers * 48 * 8  # the router

    def test_scan_and_rematerialization_do_not_change_model_flops(self):
        looped = dataclasses.replace(TEXT, execution=Execution(scan=True, remat="full"))
        assert step_flops(looped) == step_flops(TEXT)

    def test_counts_flops_of_a_classifier(self):
        """2 FLOPs per entry of a matrix and token, three times; the default is two labels."""
        sizes = {"vocab_size": 11, "d_model": 6, "num_heads": 3, "feed_forward.d_ff": 5, "num_layers": 1}
        data = LabeledText(path="a.tsv", max_length=7, batch_size=4)
        recipe, assumed = without_data(Recipe(name="a", model=TransformerConfig(**sizes), data=data))
        assert assumed == ["2 classes (--model.output.num-classes)"]
        assert step_flops(recipe).matrices == 6 * 4 * 7 * (4 * 6 * 6 + 2 * 6 * 5)


class TestRoofline:
    CHIP = Chip(name="x", flops=100.0, hbm=1, hbm_bandwidth=10.0, link_bandwidth=5.0)

    def test_step_time_is_the_maximum_of_compute_and_memory_plus_collectives(self):
        one = estimate(self.CHIP, 2, model_flops=600, flops=300, hbm_bytes=20, wire_bytes=5)
        assert (one.compute_seconds, one.memory_seconds, one.collective_seconds) == (3, 2, 1)
        assert (one.seconds, one.mfu) == (4, 0.75)
        assert estimate(self.CHIP, 2, model_flops=200, flops=100, hbm_bytes=20, wire_bytes=0).seconds == 2

    def test_8_bit_multiplications_use_their_published_peak(self):
        fast = dataclasses.replace(self.CHIP, int8_flops=200.0)
        sizes = {"model_flops": 300, "flops": 300, "hbm_bytes": 0, "wire_bytes": 0}
        assert estimate(fast, 1, **sizes, int8_flops=200).compute_seconds == 2
        assert estimate(fast, 1, **sizes, fp8_flops=200).compute_seconds == 3
        assert estimate(dataclasses.replace(fast, fp8_flops=400.0), 1, **sizes, fp8_flops=200).compute_seconds == 1.5
        assert estimate(dataclasses.replace(fast, devices=2), 1, **sizes, int8_flops=200).compute_seconds == 4

    def test_a_core_has_its_share_of_the_chip(self):
        halves = dataclasses.replace(self.CHIP, devices=2)
        one = estimate(halves, 4, model_flops=600, flops=150, hbm_bytes=10, wire_bytes=5)
        assert (one.compute_seconds, one.memory_seconds, one.collective_seconds) == (3, 2, 2)
        assert one.mfu == 600 / (200 * 5)

    def test_slice_transfers_add_time_and_host_copies_overlap(self):
        """Transfers between slices add to the time; copies from and to the host overlap with computation."""
        chip = dataclasses.replace(self.CHIP, devices=2, network_bandwidth=4.0, host_bandwidth=2.0)
        one = estimate(chip, 2, model_flops=150, flops=150, hbm_bytes=5, wire_bytes=0, network_bytes=4, host_bytes=5)
        assert (one.compute_seconds, one.network_seconds, one.host_seconds, one.seconds) == (3, 2, 5, 7)
        with pytest.raises(ValueError, match=r"7.*network_bandwidth"):
            estimate(self.CHIP, 2, model_flops=1, flops=1, hbm_bytes=1, wire_bytes=1, network_bytes=7)

    def test_recomputation_does_not_count_as_useful_work(self):
        once = estimate(self.CHIP, 1, model_flops=300, flops=300, hbm_bytes=0, wire_bytes=0)
        again = estimate(self.CHIP, 1, model_flops=300, flops=400, hbm_bytes=0, wire_bytes=0)
        assert (once.mfu, again.mfu, again.seconds) == (1, 0.75, 4)


def test_remedies_are_recipes():
    """Each suggested option, appended to the command line, gives a recipe that fits the mesh."""
    recipe = dataclasses.replace(TEXT, data=dataclasses.replace(TEXT.data, batch_size=32))
    sizes = MeshPlacement(recipe).mesh.shape
    flags = [remedy.flags.split() for remedy in remedies(recipe, sizes, 4)]
    names = ["--parallel.fsdp", "--execution.remat", "--training.accumulation", "--data.batch-size", "--model.dtype"]
    assert [flag[0] for flag in flags] == names
    assert flags[2:4] == [["--training.accumulation", "4"], ["--data.batch-size", "8"]]
    for flag in flags:
        MeshPlacement(override(recipe, flag, program="x"))


def test_remedies_for_token_batches_name_tokens():
    """Smaller batches have fewer tokens, the most that the mesh can divide; micro-batches divide row_multiple."""
    data = ParallelText(
        source_path="x.tsv", max_source_length=64, max_target_length=32, batch_tokens=9000, row_multiple=16
    )
    recipe = dataclasses.replace(PAIRS, data=data)
    sizes = MeshPlacement(recipe).mesh.shape
    assert batch_rows(data) == 128
    placed = set()  # many remedies are the same in both cases
    for times, left in {2: [["--training.accumulation", "2"], ["--data.batch-tokens", "4500"]], 16: []}.items():
        flags = [remedy.flags.split() for remedy in remedies(recipe, sizes, times)]
        assert flags[2:-1] == left
        for flag in flags:
            smaller = override(recipe, flag, program="x")
            if smaller not in placed:
                placed.add(smaller)
                MeshPlacement(smaller)
            assert flag[0] != "--data.batch-tokens" or batch_rows(smaller.data) == 64


def test_the_first_remedy_for_pmap_is_a_mesh():
    recipe = dataclasses.replace(TEXT, parallel=ParallelConfig(kind="pmap"))
    flags = remedies(recipe, {**MeshPlacement(TEXT).mesh.shape, "data": 8}, None)[0].flags
    assert override(recipe, flags.split(), program="x").parallel == ParallelConfig(fsdp=8)


def test_remedies_that_would_fail_are_omitted():
    recipe = dataclasses.replace(TEXT, training=TrainingConfig(accumulation=3), execution=Execution(remat="full"))
    flags = [one.flags.partition(" ")[0] for one in remedies(recipe, MeshPlacement(recipe).mesh.shape, 2)]
    assert flags == ["--parallel.fsdp", "--model.dtype"]


def test_activation_remedies_are_omitted_if_the_state_is_too_large():
    flags = [one.flags.partition(" ")[0] for one in remedies(TEXT, MeshPlacement(TEXT).mesh.shape, None)]
    assert flags == ["--parallel.fsdp"]


@pytest.mark.parametrize(
    ("needed", "available", "state", "times"),
    [(60, 16, 1, 4), (17, 16, 1, 2), (60, 16, 17, None), (136, 16, 1, 16), (5, 16, 5, None)],
)
def test_reports_how_much_smaller_activations_must_be(needed, available, state, times):
    assert times_smaller(needed, available, state) == times


def test_batch_shapes_have_the_sharding_of_their_arrays():
    (shape,) = MeshPlacement(TEXT).shapes({"tokens": jax.ShapeDtypeStruct((24, 40), jnp.int32)}).values()
    assert shape.sharding.shard_shape(shape.shape) == (3, 40)


class TestCommand:
    def run(self, capsys, *words):
        return main(["plan", "train", *words]), *capsys.readouterr()

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ((), "the first argument must be a recipe, got nothing"),
            (("number_words",), "--topology is missing"),
            (("number_word", "--topology", "v5e:1x1"), "Did you mean 'number_words'?"),
            (("number_words", "--topology"), "--topology takes a TPU and its chips along each axis"),
            (("number_words", "--topology", "v5e:4"), "Did you mean 'v5e:4x4'?"),
            (("number_words", "--topology", "v5e:1x1", "--model.num-layer", "3"), "--model.num-layers"),
        ],
    )
    def test_invalid_arguments_are_one_line_errors(self, words, message, capsys):
        code, out, err = self.run(capsys, *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err

    def test_prints_help(self, capsys):
        code, out, _ = self.run(capsys, "--help")
        assert code == 0
        assert "--topology v5e:4x4" in out

    def test_reports_a_missing_tpu_compiler(self, capsys, monkeypatch):
        there = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "libtpu" else there(name, *a))
        code, out, err = self.run(capsys, "number_words", "--topology", "v5e:1x1")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert 'pip install "libtpu>=0.0.51"' in err


def test_prints_the_plan():
    topology = parse_topology("v2:2x2")
    plan = Plan(
        fits=True,
        mesh="mesh: data 8",
        num_parameters=1234,
        memory={"parameters": 3 * 2**20, "averaged parameters": 0, "batch": 700},
        needed_bytes=3 * 2**20 + 700,
        available_bytes=8 * 2**30,
        counted=100,
        unit="tokens",
        flops=Flops(matrices=3000, attention=1000),
        computed_flops=5200,
        cost=Cost(
            flops=650,
            kernels=0,
            hbm_bytes=100,
            copied_bytes=0,
            collectives=[Collective("all-reduce", 2, 4096, 7168)],
            loops_known=False,
            loops_bounded=False,
        ),
        estimate=estimate(topology.chip, 8, model_flops=4000, flops=500, hbm_bytes=100, wire_bytes=7168),
        remedies=[],
        seconds=1.0,
    )
    bounded = {"loops_bounded": True}
    known, none = (
        dataclasses.replace(plan.cost, **change) for change in (bounded | {"loops_known": True}, {"collectives": []})
    )
    text = "\n".join(train_lines("x", topology, ["y"], plan))
    assert "x on v2:2x2: 4 chips, 8 GiB per core; mesh: data 8\nassumed: y\nfits: 3.00 MiB of 8 GiB per core\n" in text
    assert "40 per token, 1,234 parameters; 25.0 % in attention scores (full matrix)\n  1.30 times as many with" in text
    assert "collectives: 2 all-reduce of 4.00 KiB per step" in text
    assert "\n  a lower bound: a loop with an unknown number of iterations counts as one iteration\n" in text
    alone = "\n".join(train_lines("x", topology, ["y"], dataclasses.replace(plan, cost=none)))
    assert "collectives: none\nestimate" in alone
    assert "  a lower bound" in alone
    assert "bound" not in "\n".join(train_lines("x", topology, [], dataclasses.replace(plan, cost=known)))
    across = dataclasses.replace(plan.cost, collectives=[Collective("all-gather", 1, 2048, 1024, True)])
    spent = dataclasses.replace(plan.estimate, network_seconds=0.25, host_seconds=0.5)
    host = {"state": 3 * 2**30, "results": 0, "activations": 2**30}
    more = dataclasses.replace(plan, cost=across, estimate=spent, host_memory=host)
    text_of_more = "\n".join(train_lines("x", topology, [], more))
    assert "collectives: 1 all-gather of 2.00 KiB across slices per step\n" in text_of_more
    assert ", host 500 ms) + collectives" in text_of_more
    assert text_of_more.count(" ms + across slices 250 ms\n") == 1
    assert "\nhost memory per core: 4.00 GiB\n  state                           3.00 GiB\n  activ" in text_of_more
    images = dataclasses.replace(plan, counted=8, unit="images")
    text_of_images = "\n".join(train_lines("x", topology, [], images))
    assert " 500 per image, " in text_of_images
    assert f" {images.units_per_second:,.0f} images/s\n" in text_of_images
    whole = dataclasses.replace(plan.estimate, mfu=0.996)
    assert "MFU 100 %" in "\n".join(train_lines("x", topology, [], dataclasses.replace(plan, estimate=whole)))
    assert "averaged" not in text
    assert "estimate, not a measurement" in text
    small = dataclasses.replace(plan, fits=False, available_bytes=2**20, estimate=None, remedies=["--a 2: b"])
    text = "\n".join(train_lines("x", topology, [], small))
    assert "does not fit: it needs 3.00 MiB of 1.00 MiB per core" in text
    assert "  try --a 2: b\n" in text
    assert "collectives" not in text
    unread = "\n".join(train_lines("x", topology, [], dataclasses.replace(plan, cost=None, estimate=None)))
    assert "collectives: not available" in unread
    assert "no estimate: the compiler can't print this program" in unread


@pytest.mark.parametrize(
    ("text", "wraps"),
    [
        ("v5p:4x4x4", (True, True, True)),
        ("v5p:4x4x8", (True, True, True)),
        ("v5p:2x2x2", (False, False, False)),
        ("v4:4x4x2", (False, False, False)),
        ("v5e:16x16", (True, True)),
        ("v5e:8x16", (False, True)),
        ("v6e:4x4", (False, False)),
        ("v3:32x32", (True, True)),
    ],
)
def test_torus_links_close_only_for_whole_cubes_and_pods(text, wraps):
    assert parse_topology(text).wraps == wraps


TINY = ("--model.num-layers", "1", "--model.d-model", "128", "--data.batch-size", "8", "--execution.scan", "False")


@pytest.mark.slow
class TestCompiler:
    @pytest.fixture(autouse=True)
    def compiler(self):
        pytest.importorskip("libtpu", reason='no TPU compiler: pip install "libtpu>=0.0.51"')

    def plan(self, capsys, *words, kind="train"):
        code = main(["plan", kind, "shakespeare_cpu", *TINY, *words, "--json"])
        out, err = capsys.readouterr()
        assert err == ""
        return code, json.loads(out)

    def test_plans_a_step_over_eight_chips(self, capsys):
        code, plan = self.plan(capsys, "--topology", "v5e:2x4")
        assert (code, plan["fits"], plan["mesh"]) == (0, True, "mesh: data 8")
        assert plan["memory"]["parameters"] == 4 * plan["num_parameters"]
        assert plan["memory"]["optimizer state"] == pytest.approx(8 * plan["num_parameters"], abs=64)
        (reduce,) = [one for one in plan["cost"]["collectives"] if one["kind"] == "all-reduce"]
        assert reduce["result_bytes"] >= 4 * plan["num_parameters"]
        assert plan["estimate"]["seconds"] > 0

    def test_quantized_products_are_multiplications_of_integers(self, capsys):
        """All three products of each kernel of a layer, with 2 operations per number and token."""
        pytest.importorskip("qwix")
        _, plan = self.plan(capsys, "--topology", "v5e:2x4", "--execution.quantization", "int8_full")
        kernels = 4 * 128 * 128 + 2 * 128 * 512
        assert plan["cost"]["int8_flops"] * 8 == 3 * 2 * plan["counted"] * kernels

    @pytest.mark.parametrize("topology", ["v5p:4x4x4", "v5e:8x16"])
    def test_uses_wraparound_links(self, topology):
        """The compiler refuses an option `wrap` that does not fit its topology."""
        assert len(topology_devices(parse_topology(topology))) == math.prod(parse_topology(topology).shape)

    def test_plans_two_slices(self, capsys):
        """The gradients, which fsdp has scattered in each slice, are summed across slices. The compiler scatters only
        arrays of at least about 1 MiB.
        """
        slices = ("--topology", "2*v5e:2x2", "--parallel.dcn.data", "2", "--model.d-model", "512")
        code, plan = self.plan(capsys, *slices, "--parallel.fsdp", "4")
        assert (code, plan["mesh"]) == (0, "mesh: data 2 x fsdp 4 (data 2 across slices)")
        across = [one for one in plan["cost"]["collectives"] if one["over_network"]]
        assert {one["kind"] for one in across} == {"all-reduce"}
        assert across[0]["wire_bytes"] == pytest.approx(plan["num_parameters"], rel=0.01)  # 4 bytes, a quarter of them
        assert plan["estimate"]["network_seconds"] == across[0]["wire_bytes"] / 3.125e9

    def test_offload_moves_the_state_and_activations_to_the_host(self, capsys):
        remat = ("--topology", "v5e:2x2", "--parallel.fsdp", "4", "--execution.remat")
        _, names = self.plan(capsys, *remat, "names")
        code, plan = self.plan(capsys, *remat, "offload", "--parallel.optimizer-memory-host-offload", "True")
        assert code == 0
        assert plan["memory"]["optimizer state"] < 100 < names["memory"]["optimizer state"]
        assert plan["host_memory"]["state"] >= names["memory"]["optimizer state"] - 100
        assert plan["host_memory"]["activations"] > 0
        assert not any(names["host_memory"].values())
        assert plan["estimate"]["host_seconds"] > 0

    def test_embedding_gradients_in_bfloat16_are_half_the_bytes_on_the_wire(self, capsys):
        """Of the sums of table and head; other sums and gathers, the peak memory and the FLOPs stay or fall."""
        own = ("--topology", "v5e:2x4", "--model.embedding.tie", "False", "--model.vocab-size", "32768")
        own += ("--parallel.data", "1", "--parallel.fsdp", "8", "--training.loss-tokens", "128")
        _, wide = self.plan(capsys, *own)
        _, narrow = self.plan(capsys, *own, "--training.embedding-gradient-dtype", "bfloat16")

        def wire(plan, *kinds):
            return sum(one["wire_bytes"] for one in plan["cost"]["collectives"] if one["kind"] in kinds)

        # A reduce-scatter over 8 chips sends 7/8 of its bytes: 2 arrays (32,768, 128), 2 bytes less per value.
        saved = wire(wide, "all-reduce", "reduce-scatter") - wire(narrow, "all-reduce", "reduce-scatter")
        assert saved == pytest.approx(7 / 8 * 2 * 2 * 32_768 * 128, rel=0.01)
        assert wire(narrow, "all-gather") <= wire(wide, "all-gather")
        assert narrow["needed_bytes"] <= wide["needed_bytes"]
        assert narrow["computed_flops"] == wide["computed_flops"]

    def test_the_gradient_of_the_head_is_summed_before_the_layers(self, capsys):
        """Otherwise a chip holds its own gradient of the head, 1.96 GiB, in the backward pass: a peak of 11.23 GiB."""
        assert main(["plan", "train", "llama3_8b", "--topology", "v5p:4x4x4", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["needed_bytes"] < 10.5 * 2**30

    def test_a_model_that_does_not_fit_is_a_result(self, capsys):
        big = ("--model.vocab-size", "4000000", "--model.d-model", "1024")
        code, plan = self.plan(capsys, "--topology", "v5e:1x1", *big)
        assert (code, plan["fits"]) == (1, False)
        assert plan["needed_bytes"] > plan["available_bytes"] > 15 * 2**30
        assert [remedy.partition(" ")[0] for remedy in plan["remedies"]] == ["another"]

    def test_plans_pmap_over_the_eight_cores_of_a_v2(self, capsys):
        code, plan = self.plan(capsys, "--topology", "v2:2x2", "--parallel.kind", "pmap")
        assert (code, plan["fits"], plan["mesh"]) == (0, True, "pmap: data 8")
        assert plan["memory"]["parameters"] == 4 * plan["num_parameters"]
        assert plan["computed_flops"] == pytest.approx(plan["flops"]["total"], rel=0.01)

    def test_a_loop_over_layers_counts_every_iteration(self, capsys):
        layers = ("--topology", "v5e:1x1", "--model.num-layers", "3", "--execution.remat", "full")
        _, unrolled = self.plan(capsys, *layers)
        _, looped = self.plan(capsys, *layers, "--execution.scan", "True")
        assert looped["cost"]["loops_known"]
        assert looped["computed_flops"] == unrolled["computed_flops"] > 1.1 * looped["flops"]["total"]
        times = [plan["estimate"]["memory_seconds"] for plan in (unrolled, looped)]
        assert times[0] == pytest.approx(times[1], rel=0.2)

    def test_plans_generation(self, capsys):
        code, plan = self.plan(capsys, "--topology", "v5e:1x1", "--shape", "8:64:32", kind="decode")
        assert (code, plan["fits"], plan["generation"]) == (0, True, {"rows": 8, "prompt": 64, "new": 32})
        assert plan["prefill"]["compute_seconds"] > 8 * plan["token"]["compute_seconds"] > 0
