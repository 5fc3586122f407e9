# SPDX-License-Identifier: Apache-2.0
"""Schedules and HLO modules are read from stored texts of the TPU compiler, and priced."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.pricing import chips, hlo, schedule
from wanjax.pricing.compile import Compiled, Memory
from wanjax.pricing.costs import (
    ACHIEVED_LINK_FRACTION,
    BEST_MATMUL_FRACTION,
    HOST_LINK_FRACTIONS,
    KERNEL_HIGH_FACTOR,
    KERNEL_LOW_FACTOR,
    MAX_BYTE_TIME_RATIO,
    price_compiled,
)
from wanjax.pricing.pallas_kernels import kernel_seconds
from wanjax.pricing.work import flops, traffic, trip_count, wire_bytes

DATA = Path(__file__).parents[1] / "data/pricing"
# 6 layers, 2048 tokens, width 1024, on v6e-8 with weights over 4 devices
LAYERS = (DATA / "layers_module.txt").read_text()
WORDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def kernel():
    """Return the schedule of a product [512, 256] × [256, 128] in blocks of 128 on v6e.

    Its grid is (4, 1, 2); the kernel has a prologue, a body and an epilogue.
    """
    texts = ((DATA / f"kernel_{part}.txt").read_text() for part in ("bundles", "utilization", "allocations"))
    return schedule.parse("product.1", *texts, chips.V6E.branch_delay)


def test_a_block_counts_as_often_as_the_grid_runs_it(kernel):
    run = kernel.run()
    slots_by_count = {}
    for block in kernel.blocks:
        for unit, slots in block.units.items():
            slots_by_count.setdefault(unit, {}).setdefault(run.run_counts[block.start], 0)
            slots_by_count[unit][run.run_counts[block.start]] += slots
    assert run.data_dependent_blocks == set()
    assert slots_by_count["EUP"] == {
        count: 16 if count == 4 else 0 for count in slots_by_count["EUP"]
    }  # the epilogue, in 4 of 8 steps
    assert slots_by_count["MXU"][8] > 0  # the body
    assert sum(slots_by_count["MXU"].values()) == slots_by_count["MXU"][8]
    # once: outside the grid; 4 times: prologue and epilogue; 8 times: body; 10 times: the pipelined loop
    assert set(run.run_counts.values()) == {1, 4, 8, 10}


def test_the_traffic_of_a_kernel_is_that_of_its_blocks(kernel):
    blocks = 128 * 128
    x, y, out = 8 * 2 * blocks, 8 * 2 * blocks, 4 * 4 * blocks  # bfloat16 in each step, float32 in each epilogue
    assert kernel.run().traffic_bytes == x + y + out


def test_the_units_and_memory_of_a_kernel_are_read(kernel):
    run = kernel.run()
    assert kernel.vmem == 0x12000 + 0x10000 + 2 * 0x10000 + 0x20000
    assert kernel.slots["MXU"] == 2
    assert kernel.bundles < kernel.cycles(run.run_counts)
    assert kernel.units()["EUP"] == 16
    assert kernel.units(run.run_counts)["EUP"] == 64
    assert 0 < kernel.occupancy(run.run_counts)["MXU"] < kernel.occupancy()["VSTORE"] < 1
    assert kernel.units(run.run_counts)["VSTORE:SPILL"] == 0


def test_a_kernel_costs_its_bundles(kernel):
    cycles = kernel.cycles(kernel.run().run_counts)
    program = compiled((DATA / "kernel_module.txt").read_text(), schedules={"product.1": kernel})
    cost = price_compiled(program).by_kind["kernels"]
    assert cost.mid == pytest.approx(cycles / 1.75e9)
    assert (cost.low, cost.high) == pytest.approx((KERNEL_LOW_FACTOR * cost.mid, KERNEL_HIGH_FACTOR * cost.mid))
    slow = replace(program, slice=replace(program.slice, chip=replace(chips.V6E, bandwidth=1e6)))
    assert price_compiled(slow).by_kind["kernels"].mid == pytest.approx(kernel.run().traffic_bytes / 0.8e6)


BRANCHES = """
     0   :  { %s1_s0 = sld [smem:[#allocation5 + $0x3]]  ;;  %s2_s1 = smov 0 /* a constant */ }
   0x1 LB: > { %s3_s2 = sphi %s2_s1, %s4_s2  ;;  %p5_p0 = scmp.eq.s32.totalorder %s1_s0, 7 } /* Start region 9 */
   0x2   : > { %8 = sbr.rel (%p5_p0) target = $region7 }
   0x3   : > { %s4_s2 = sadd.s32 1, %s3_s2 }
   0x4   : > { %v1 = vadd.f32 %v0, %v0 } /* one
more line of the comment */
   0x5 PF: > { %p6_p1 = scmp.ge.s32.totalorder %s4_s2, 5 /* loop exit test */ } /* Start/End empty region 7 */
   0x6   : > { %9 = sbr.rel (!%p6_p1) target = $region9 }
   0x7   :  {}
   0x8   :  {}
"""


def test_branches_that_depend_on_data_are_listed():
    units = "\n".join(["== CAPACITY:", "VALU", "4", "== UTILIZATION:", *("1" if i == 4 else "0" for i in range(9))])
    parsed = schedule.parse("branchy", BRANCHES, units, "", branch_delay=1)
    assert [(block.start, block.stop) for block in parsed.blocks] == [(0, 1), (1, 4), (4, 5), (5, 8), (8, 9)]
    run = parsed.run()
    assert run.data_dependent_blocks == {1}
    assert run.run_counts == {0: 1, 1: 5, 4: 5, 5: 5, 8: 1}
    assert parsed.units(run.run_counts) == {"VALU": 5}
    assert parsed.run(skip={1}).run_counts == {0: 1, 1: 5, 4: 0, 5: 5, 8: 1}
    assert parsed.cycles(parsed.run(skip={1}).run_counts) == 1 + 3 * 5 + 3 * 5 + 1


def test_the_price_names_data_dependent_blocks():
    units = "VALU\n4\n" + "0\n" * 9
    parsed = schedule.parse("product.1", BRANCHES, units, "", branch_delay=1)
    text = (DATA / "kernel_module.txt").read_text()
    full_price = price_compiled(compiled(text, schedules={"product.1": parsed}))
    assert full_price.data_dependent_blocks == {"product.1": {1}}
    skipped = price_compiled(compiled(text, schedules={"product.1": parsed}), skip={"product.1": {1}})
    assert full_price.total.mid - skipped.total.mid == pytest.approx(5 / 1.75e9)


FLAGS = """
     0   :  { %1 = sst [smem:[#allocation5 + $0x1]] %s1_s0  ;;  %s0_s1 = smov 7  ;;  %s4_s9 = smov 8 }
   0x1   :  { %2 = sst [smem:[#allocation5 + $0x1]] %s0_s1  ;;  %p1_p0 = scmp.eq.s32.totalorder %s0_s1, 8 }
   0x2   :  { %3 = sst [smem:[#allocation5 + $0x1]] (%p1_p0), %s9_s9 }
   0x3   :  { %s2_s0 = sld [smem:[#allocation5 + $0x1]]  ;;  %s3_s1 = sld [smem:[#allocation5]] }
   0x4   :  { %p4_p1 = scmp.eq.s32.totalorder %s2_s0, 7  ;;  %p5_p2 = scmp.eq.s32.totalorder %s3_s1, 7 }
   0x5   :  { %5 = sbr.rel (%p4_p1) target = $region3 }
   0x6   :  {}
   0x7   :  {}
   0x8 PF:  { %6 = sst [smem:[#allocation5 + $0x1]] (!%p5_p2), %s4_s9  ;;  %8 = sbr.rel (%p5_p2) target = $region2 }
/* Start region 3 */
   0x9   :  { %s6_s0 = sld [smem:[#allocation5 + $0x1]] } /* Start region 2 */
   0xa   :  { %p7_p1 = scmp.eq.s32.totalorder %s6_s0, 7 }
   0xb   :  { %7 = sbr.rel (%p7_p1) target = $region4 }
   0xc   :  {}
   0xd   :  {} /* Start region 4 */
"""


def test_flags_in_memory_decide_branches():
    """A store with a known predicate is decided. A store with a predicate from data follows the branch of its block."""
    parsed = schedule.parse("flags", FLAGS, "VALU\n4\n" + "0\n" * 14, "", branch_delay=0)
    assert parsed.run().data_dependent_blocks == {8}
    assert parsed.run().run_counts == {0: 1, 6: 0, 8: 1, 9: 1, 12: 1, 13: 1}
    assert parsed.run(skip={8}).run_counts == {0: 1, 6: 0, 8: 1, 9: 1, 12: 0, 13: 1}


RARE = """
     0   :  { %1 = sst [smem:[#allocation5 + $0x1]] %s0_s1  ;;  %s0_s1 = smov 7  ;;  %s4_s9 = smov 8 }
   0x1   :  { %2 = sst [smem:[#allocation5 + $0x1]] %s0_s1 }
   0x2   :  { %p5_p2 = scmp.eq.s32.totalorder %s3_s1, 7 /* of a vector */ }
   0x3   :  { %5 = sbr.rel (%p5_p2) target = $region2 }
   0x4   :  { %6 = sst [smem:[#allocation5 + $0x1]] %s4_s9 }
   0x5   :  { %s6_s0 = sld [smem:[#allocation5 + $0x1]] } /* Start region 2 */
   0x6   :  { %p7_p1 = scmp.eq.s32.totalorder %s6_s0, 8 }
   0x7   :  { %7 = sbr.rel (%p7_p1) target = $region4 }
   0x8   :  {}
   0x9   :  { %p9_p3 = scmp.eq.s32.totalorder %s8_s2, 7 }
   0xa   :  { %8 = sbr.rel (%p9_p3) target = $region4 }
   0xb   :  {}
   0xc   :  {} /* Start region 4 */
"""


def test_work_that_only_rare_paths_reach_is_not_typical():
    """The branch at 10 is reached only if the branch at 3 skips its code. The typical path skips the code of both."""
    parsed = schedule.parse("product.1", RARE, "VALU\n4\n" + "0\n" * 13, "", branch_delay=0)
    assert parsed.run().data_dependent_blocks == {0}
    assert parsed.run(skip={0}).data_dependent_blocks == {0, 8}
    module = compiled((DATA / "kernel_module.txt").read_text(), schedules={"product.1": parsed})
    seconds = kernel_seconds(module, [1])
    assert seconds.typical == pytest.approx((13 - 2) / 1.75e9)
    assert seconds.worst == pytest.approx((13 - 4) / 1.75e9)  # the rare store at 4 makes the branch at 7 jump


EMPTY = """
     0   :  { %s3_s9 = sld [smem:[#allocation0]] /* core id */ }
   0x1   :  { %p684_p0 = scmp.ne.s32.totalorder %s3_s9, 0 } /* End region 1 */
   0x2   :  { %13 = sbr.rel (%p684_p0) target = $region4 }
   0x3   :  {} /* End region 2 */
   0x4   :  { %14 = vsyncpa [#allocation4], 0 } /* Start region 3 :: Start region 5 */
   0x5   :  { %15 = sbr.rel (%p684_p0) target = $region9 }
   0x6   :  {}
   0x7   :  {}
"""


def test_a_region_without_a_label_starts_at_the_next_region():
    """The compiler's dump for v4 and v5p has a branch to an empty region that has no label."""
    parsed = schedule.parse("product.1", EMPTY, "VALU\n4\n" + "0\n" * 8, "", branch_delay=1)
    assert [branch.target for branch in (block.branch for block in parsed.blocks) if branch] == [4, 8]
    assert parsed.run().run_counts == {0: 1, 4: 1, 7: 1}


def test_a_loop_that_ends_by_data_counts_once():
    text = BRANCHES.replace("%s4_s2, 5", "%s1_s0, 5")
    run = schedule.parse("endless", text, "VALU\n4\n" + "0\n" * 9, "", branch_delay=1).run()
    assert run.run_counts == {0: 1, 1: 1, 4: 1, 5: 1, 8: 1}
    assert run.data_dependent_blocks == {1, 5}


def test_bytes_include_padding_of_tiles():
    (array,) = hlo.arrays("bf16[300,100]{1,0:T(8,128)(2,1)}")
    assert array.bytes == 304 * 128 * 2
    (array,) = hlo.arrays("bf16[300,100]{0,1:T(8,128)(2,1)S(1)}")
    assert (array.bytes, array.traffic) == (104 * 384 * 2, 0)
    assert [a.bytes for a in hlo.arrays("(s32[], pred[5]{0:T(512)}, f8e4m3fn[3,2]{1,0}, s4[64]{0})")] == [4, 512, 6, 32]


def layers():
    module = hlo.parse(LAYERS)
    (loop,) = (instruction for instruction in module.entry.instructions if instruction.opcode == "while")
    return module, loop, module.computations[loop.computation_name("body")]


def test_the_trip_count_of_a_loop_is_read():
    module, loop, _ = layers()
    assert trip_count(module, loop, module.entry) == 6


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("constant.1.clone.1..sunk = s32[]{:T(128)} constant(1)", "constant.1.clone.1..sunk = s32[] constant(2)", 3),
        ("constant.8.clone = s32[]{:T(128)} constant(0)", "constant.8.clone = s32[]{:T(128)} constant(1)", 5),
        ("%copy.4, %constant.1.clone.1..sunk", "%copy.4, %get-tuple-element.57", 6),  # the loop carries the step
        ("%copy.4, %constant.1.clone.1..sunk", "%copy.4, %copy.4", None),
        ("direction=LT", "direction=NE", None),
        (
            "body=%wide.region_0.1_spmd.sunk",
            'body=%wide.region_0.1_spmd.sunk, backend_config={"known_trip_count":{"n":"9"}}',
            9,
        ),
    ],
)
def test_trip_counts_of_other_kinds_of_loops_are_read(old, new, expected):
    assert old in LAYERS
    module = hlo.parse(LAYERS.replace(old, new))
    loop = next(instruction for instruction in module.entry.instructions if instruction.opcode == "while")
    assert trip_count(module, loop, module.entry) == expected


def test_a_fusion_reads_only_its_slice():
    module, _, body = layers()
    fusion = body.by_name["convolution_tanh_fusion.2"]
    assert flops(module, fusion, body) == 2 * 2048 * 1024 * 256
    assert traffic(module, fusion, body) == 1024 * 256 * 2  # the weights of a layer; everything else is in VMEM


def test_a_slice_with_another_tiling_reads_only_the_slice():
    """The compiler slices stacked int8 weights with the tiling of 32-bit numbers, and does not copy the stack."""
    module = hlo.parse("""HloModule slices, is_scheduled=true

%copy_fusion (input: s8[40,5120,1280]) -> s8[40,5120,1280] {
  %input = s8[40,5120,1280]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy.1 = s8[40,5120,1280]{2,1,0:T(8,128)(4,1)} copy(%input)
}

%fused (stack: s8[40,5120,1280], layer: s32[]) -> s8[1,5120,1280] {
  %stack = s8[40,5120,1280]{2,1,0:T(32,128)(4,1)} parameter(0)
  %retiled = s8[40,5120,1280]{2,1,0:T(8,128)(4,1)} fusion(%stack), kind=kLoop, calls=%copy_fusion
  %layer = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %slice = s8[1,5120,1280]{2,1,0:T(8,128)(4,1)} dynamic-slice(%retiled, %layer, %zero, %zero)
  ROOT %copy.2 = s8[1,5120,1280]{2,1,0:T(32,128)(4,1)S(1)} copy(%slice)
}

ENTRY %main (weights: s8[40,5120,1280], number: s32[]) -> s8[1,5120,1280] {
  %weights = s8[40,5120,1280]{2,1,0:T(32,128)(4,1)} parameter(0)
  %number = s32[]{:T(128)} parameter(1)
  ROOT %sliced = s8[1,5120,1280]{2,1,0:T(32,128)(4,1)S(1)} fusion(%weights, %number), kind=kLoop, calls=%fused
}
""")
    slice_bytes = 5120 * 1280
    assert slice_bytes <= traffic(module, module.entry.root, module.entry) <= slice_bytes + 8  # plus the layer index


def test_the_group_and_bytes_of_a_collective_are_read():
    _, _, body = layers()
    gather = body.by_name["all-gather.2"]
    assert gather.group_size == 4
    assert wire_bytes(gather, body) == 3 * 256 * 2048 * 2


@pytest.mark.parametrize(
    ("opcode", "groups", "expected"),
    [
        ("all-gather", "{{0,1,2,3}}", 3 * 1024),
        ("all-gather-start", "[2,4]<=[8]", 3 * 1024),
        ("all-gather", "mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}", 3 * 1024),
        ("all-gather", "mesh['a'=2,'b'=4] {'a','b'}", 7 * 1024),
        ("all-gather", "mesh['a'=8] {'a':(2)4}", 3 * 1024),
        ("reduce-scatter", "{{0,1},{2,3}}", 512),
        ("all-reduce", "{{0,1,2,3}}", 2 * 768),
        ("all-to-all", "{{0,1,2,3}}", 1024),  # a quarter goes to each neighbour, and a quarter over two links
        ("all-to-all", "[4,2]<=[8]", 512),
        ("all-to-all", "[1,8]<=[8]", 2048),
    ],
)
def test_the_bytes_of_a_collective_depend_on_its_group(opcode, groups, expected):
    module = hlo.parse(
        "ENTRY %main (x: f32[256]) -> f32[256] {\n  %x = f32[256]{0:T(256)} parameter(0)\n"
        f"  ROOT %c = f32[256]{{0:T(256)}} {opcode}(%x), replica_groups={groups}, dimensions={{0}}\n}}\n"
    )
    assert wire_bytes(module.entry.root, module.entry) == expected


@pytest.mark.parametrize(
    ("shapes", "attributes", "expected"),
    [
        (("f32[4,8]", "f32[8,16]", "f32[4,16]"), "dim_labels=bf_io->bf", 2 * 4 * 8 * 16),
        # a batch of five products as a convolution; each output reads one entry
        (
            ("f32[5,4,8]", "f32[5,8,16]", "f32[5,4,16]"),
            "window={size=5 stride=4 pad=0_0 lhs_dilate=5}, dim_labels=0bf_0io->0bf",
            2 * 5 * 4 * 8 * 16,
        ),
        # three taps over ten entries, padded by one on each side
        (("f32[1,10,2]", "f32[3,2,7]", "f32[1,10,7]"), "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f", 2 * 28 * 14),
    ],
)
def test_flops_of_convolutions(shapes, attributes, expected):
    lhs, rhs, out = shapes
    module = hlo.parse(
        f"ENTRY %main (x: {lhs}, y: {rhs}) -> {out} {{\n  %x = {lhs} parameter(0)\n  %y = {rhs} parameter(1)\n"
        f"  ROOT %c = {out} convolution(%x, %y), {attributes}\n}}\n"
    )
    assert flops(module, module.entry.root, module.entry) == expected


def test_flops_of_a_dot():
    module = hlo.parse(
        "ENTRY %main (x: f32[3,4,8], y: f32[3,8,16]) -> f32[3,4,16] {\n  %x = f32[3,4,8] parameter(0)\n"
        "  %y = f32[3,8,16] parameter(1)\n  ROOT %c = f32[3,4,16] dot(%x, %y), lhs_batch_dims={0}, "
        "lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}\n}\n"
    )
    assert flops(module, module.entry.root, module.entry) == 2 * 3 * 4 * 8 * 16


UPDATE = """HloModule update

%fused (p: f32[64,1024], u: f32[8,1024], i: s32[]) -> f32[64,1024] {
  %p = f32[64,1024]{1,0:T(8,128)} parameter(0)
  %u = f32[8,1024]{1,0:T(8,128)} parameter(1)
  %i = s32[]{:T(128)S(6)} parameter(2)
  %z = s32[]{:T(128)} constant(0)
  ROOT %d = f32[64,1024]{1,0:T(8,128)} dynamic-update-slice(%p, %u, %i, %z)
}

ENTRY %main (p: f32[64,1024], u: f32[8,1024], i: s32[]) -> f32[64,1024] {
  %p.1 = f32[64,1024]{1,0:T(8,128)} parameter(0)
  %u.1 = f32[8,1024]{1,0:T(8,128)} parameter(1)
  %i.1 = s32[]{:T(128)S(6)} parameter(2)
  ROOT %f = f32[64,1024]{1,0:T(8,128)} fusion(%p.1, %u.1, %i.1), kind=kLoop, calls=%fused
}
"""


def test_an_update_in_place_moves_the_update():
    module = hlo.parse(UPDATE)
    assert traffic(module, module.entry.root, module.entry) == 2 * 8 * 1024 * 4


def compiled(text, slice_name="v6e-8", schedules=None):
    return Compiled(chips.find_slice(slice_name), Memory(0, 0), text, schedules or {})


def test_layers_are_priced_by_products_copies_and_collectives():
    priced = price_compiled(compiled(LAYERS))
    items = {item.name: item for item in priced.items}
    assert priced.flops == 6 * 2 * 2048 * 1024 * 256
    assert priced.unknown_loops == priced.unpriced_kernels == ()
    product = items["convolution_tanh_fusion.2"]
    assert (product.kind, product.num_executions) == ("matmuls", 6)
    floor, estimate = product.flops / 918e12, 6 * 4832 / 1.75e9
    assert product.cost.low == pytest.approx(floor / BEST_MATMUL_FRACTION)
    assert product.cost.high == pytest.approx(estimate)
    assert product.cost.mid == pytest.approx((floor * estimate) ** 0.5)
    assert items["all-gather.2"].cost.mid == pytest.approx(6 * 3 * 2**20 / 180e9)
    assert items["all-gather.2"].cost.high == pytest.approx(items["all-gather.2"].cost.mid / ACHIEVED_LINK_FRACTION)
    assert items["all-gather.2"].group == 4
    copy = items["copy"]  # a transpose to VMEM reads 4 MiB; the compiler's estimate is above three times the price
    assert (copy.kind, copy.bytes) == ("copies", 2048 * 1024 * 2)
    assert copy.cost.high == pytest.approx(MAX_BYTE_TIME_RATIO * copy.cost.mid)
    assert copy.cost.mid == pytest.approx(copy.bytes / (0.8 * 1.64e12))
    assert sum(cost.mid for cost in priced.by_kind.values()) == pytest.approx(priced.total.mid)
    assert price_compiled(compiled(LAYERS.replace("direction=LT", "direction=NE"))).unknown_loops == ("while.9",)


LARGE_PRODUCT = """HloModule product

ENTRY %main (x: bf16[8192,8192], y: bf16[8192,8192]) -> bf16[8192,8192] {
  %x = bf16[8192,8192]{1,0:T(8,128)(2,1)} parameter(0)
  %y = bf16[8192,8192]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %product = bf16[8192,8192]{1,0:T(8,128)(2,1)} convolution(%x, %y), dim_labels=bf_io->bf, CONFIG
}
""".replace("CONFIG", 'backend_config={"window_config":{"estimated_cycles":"2978000"}}')


def test_published_measurements_lie_within_the_price_range(kernel):
    """On v6e, a product of 8,192³ took 2.644 M cycles, and splash attention took 43.93 ms (priced at 44.4 ms)."""
    cost = price_compiled(compiled(LARGE_PRODUCT)).total
    assert cost.low < 2.644e6 / 1.75e9 < cost.high
    program = compiled((DATA / "kernel_module.txt").read_text())
    cost = price_compiled(program, kernels={"product.1": 44.4e-3}).total
    assert cost.low < 43.93e-3 < cost.high


def test_a_kernel_is_priced_by_schedule_or_given_seconds(kernel):
    text = (DATA / "kernel_module.txt").read_text()
    priced = price_compiled(compiled(text, schedules={"product.1": kernel}))
    assert priced.total.mid == pytest.approx(kernel.cycles(kernel.run().run_counts) / 1.75e9)
    assert priced.data_dependent_blocks == {}
    assert price_compiled(compiled(text)).unpriced_kernels == ("product.1",)
    assert price_compiled(compiled(text), kernels={"product": 2.0}).by_kind["kernels"].mid == 2.0
    assert price_compiled(compiled(text), kernels={"product.1": 3.0, "product": 2.0}).total.mid == 3.0


ASYNC = """HloModule beside

ENTRY %main (x: f32[1024,1024], y: f32[8192,1024]) -> (f32[4096,1024], f32[8192,1024]) {
  %x = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  %y = f32[8192,1024]{1,0:T(8,128)} parameter(1)
  %s = (f32[1024,1024], f32[4096,1024]) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}
  %n = f32[8192,1024]{1,0:T(8,128)} negate(%y)
  %d = f32[4096,1024]{1,0:T(8,128)} all-gather-done(%s)
  ROOT %t = (f32[4096,1024], f32[8192,1024]) tuple(%d, %n)
}
"""


def test_overlapped_work_costs_only_what_is_not_hidden():
    items = {item.name: item for item in price_compiled(compiled(ASYNC)).items}
    total, overlapped = 3 * 2**22 / 180e9, 2 * 8192 * 1024 * 4 / (0.8 * 1.64e12)
    assert items["n"].cost.mid == pytest.approx(overlapped)
    assert items["s"].cost.mid == pytest.approx(total - overlapped)
    assert items["s"].cost.mid > 0


def test_work_on_another_core_is_overlapped_too():
    """The text of a computation on another thread ends with the name of the thread."""
    text = ASYNC.replace(
        "ENTRY",
        """%called (x: f32[1024,1024]) -> f32[4096,1024] {
  %p = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  ROOT %s = f32[4096,1024]{1,0:T(8,128)} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}
}, execution_thread="sparsecore"

ENTRY""",
    )
    text = text.replace(
        "all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}",
        'call-start(%x), async_execution_thread="sparsecore", to_apply=%called',
    ).replace("all-gather-done", "call-done")
    assert hlo.parse(text).computations["called"].root.opcode == "all-gather"
    assert price_compiled(compiled(text)).total == pytest.approx(price_compiled(compiled(ASYNC)).total)


@pytest.mark.parametrize("second", ["all-gather-start", "all-gather"])
def test_collectives_share_the_links(second):
    """A collective waits for the collective before it, also if both are asynchronous."""
    gather = "replica_groups=[2,4]<=[8], dimensions={0}"
    lines = [f"  %s2 = (f32[1024,1024], f32[4096,1024]) all-gather-start(%x), {gather}"]
    lines += ["  %d2 = f32[4096,1024]{1,0:T(8,128)} all-gather-done(%s2)"]
    if second == "all-gather":
        lines = [f"  %d2 = f32[4096,1024]{{1,0:T(8,128)}} all-gather(%x), {gather}"]
    text = ASYNC.replace("  %n =", "\n".join(lines) + "\n  %n =")
    assert price_compiled(compiled(text)).by_kind["collectives"].mid == pytest.approx(2 * 3 * 2**22 / 180e9)


@pytest.mark.parametrize(
    ("second_pairs", "seconds"), [("{{1,0},{2,1},{0,2}}", 1), ("{{0,1},{1,2},{2,0}}", 2), ("{{0,1},{1,0}}", 2)]
)
def test_permutes_in_opposite_directions_use_different_links(second_pairs, seconds):
    """Two permutes share links only if a device sends to the same device in both."""
    permute = "f32[1024,1024]{1,0:T(8,128)} collective-permute-done"
    start = "(f32[1024,1024], f32[1024,1024]) collective-permute-start(%x), source_target_pairs="
    text = f"""HloModule permutes

ENTRY %main (x: f32[1024,1024]) -> (f32[1024,1024], f32[1024,1024]) {{
  %x = f32[1024,1024]{{1,0:T(8,128)}} parameter(0)
  %s1 = {start}{{{{0,1}},{{1,2}},{{2,0}}}}
  %s2 = {start}{second_pairs}
  %d1 = {permute}(%s1)
  %d2 = {permute}(%s2)
  ROOT %t = (f32[1024,1024], f32[1024,1024]) tuple(%d1, %d2)
}}
"""
    expected = seconds * 2**22 / 90e9
    assert price_compiled(compiled(text)).by_kind["collectives"].mid == pytest.approx(expected)


OFFLOADED = """HloModule offloaded

ENTRY %main (w: bf16[40,4096,4096], y: f32[65536,1024]) -> (bf16[1,4096,4096], f32[65536,1024]) {
  %w = bf16[40,4096,4096]{2,1,0:T(8,128)(2,1)S(5)} parameter(0)
  %y = f32[65536,1024]{1,0:T(8,128)} parameter(1)
  %i = s32[] constant(3)
  %s = ((bf16[40,4096,4096]{2,1,0:T(8,128)(2,1)S(5)}, s32[]), bf16[1,4096,4096]{2,1,0:T(8,128)(2,1)}, u32[]) dynamic-slice-start(%w, %i), dynamic_slice_sizes={1,4096,4096}
  %n = f32[65536,1024]{1,0:T(8,128)} negate(%y)
  %d = bf16[1,4096,4096]{2,1,0:T(8,128)(2,1)} dynamic-slice-done(%s)
  ROOT %t = (bf16[1,4096,4096], f32[65536,1024]) tuple(%d, %n)
}
"""  # noqa: E501


@pytest.mark.parametrize("copies", [1, 2])
def test_copies_from_the_host_s_memory_share_its_link(copies):
    """A copy costs the time for its bytes, not those of the stack, minus the computation that overlaps the copy."""
    start, done = (line for line in OFFLOADED.splitlines() if "dynamic-slice-" in line)
    text = OFFLOADED
    for number in range(1, copies):
        text = text.replace("  %n =", start.replace("%s =", f"%s{number} =") + "\n  %n =")
        text = text.replace(
            "  ROOT", done.replace("%d =", f"%d{number} =").replace("(%s)", f"(%s{number})") + "\n  ROOT"
        )
    priced = price_compiled(compiled(text))
    overlapped = 2 * 65536 * 1024 * 4 / (0.8 * 1.64e12)
    for end, link_share in zip(("low", "mid", "high"), HOST_LINK_FRACTIONS, strict=True):
        total = copies * 4096 * 4096 * 2 / (link_share * chips.V6E.host_link)
        assert getattr(priced.by_kind["offload"], end) == pytest.approx(total - overlapped)


def test_slices_are_found_by_name():
    assert chips.find_slice("v6e-8").devices == 8
    assert chips.find_slice("v5p-8").devices == chips.find_slice("v4-8").devices == 4
    with pytest.raises(WanjaxError, match=line_with_words("'v6e-5' v5e-1")):
        chips.find_slice("v6e-5")
