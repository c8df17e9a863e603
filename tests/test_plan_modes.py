"""Plans beside that of a step on a mesh: pmap, generation, a search, and steps measured on the devices that are here.

The compiler is the CPU's, for its eight simulated devices with the figures of a TPU; tests/test_plan.py has the TPU's.
"""

import dataclasses
import json
import math
import re
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from transformer.__main__ import main
from transformer.chips import DEVICE_KINDS
from transformer.cli.plan_print import decode_lines, duration, here_lines, search_line, search_lines
from transformer.config import MLA, ConfigError, Execution, LayerKind, MoE, TransformerConfig
from transformer.data.configs import ParallelText, TextFile
from transformer.models import count_parameters
from transformer.plan import (
    Generation,
    Measured,
    Topology,
    decoding,
    hlo,
    make_decode_plan,
    make_plan,
    parse_generation,
    parse_topology,
    present_topology,
    ranked,
    search,
    searching,
)
from transformer.plan.measuring import made_up_batch
from transformer.plan.searching import candidates, meshes
from transformer.sharding import AXES, ParallelConfig
from transformer.training import Recipe
from transformer.training.flops import batch_rows
from transformer.training.overrides import load_recipe_file, override
from transformer.training.state import abstract_state

TEXT = Recipe(
    name="text",
    model=TransformerConfig(
        vocab_size=96, d_model=32, num_heads=4, num_kv_heads=2, num_layers=3, d_ff=64, position="rotary"
    ),
    data=TextFile(path="nowhere.txt", sequence_length=24, batch_size=8),
)
PAIRS = dataclasses.replace(
    TEXT, data=ParallelText(source_path="nowhere.tsv", max_source_length=12, max_target_length=10, batch_size=8)
)
SMALL = dataclasses.replace(TEXT, model=TEXT.model.replace(num_layers=1), execution=Execution(scan=False))
BY_TOKENS = dataclasses.replace(
    PAIRS, data=ParallelText(source_path="nowhere.tsv", max_source_length=12, max_target_length=10, batch_tokens=150)
)
CHIPS = parse_topology("v5e:2x4")


def parallel(recipe, **sizes):
    return dataclasses.replace(recipe, parallel=ParallelConfig(**sizes))


@pytest.mark.slow
class TestPmap:
    def test_it_is_the_same_work_as_over_a_mesh(self):
        one, other = (make_plan(parallel(SMALL, kind=kind), CHIPS, jax.devices()) for kind in ("pmap", "mesh"))
        assert (one.fits, one.mesh, other.mesh) == (True, "pmap: data 8", "mesh: data 8")
        assert one.memory["parameters"] == other.memory["parameters"] == 4 * one.num_parameters
        assert one.memory["batch"] == other.memory["batch"]
        assert one.computed_flops == pytest.approx(other.computed_flops, rel=0.01)
        assert {talk.kind for talk in one.collectives} == {"all-reduce"}

    def test_rows_that_the_devices_can_not_share(self):
        uneven = dataclasses.replace(TEXT, data=dataclasses.replace(TEXT.data, batch_size=12))
        with pytest.raises(ConfigError, match="must be a multiple of the 8 parts"):
            make_plan(parallel(uneven, kind="pmap"), CHIPS, jax.devices())

    def test_fewer_devices_are_the_peak_of_fewer(self):
        whole = make_plan(parallel(SMALL, kind="pmap"), CHIPS, jax.devices())
        half = make_plan(parallel(SMALL, kind="pmap", devices=4), CHIPS, jax.devices())
        assert half.estimate.compute_seconds == pytest.approx(2 * whole.estimate.compute_seconds, rel=0.01)


class TestDecode:
    def test_what_is_asked_for(self):
        assert parse_generation("8:1024:256", TEXT) == Generation(8, 1024, 256)
        assert parse_generation(None, TEXT) == Generation(8, 12, 12)
        assert parse_generation(None, PAIRS) == Generation(8, 12, 10)
        assert str(Generation(3, 5, 7)) == "3:5:7"

    @pytest.mark.parametrize("text", ["8", "8:1024", "8:0:1", "a:b:c", "8:16:4:2", "configs/x.py"])
    def test_what_is_none(self, text):
        with pytest.raises(ConfigError, match=r"ROWS:PROMPT:NEW.*such as 8:1024:256, got"):
            parse_generation(text, TEXT)

    def test_more_than_there_are_positions(self):
        learned = dataclasses.replace(TEXT, model=TEXT.model.replace(position="learned", max_length=30))
        assert parse_generation("1:20:10", learned)
        with pytest.raises(ConfigError, match="the model has 30 positions"):
            parse_generation("1:20:11", learned)

    @pytest.mark.parametrize("scan", [True, False])
    def test_a_token_reads_parameters_and_cache(self, scan):
        recipe = dataclasses.replace(parallel(TEXT, data=4, tensor=2), execution=Execution(scan=scan))
        plan = make_decode_plan(recipe, Generation(8, 16, 8), CHIPS, jax.devices())
        assert (plan.fits, plan.mesh) == (True, "mesh: data 4 x tensor 2")
        keys = 3 * 2 * 8 * 24 * 2 * 8 * 4  # layers, keys and values, rows, slots, heads, size of a head, bytes
        assert keys / 8 <= plan.cache_bytes < 1.2 * keys / 8  # beside them positions and lengths
        assert 2 * plan.num_parameters < plan.memory["parameters"] < 2.2 * plan.num_parameters
        needed = plan.memory["parameters"] + plan.cache_bytes
        assert plan.token.memory_seconds >= needed / CHIPS.chip.hbm_bandwidth
        assert plan.prefill.compute_seconds > 8 * plan.token.compute_seconds > 0
        assert plan.tokens_per_second == 8 / plan.token.seconds

    def test_devices_that_split_heads_hold_latents_whole(self):
        mla = MLA(kv_rank=6, plain_dim=4, rotary_dim=4, value_dim=4)
        model = SMALL.model.replace(num_kv_heads=None, mla=mla)
        recipe = dataclasses.replace(parallel(SMALL, data=4, tensor=2), model=model)
        plan = make_decode_plan(recipe, Generation(8, 16, 8), CHIPS, jax.devices())
        latents = 8 * 24 * (6 + 4) * 4  # rows, slots, numbers of a token, bytes
        assert latents / 4 <= plan.cache_bytes < 1.2 * latents / 4

    def test_a_longer_text_has_a_larger_cache(self):
        short, long = (
            make_decode_plan(parallel(TEXT, devices=1), Generation(2, 8, new), CHIPS, jax.devices()) for new in (8, 56)
        )
        assert long.cache_bytes == pytest.approx(4 * short.cache_bytes, rel=0.01)
        assert long.token.memory_seconds > short.token.memory_seconds

    def test_of_a_translation(self):
        plan = make_decode_plan(PAIRS, Generation(8, 12, 10), CHIPS, jax.devices())
        text = "\n".join(decode_lines("x", CHIPS, ["y"], plan))
        assert "generation (--decode 8:12:10): 8 rows, 12 tokens of each read, 10 written" in text
        assert re.search(
            r"(?m)^estimate, not a measurement: [\d.e-]+ ms in all; once prompts are read, [\d,]+ new tokens/s$", text
        )
        assert "  a token of each row " in text
        assert "bound" not in text

    @pytest.mark.parametrize("mesh", [{"devices": 1}, {"data": 2, "expert": 4}], ids=str)
    def test_of_experts_all_blocks_are_read(self, mesh):
        """One block for each of 8 x 2 copies of tokens; of a device's experts it may be all."""
        experts = TEXT.model.replace(num_layers=1, period=(LayerKind(moe=MoE(num_experts=4, d_ff=512)),))
        recipe = dataclasses.replace(parallel(TEXT, **mesh), model=experts)
        plan = make_decode_plan(recipe, Generation(8, 16, 8), CHIPS, jax.devices())
        blocks = 16 // mesh.get("data", 1)
        kernels = 2 * 4 * 32 * 512
        assert plan.token.memory_seconds > blocks * kernels / CHIPS.chip.hbm_bandwidth
        assert plan.token.compute_seconds > blocks * 2 * kernels / 4 / CHIPS.chip.flops
        assert not plan.loops_known
        assert "\n  an upper bound: a loop over experts counts as often" in "\n".join(
            decode_lines("x", CHIPS, [], plan)
        )

    @pytest.mark.parametrize(
        ("name", "value", "why"),
        [
            ("_turns_at_most", lambda loop: None, "the turns of a loop are not known"),
            ("LOOP", "jit(other)/while", "the loop over new tokens is not to be found"),
        ],
    )
    def test_no_estimate_where_a_loop_is_not_understood(self, monkeypatch, name, value, why):
        monkeypatch.setattr(hlo if name == "_turns_at_most" else decoding, name, value)
        model = SMALL.model.replace(period=(LayerKind(moe=MoE(num_experts=4)),))
        recipe = dataclasses.replace(parallel(SMALL, devices=1), model=model)
        plan = make_decode_plan(recipe, Generation(2, 8, 8), CHIPS, jax.devices())
        assert (plan.fits, plan.prefill, plan.token, plan.tokens_per_second) == (True, None, None, 0)
        text = "\n".join(decode_lines("x", CHIPS, [], plan))
        assert f"\nno estimate: {why}" in text
        assert f"collectives: not available, {why}" in text

    def test_a_token_computes_with_each_matrix(self, monkeypatch):
        """Also where the compiler writes no products, as of a single row."""
        monkeypatch.setattr(hlo.Program, "_flops", lambda *given: 0)
        plan = make_decode_plan(parallel(SMALL, devices=1), Generation(1, 8, 8), CHIPS, jax.devices())
        matrices = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 2 * 32 * 64 + 32 * 96
        assert plan.token.compute_seconds == pytest.approx(2 * matrices / CHIPS.chip.flops)
        assert plan.prefill.compute_seconds == 0

    @pytest.mark.parametrize(
        ("recipe", "rows", "message"),
        [
            (TEXT, 6, r"--decode 6:8:8: rows must be a multiple of the 8 parts.*Give 8 rows, or --parallel.tensor 8"),
            (parallel(TEXT, kind="pmap"), 8, r"Leave --parallel\.kind out"),
            (parallel(TEXT, tensor=8, data=1), 8, "num_heads"),
        ],
    )
    def test_what_can_not_be(self, recipe, rows, message):
        with pytest.raises(ConfigError, match=message):
            make_decode_plan(recipe, Generation(rows, 8, 8), CHIPS, jax.devices())


class TestSearch:
    def test_meshes_multiply_to_the_devices(self):
        found = list(meshes(TEXT, 12))
        assert {math.prod(sizes.values()) for sizes in found} == {12}
        assert len({tuple(sizes.values()) for sizes in found}) == len(found)
        assert {sizes["expert"] for sizes in found} == {1}
        assert {sizes["context"] for sizes in meshes(PAIRS, 12)} == {1}
        routed = TEXT.model.replace(period=(LayerKind(moe=MoE(num_experts=4)),))
        assert {sizes["expert"] for sizes in meshes(dataclasses.replace(TEXT, model=routed), 4)} == {1, 2, 4}

    def test_what_is_divided_is_all_that_is_left(self):
        for one in candidates(TEXT, CHIPS, 8):
            assert one.sizes["tensor"] in (1, 2, 4)
            ways = one.sizes["data"] * one.sizes["fsdp"]
            assert one.recipe.data.batch_size in (4, 8, 16)
            assert one.recipe.data.batch_size % ways == 0
        found = {(one.recipe.data.batch_tokens, batch_rows(one.recipe.data)) for one in candidates(BY_TOKENS, CHIPS, 8)}
        assert found == {(150, 8), (300, 24)}  # of 75 there is no room for the 8 rows of a bucket

    def test_a_state_that_can_not_fit_is_not_compiled(self):
        small = Topology(dataclasses.replace(CHIPS.chip, hbm=200_000 / 2**30), (2, 4))  # the state: 12 x 31,000 bytes
        found = candidates(TEXT, small, 8)
        assert found
        assert all(one.sizes["fsdp"] * one.sizes["tensor"] > 1 for one in found)
        assert not candidates(TEXT, Topology(dataclasses.replace(CHIPS.chip, hbm=1e-5), (2, 4)), 8)

    def test_what_may_fit_comes_first_by_speed_and_then_what_asks_for_least(self):
        small = Topology(dataclasses.replace(CHIPS.chip, hbm=500_000 / 2**30), (2, 4))
        found = candidates(TEXT, small, 8)
        fits = [one.needed_bytes <= 500_000 for one in found]
        assert 0 < sum(fits) < len(fits)
        assert fits == sorted(fits, reverse=True)
        speeds = [batch_rows(one.recipe.data) / one.seconds for one in found[: sum(fits)]]
        assert speeds == sorted(speeds, reverse=True)
        needs = [one.needed_bytes for one in found[sum(fits) :]]
        assert needs == sorted(needs)

    def test_logits_count_that_are_there_together(self):
        needs = {}
        for tokens in (None, 0, 8):
            recipe = dataclasses.replace(
                TEXT,
                model=TEXT.model.replace(vocab_size=2**23),
                training=dataclasses.replace(TEXT.training, loss_tokens=tokens),
            )
            one = next(
                one
                for one in candidates(recipe, parse_topology("v5p:2x2x2"), 8)
                if one.sizes == {axis: 8 if axis == "fsdp" else 1 for axis in AXES}
                and one.recipe.execution.remat == "full"
                and batch_rows(one.recipe.data) == 16
            )
            needs[tokens] = one.needed_bytes
        own = 16 // 8 * TEXT.data.sequence_length
        assert needs[0] - needs[8] == (own - 8) * 8 * 2**23
        assert needs[None] - needs[8] == (2**27 // 2**23 - 8) * 8 * 2**23

    @pytest.mark.parametrize("before", [parallel(TEXT, data=1, fsdp=-1), parallel(TEXT, kind="pmap"), BY_TOKENS])
    def test_flags_make_the_candidate(self, before):
        for one in candidates(before, CHIPS, 8)[::37]:
            assert override(before, one.flags.split(), program="x") == one.recipe

    @pytest.mark.parametrize("before", ["--data.batch-size 64 --parallel.fsdp 8", "--parallel.tensor 2"])
    def test_flags_are_added_to_those_of_the_command(self, before):
        for one in candidates(override(TEXT, before.split(), program="x"), CHIPS, 8)[::37]:
            assert override(TEXT, [*before.split(), *one.flags.split()], program="x") == one.recipe

    @pytest.mark.parametrize(
        ("recipe", "topology", "message"),
        [
            (
                dataclasses.replace(TEXT, data=dataclasses.replace(TEXT.data, batch_size=1)),
                parse_topology("v5e:1x7"),
                r"no mesh of 7 chips: --data.batch-size 1 is no multiple of 7, --model.d-model 32 is no multiple of 7, "
                r"--model.num-heads 4 .* Change one of them, at best the rows; or",
            ),
            (BY_TOKENS, parse_topology("v5e:1x3"), r"no mesh of 3 chips: --data.row-multiple 8 is no multiple of 3, "),
            (
                TEXT,
                Topology(dataclasses.replace(CHIPS.chip, hbm=1e-5), (1, 7)),
                r"state alone are more than the 1e-05 GiB of a chip, however .* another --topology\.",
            ),
        ],
    )
    def test_nothing_to_search(self, recipe, topology, message):
        with pytest.raises(ConfigError, match=message):
            next(search(recipe, topology, jax.devices()[: topology.num_chips], 3))

    def test_one_without_an_estimate_fits(self, monkeypatch):
        monkeypatch.setattr(searching, "make_plan", lambda *given: types.SimpleNamespace(fits=True, estimate=None))
        tried = list(search(TEXT, CHIPS, jax.devices(), 1))
        text = "\n".join(search_lines("x", CHIPS, [], tried, ranked(tried)))
        assert "1 fit, 0 do not, 0 failed\n  not ranked, --parallel.data " in text
        assert search_line(tried[0]).endswith(": fits, no estimate: the compiler can't print this program")

    def test_it_ranks_by_tokens(self, monkeypatch):
        speeds = iter((3.0, 7.0, 5.0))

        def plan(recipe, topology, devices):
            expected = types.SimpleNamespace(seconds=0.1, mfu=0.5)
            speed = next(speeds)
            told = {"unit": "tokens", "units_per_second": speed, "needed_bytes": 2**30}
            return types.SimpleNamespace(fits=True, estimate=expected, **told)

        monkeypatch.setattr(searching, "make_plan", plan)
        tried = list(search(TEXT, CHIPS, jax.devices(), 3))
        best = ranked(tried)
        assert [one.plan.units_per_second for one in best] == [7, 5, 3]
        text = "\n".join(search_lines("x", CHIPS, ["y"], tried, best))
        assert "3 ways compiled in" in text
        assert re.search(rf"(?m)^ +1 +7 +100 +50 +1\.00 +{best[0].candidate.flags}$", text)
        assert "3 fit, 0 do not, 0 failed" in text

    def test_an_error_is_a_result(self, monkeypatch):
        def refuse(recipe, topology, devices):
            raise ValueError("no\nsuch thing")

        monkeypatch.setattr(searching, "make_plan", refuse)
        tried = list(search(TEXT, CHIPS, jax.devices(), 3))
        assert [(one.plan, one.error) for one in tried] == 3 * [(None, "ValueError: no")]
        assert ranked(tried) == []
        assert search_line(tried[0]).endswith(": ValueError: no")
        assert "0 fit, 0 do not, 3 failed" in "\n".join(search_lines("x", CHIPS, [], tried, []))

    def test_more_than_what_did_not_fit_is_passed_over(self, monkeypatch):
        seen = []

        def too_large(recipe, topology, devices):
            seen.append((recipe.parallel, recipe.data.batch_size, recipe.execution.remat))
            return types.SimpleNamespace(fits=False, estimate=None, needed_bytes=5 * 2**30)

        smallest_first = candidates(TEXT, CHIPS, 8)[::-1]
        monkeypatch.setattr(searching, "candidates", lambda *given: smallest_first)
        monkeypatch.setattr(searching, "make_plan", too_large)
        tried = list(search(TEXT, CHIPS, jax.devices(), 10_000))
        assert len(tried) == len(seen) < len(smallest_first) / 3
        for place, (mesh, rows, remat) in enumerate(seen):
            assert not any(mesh == m and rows >= r and remat == kept for m, r, kept in seen[:place])
        assert search_line(tried[0]).endswith("does not fit, 5.00 GiB")


class TestHere:
    def test_figures_of_these_devices_are_timed(self, monkeypatch):
        monkeypatch.setattr("transformer.plan.measuring.MATRIX", 128)
        monkeypatch.setattr("transformer.plan.measuring.COPIED", 2**16)
        topology, told = present_topology(jax.devices())
        assert (str(topology), topology.unit) == ("cpu:8", "device")
        assert min(topology.chip.flops, topology.chip.hbm_bandwidth, topology.hbm) > 0
        assert "timed now, a device of 8 at once" in told

    @pytest.mark.parametrize(("kind", "count", "name"), [("TPU v5 lite", 4, "v5e:4"), ("TPU v2", 8, "v2:4")])
    def test_figures_of_known_ones_are_published(self, kind, count, name):
        topology, told = present_topology([types.SimpleNamespace(device_kind=kind)] * count)
        assert (str(topology), told) == (name, f"published figures of {name.partition(':')[0]}")
        assert set(DEVICE_KINDS.values()) == {"v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"}

    @pytest.mark.parametrize("recipe", [TEXT, PAIRS])
    def test_made_up_tokens(self, recipe):
        batch = made_up_batch(recipe)
        assert batch["tokens"].shape == batch["weights"].shape
        assert 0 <= batch["tokens"].min() <= batch["tokens"].max() < 96
        assert batch["weights"].min() == 1
        if recipe is PAIRS:
            np.testing.assert_array_equal(batch["source_lengths"], 12)

    def test_what_is_printed(self):
        plan = types.SimpleNamespace(estimate=types.SimpleNamespace(seconds=0.25))
        measured = Measured(step_seconds=0.5, steps=7, peak_bytes=3 * 2**20)
        told = "\n".join(here_lines(plan, measured, "of a test"))
        assert "measured: 500 ms a step, the median of 7, at most 3.00 MiB held" in told
        assert "measured / estimated: 2.00" in told


def test_durations():
    assert [duration(seconds) for seconds in (12.345, 1, 0.9996, 2e-7)] == ["12.3 s", "1 s", "1 s", "0.0002 ms"]


TINY = "--model.num-layers 1 --model.d-model 32 --data.sequence-length 16 --execution.scan False --parallel.devices 1"


class TestVerb:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("--topology v5e:1x1 --decode 3", "--decode takes ROWS:PROMPT:NEW"),
            ("--topology v5e:1x1 --search 0", "--search takes how many to compile.*got '0'"),
            ("--topology v5e:1x1 --search many", "got 'many'"),
            ("--topology v5e:1x1 --search --decode", "--decode and --search are plans of their own"),
            ("--topology v5e:1x1 --here", "Leave --topology out"),
        ],
    )
    def test_what_is_wrong_is_one_line(self, words, message, capsys, monkeypatch):
        monkeypatch.setattr("transformer.plan.topology_devices", lambda topology: jax.devices())
        code = main(["plan", "shakespeare_cpu", *words.split()])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert re.search(message, err)

    def test_here(self, capsys, monkeypatch):
        monkeypatch.setattr("transformer.plan.measuring.MATRIX", 128)
        monkeypatch.setattr("transformer.plan.measuring.COPIED", 2**16)
        code = main(["plan", "shakespeare_cpu", "--here", *TINY.split()])
        out, _ = capsys.readouterr()
        assert code == 0
        assert "shakespeare_cpu on cpu:1: 1 device, " in out
        assert "measured / estimated: " in out

    def test_here_nothing_is_run_that_does_not_fit(self, capsys, monkeypatch):
        monkeypatch.setattr("transformer.plan.measuring.MATRIX", 128)
        monkeypatch.setattr("transformer.plan.measuring.COPIED", 2**16)
        monkeypatch.setattr("transformer.plan.measuring.device_bytes", lambda devices: 1e5)
        code = main(["plan", "shakespeare_cpu", "--here", *TINY.split()])
        out, err = capsys.readouterr()
        assert (code, err) == (1, "")
        assert re.search(r"does not fit: it needs [\d.]+ MiB of 97.66 KiB a device", out)
        assert "measured" not in out.replace("not a measurement", "")

    def test_search_as_json(self, capsys, monkeypatch):
        monkeypatch.setattr("transformer.plan.topology_devices", lambda topology: jax.devices())
        code = main(["plan", "shakespeare_cpu", "--topology", "v5e:2x4", "--search", "1", "--json", *TINY.split()])
        values = json.loads(capsys.readouterr().out)
        assert (code, values["topology"], len(values["ranked"])) == (0, "v5e:2x4", 1)
        assert values["ranked"][0]["flags"].startswith("--parallel.data 1 --data.batch-size ")


@pytest.mark.parametrize(("name", "parameters"), [("llama3_8b", 8_030_261_248), ("llama3_70b", 70_553_706_496)])
def test_recipes_of_published_sizes(name, parameters):
    """arXiv 2407.21783, table 3; the counts are those of the published weights."""
    recipe, _ = load_recipe_file(Path(__file__).resolve().parents[1] / "configs" / f"{name}.py")
    assert count_parameters(abstract_state(recipe).params) == parameters
    assert (recipe.data.sequence_length, recipe.model.dtype, recipe.execution.scan) == (8192, "bfloat16", True)
    topology = parse_topology("v5p:4x4x4")
    found = candidates(recipe, topology, 64)
    assert len(found) > 12
    assert found[0].needed_bytes < topology.hbm * 2**30
