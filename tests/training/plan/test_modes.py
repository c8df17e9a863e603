"""Other modes of planning: pmap, generation, and steps measured on the present devices.

The compiler is the CPU's, for its eight simulated devices with the figures of a TPU; test_planning.py has the TPU's.
"""

import dataclasses
import json
import re
import types

import jax
import numpy as np
import pytest
from plan_recipes import CHIPS, PAIRS, SMALL, TEXT, parallel

from transformer.__main__ import main
from transformer.cli._plan_print import decode_lines, duration, here_lines
from transformer.config import MLA, ConfigError, Execution, LayerKind, LearnedOptions, MoE
from transformer.training._chips import DEVICE_KINDS
from transformer.training.plan import (
    Generation,
    Measured,
    make_decode_plan,
    make_plan,
    parse_generation,
    present_topology,
)
from transformer.training.plan import _decode_plan as decoding
from transformer.training.plan import _hlo as hlo
from transformer.training.plan._measurement import made_up_batch


@pytest.mark.slow
class TestPmap:
    def test_pmap_does_the_same_work_as_a_mesh(self):
        one, other = (make_plan(parallel(SMALL, kind=kind), CHIPS, jax.devices()) for kind in ("pmap", "mesh"))
        assert (one.fits, one.mesh, other.mesh) == (True, "pmap: data 8", "mesh: data 8")
        assert one.memory["parameters"] == other.memory["parameters"] == 4 * one.num_parameters
        assert one.memory["batch"] == other.memory["batch"]
        assert one.computed_flops == pytest.approx(other.computed_flops, rel=0.01)
        assert {talk.kind for talk in one.cost.collectives} == {"all-reduce"}

    def test_rejects_rows_that_the_devices_cannot_divide(self):
        uneven = dataclasses.replace(TEXT, data=dataclasses.replace(TEXT.data, batch_size=12))
        with pytest.raises(ConfigError, match="must be a multiple of the 8 parts"):
            make_plan(parallel(uneven, kind="pmap"), CHIPS, jax.devices())

    def test_half_the_devices_double_the_compute_time(self):
        whole = make_plan(parallel(SMALL, kind="pmap"), CHIPS, jax.devices())
        half = make_plan(parallel(SMALL, kind="pmap", devices=4), CHIPS, jax.devices())
        assert half.estimate.compute_seconds == pytest.approx(2 * whole.estimate.compute_seconds, rel=0.01)


class TestDecode:
    def test_reads_the_requested_generation(self):
        assert parse_generation("8:1024:256", TEXT) == Generation(8, 1024, 256)
        assert parse_generation(None, TEXT) == Generation(8, 12, 12)
        assert parse_generation(None, PAIRS) == Generation(8, 12, 10)
        assert str(Generation(3, 5, 7)) == "3:5:7"

    @pytest.mark.parametrize("text", ["8", "8:1024", "8:0:1", "a:b:c", "8:16:4:2", "configs/x.py"])
    def test_rejects_invalid_generation_requests(self, text):
        with pytest.raises(ConfigError, match=r"ROWS:PROMPT:NEW.*8:1024:256"):
            parse_generation(text, TEXT)

    def test_rejects_texts_longer_than_the_position_table(self):
        learned = dataclasses.replace(TEXT, model=TEXT.model.replace(position=LearnedOptions(max_length=30)))
        assert parse_generation("1:20:10", learned)
        with pytest.raises(ConfigError, match=r"model.*30"):
            parse_generation("1:20:11", learned)
        sources = PAIRS.model.replace(position=LearnedOptions(max_length=30, source_max_length=90))
        pairs = dataclasses.replace(PAIRS, model=sources)
        assert parse_generation("1:90:30", pairs)
        for text, longest in (("1:91:30", 90), ("1:90:31", 30)):
            with pytest.raises(ConfigError, match=rf"model.*{longest}"):
                parse_generation(text, pairs)

    @pytest.mark.parametrize("scan", [True, False])
    def test_a_token_reads_parameters_and_cache(self, scan):
        recipe = dataclasses.replace(parallel(TEXT, data=4, tensor=2), execution=Execution(scan=scan))
        plan = make_decode_plan(recipe, Generation(8, 16, 8), CHIPS, jax.devices())
        assert (plan.fits, plan.mesh) == (True, "mesh: data 4 x tensor 2")
        keys = 3 * 2 * 8 * 24 * 2 * 8 * 4  # layers, keys and values, rows, cache slots, heads, head size, bytes
        assert keys / 8 <= plan.cache_bytes < 1.2 * keys / 8  # in addition, positions and lengths
        assert 2 * plan.num_parameters < plan.memory["parameters"] < 2.2 * plan.num_parameters
        needed = plan.memory["parameters"] + plan.cache_bytes
        assert plan.token.memory_seconds >= needed / CHIPS.chip.hbm_bandwidth
        assert plan.prefill.compute_seconds > 8 * plan.token.compute_seconds > 0
        assert plan.tokens_per_second == 8 / plan.token.seconds

    def test_latents_are_replicated_on_devices_that_shard_heads(self):
        mla = MLA(kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
        model = SMALL.model.replace(**{"attention.num_kv_heads": None, "attention.mla": mla})
        recipe = dataclasses.replace(parallel(SMALL, data=4, tensor=2), model=model)
        plan = make_decode_plan(recipe, Generation(8, 16, 8), CHIPS, jax.devices())
        latents = 8 * 24 * (6 + 4) * 4  # rows, cache slots, values per token, bytes
        assert latents / 4 <= plan.cache_bytes < 1.2 * latents / 4

    def test_generation_does_not_use_full_sequence_kernels(self):
        recipe = dataclasses.replace(parallel(SMALL, devices=1), execution=Execution(attention="splash"))
        assert make_decode_plan(recipe, Generation(2, 8, 8), CHIPS, jax.devices()).fits

    def test_a_longer_text_has_a_larger_cache(self):
        short, long = (
            make_decode_plan(parallel(SMALL, devices=1), Generation(2, 8, new), CHIPS, jax.devices()) for new in (8, 56)
        )
        assert long.cache_bytes == pytest.approx(4 * short.cache_bytes, rel=0.01)
        assert long.token.memory_seconds > short.token.memory_seconds

    def test_plans_a_translation(self):
        pairs = dataclasses.replace(PAIRS, model=PAIRS.model.replace(num_layers=1))
        plan = make_decode_plan(pairs, Generation(8, 12, 10), CHIPS, jax.devices())
        text = "\n".join(decode_lines("x", CHIPS, ["y"], plan))
        assert "generation (--shape 8:12:10): 8 rows, 12 prompt tokens and 10 new tokens per row" in text
        assert re.search(
            r"(?m)^estimate, not a measurement: [\d.e-]+ ms in total; after the prefill, [\d,]+ new tokens/s$", text
        )
        assert "  one token per row " in text
        assert "bound" not in text

    @pytest.mark.parametrize("mesh", [{"devices": 1}, {"data": 2, "expert": 4}], ids=str)
    def test_generation_reads_all_expert_blocks(self, mesh):
        """At most one block for each of 8 x 2 copies of tokens; a device's experts may receive all of them."""
        experts = TEXT.model.replace(num_layers=1, **{"stack.period": (LayerKind(moe=MoE(num_experts=4, d_ff=512)),)})
        recipe = dataclasses.replace(parallel(TEXT, **mesh), model=experts)
        plan = make_decode_plan(recipe, Generation(8, 16, 8), CHIPS, jax.devices())
        blocks = 16 // mesh.get("data", 1)
        kernels = 2 * 4 * 32 * 512
        assert plan.token.memory_seconds > blocks * kernels / CHIPS.chip.hbm_bandwidth
        assert plan.token.compute_seconds > blocks * 2 * kernels / 4 / CHIPS.chip.flops
        assert not plan.loops_known
        assert "\n  an upper bound: a loop over experts counts with its maximum" in "\n".join(
            decode_lines("x", CHIPS, [], plan)
        )

    @pytest.mark.parametrize(
        ("name", "value", "why"),
        [
            ("_turns_at_most", lambda loop, expert_shards: None, "the number of iterations of a loop is not known"),
            ("LOOP", "jit(other)/while", "the compiled program has no recognizable loop over new tokens"),
        ],
    )
    def test_an_unknown_loop_gives_no_estimate(self, monkeypatch, name, value, why):
        monkeypatch.setattr(hlo if name == "_turns_at_most" else decoding, name, value)
        model = SMALL.model.replace(**{"stack.period": (LayerKind(moe=MoE(num_experts=4)),)})
        recipe = dataclasses.replace(parallel(SMALL, devices=1), model=model)
        plan = make_decode_plan(recipe, Generation(2, 8, 8), CHIPS, jax.devices())
        assert (plan.fits, plan.prefill, plan.token, plan.tokens_per_second) == (True, None, None, 0)
        text = "\n".join(decode_lines("x", CHIPS, [], plan))
        assert f"\nno estimate: {why}" in text
        assert f"collectives: not available, {why}" in text

    def test_a_token_computes_with_each_matrix(self, monkeypatch):
        """Also if the compiler uses no dot operations, as for a single row."""
        monkeypatch.setattr(hlo.Program, "_flops", lambda *given: 0)
        plan = make_decode_plan(parallel(SMALL, devices=1), Generation(1, 8, 8), CHIPS, jax.devices())
        matrices = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 2 * 32 * 64 + 32 * 96
        assert plan.token.compute_seconds == pytest.approx(2 * matrices / CHIPS.chip.flops)
        assert plan.prefill.compute_seconds == 0

    @pytest.mark.parametrize(
        ("recipe", "rows", "message"),
        [
            (
                TEXT,
                6,
                r"--shape 6:8:8.*8.*8.*--parallel",
            ),
            (parallel(TEXT, kind="pmap"), 8, r"Remove --parallel\.kind"),
            (parallel(TEXT, tensor=8, data=1), 8, "num_heads"),
        ],
    )
    def test_rejects_models_that_cannot_generate(self, recipe, rows, message):
        with pytest.raises(ConfigError, match=message):
            make_decode_plan(recipe, Generation(rows, 8, 8), CHIPS, jax.devices())


class TestHere:
    def test_peaks_of_local_devices_are_measured(self, monkeypatch):
        monkeypatch.setattr("transformer.training.plan._measurement.MATRIX", 128)
        monkeypatch.setattr("transformer.training.plan._measurement.COPIED", 2**16)
        topology, told = present_topology(jax.devices()[:2])
        assert (str(topology), topology.unit) == ("cpu:2", "device")
        assert min(topology.chip.flops, topology.chip.hbm_bandwidth, topology.hbm) > 0
        assert "measured now, per device with 2 in use" in told

    @pytest.mark.parametrize(("kind", "count", "name"), [("TPU v5 lite", 4, "v5e:4"), ("TPU v2", 8, "v2:4")])
    def test_peaks_of_known_devices_are_published_values(self, kind, count, name):
        topology, told = present_topology([types.SimpleNamespace(device_kind=kind)] * count)
        assert (str(topology), told) == (name, f"published figures for {name.partition(':')[0]}")
        assert set(DEVICE_KINDS.values()) == {"v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"}

    @pytest.mark.parametrize("recipe", [TEXT, PAIRS])
    def test_synthetic_tokens_are_valid(self, recipe):
        batch = made_up_batch(recipe)
        assert batch["tokens"].shape == batch["weights"].shape
        assert 0 <= batch["tokens"].min() <= batch["tokens"].max() < 96
        assert batch["weights"].min() == 1
        if recipe is PAIRS:
            np.testing.assert_array_equal(batch["source_lengths"], 12)

    def test_prints_the_plan(self):
        plan = types.SimpleNamespace(estimate=types.SimpleNamespace(seconds=0.25))
        measured = Measured(step_seconds=0.5, steps=7, peak_bytes=3 * 2**20)
        told = "\n".join(here_lines(plan, measured, "of a test"))
        assert "measured: 500 ms per step, median of 7 steps, peak memory 3.00 MiB" in told
        assert "measured / estimated: 2.00" in told


def test_formats_durations():
    assert [duration(seconds) for seconds in (12.345, 1, 0.9996, 2e-7)] == ["12.3 s", "1 s", "1 s", "0.0002 ms"]


TINY = "--model.num-layers 1 --model.d-model 32 --data.sequence-length 16 --execution.scan False --parallel.devices 1"


class TestCommand:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("decode --topology v5e:1x1 --shape 3", "--shape must be ROWS:PROMPT:NEW"),
            ("search --topology v5e:1x1 --candidates 0", "--candidates must be the number of candidates.*got '0'"),
            ("search --topology v5e:1x1 --candidates many", "got 'many'"),
            ("here --topology v5e:1x1", "unknown option --topology"),
        ],
    )
    def test_invalid_arguments_are_one_line_errors(self, words, message, capsys, monkeypatch):
        monkeypatch.setattr("transformer.training.plan._topologies.topology_devices", lambda topology: jax.devices())
        kind, *options = words.split()
        code = main(["plan", kind, "shakespeare_cpu", *options])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert re.search(message, err)

    def test_plans_for_the_local_devices(self, capsys, monkeypatch):
        monkeypatch.setattr("transformer.training.plan._measurement.MATRIX", 128)
        monkeypatch.setattr("transformer.training.plan._measurement.COPIED", 2**16)
        code = main(["plan", "here", "shakespeare_cpu", *TINY.split()])
        out, _ = capsys.readouterr()
        assert code == 0
        assert "shakespeare_cpu on cpu:1: 1 device, " in out
        assert "measured / estimated: " in out

    def test_a_local_plan_that_does_not_fit_is_not_run(self, capsys, monkeypatch):
        monkeypatch.setattr("transformer.training.plan._measurement.MATRIX", 128)
        monkeypatch.setattr("transformer.training.plan._measurement.COPIED", 2**16)
        monkeypatch.setattr("transformer.training.plan._measurement.device_bytes", lambda devices: 1e5)
        code = main(["plan", "here", "shakespeare_cpu", *TINY.split()])
        out, err = capsys.readouterr()
        assert (code, err) == (1, "")
        assert re.search(r"does not fit: it needs [\d.]+ MiB of 97.66 KiB per device", out)
        assert "measured" not in out.replace("not a measurement", "")

    def test_prints_the_search_as_json(self, capsys, monkeypatch):
        monkeypatch.setattr("transformer.training.plan._topologies.topology_devices", lambda topology: jax.devices())
        words = ("--topology", "v5e:2x4", "--candidates", "1", "--json")
        code = main(["plan", "search", "shakespeare_cpu", *words, *TINY.split()])
        values = json.loads(capsys.readouterr().out)
        assert (code, values["topology"], len(values["ranked"])) == (0, "v5e:2x4", 1)
        assert values["ranked"][0]["flags"].startswith("--parallel.data 1 --data.batch-size ")
