"""Small HLO texts with answers worked by hand; no compiler for TPUs is needed."""

import jax
import pytest

from opd_jax import rollout
from tests import tiny
from tools import hlo, hlo_cost

# A scan of 5 products [8,16]x[16,32] in bf16, in the style of a TPU's compiler: the weight of each
# turn is sliced from a stack, the activations lie on the chip, S(1), results are written in place.
SCAN = """
HloModule jit_f, is_scheduled=true

%fused (p0: bf16[5,16,32], p1: s32[], p2: bf16[8,16]) -> bf16[8,32] {
  %p0 = bf16[5,16,32]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,16,32]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,16,32}
  %w = bf16[16,32]{1,0:T(8,128)(2,1)} bitcast(%slice)
  %p2 = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  ROOT %dot = bf16[8,32]{1,0:T(8,128)(2,1)} dot(%p2, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (s: (s32[], bf16[5,16,32], bf16[5,8,32])) -> (s32[], bf16[5,16,32], bf16[5,8,32]) {
  %s = (s32[], bf16[5,16,32]{2,1,0:T(8,128)(2,1)}, /*index=2*/bf16[5,8,32]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %stack = bf16[5,16,32]{2,1,0:T(8,128)(2,1)} get-tuple-element(%s), index=1
  %out = bf16[5,8,32]{2,1,0} get-tuple-element(%s), index=2
  %x = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  %y = bf16[8,32]{1,0:T(8,128)(2,1)} fusion(%stack, %i, %x), kind=kOutput, calls=%fused
  %y3 = bf16[1,8,32]{2,1,0} bitcast(%y)
  %zero = s32[] constant(0)
  %new = bf16[5,8,32]{2,1,0} dynamic-update-slice(%out, %y3, %i, %zero, %zero)
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  ROOT %t = (s32[], bf16[5,16,32]{2,1,0}, bf16[5,8,32]{2,1,0}) tuple(%j, %stack, %new)
}

%cond (s: (s32[], bf16[5,16,32], bf16[5,8,32])) -> pred[] {
  %s = (s32[], bf16[5,16,32]{2,1,0}, bf16[5,8,32]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(7)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: bf16[5,16,32], b: bf16[5,8,32]) -> bf16[5,8,32] {
  %a = bf16[5,16,32]{2,1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="w"}
  %b = bf16[5,8,32]{2,1,0} parameter(1)
  %zero = s32[] constant(0)
  %init = (s32[], bf16[5,16,32]{2,1,0}, bf16[5,8,32]{2,1,0}) tuple(%zero, %a, %b)
  %loop = (s32[], bf16[5,16,32]{2,1,0}, bf16[5,8,32]{2,1,0}) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"},"other":{"x":"1"}}
  ROOT %r = bf16[5,8,32]{2,1,0} get-tuple-element(%loop), index=2
}
"""  # noqa: E501


def module_of(*lines):
    """A module whose entry holds these lines."""
    return hlo.parse("\n".join(("ENTRY %main (x: f32[1]) -> f32[1] {", *lines, "}")))


def cost_of(function, module, name):
    return function(module, module.entry, module.computations[module.entry][name])


def test_a_line_is_taken_apart():
    module = hlo.parse(SCAN)
    loop = module.computations["main"]["loop"]
    assert module.entry == "main"
    assert (loop.opcode, loop.operands) == ("while", ("init",))
    assert [str(a) for a in loop.arrays] == ["s32[]", "bf16[5,16,32]", "bf16[5,8,32]"]
    assert loop.called == {"condition": "cond", "body": "body"}
    assert module.computations["fused"]["dot"].is_root
    assert module.computations["main"]["a"].op_name == "w"


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="not the text of an HLO module"):
        hlo.parse("HloModule x\n")


@pytest.mark.parametrize(
    ("shape", "size", "on_chip"),
    [
        ("bf16[3,100]{1,0}", 600, False),
        # The fastest dimension, the last one named, fills 128 lanes, the next 8 sublanes.
        ("bf16[3,100]{1,0:T(8,128)(2,1)}", 8 * 128 * 2, False),
        ("f32[3,100]{0,1:T(8,128)}", 104 * 128 * 4, False),
        ("f32[3,100]{1,0:T(8,128)S(1)}", 8 * 128 * 4, True),
        ("pred[]{:T(512)}", 1, False),
    ],
)
def test_an_array_takes_its_padded_size_and_only_in_main_memory(shape, size, on_chip):
    (array,) = module_of(f"  ROOT %x = {shape} parameter(0)").computations["main"]["x"].arrays
    assert (array.bytes, array.main_bytes) == (size, 0 if on_chip else size)


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
    module = hlo.parse(SCAN)
    runs = {e.instruction.name: e.times for e in hlo_cost.executed(module)}
    assert (runs["loop"], runs["y"], runs["lt"]) == (1, 5, 5)
    total = sum(
        e.times * hlo_cost.flops(module, e.computation, e.instruction)
        for e in hlo_cost.executed(module)
    )
    assert total == 5 * 2 * 8 * 16 * 32


def test_without_the_compilers_word_the_condition_bounds_the_loop():
    """As in the sampler, whose loop may end early: here the constant is 7."""
    module = hlo.parse(SCAN.replace("known_trip_count", "nothing"))
    assert hlo.trip_count(module, module.computations["main"]["loop"]) == 7


def test_the_samplers_loops_say_how_long_they_are_if_no_row_stops(mesh, monkeypatch):
    monkeypatch.setattr("opd_jax.rollout.LONG", 10)
    monkeypatch.setattr("opd_jax.rollout.FEWEST", 2)
    args = tiny.params(mesh, tiny.CONFIG), tiny.prompts(mesh), jax.random.key(0)
    draw = jax.jit(lambda p, *rest: rollout.sample(p, tiny.CONFIG, *rest, rollout.Sampling(4, 10)))
    module = hlo.parse(draw.lower(*args).compile().as_text())
    loops = [e.instruction for e in hlo_cost.executed(module) if e.instruction.opcode == "while"]
    decode = [loop for loop in loops if "_rows_" in loop.op_name.split("/")[-2]]
    # Three sizes of the cache, nine columns in all; then smaller batches, for rows that go on.
    assert [hlo.trip_count(module, loop) for loop in decode] == [3, 2, 4, 0, 0, 0]


def test_a_loop_of_unknown_length_is_reported():
    module = hlo.parse(SCAN.replace("known_trip_count", "nothing").replace("LT", "GT"))
    assert hlo_cost.unbounded_loops(module) == ["loop"]
    assert hlo_cost.unbounded_loops(hlo.parse(SCAN)) == []


def test_of_a_stack_only_the_slice_is_read_and_only_the_update_written():
    module = hlo.parse(SCAN)
    instructions = module.computations["body"].values()
    body = {i.name: hlo_cost.traffic(module, "body", i) for i in instructions}
    weight, index, result = 16 * 128 * 2, 4, 8 * 128 * 2
    assert body["y"] == weight + index + result  # Not the stack, not what lies on the chip.
    update = 8 * 32 * 2
    assert body["new"] == update + 2 * index + update
    assert body["stack"] == body["t"] == body["x"] == 0


@pytest.mark.parametrize(
    ("shapes", "window", "labels", "expected"),
    [
        # A plain matmul: [256, 2816] x [2816, 1024].
        (("[256,2816]", "[2816,1024]", "[256,1024]"), "", "bf_io->bf", 2 * 256 * 2816 * 1024),
        # A batch of 2 x 4 matmuls as dilated axes: each output sees one tap of the batch's 8.
        (
            ("[2,4,2,256,128]", "[2,4,1,256,128]", "[2,4,2,256,256]"),
            "window={size=2x4x1 stride=1x3x1 lhs_dilate=2x4x1}, ",
            "012bf_012oi->012bf",
            2 * 8 * 2 * 256 * 128 * 256,
        ),
        # A contraction over two axes: the second is a window of 2 that fits in one place.
        (("[256,2,64]", "[2,64,512]", "[256,1,512]"), "window={size=2}, ", "b0f_0io->b0f",
         2 * 256 * 128 * 512),
        # Padding by one: a window of 3 over 4 elements has 10 taps inside, not 12.
        (("[1,4,1]", "[3,1,1]", "[1,4,1]"), "window={size=3 pad=1_1}, ", "b0f_0io->b0f", 2 * 10),
    ],
)  # fmt: skip
def test_a_matmul_written_as_a_convolution(shapes, window, labels, expected):
    lhs, rhs, out = shapes
    module = module_of(
        f"  %a = bf16{lhs} parameter(0)",
        f"  %b = bf16{rhs} parameter(1)",
        f"  ROOT %c = f32{out} convolution(%a, %b), {window}dim_labels={labels}",
    )
    assert cost_of(hlo_cost.flops, module, "c") == expected


def test_a_kernel_counts_with_what_it_states():
    module = module_of(
        "  %a = bf16[8] parameter(0)",
        '  ROOT %k = bf16[8] custom-call(%a), custom_call_target="tpu_custom_call", '
        'backend_config={"cost_estimate":{"flops":"123","bytes_accessed":"4"}}',
    )
    assert cost_of(hlo_cost.flops, module, "k") == 123


@pytest.mark.parametrize(
    ("line", "kind", "group", "sent"),
    [
        ("f32[8,16] all-gather(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}",
         "all-gather", 4, 512 * 3 / 4),
        ("f32[8,16] all-reduce(%a), replica_groups=[2,4]<=[8], to_apply=%add",
         "all-reduce", 4, 2 * 512 * 3 / 4),
        ("f32[8,16] reduce-scatter(%a), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}",
         "reduce-scatter", 2, 512),
        ("f32[8,16] all-to-all(%a), replica_groups=mesh['x'=2,'y'=4] {'y'}", "all-to-all", 4, 384),
        ("f32[8,16] all-reduce(%a), replica_groups=mesh['x'=2,'y'=8] {'x','y':(2)4}", "all-reduce",
         8, 2 * 512 * 7 / 8),
        ("(f32[8,16], f32[8,16], u32[]) collective-permute-start(%a), source_target_pairs={{0,1}}",
         "collective-permute", 2, 512),
        ("(f32[2,16], f32[8,16]) all-gather-start(%a), replica_groups={{0,1,2,3}}, dimensions={0}",
         "all-gather", 4, 384),
    ],
)  # fmt: skip
def test_what_a_device_sends(line, kind, group, sent):
    module = module_of("  %a = f32[2,16] parameter(0)", f"  ROOT %c = {line}")
    (found,) = hlo_cost.collectives(module)
    assert (found.kind, found.group, found.times) == (kind, group, 1)
    assert found.wire_bytes == pytest.approx(sent)
    assert cost_of(hlo_cost.traffic, module, "c") == 0


PIECES = """
%start (p: bf16[4]) -> (bf16[4], bf16[16]) {
  %p = bf16[4] parameter(0)
  %g = bf16[16] all-gather(%p), channel_id=9, replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="1"}
  ROOT %s = (bf16[4], bf16[16]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}
%step (p: bf16[4], q: bf16[16]) -> (bf16[4], bf16[16]) {
  %p = bf16[4] parameter(0)
  %q = bf16[16] parameter(1)
  %g = bf16[16] all-gather(%p), channel_id=9, replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="1"}
  ROOT %t = (bf16[4], bf16[16]) tuple(%p, %g)
}
ENTRY %main (a: bf16[4]) -> bf16[16] {
  %a = bf16[4] parameter(0)
  %f0 = (bf16[4], bf16[16]) fusion(%a), kind=kCustom, calls=%start
  %b = bf16[4] get-tuple-element(%f0), index=0
  %c = bf16[16] get-tuple-element(%f0), index=1
  %f1 = (bf16[4], bf16[16]) fusion(%b, %c), kind=kCustom, calls=%step
  ROOT %r = bf16[16] get-tuple-element(%f1), index=1
}
"""  # noqa: E501


def test_an_exchange_in_pieces_counts_once():
    module = hlo.parse(PIECES)
    assert [c.kind for c in hlo_cost.collectives(module)] == ["all-gather"]
    fusions = [i for i in module.computations["main"].values() if i.opcode == "fusion"]
    assert [hlo_cost.traffic(module, "main", i) for i in fusions] == [0, 0]


def test_a_transfer_counts_where_it_ends():
    module = module_of(
        "  %a = f32[64]{0} parameter(0)",
        "  %s = (f32[64]{0:S(1)}, f32[64]{0}, u32[]) copy-start(%a)",
        "  %d = f32[64]{0:S(1)} copy-done(%s)",
        "  %t = (f32[64]{0}, f32[64]{0:S(1)}, u32[]) copy-start(%d)",
        "  ROOT %e = f32[64]{0} copy-done(%t)",
    )
    moved = [cost_of(hlo_cost.traffic, module, name) for name in "sdte"]
    assert moved == [0, 256, 0, 256]


def test_a_fusion_that_only_renames_passes_the_reading_on():
    """The inner fusion of a weight is a bitcast; the product reads the weight all the same."""
    text = """
%inner (p: bf16[64,64]) -> bf16[64,64] {
  %p = bf16[64,64] parameter(0)
  ROOT %b = bf16[64,64] bitcast(%p)
}
%outer (x: bf16[8,64], w: bf16[64,64]) -> bf16[8,64] {
  %x = bf16[8,64]{1,0:S(1)} parameter(0)
  %w = bf16[64,64] parameter(1)
  %v = bf16[64,64] fusion(%w), kind=kLoop, calls=%inner
  ROOT %d = bf16[8,64] convolution(%x, %v), dim_labels=bf_io->bf
}
ENTRY %main (x: bf16[8,64], w: bf16[64,64]) -> bf16[8,64] {
  %x = bf16[8,64]{1,0:S(1)} parameter(0)
  %w = bf16[64,64] parameter(1)
  ROOT %f = bf16[8,64]{1,0:S(1)} fusion(%x, %w), kind=kOutput, calls=%outer
}
"""
    assert cost_of(hlo_cost.traffic, hlo.parse(text), "f") == 64 * 64 * 2
