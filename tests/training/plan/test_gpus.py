"""GPU topologies: their figures, the packages of the compiler, and costs of programs for GPUs on several hosts."""

import importlib.metadata
import importlib.util
import json
import re

import pytest
from gpu_compiler import GPU_COMPILER
from plan_recipes import TEXT

from transformer.__main__ import main
from transformer.config import ConfigError
from transformer.training._flops import peak_flops
from transformer.training.plan import (
    GPUS,
    CompilerError,
    GpuTopology,
    estimate,
    make_serve_plan,
    parse_topology,
    present_topology,
    topology_devices,
)
from transformer.training.plan import _gpu_topology as gpu
from transformer.training.plan._gpu_topology import target_config
from transformer.training.plan._hlo_gpu import GpuProgram
from transformer.training.plan._hlo_text import Operation, replica_groups


class TestFigures:
    @pytest.mark.parametrize(
        ("name", "per_clock", "clock"),
        [  # multiply-add operations in 16 bits of an SM per clock, and the clock in GHz, from NVIDIA's white papers
            ("t4", 512, 1.59),
            ("l4", 512, 2.04),
            ("a100-40gb", 1024, 1.41),
            ("a100", 1024, 1.41),
            ("h100", 2048, 1.83),
            ("h200", 2048, 1.83),
            ("b200", 4096, 1.85),
        ],
    )
    def test_the_peak_is_that_of_all_multiprocessors(self, name, per_clock, clock):
        assert GPUS[name].flops == pytest.approx(2 * GPUS[name].cores * per_clock * clock * 1e9, rel=0.01)

    @pytest.mark.parametrize("name", GPUS)
    def test_figures_are_ordered(self, name):
        """Memory is faster than links, links than the network; smaller types are faster."""
        one = GPUS[name]
        assert one.hbm_bandwidth > one.link_bandwidth > one.network_bandwidth
        assert one.link_bandwidth >= one.host_bandwidth
        assert one.float32_flops < one.flops < one.int8_flops
        assert one.fp8_flops is None or one.fp8_flops == one.int8_flops
        assert one.hbm * 2**30 == one.memory_bytes
        assert peak_flops(one.device_kind) == one.flops

    def test_variants_of_the_a100_differ_in_memory(self):
        assert [round(GPUS[name].memory_bytes / 1e9) for name in ("a100", "a100-40gb")] == [85, 42]

    @pytest.mark.parametrize("name", GPUS)
    def test_the_compiler_gets_the_properties_of_the_gpu(self, name):
        one = GPUS[name]
        text = target_config(one, cuda="13.5.37", cudnn="9.28.1")
        assert text.count("{") == text.count("}")
        fields = dict(re.findall(r"(\w+): (\S+)", re.split("scalar_unit|dnn_version_info", text)[0]))
        assert int(fields["core_count"]) == one.cores
        assert int(fields["device_memory_size"]) == one.memory_bytes
        assert (int(fields["major"]), int(fields["minor"])) == one.capability
        exact = one.capability >= (9, 0)
        assert (fields["feature_extension"] == "ACCELERATED_FEATURES") == exact
        assert ("matrix_unit_description" in text) == exact
        assert "dnn_version_info { major: 9 minor: 28 patch: 1 }" in text
        links = {"t4": None, "l4": None, "a100-40gb": "12", "a100": "12", "h100": "18", "h200": "18", "b200": "18"}
        assert fields.get("active_links") == links[name]


class TestTopology:
    def test_has_hosts_and_gpus_per_host(self):
        topology = parse_topology("2*h100:3x5")
        assert isinstance(topology, GpuTopology)
        assert (topology.hosts, topology.per_host, topology.num_slices) == (3, 5, 2)
        assert (str(topology), topology.num_chips, topology.unit) == ("2*h100:3x5", 30, "GPU")
        assert parse_topology("1*h100:3x5") == parse_topology("h100:3x5")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("h1000:1x8", r"GPU or TPU 'h1000'.*'h100:1x8'.*v5e:4x4.*b200:1x8"),
            ("h100", r"h100:HOSTSxGPUS.*got 'h100'.*'h100:1x8'"),
            ("h100:4", r"got 'h100:4'.*'h100:1x4'"),
            ("h100:20", r"got 'h100:20'.*'h100:3x8'"),
            ("h100:1x0", r"got 'h100:1x0'.*'h100:1x8'"),
            ("h100:2x2x2", "got 'h100:2x2x2'"),
            ("h100:2x9", r"9 GPUs per host.*at most 8.*18 GPUs.*h100:3x8"),
            ("a100-40gb:1x17", r"at most 16"),
            ("0*h100:1x8", r"got '0'.*'2[*]h100:1x8'"),
        ],
    )
    def test_an_invalid_topology_names_a_valid_one(self, text, message):
        with pytest.raises(ConfigError, match=message):
            parse_topology(text)

    def test_jax_uses_a_fraction_of_the_memory(self, monkeypatch):
        monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
        topology = parse_topology("h100:1x1")
        assert topology.usable_bytes == 84_942_979_072 * 3 // 4
        assert topology.memory_note.startswith("75 % of 79.11 GiB; ")
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
        assert topology.usable_bytes == 84_942_979_072 // 2

    @pytest.mark.parametrize("value", ["much", "0", "1.5"])
    def test_rejects_an_invalid_fraction(self, monkeypatch, value):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", value)
        with pytest.raises(ConfigError, match=rf"XLA_PYTHON_CLIENT_MEM_FRACTION.*got '{value}'"):
            parse_topology("h100:1x1")

    def test_a_present_gpu_has_published_figures(self):
        device = type("Device", (), {"device_kind": "NVIDIA H100 80GB HBM3", "platform": "gpu"})
        topology, told = present_topology([device] * 4)
        assert (str(topology), told) == ("h100:1x4", "published figures for h100")

    def test_a_server_has_the_usable_memory(self, monkeypatch):
        monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
        plan = make_serve_plan(TEXT, 24, parse_topology("l4:1x1"))
        assert plan.available_bytes == pytest.approx(0.9 * 0.75 * 23_612_293_120, abs=2)
        # 3 layers, 16 tokens, 2 heads of 8 numbers, keys and values, 4 bytes; a TPU would pad each head to 128 numbers
        assert plan.page_bytes == 3 * 16 * 2 * 8 * 2 * 4


class TestPackages:
    JAX = importlib.metadata.version("jax")

    def installed(self, monkeypatch, **versions):
        there = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(gpu, "_version", there.get)

    def error(self, capsys, *words):
        code = main(["plan", "train", "number_words", "--topology", "h100:1x8", *words])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (1, "", 1)
        return err

    def test_reports_a_missing_compiler(self, capsys, monkeypatch):
        self.installed(monkeypatch)
        assert f'jax-cuda13-plugin. Install it: pip install "jax[cuda13]=={self.JAX}"' in self.error(capsys)

    @pytest.mark.parametrize(
        ("versions", "message"),
        [
            ({"jax_cuda13_plugin": "0.1.2"}, r"jax-cuda13-plugin .* {jax}, got 0\.1\.2\. .*\[cuda13\]=={jax}"),
            ({"jax_cuda12_plugin": "{jax}"}, r"jax-cuda12-pjrt .* {jax}, got no such package\. .*\[cuda12\]=={jax}"),
        ],
    )
    def test_reports_packages_for_another_jax(self, capsys, monkeypatch, versions, message):
        self.installed(monkeypatch, **{name: one.format(jax=self.JAX) for name, one in versions.items()})
        assert re.search(message.format(jax=re.escape(self.JAX)), self.error(capsys))

    @pytest.mark.parametrize(
        ("program", "said"),
        [
            ("raise RuntimeError('no ptxas')", "its message: RuntimeError: no ptxas"),
            ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", r"it crashed \(SIGSEGV\)"),
        ],
    )
    def test_reports_a_compiler_that_does_not_work(self, monkeypatch, program, said):
        self.installed(monkeypatch, jax=self.JAX, jax_cuda13_plugin=self.JAX, jax_cuda13_pjrt=self.JAX)
        monkeypatch.setattr(gpu, "PROBE", program)
        message = rf"\(jax .*, jax-cuda13-plugin .*\) can't compile a matrix multiplication for h100: {said}\. "
        with pytest.raises(CompilerError, match=message):
            topology_devices(parse_topology("h100:1x7"))

    def test_flags_of_the_tpu_compiler_are_removed(self, monkeypatch):
        self.installed(monkeypatch, jax=self.JAX, jax_cuda13_plugin=self.JAX, jax_cuda13_pjrt=self.JAX)
        monkeypatch.setattr(gpu, "PROBE", "raise SystemExit(1)")
        monkeypatch.setenv("XLA_FLAGS", "--xla_tpu_x=1 --xla_gpu_y=2 --xla_cpu_z=3")
        with pytest.raises(CompilerError):
            topology_devices(parse_topology("h100:1x6"))
        assert gpu.os.environ["XLA_FLAGS"] == "--xla_gpu_y=2 --xla_cpu_z=3"


def program(*lines, hosts=(0, 0, 0, 0, 1, 1, 1, 1)):
    body = "\n".join(f"  {line}" for line in lines)
    return GpuProgram(f"HloModule x\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n", hosts)


class TestGroups:
    @pytest.mark.parametrize(
        ("text", "groups"),
        [
            ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
            ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
            ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
            ("replica_groups=mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
            ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
            ("replica_groups=mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
            ("replica_groups=mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
            ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", [[0, 2], [1, 3]]),
            ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
            ("source_target_pairs={{0,1},{1,2},{2,0}}", [[0, 1], [1, 2], [2, 0]]),
            ("replica_groups={}", [list(range(8))]),
        ],
    )
    def test_reads_the_devices_of_each_group(self, text, groups):
        assert (
            replica_groups(Operation("f32[2]", "all-reduce", [], f"channel_id=1, {text}, to_apply=%add"), 8) == groups
        )


class TestHosts:
    """Eight GPUs, four on each of two hosts."""

    def sent(self, kind, groups, hosts=(0, 0, 0, 0, 1, 1, 1, 1)):
        cost = program("%x = f32[64] parameter(0)", f"ROOT %r = f32[64] {kind}(%x), {groups}", hosts=hosts).cost(8)
        return cost.wire_bytes, cost.network_bytes

    def test_groups_inside_a_host_use_its_links(self):
        assert self.sent("all-reduce", "replica_groups=[2,4]<=[8]") == (2 * 3 * 64, 0)

    def test_hosts_are_those_of_the_devices_of_the_mesh(self):
        """The same groups, in a mesh whose neighbors are on different hosts."""
        apart = (0, 1, 0, 1, 0, 1, 0, 1)
        assert self.sent("all-reduce", "replica_groups=[2,4]<=[8]", apart) == (0, 2 * 3 * 64 // 2)

    @pytest.mark.parametrize(
        ("kind", "groups", "sent"),
        [  # of a result of 256 bytes
            ("all-reduce", "replica_groups=[1,8]<=[8]", 2 * 7 * 32 // 4),  # 4 GPUs of a host share what the host sends
            ("all-gather", "replica_groups=[1,8]<=[8]", 7 * 32 // 4),
            ("reduce-scatter", "replica_groups=[1,8]<=[8]", 7 * 256 // 4),
            ("all-reduce", "replica_groups=[4,2]<=[2,4]T(1,0)", 256),  # one GPU of each host
            ("all-to-all", "replica_groups=[1,8]<=[8]", 4 * 32),  # 4 of 8 parts
            ("collective-permute", "source_target_pairs={{0,1},{3,4}}", 256),  # 3 and 4 are on two hosts
        ],
    )
    def test_groups_on_both_hosts_share_the_network(self, kind, groups, sent):
        assert self.sent(kind, groups) == (0, sent)

    def test_a_permutation_inside_hosts_uses_links(self):
        assert self.sent("collective-permute", "source_target_pairs={{0,1},{4,5}}") == (256, 0)

    @pytest.mark.parametrize(
        ("start", "kind", "result"),
        [
            ("((f32[64]), f32[64]) all-reduce-start", "all-reduce", 256),
            ("((f32[8]), f32[64]) all-gather-start", "all-gather", 256),
            ("((f32[64]), f32[8]) reduce-scatter-start", "reduce-scatter", 32),
        ],
    )
    def test_results_of_asynchronous_collectives(self, start, kind, result):
        cost = program("%x = f32[64] parameter(0)", f"ROOT %r = {start}(%x), replica_groups=[2,4]<=[8]").cost(8)
        assert [(one.kind, one.result_bytes) for one in cost.collectives] == [(kind, result)]

    def test_the_estimate_uses_the_bandwidth_of_each_connection(self):
        chip = GPUS["h100"]
        sizes = {"model_flops": 1, "flops": 1, "hbm_bytes": 0}
        one = estimate(chip, 8, **sizes, wire_bytes=450 * 10**9, network_bytes=100 * 10**9)
        assert (one.collective_seconds, one.network_seconds) == (1, 2)

    def test_float32_multiplications_use_their_own_peak(self):
        chip = GPUS["h100"]
        sizes = {"model_flops": 1, "hbm_bytes": 0, "wire_bytes": 0}
        one = estimate(chip, 1, flops=989 * 10**12 + 494 * 10**12, **sizes, float32_flops=494 * 10**12)
        assert one.compute_seconds == 2


class TestPrograms:
    def test_counts_multiplications_of_cublas(self):
        options = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
        cost = program(
            "%x = f32[3,5]{1,0} parameter(0)",
            "%y = f32[5,7]{1,0} parameter(1)",
            '%z = (f32[3,7]{1,0}, s8[64]{0}) custom-call(%x, %y), custom_call_target="__cublas$lt$matmul", '
            f"backend_config={options}",
            "ROOT %r = f32[3,7]{1,0} get-tuple-element(%z), index=0",
        ).cost(1)
        assert (cost.flops, cost.float32_flops, cost.launches) == (2 * 3 * 5 * 7, 2 * 3 * 5 * 7, 1)

    @pytest.mark.parametrize(
        ("target", "types"),
        [
            ("__cudnn$convForward", ("f16[2,9,3]", "f16[4,3,5]", "f16[2,6,5]")),
            ("__cudnn$convBackwardInput", ("f16[2,6,5]", "f16[4,3,5]", "f16[2,9,3]")),
            ("__cudnn$convBackwardFilter", ("f16[2,9,3]", "f16[2,6,5]", "f16[4,3,5]")),
        ],
    )
    def test_counts_convolutions_of_cudnn(self, target, types):
        """6 positions of the result, of 4 positions of the kernel each; the derivatives have as many FLOPs."""
        cost = program(
            f"%x = {types[0]} parameter(0)",
            f"%y = {types[1]} parameter(1)",
            f"ROOT %z = ({types[2]}, u8[64]) custom-call(%x, %y), window={{size=4}}, dim_labels=b0f_0io->b0f, "
            f'custom_call_target="{target}"',
        ).cost(1)
        assert cost.flops == 2 * 2 * 3 * 5 * 6 * 4

    def test_attention_of_cudnn_is_a_kernel_with_unknown_flops(self):
        cost = program(
            "%x = bf16[4,4] parameter(0)",
            'ROOT %y = (bf16[4,4], u8[0]) custom-call(%x, %x), custom_call_target="__cudnn$fmhaSoftmax"',
        ).cost(1)
        assert (cost.kernels, cost.flops, cost.launches) == (1, 0, 1)

    def test_launches_are_those_of_every_iteration(self):
        """A loop of 5 iterations with two fusions, and a copy; views and ends of asynchronous ones don't count."""
        text = """\
HloModule x

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  %q = f32[4] negate(%p)
  ROOT %s = f32[4] sine(%q)
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p.1 = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%p.1), index=0
  %v = f32[4] get-tuple-element(%p.1), index=1
  %f = s32[] fusion(%i), kind=kLoop, calls=%fused
  %g = f32[4] fusion(%v), kind=kLoop, calls=%fused
  ROOT %t.1 = (s32[], f32[4]) tuple(%f, %g)
}

%cond (p: (s32[], f32[4])) -> pred[] {
  %p.2 = (s32[], f32[4]) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %n = s32[] constant(5)
  ROOT %less = pred[] compare(%i.2, %n), direction=LT
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4] parameter(0)
  %zero = s32[] constant(0)
  %t = (s32[], f32[4]) tuple(%zero, %a)
  %w = (s32[], f32[4]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %r = f32[4] get-tuple-element(%w), index=1
  %c = (f32[4], f32[4], u32[]) copy-start(%r)
  %d = f32[4] copy-done(%c)
  ROOT %e = f32[4] bitcast(%d)
}
"""
        assert GpuProgram(text, [0]).cost(1).launches == 5 * 2 + 1

    @pytest.mark.parametrize("start", ["", "-start"])
    def test_a_fusion_that_slices_reads_only_the_slice(self, start):
        """Of the stacked parameters (16, 64) of scanned layers, one layer; also if the fusion is asynchronous."""
        types = "((f32[16,64], s32[]), f32[1,64], u32[])" if start else "f32[1,64]"
        text = f"""\
HloModule x

%fused (p: f32[16,64], i: s32[]) -> f32[1,64] {{
  %p = f32[16,64] parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %s = f32[1,64] dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={{1,64}}
}}

ENTRY %main (a: f32[16,64], n: s32[]) -> f32[1,64] {{
  %a = f32[16,64] parameter(0)
  %n = s32[] parameter(1)
  ROOT %f = {types} fusion{start}(%a, %n), kind=kLoop, calls=%fused
}}
"""
        assert GpuProgram(text, [0]).cost(1).hbm_bytes == pytest.approx(2 * 256, abs=4)  # 4 bytes: the index

    def test_memory_of_collectives_is_memory_of_the_gpu(self):
        cost = program("%x = f32[64]{0:S(1)} parameter(0)", "ROOT %y = f32[64]{0} negate(%x)").cost(1)
        assert cost.hbm_bytes == 2 * 256


TINY = ("--model.num-layers", "2", "--model.d-model", "128", "--data.batch-size", "8", "--model.dtype", "bfloat16")
TINY += ("--execution.scan", "True")  # compiles faster


class TestGpuCompiler:
    pytestmark = GPU_COMPILER

    def plan(self, capsys, *words, kind="train"):
        code = main(["plan", kind, "shakespeare_cpu", *TINY, *words, "--json"])
        out, err = capsys.readouterr()
        assert err == ""
        return code, json.loads(out)

    @pytest.mark.parametrize("name", ["t4", "l4", "a100", "h100", "b200"])
    def test_compiles_for_each_architecture(self, name):
        devices = topology_devices(parse_topology(f"2*{name}:2x3"))
        assert [device.process_index for device in devices] == [host for host in range(4) for _ in range(3)]
        assert {device.device_kind for device in devices} == {GPUS[name].device_kind}

    def test_fsdp_gathers_parameters_between_hosts(self, capsys):
        code, plan = self.plan(capsys, "--topology", "h100:2x4", "--parallel.data", "1", "--parallel.fsdp", "8")
        assert (code, plan["fits"], plan["mesh"]) == (0, True, "mesh: fsdp 8")
        assert plan["available_bytes"] == parse_topology("h100:1x1").usable_bytes
        size = plan["num_parameters"]
        assert size / 2 <= plan["memory"]["parameters"] <= 0.6 * size  # 4 bytes of each of an eighth; norms are whole
        assert 2 * plan["memory"]["parameters"] == pytest.approx(plan["memory"]["optimizer state"], abs=64)
        kinds = {one["kind"]: one for one in plan["cost"]["collectives"]}
        assert all(one["over_network"] for one in kinds.values())
        assert kinds["all-gather"]["result_bytes"] >= 2 * size
        assert plan["estimate"]["network_seconds"] * 50e9 == pytest.approx(
            sum(one["wire_bytes"] for one in kinds.values())
        )
        assert plan["estimate"]["collective_seconds"] == 0
        assert plan["computed_flops"] == pytest.approx(plan["flops"]["total"], rel=0.2)
        assert 100 < plan["cost"]["launches"] < 1000

    def test_tensor_sums_activations_inside_a_host(self, capsys):
        """Two sums per layer and pass in each host; only gradients are summed between hosts."""
        _, plan = self.plan(capsys, "--topology", "h100:2x2", "--parallel.data", "2", "--parallel.tensor", "2")
        inside, between = (
            [one for one in plan["cost"]["collectives"] if one["over_network"] == far] for far in (False, True)
        )
        assert {one["kind"] for one in between} == {"all-reduce"}
        (reduce,) = [one for one in inside if one["kind"] == "all-reduce"]
        activations = 2 * plan["counted"] // 2 * 128  # bfloat16, of half of the rows
        assert reduce["count"] >= 2 * 2 * 2
        assert reduce["result_bytes"] >= 2 * 2 * 2 * activations
        assert plan["estimate"]["collective_seconds"] > 0
        assert plan["estimate"]["network_seconds"] > 0

    def test_plans_generation(self, capsys):
        code, plan = self.plan(capsys, "--topology", "l4:1x1", "--shape", "8:64:32", kind="decode")
        assert (code, plan["fits"], plan["generation"]) == (0, True, {"rows": 8, "prompt": 64, "new": 32})
        assert plan["prefill"]["compute_seconds"] > 8 * plan["token"]["compute_seconds"] > 0
        assert 20 < plan["launches"] < 200

    def test_a_batch_that_does_not_fit_is_a_result(self, capsys):
        big = ("--data.batch-size", "131072", "--execution.remat", "none")
        code, plan = self.plan(capsys, "--topology", "t4:1x1", *big)
        assert (code, plan["fits"], plan["estimate"]) == (1, False, None)
        assert plan["needed_bytes"] > plan["available_bytes"] == parse_topology("t4:1x1").usable_bytes
        assert any("--training.accumulation" in remedy for remedy in plan["remedies"])
