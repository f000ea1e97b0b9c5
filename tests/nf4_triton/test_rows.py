"""Selected slices: the bits of the whole weight's slices, in one launch, and nothing else written."""

import pytest
import torch

from nf4_triton import dequantize, launch_general, reference
from nf4_triton.reference import same_bits
from nf4_triton.state import Selection, UnsupportedState, check, read_state
from states import DTYPES, between_guards, moved, oracle, part, random_state

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy, about NaN
SHAPES = [(9, 8), (40, 24), (40, 96), (12, 4096), (7, 5, 64), (5, 1000)]
ON_A_GPU = pytest.mark.gpu


def check_rows(weight, state, rows, skip=0):
    """Compare a call that allocates, and one with `out` between guards, `skip` elements off alignment."""
    expected = oracle(weight.reshape(-1, 1), state)[rows]
    before, out, after = between_guards(expected.shape, state.dtype, weight.device, skip)
    for _ in range(2 if weight.is_cuda else 1):  # the second call is launched again
        assert same_bits(dequantize(weight, state, rows=rows), expected)
        out.fill_(torch.nan)
        assert dequantize(weight, state, out=out, rows=rows).data_ptr() == out.data_ptr()
        assert same_bits(out, expected)
    assert before.isnan().all() and after.isnan().all(), "written outside"


@pytest.mark.parametrize("blocksize", [8, 64, 4096])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slices_of_every_size(device, shape, blocksize):
    weight, state = random_state(shape, DTYPES[len(shape) - 1], blocksize=blocksize)
    last = shape[0] - 1
    ids = torch.tensor([3, 1, last], dtype=torch.int32, device=device)
    for rows in (slice(1, last), slice(3, 3), [last, 0, 2, 2], ids):
        check_rows(weight, state, rows)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_state(device, dtype, nested, quant_type):
    weight, state = random_state((6, 192), dtype, nested, quant_type)
    for rows in (slice(1, 4), [5, 0]):
        check_rows(weight, state, rows)


@pytest.mark.parametrize("step", [200, pytest.param(1, marks=ON_A_GPU)])
def test_every_first_block_in_a_group_of_256(device, step):
    """absmax2 holds one value for 256 blocks: a slice that begins in their middle must read the right one."""
    weight, state = random_state((520, 64), torch.bfloat16)
    for first in range(0, 512, step):
        check_rows(weight, state, slice(first, first + 5))
    check_rows(weight, state, list(range(7, 520, step)))


def test_misaligned_memory_and_other_storages(device):
    weight, state = random_state((8, 320), torch.float16)
    odd = moved(weight, 3)
    for given in (odd, weight.view(-1).view(torch.bfloat16), weight.t()):
        for rows in (slice(2, 6), [7, 1]):
            check_rows(given, state, rows, skip=3 if given is odd else 0)


def test_ids_out_of_range(device):
    """Known on the CPU: an IndexError. On a GPU: NaN, and nothing outside is read."""
    packed = read_state(*random_state((4, 320), torch.bfloat16))
    for bad in ([0, -1], torch.tensor([2, 4]), [2**63], range(3, 5), torch.tensor([[1, 9]])):
        with pytest.raises(IndexError, match="rows has .*expected ids from 0 to 3"):
            launch_general.dequantize_packed(packed, rows=bad)
    ids = torch.tensor([-1, 2, 4, -(2**40), 2**40], device=device)
    selection = Selection(ids, 0, len(ids))
    expected = reference.dequantize(packed, selection=selection)
    assert expected[[0, 2, 3, 4]].isnan().all() and same_bits(expected[1], reference.dequantize(packed)[2])
    assert same_bits(launch_general.check_and_launch(packed, None, selection), expected)
    empty, its_state = random_state((0, 320), torch.bfloat16)
    with pytest.raises(IndexError, match="the weight has no slices"):
        launch_general.check_and_launch(read_state(empty, its_state), None, selection)


# An id list or a result of one slice has any first stride; another call's strides may not be contiguous.
VIEWS = {
    "whole": lambda memory, count: memory[:count, :1].contiguous().view(-1),
    "column": lambda memory, count: memory[:count, 0],
    "every other": lambda memory, count: memory.view(-1)[: 2 * count : 2],
    "expanded": lambda memory, count: memory[0, :1].expand(count),
}


def by_device_ids(packed, ids):
    """Return slices by ids that need no copy to the weight's device, as on a GPU."""
    selection = Selection(ids, 0, ids.numel())
    return launch_general.dequantize(packed.tensors, packed.layout, None, selection)


@pytest.mark.parametrize("order", [(1, 4), (4, 1, 4)], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_ids_that_are_not_contiguous(general, device, view, order):
    """A router's top-k column of one token, then of several, and the other way round."""
    packed = read_state(*random_state((10, 64), torch.bfloat16))
    whole = reference.dequantize(packed)
    pairs = torch.tensor([[3, 9], [5, 2], [7, 8], [1, 0]], device=device)
    for count in order:
        ids = VIEWS[view](pairs, count)
        if ids.is_contiguous():
            assert same_bits(by_device_ids(packed, ids), whole[ids]), count
        else:
            with pytest.raises(UnsupportedState, match="expected contiguous int32 or int64 ids"):
                by_device_ids(packed, ids)


OUTS = {
    "columns": lambda memory, count: memory[:count, :64],
    "every other row": lambda memory, count: memory[: 2 * count : 2],
    "expanded": lambda memory, count: memory[:1].expand(count, -1),
    "transposed": lambda memory, count: memory[:64, :count].t(),
}


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], slice(0, 5)], ids=["ids", "range"])
@pytest.mark.parametrize("view", OUTS)
def test_an_out_that_is_not_contiguous(general, device, view, rows):
    """Also after a call with one slice, whose first stride means nothing: nothing is written."""
    packed = read_state(*random_state((8, 64), torch.bfloat16))
    memory = torch.full((128, 64 if "row" in view or view == "expanded" else 128), torch.nan, device=device)
    memory = memory.to(torch.bfloat16)
    for count in (1, 5, 1, 5):
        out = OUTS[view](memory, count)
        few = rows[:count] if isinstance(rows, list) else slice(0, count)
        if out.is_contiguous():
            launch_general.dequantize_packed(packed, out, few)
            assert same_bits(out, reference.dequantize(packed)[few])
            out.fill_(torch.nan)
        else:
            with pytest.raises(UnsupportedState, match="out has"):
                launch_general.dequantize_packed(packed, out, few)
        assert memory.isnan().all(), "written outside"


def test_a_slice_of_another_alignment_has_a_launch_of_its_own(general):
    """Rows of 12 bytes: every fourth begins at a multiple of 16. A kept launch's 16-byte load would fail."""
    packed = read_state(*random_state((16, 24), torch.float16))
    whole = reference.dequantize(packed)
    for turn in range(2):
        for first in (0, 1, 4, 2, 8, 3):
            before = general.checked
            result = launch_general.dequantize_packed(packed, rows=slice(first, first + 4))
            assert same_bits(result, whole[first : first + 4]), first
            assert general.checked == before or (turn, first) in ((0, 0), (0, 1)), "not launched again"
    kept = sum(launch_general.launches.values(), [])
    aligned = {aligned: constexprs for *_, (_, constexprs, aligned, _), _ in kept}
    assert aligned.keys() == {True, False} and aligned[True] != aligned[False]


BAD = [
    ((4, 320), torch.tensor([True, False, True, True]), "mask.nonzero"),
    ((4, 320), slice(0, 4, 2), "expected ints and step 1"),
    ((4, 320), "all", "rows is str"),
    ((4, 320), [1.5], "rows has 1.5, expected ints"),
    ((4, 320), [True, False, True], "rows has True, expected ints: use mask.nonzero"),
    ((4, 320), [torch.tensor(True)], "rows has tensor.True., expected ints"),
    ((4, 320), slice(1.0, 3.0), "expected ints and step 1"),
    ((4, 320), torch.empty(2, dtype=torch.int64, device="meta"), "rows is on meta, expected"),
    ((4, 12), [1], "a slice of .* has 12 elements, expected a multiple of 8"),
]


@pytest.mark.parametrize("shape, rows, text", BAD, ids=lambda x: str(x))
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_what_is_refused(monkeypatch, device, shape, rows, text, backend):
    monkeypatch.setenv("NF4_BACKEND", backend)
    if isinstance(rows, torch.Tensor) and rows.device.type == "cpu":
        rows = rows.to(device)
    weight, state = random_state(shape, torch.float16)
    with pytest.raises(UnsupportedState, match=text):
        dequantize(weight, state, rows=rows)


@pytest.mark.parametrize("n", [8, 24, 32, 40, 64, 96])
def test_slices_that_begin_between_16_byte_words_are_loaded_by_bytes(n, device):
    """On a GPU a wide load from such an address fails."""
    packed = read_state(*random_state((5, n), torch.float16))
    for selection in (Selection(torch.tensor([3], device=device), 0, 1), Selection(None, 1, 2)):
        ready = launch_general.prepare(packed, check(packed), packed.offset, selection)
        named = dict(zip(ready.kernel.arg_names, ready.arguments, strict=True))
        assert named["BYTES"] == (n % 32 > 0)


def test_an_out_of_another_number_of_slices(general):
    packed = read_state(*random_state((8, 64), torch.float16))
    out = torch.full((5, 64), torch.nan, dtype=packed.dtype, device=packed.weight.device)
    for rows in (slice(0, 5), [0, 1, 2, 3, 4]):
        launch_general.dequantize_packed(packed, out, rows)
        out.fill_(torch.nan)
        with pytest.raises(UnsupportedState, match="out has"):
            launch_general.dequantize_packed(packed, out, rows[:3] if isinstance(rows, list) else slice(3))
        assert out.isnan().all()


def test_an_out_that_does_not_fit(device):
    weight, state = random_state((4, 320), torch.float16)
    memory = torch.zeros(1280, dtype=torch.uint8, device=device)
    out = memory.view(torch.float16).view(2, 320)
    for other in (out.view(-1), memory.new_empty(3, 320, dtype=torch.float16)):
        with pytest.raises(UnsupportedState, match="out has"):
            dequantize(weight, state, out=other, rows=[0, 1])
    ids = memory.view(torch.int64)[:2]
    with pytest.raises(UnsupportedState, match="out shares memory with rows"):
        dequantize(weight, state, out=out, rows=ids)
    assert not memory.any()


def test_any_number_of_slices_has_one_launch(general, device):
    """Its guards do not depend on how many slices are selected, or on where a range begins."""
    packed = read_state(*random_state((16, 64), torch.bfloat16))
    whole = reference.dequantize(packed)
    for kind in ("ids", "range"):
        for count in (3, 5, 0, 8, 1):
            ids = torch.arange(count, device=device) * 2 % 16
            rows = ids if kind == "ids" else slice(count, 2 * count)
            before = general.checked
            assert same_bits(launch_general.dequantize_packed(packed, rows=rows), whole[rows])
            assert (general.checked == before) == (count != 3), (kind, count)
    assert [len(kept) for kept in launch_general.launches.values()] == [1, 1]


@pytest.mark.filterwarnings("ignore:.*performance drop because we have not yet implemented")
def test_vmap_over_ids(device):
    weight, state = random_state((8, 64), torch.float16)
    whole = oracle(weight, state)
    ids = torch.tensor([[3, 1], [0, 7]], device=device)
    result = torch.func.vmap(lambda chosen: dequantize(weight, state, rows=chosen))(ids)
    assert same_bits(result, whole[ids])
    factors = torch.tensor([1.0, 2.0], dtype=torch.float16, device=device)
    result = torch.func.vmap(lambda factor: dequantize(weight, state, rows=[3, 1]) * factor)(factors)
    assert same_bits(result[0], whole[[3, 1]])


def test_a_list_is_checked_when_it_is_compiled(device):
    weight, state = random_state((8, 64), torch.float16)
    compiled = torch.compile(lambda w, rows: dequantize(w, state, rows=rows) + 0, backend="aot_eager")
    assert same_bits(compiled(weight, [3, 1]), oracle(weight, state)[[3, 1]])
    with pytest.raises(IndexError, match="rows has 8, expected ids from 0 to 7"):
        compiled(weight, [0, 8])


def test_exported(device):
    weight, state = random_state((16, 64), torch.float16)

    class Experts(torch.nn.Module):
        def forward(self, ids):
            return dequantize(weight, state, rows=ids), dequantize(weight, state, rows=slice(2, 5))

    count = torch.export.Dim("count", min=2, max=64)
    ids = torch.tensor([5, 0, 11], device=device)
    exported = torch.export.export(Experts(), (ids,), dynamic_shapes=({0: count},)).module()
    whole = oracle(weight, state)
    for given in (ids, torch.tensor([1, 1, 2, 3, 5], device=device)):
        selected, consecutive = exported(given)
        assert same_bits(selected, whole[given]) and same_bits(consecutive, whole[2:5])


def test_a_stack_made_by_a_parametrization(device):
    """As transformers and PEFT hold experts: (module, "name") names one, and the error says so."""
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    module = torch.nn.Module()
    module.experts = torch.nn.Parameter(torch.randn(4, 32, 64, dtype=torch.float16, device=device))
    parametrize.replace_parameter_4bit(module, "experts", compress_statistics=True, quant_type="nf4")
    wrapper = torch.nn.Module()
    wrapper.base_layer = module
    with torch.no_grad():
        whole = module.experts
    for holder in (module, wrapper):
        assert same_bits(dequantize((holder, "experts")), whole)
        assert same_bits(dequantize((holder, "experts"), rows=[3, 1]), whole[[3, 1]])
    with pytest.raises(UnsupportedState, match=r"pass \(module, 'experts'\)"):
        dequantize(module)
    with pytest.raises(UnsupportedState, match="'gate' of .*Module is not quantized by a parametrization"):
        dequantize((module, "gate"))


@ON_A_GPU
def test_beyond_2_to_the_31_elements():
    shape = (2**19 + 3, 4096)
    if torch.cuda.mem_get_info()[0] < 4 * 2**30:
        pytest.skip("needs 4 GiB of free GPU memory")
    weight, state = random_state(shape, torch.bfloat16)
    ids = torch.tensor([0, shape[0] - 1, 2**19, 2**18, 2**18 - 1, shape[0]], device="cuda")
    result = dequantize(weight, state, rows=ids)
    assert result[-1].isnan().all()
    for i, row in enumerate(ids.tolist()[:-1]):
        assert same_bits(result[i : i + 1], oracle(*part(weight, state, row * 4096, (1, 4096)))), row
        assert same_bits(dequantize(weight, state, rows=slice(row, row + 1)), result[i : i + 1]), row
