"""Costs of compiled programs: iterations of loops, matrix multiplications, bytes of the HBM, collectives."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from transformer.config import Execution, FeedForwardOptions, RotaryOptions, TransformerConfig
from transformer.data import TextFile
from transformer.nn._moe import grouped_linear
from transformer.nn._sharding import ParallelConfig
from transformer.training import Recipe
from transformer.training._parallel import MeshPlacement
from transformer.training._state import abstract_state
from transformer.training._step import make_train_step
from transformer.training.plan import Program, batch_shapes

TEXT = Recipe(
    name="text",
    model=TransformerConfig(
        vocab_size=97,
        d_model=48,
        num_heads=3,
        num_layers=3,
        feed_forward=FeedForwardOptions(d_ff=176),
        position=RotaryOptions(),
    ),
    data=TextFile(path="nowhere.txt", sequence_length=40, batch_size=24),
)

HLO = """\
HloModule jit_step, entry_computation_layout={(f32[16]{0})->f32[16]{0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%cond (p: (s32[], f32[16])) -> pred[] {
  %p.1 = (s32[], f32[16]) parameter(0)
  %i = s32[] get-tuple-element(%p.1), index=0
  %n = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%fused (p: bf16[4,6]) -> bf16[2,6] {
  %p.2 = bf16[4,6] parameter(0)
  ROOT %rs = bf16[2,6]{1,0:T(8,128)} reduce-scatter(%p.2), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%add
}

%body (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %p = (s32[], f32[16]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i.1, %one)
  %x.1 = f32[16] get-tuple-element(%p), index=1
  %y.1 = bf16[4,6] constant({...})
  %ar = f32[16]{0} all-reduce(%x.1), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %f = bf16[2,6] fusion(%y.1), kind=kCustom, calls=%fused
  ROOT %t.1 = (s32[], f32[16]) tuple(%next, %ar)
}

ENTRY %main (a: f32[16]) -> f32[16] {
  %a = f32[16]{0} parameter(0)
  %zero = s32[] constant(0)
  %t = (s32[], f32[16]) tuple(%zero, %a)
  %w = (s32[], f32[16]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %ag = (f32[3], f32[24]) all-gather-start(%a), channel_id=4, replica_groups={}, dimensions={0}
  %agd = f32[24] all-gather-done(%ag)
  %both = (f32[16]{0}, f32[]) all-reduce(%a, %a), channel_id=5, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %cp = (s8[40], s8[40], u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
}
"""
UNTOLD = HLO.replace("known_trip_count", "other")


def text_of(function, *shapes):
    return jax.jit(function).lower(*shapes).compile().as_text()


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def entry(*lines, more=""):
    body = "\n".join(f"  {line}" for line in lines)
    return Program(f"HloModule x\n\n{more}\nENTRY %main () -> f32[] {{\n{body}\n}}\n")


class TestCollectives:
    def test_collectives_are_counted_with_bytes_by_kind(self):
        cost = Program(HLO).cost(8)
        reduce, gather, scatter, permute = cost.collectives
        assert cost.loops_known
        assert (reduce.kind, reduce.count, reduce.result_bytes) == ("all-reduce", 6, 5 * 64 + 68)
        assert reduce.wire_bytes == 5 * 64 * 2 * 3 // 4 + 68 * 2 * 7 // 8
        assert (gather.kind, gather.count, gather.result_bytes, gather.wire_bytes) == ("all-gather", 1, 96, 84)
        assert (scatter.kind, scatter.count) == ("reduce-scatter", 5)
        assert (scatter.result_bytes, scatter.wire_bytes) == (5 * 24, 5 * 24 * 3)
        assert (permute.kind, permute.count, permute.result_bytes) == ("collective-permute", 1, 40)
        assert cost.wire_bytes == sum(one.wire_bytes for one in cost.collectives)

    @pytest.mark.parametrize(
        ("groups", "size"),
        [
            ("[4,2]<=[8]", 2),
            ("{{0,1,2,3},{4,5,6,7}}", 4),
            ("mesh['a'=2,'b'=4] {'b'}", 4),
            ("mesh['a'=2,'b'=4] {'a','b'}", 8),
            ("mesh['a'=2,'b'=4] {'a','b':(1)2}", 4),
            ("{}", 8),
        ],
    )
    def test_reads_device_groups(self, groups, size):
        line = f"ROOT %r = f32[2] reduce-scatter(%x), replica_groups={groups}, to_apply=%add"
        (scatter,) = entry("%x = f32[16] parameter(0)", line).cost(8).collectives
        assert scatter.wire_bytes == (size - 1) * 8

    @pytest.mark.parametrize(("root", "kind"), [("%slice", "reduce-scatter"), ("%other", "all-reduce")])
    def test_an_all_reduce_whose_slice_a_fusion_returns_is_a_reduce_scatter(self, root, kind):
        slice_of = {"%slice": "%ar", "%other": "%p"}[root]
        fused = f"""\
%fused (p: f32[16]) -> f32[4] {{
  %p = f32[16] parameter(0)
  %zero = s32[] constant(0)
  %ar = f32[16] all-reduce(%p), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, to_apply=%add
  %part = f32[4] dynamic-slice({slice_of}, %zero), dynamic_slice_sizes={{4}}
  ROOT %same = f32[4] bitcast(%part)
}}
"""
        call = "ROOT %f = f32[4] fusion(%a), kind=kCustom, calls=%fused"
        (found,) = entry("%a = f32[16] parameter(0)", call, more=fused).cost(8).collectives
        assert found.kind == kind
        # Three of four parts, sent once for a reduce-scatter and twice for an all-reduce.
        assert found.wire_bytes == {"reduce-scatter": 48, "all-reduce": 96}[kind]

    @pytest.mark.parametrize(
        ("transfer", "target", "found"),
        [  # of 48 bytes between 3 slices: kind, bytes of the result, and bytes sent
            ("ALL_REDUCE", '"{1,2,3}x{0:15}"', ("all-reduce", 48, 64)),
            ("ALL_REDUCE", '"{1:3}x{0:15}"', ("all-reduce", 48, 64)),
            ("ALL_GATHER", '"{1,2,3}x{0:15}"', ("all-gather", 144, 96)),
            ("REDUCE_SCATTER", '"{1,2,3}x{0:15}"', ("reduce-scatter", 16, 32)),
            ("ALL_TO_ALL", "{{100000,200000,300000},{100001,200001,300001}}", ("all-to-all", 48, 32)),
            ("ONE_TO_ONE", "{{100000->200000},{200000->100000}}", ("collective-permute", 48, 48)),
        ],
    )
    def test_detects_collectives_across_slices(self, transfer, target, found):
        """The compiler rewrites them to a send to the host and a receive; other transfers to the host don't count."""
        about = f'_xla_megascale_target={target},_xla_megascale_transfer_type="{transfer}"'
        lines = (
            "%x = f32[12] parameter(0)",
            "%none = token[] after-all()",
            f"%s = (f32[12], u32[], token[]) send(%x, %none), is_host_transfer=true, frontend_attributes={{{about}}}",
            f"%r = (f32[12], u32[], token[]) recv(%none), is_host_transfer=true, frontend_attributes={{{about}}}",
            "%other = (f32[12], u32[], token[]) send(%x, %none), is_host_transfer=true",
            "ROOT %ar = f32[12] all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add",
        )
        cost = entry(*lines).cost(4)
        inside, across = cost.collectives
        assert (inside.kind, inside.over_network, across.over_network) == ("all-reduce", False, True)
        assert (across.kind, across.result_bytes, across.wire_bytes) == found
        assert (cost.wire_bytes, cost.network_bytes) == (72, found[2])
        assert cost.hbm_bytes == 5 * 48  # one read or write by each transfer, and two by the all-reduce

    def test_reads_collectives_of_a_compiled_program(self):
        """Data parallelism over eight devices: every gradient goes through an all-reduce."""
        model = TEXT.model.replace(num_layers=1)
        recipe = dataclasses.replace(
            TEXT, model=model, parallel=ParallelConfig(data=8), execution=Execution(scan=False)
        )
        placement = MeshPlacement(recipe)
        cost = Program(placement.lower(batch_shapes(recipe)).compile().as_text()).cost(8)
        parameters = sum(4 * leaf.size for leaf in jax.tree.leaves(placement.abstract_state().params))
        assert cost.loops_known
        assert {one.kind for one in cost.collectives} == {"all-reduce"}
        assert parameters <= cost.collectives[0].result_bytes < 1.5 * parameters


class TestLoops:
    def test_reads_trip_counts_from_the_loop_condition(self):
        cost = Program(UNTOLD).cost(8)
        assert (cost.collectives[0].count, cost.loops_known) == (8, True)

    def test_reads_start_and_step_of_a_loop(self):
        program = Program(UNTOLD.replace("s32[] constant(0)", "s32[] constant(2)"))
        assert program.cost(8).collectives[0].count == 6
        assert Program(UNTOLD.replace("%one = s32[] constant(1)", "%one = s32[] constant(3)")).cost(8).collectives[
            0
        ].count == (3 + 1)

    def test_unknown_trip_counts_are_reported(self):
        program = Program(UNTOLD.replace("direction=LT", "direction=NE"))
        cost = program.cost(8)
        assert (cost.collectives[0].count, cost.loops_known) == (2, False)
        assert not program.cost(8, at_most=True).loops_bounded
        assert program.cost(8, begin="body").collectives[0].count == 1

    def test_an_unknown_loop_start_is_reported(self):
        program = Program(UNTOLD.replace("%zero = s32[] constant(0)", "%zero = s32[] parameter(1)"))
        assert not program.cost(8).loops_known

    def test_a_loop_is_identified_by_its_name(self):
        named = HLO.replace("backend_config", 'metadata={op_name="jit(f)/while"}, backend_config')
        program = Program(named)
        assert program.loop("jit(f)/while") == "body"
        assert program.loop("jit(f)/x/while") is None
        without = program.cost(8, without="body")
        assert (without.collectives[0].count, without.loops_known) == (1, True)
        line = next(line for line in named.splitlines() if "%w = " in line)
        assert Program(named.replace(line, f"{line}\n{line.replace('%w', '%v')}")).loop("jit(f)/while") is None

    @pytest.mark.parametrize("experts", [1, 5])
    def test_a_loop_over_experts_runs_at_most_once_per_block(self, experts):
        blocks, rows, width = 13, 3, 7

        def feed_forward(x, kernel, expert, used):
            with jax.named_scope("layer"), jax.named_scope("feed_forward"):
                return grouped_linear(x, kernel, expert, used)

        integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((blocks,), ())]
        program = Program(text_of(feed_forward, floats(blocks, rows, width), floats(experts, width, 11), *integers))
        once, all_blocks = program.cost(1), program.cost(1, at_most=True)
        assert [once.loops_known, once.loops_bounded, all_blocks.loops_known] == 3 * [False]
        assert all_blocks.loops_bounded
        assert all_blocks.flops == blocks * once.flops == blocks * 2 * rows * width * 11
        shared = program.cost(1, at_most=True, expert_shards=4)
        assert shared.flops == 4 * once.flops  # ceil(13 / 4) blocks

        def gradient(x, kernel, expert, used):
            return jax.grad(lambda x, kernel: (feed_forward(x, kernel, expert, used) ** 2).sum(), (0, 1))(x, kernel)

        backward = Program(text_of(gradient, floats(blocks, rows, width), floats(experts, width, 11), *integers))
        assert backward.cost(1, at_most=True).loops_bounded
        assert backward.cost(1, at_most=True).flops == 3 * all_blocks.flops

    def test_a_loop_over_layers_costs_the_sum_of_its_layers(self):
        def layer(x, weights):
            return jnp.tanh(x @ weights), None

        def looped(stack, x):
            return jax.lax.scan(layer, x, stack)[0]

        def unrolled(stack, x):
            for weights in stack:
                x, _ = layer(x, weights)
            return x

        one, other = (
            Program(text_of(each, floats(7, 211, 211), floats(13, 211))).cost(1) for each in (looped, unrolled)
        )
        assert one.loops_known
        assert one.flops == other.flops == 7 * 2 * 13 * 211 * 211
        assert one.hbm_bytes == pytest.approx(other.hbm_bytes, rel=0.2)

    def test_the_compiler_counts_the_body_of_a_loop_once(self):
        def looped(stack, x):
            return jax.lax.scan(lambda x, weights: (jnp.tanh(x @ weights), None), x, stack)[0]

        cost = jax.jit(looped).lower(floats(7, 211, 211), floats(13, 211)).compile().cost_analysis()
        assert cost["flops"] < 2 * 2 * 13 * 211 * 211

    @pytest.mark.slow
    @pytest.mark.parametrize("remat", ["none", "full"])
    def test_the_loop_cost_holds_for_a_recipe(self, remat):
        def cost(scan):
            recipe = dataclasses.replace(TEXT, execution=Execution(scan=scan, remat=remat, attention="reference"))
            return Program(text_of(make_train_step(recipe), abstract_state(recipe), batch_shapes(recipe))).cost(1)

        looped, unrolled = cost(True), cost(False)
        assert looped.loops_known
        assert looped.flops == pytest.approx(unrolled.flops, rel=0.01)
        if remat == "full":  # otherwise the loop stacks activations for the backward pass, which writes and reads more
            assert looped.hbm_bytes == pytest.approx(unrolled.hbm_bytes, rel=0.2)


def test_rejects_text_that_is_not_hlo():
    with pytest.raises(ValueError, match=r"ENTRY.*'HloModule x'"):
        Program("HloModule x")


class TestFlops:
    @pytest.mark.parametrize(
        "function",
        [
            lambda x, y: x @ y,
            lambda x, y: jnp.einsum("bij,jk->bik", x[None], y),
            lambda x, y: jnp.einsum("bij,bjk->bik", jnp.stack([x] * 7), jnp.stack([y] * 7)),
        ],
    )
    def test_counts_flops_of_matrix_multiplications(self, function):
        compiled = jax.jit(function).lower(floats(13, 29), floats(29, 31)).compile()
        own = Program(compiled.as_text()).cost(1).flops
        assert own % (2 * 13 * 29 * 31) == 0
        assert own <= compiled.cost_analysis()["flops"] <= 1.1 * own

    @pytest.mark.parametrize("chosen", [lambda x: x[0, 0] > 0, lambda x: x[0, 0].astype(jnp.int32)])
    def test_the_most_expensive_branch_counts(self, chosen):
        def branch(x):
            return jax.lax.switch(chosen(x) * 1, [lambda x: x @ x, lambda x: x @ x @ x], x)

        assert Program(text_of(branch, floats(53, 53))).cost(1).flops == 2 * 2 * 53**3

    @pytest.mark.parametrize(
        ("operands", "attributes", "result", "pairs"),
        [
            (
                "f32[12,64,128] f32[128,512,1]",
                "window={size=1}, dim_labels=0bf_io0->0bf",
                "f32[12,64,512]",
                64 * 65536 * 12,
            ),
            (
                "f32[12,4,64,32] f32[12,4,64,32]",
                "window={size=12x4 stride=11x3 lhs_dilate=12x4}, dim_labels=01bf_01oi->01bf",
                "f32[12,4,64,64]",
                12 * 4 * 64 * 64 * 32,
            ),
            (
                "f32[1,64,8] f32[4,8,16]",
                "window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=0bf_0io->0bf",
                "f32[4,64,16]",
                4 * 64 * 8 * 16,
            ),
        ],
        ids=["plain", "batched", "reversed"],
    )
    def test_reads_matrix_multiplications_in_tpu_hlo(self, operands, attributes, result, pairs):
        left, right = operands.split()
        program = entry(
            f"%l = {left} parameter(0)",
            f"%r = {right} parameter(1)",
            f"ROOT %c = {result} convolution(%l, %r), {attributes}",
        )
        assert program.cost(1).flops == 2 * pairs

    @pytest.mark.parametrize(
        ("factors", "found"),
        [
            ("s8 s8", (120, 0)),
            ("u8 s4", (120, 0)),
            ("f8e4m3fn f8e5m2", (0, 120)),
            ("bf16 s8", (0, 0)),
            ("s32 s32", (0, 0)),
        ],
    )
    def test_counts_8_bit_matrix_multiplications_separately(self, factors, found):
        left, right = factors.split()
        cost = entry(
            f"%l = {left}[4,3]{{1,0}} parameter(0)",
            f"%r = {right}[3,5]{{1,0}} parameter(1)",
            "ROOT %c = f32[4,5] dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        ).cost(1)
        assert (cost.flops, cost.int8_flops, cost.fp8_flops) == (120, *found)


GROUPED = """\
HloModule m

ENTRY %main (a: s32[1]) -> RESULT {
  %begin = s32[1] parameter(0)
  %ends = s32[5] parameter(1)
  %group = s32[11] parameter(2)
  %tile = s32[11] parameter(3)
  %metadata = s32[5] custom-call(%ends), custom_call_target="tpu_custom_call", metadata={op_name="ragged-dot-metadata"}
  %x = bf16[LEFT] parameter(4)
  %w = bf16[RIGHT] parameter(5)
  ROOT %y = bf16[RESULT] custom-call(%begin, %ends, %group, %tile, %begin, %x, %w), TILING
}
"""
"""a kernel for 4 experts, 2,048 rows in 8 tiles of 256, of which 3 are visited twice"""


def grouped(left, right, result, tiles=None):
    tiling = f'frontend_attributes={{ragged_dot_tiling="{tiles}"}}, ' if tiles else ""
    text = GROUPED.replace("TILING", tiling + 'custom_call_target="tpu_custom_call"')
    return Program(text.replace("LEFT", left).replace("RIGHT", right).replace("RESULT", result))


class TestExperts:
    ROWS = 2048 + 3 * 256
    """rows that the kernel computes"""

    @pytest.mark.parametrize(
        ("sizes", "tiles", "read"),
        [
            # Rows once per tile of output features; kernels once per expert if a tile has all input features.
            (("2048,512", "4,512,1024", "2048,1024"), "256,512,256", (4 * ROWS, 4)),
            (("2048,512", "4,512,1024", "2048,1024"), "256,128,512", (2 * ROWS, 11)),
            (("2048,512", "4,512,1024", "2048,1024"), None, (ROWS, 4)),
            (("2048,512", "4,1024,512", "2048,1024"), None, (ROWS, 4)),  # the transposed kernel of megablox
        ],
    )
    def test_counts_flops_of_grouped_matrix_multiplications(self, sizes, tiles, read):
        cost = grouped(*sizes, tiles).cost(1)
        assert (cost.flops, cost.kernels) == (2 * self.ROWS * 512 * 1024, 0)
        metadata = 2 * 4 * 5  # reads and writes 5 integers
        assert cost.hbm_bytes - metadata == 2 * (read[0] * 512 + read[1] * 512 * 1024 + self.ROWS * 1024)

    def test_counts_flops_of_grouped_kernel_gradients(self):
        cost = grouped("2048,512", "2048,1024", "4,512,1024", "256,256,512").cost(1)
        assert (cost.flops, cost.kernels) == (2 * self.ROWS * 512 * 1024, 0)
        assert cost.hbm_bytes - 40 == 2 * (2 * self.ROWS * 512 + 2 * self.ROWS * 1024 + 4 * 512 * 1024)

    def test_experts_on_several_devices_divide_the_rows(self):
        cost = grouped("2048,512", "4,512,1024", "2048,1024").cost(8, expert_shards=2)
        assert cost.flops == 2 * (1024 + 3 * 256) * 512 * 1024

    def test_ignores_other_kernels(self):
        cost = grouped("2048,512,7", "4,512,1024", "2048,1024").cost(1)
        assert (cost.flops, cost.kernels) == (0, 1)


class TestBytes:
    def test_values_in_on_chip_memory_cost_no_traffic(self):
        program = entry(
            "%a = f32[128,8]{1,0:T(8,128)} parameter(0)",
            "%b = f32[128,8]{1,0:T(8,128)S(1)} negate(%a)",
            "ROOT %c = f32[128,8]{1,0:T(8,128)S(1)} negate(%b)",
        )
        assert program.cost(1).hbm_bytes == 128 * 128 * 4  # read once, padded to whole tiles

    def test_counts_bytes_read_and_written(self):
        text = text_of(lambda x: x + 1, floats(1031))
        assert Program(text).cost(1).hbm_bytes == pytest.approx(2 * 4 * 1031, abs=16)

    def test_a_slice_counts_only_its_own_bytes(self):
        text = text_of(lambda x, i: jax.lax.dynamic_index_in_dim(x, i, 0), floats(101, 1031), jnp.int32(3))
        assert Program(text).cost(1).hbm_bytes < 3 * 4 * 1031

    def test_a_view_inside_a_fusion_counts_the_bytes_its_users_read(self):
        """A TPU reads the output head through a fusion inside the fusion, which only returns its operand."""
        inside = """\
%view (v: f32[64,8]) -> f32[64,8] {
  %v = f32[64,8] parameter(0)
  ROOT %same = f32[64,8] bitcast(%v)
}

%head (w: f32[64,8], x: f32[4,8]) -> f32[4,64] {
  %w = f32[64,8] parameter(0)
  %x = f32[4,8] parameter(1)
  %again = f32[64,8] fusion(%w), kind=kLoop, calls=%view
  ROOT %product = f32[4,64] convolution(%x, %again), dim_labels=bf_oi->bf
}
"""
        program = entry(
            "%a = f32[64,8] parameter(0)",
            "%b = f32[4,8] parameter(1)",
            "ROOT %c = f32[4,64] fusion(%a, %b), kind=kOutput, calls=%head",
            more=inside,
        )
        assert program.cost(1).hbm_bytes == 4 * (64 * 8 + 4 * 8 + 4 * 64)

    def test_an_in_place_update_counts_only_new_bytes(self):
        def fill(x):
            return jax.lax.fori_loop(0, 101, lambda i, x: x.at[i].set(jnp.sin(x[i])), x)

        cost = Program(text_of(fill, floats(101, 1031))).cost(1)
        assert cost.loops_known
        assert 2 * 4 * 101 * 1031 <= cost.hbm_bytes < 5 * 4 * 101 * 1031


class TestHost:
    """S(5) is the memory of the host."""

    @pytest.mark.parametrize(
        ("line", "count"),
        [
            ("%c = (f32[16], f32[16]{0:T(128)S(5)}, u32[]) copy-start(%host)", 64),
            ("%c = (f32[16]{0:T(128)S(5)}, f32[16], u32[]) copy-start(%device)", 64),
            ("%c = f32[16]{0:T(128)S(5)} copy(%device)", 64),
            ("%c = f32[16]{0:T(128)S(1)} copy(%device)", 0),
            ("%c = ((f32[16]{0:T(128)S(5)}, s32[]), f32[2], u32[]) dynamic-slice-start(%host, %i)", 8),
            ("%c = ((f32[16]{0:T(128)S(5)}, f32[2], s32[]), f32[16]{0:T(128)S(5)}, u32[]) "
             "dynamic-update-slice-start(%host, %part, %i)", 8),
            ("%c = f32[2] dynamic-slice(%device, %i)", 0),
        ],
    )  # fmt: skip
    def test_counts_bytes_of_a_copy(self, line, count):
        lines = (
            "%host = f32[16]{0:T(128)S(5)} parameter(0)",
            "%device = f32[16]{0:T(128)} parameter(1)",
            "%part = f32[2]{0:T(128)} parameter(2)",
            "%i = s32[] constant(3)",
        )
        assert entry(*lines, line).cost(1).host_bytes == count

    def test_the_busier_transfer_direction_counts(self):
        """Copies in both directions take place at the same time."""
        lines = (
            "%a = f32[16]{0:S(5)} parameter(0)",
            "%b = f32[16] copy(%a)",
            "%c = f32[16] copy(%a)",
            "%d = f32[16]{0:S(5)} copy(%b)",
        )
        assert entry(*lines).cost(1).host_bytes == 128
