"""Search over meshes, batch sizes and remat policies: which candidates, in which order, and the output."""

import dataclasses
import math
import re
import types
from pathlib import Path

import jax
import pytest
from plan_recipes import BY_TOKENS, CHIPS, PAIRS, TEXT, parallel

from transformer.cli._plan_print import search_line, search_lines
from transformer.config import ConfigError, LayerKind, MoE
from transformer.nn._sharding import AXES
from transformer.nn.models import count_parameters
from transformer.training._flops import batch_rows
from transformer.training._overrides import load_recipe_file, override
from transformer.training._state import abstract_state
from transformer.training.plan import TpuTopology, parse_topology, ranked, search
from transformer.training.plan import _search as searching
from transformer.training.plan._search import candidates, meshes


class TestSearch:
    def test_meshes_multiply_to_the_devices(self):
        found = list(meshes(TEXT, 12))
        assert {math.prod(sizes.values()) for sizes in found} == {12}
        assert len({tuple(sizes.values()) for sizes in found}) == len(found)
        assert {sizes["expert"] for sizes in found} == {1}
        assert {sizes["context"] for sizes in meshes(PAIRS, 12)} == {1}
        routed = TEXT.model.replace(**{"stack.period": (LayerKind(moe=MoE(num_experts=4)),)})
        assert {sizes["expert"] for sizes in meshes(dataclasses.replace(TEXT, model=routed), 4)} == {1, 2, 4}

    def test_candidates_divide_rows_over_data_and_fsdp(self):
        for one in candidates(TEXT, CHIPS, 8):
            assert one.sizes["tensor"] in (1, 2, 4)
            ways = one.sizes["data"] * one.sizes["fsdp"]
            assert one.recipe.data.batch_size in (4, 8, 16)
            assert one.recipe.data.batch_size % ways == 0
        found = {(one.recipe.data.batch_tokens, batch_rows(one.recipe.data)) for one in candidates(BY_TOKENS, CHIPS, 8)}
        assert found == {(150, 8), (300, 24)}  # 75 tokens have no room for the 8 rows of a bucket

    def test_a_state_that_cannot_fit_is_not_compiled(self):
        small = TpuTopology(
            dataclasses.replace(CHIPS.chip, hbm=200_000 / 2**30), (2, 4)
        )  # the training state: 12 x 31,000 bytes
        found = candidates(TEXT, small, 8)
        assert found
        assert all(one.sizes["fsdp"] * one.sizes["tensor"] > 1 for one in found)
        assert not candidates(TEXT, TpuTopology(dataclasses.replace(CHIPS.chip, hbm=1e-5), (2, 4)), 8)

    def test_candidates_that_may_fit_are_ordered_by_speed_then_by_changes(self):
        small = TpuTopology(dataclasses.replace(CHIPS.chip, hbm=500_000 / 2**30), (2, 4))
        found = candidates(TEXT, small, 8)
        fits = [one.needed_bytes <= 500_000 for one in found]
        assert 0 < sum(fits) < len(fits)
        assert fits == sorted(fits, reverse=True)
        speeds = [batch_rows(one.recipe.data) / one.seconds for one in found[: sum(fits)]]
        assert speeds == sorted(speeds, reverse=True)
        needs = [one.needed_bytes for one in found[sum(fits) :]]
        assert needs == sorted(needs)

    def test_only_logits_held_at_once_count(self):
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
        by_default = max(2**27 // 2**23, TEXT.model.d_model)
        assert needs[None] - needs[8] == (by_default - 8) * 8 * 2**23

    @pytest.mark.parametrize("before", [parallel(TEXT, data=1, fsdp=-1), parallel(TEXT, kind="pmap"), BY_TOKENS])
    def test_flags_reproduce_the_candidate(self, before):
        for one in candidates(before, CHIPS, 8)[::37]:
            assert override(before, one.flags.split(), program="x") == one.recipe

    @pytest.mark.parametrize("before", ["--data.batch-size 64 --parallel.fsdp 8", "--parallel.tensor 2"])
    def test_flags_extend_the_flags_of_the_command(self, before):
        for one in candidates(override(TEXT, before.split(), program="x"), CHIPS, 8)[::37]:
            assert override(TEXT, [*before.split(), *one.flags.split()], program="x") == one.recipe

    @pytest.mark.parametrize(
        ("recipe", "topology", "message"),
        [
            (
                dataclasses.replace(TEXT, data=dataclasses.replace(TEXT.data, batch_size=1)),
                parse_topology("v5e:1x7"),
                r"7.*--data.batch-size 1.*7.*--model.d-model 32.*7.*--model.num-heads 4",
            ),
            (
                BY_TOKENS,
                parse_topology("v5e:1x3"),
                r"3.*--data.row-multiple 8.*3",
            ),
            (
                TEXT,
                TpuTopology(dataclasses.replace(CHIPS.chip, hbm=1e-5), (1, 7)),
                r"1e-05 GiB.*--topology",
            ),
        ],
    )
    def test_reports_an_empty_search(self, recipe, topology, message):
        with pytest.raises(ConfigError, match=message):
            next(search(recipe, topology, jax.devices()[: topology.num_chips], 3))

    def test_a_plan_without_estimate_counts_as_fitting(self, monkeypatch):
        monkeypatch.setattr(searching, "make_plan", lambda *given: types.SimpleNamespace(fits=True, estimate=None))
        tried = list(search(TEXT, CHIPS, jax.devices(), 1))
        text = "\n".join(search_lines("x", CHIPS, [], tried, ranked(tried)))
        assert "1 fit, 0 do not fit, 0 failed\n  not ranked, --parallel.data " in text
        assert search_line(tried[0]).endswith(": fits, no estimate: the compiler can't print this program")

    def test_candidates_are_ranked_by_tokens_per_second(self, monkeypatch):
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
        assert "3 configurations compiled in" in text
        assert re.search(rf"(?m)^ +1 +7 +100 +50 +1\.00 +{best[0].candidate.flags}$", text)
        assert "3 fit, 0 do not fit, 0 failed" in text

    def test_a_compilation_error_is_a_result(self, monkeypatch):
        def refuse(recipe, topology, devices):
            raise ValueError("no\nsuch thing")

        monkeypatch.setattr(searching, "make_plan", refuse)
        tried = list(search(TEXT, CHIPS, jax.devices(), 3))
        assert [(one.plan, one.error) for one in tried] == 3 * [(None, "ValueError: no")]
        assert ranked(tried) == []
        assert search_line(tried[0]).endswith(": ValueError: no")
        assert "0 fit, 0 do not fit, 3 failed" in "\n".join(search_lines("x", CHIPS, [], tried, []))

    def test_candidates_larger_than_a_failed_one_are_skipped(self, monkeypatch):
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


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama3_8b", 8_030_261_248), ("llama3_70b", 70_553_706_496), ("mixtral_8x7b", 46_702_792_704)],
)
def test_recipes_of_published_models_have_their_sizes_and_candidates(name, parameters):
    """arXiv 2407.21783, table 3, and 2401.04088, table 1; the parameter counts are those of the published weights."""
    recipe, _ = load_recipe_file(Path(__file__).resolve().parents[3] / "configs" / f"{name}.py")
    assert count_parameters(abstract_state(recipe).params) == parameters
    assert (recipe.data.sequence_length, recipe.model.dtype, recipe.execution.scan) == (8192, "bfloat16", True)
    topology = parse_topology("v5p:4x4x4")
    found = candidates(recipe, topology, 64)
    assert len(found) > 12
    assert found[0].needed_bytes < topology.hbm * 2**30
