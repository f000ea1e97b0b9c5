"""Selected slices: bit-identical to the whole weight's slices, in one launch; nothing else is written.

Beyond 2^31 elements: test_kernel_bits.py.
"""

import pytest
import torch

from nf4_triton import dequantize
from nf4_triton.core import launch_general, reference
from nf4_triton.core.reference import same_bits
from nf4_triton.core.state import Selection, read_rows, read_state, to_fields
from nf4_triton.core.supported import UnsupportedState
from states import oracle, random_state

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy, about NaN


@pytest.fixture
def packed():
    return read_state(*random_state((16, 64), torch.bfloat16))


@pytest.fixture
def whole(packed):
    return reference.exact_weight(*packed)


def select(packed, rows, out=None):
    """Return rows of a weight that read_state read, from the kernel."""
    return launch_general.dequantize_tensors(*packed, out, read_rows(rows, *packed))


def test_ids_out_of_range(packed, whole, device):
    """Known on the CPU, they raise IndexError. On a GPU they give NaN, and nothing outside is read."""
    for bad in ([0, -1], torch.tensor([2, 16]), [2**63], range(15, 17)):
        with pytest.raises(IndexError, match="rows has .*expected ids from 0 to 15"):
            select(packed, bad)
    ids = torch.tensor([-1, 2, 16, -(2**40), 2**40], device=device)
    selection = Selection(ids, 0, len(ids))
    for result in (
        reference.exact_weight(*packed, selection),
        launch_general.launch_first(*packed, None, selection),
    ):
        assert result[[0, 2, 3, 4]].isnan().all() and same_bits(result[1], whole[2])
    empty = read_state(*random_state((0, 320), torch.bfloat16))
    with pytest.raises(IndexError, match="the weight has no slices"):
        launch_general.launch_first(*empty, None, selection)


@pytest.mark.parametrize(
    "count, start, number", [(None, 14, 3), (None, 1 << 40, 1), (None, -1, 2), (1, 0, 2)]
)
def test_the_operator_reads_nothing_outside(packed, device, count, start, number):
    """Called directly, or with ids other than those that a tracer saw."""
    ids = None if count is None else torch.arange(8, device=device)[:count]
    with pytest.raises(UnsupportedState, match="rows (are|has) .*expected"):
        launch_general.general_operator(*to_fields(*packed, Selection(ids, start, number)), "")


class DTensor(torch.Tensor):
    """A stand-in, recognized by its name: torch.distributed.tensor may be missing."""


SPARSE = torch.eye(2, dtype=torch.int64).to_sparse()
BAD = [
    (torch.arange(2).as_subclass(DTensor), "rows is a DTensor, expected .* pass rows.full_tensor"),
    (SPARSE, "rows is torch.sparse_coo, expected .*to_dense"),
    (SPARSE[0], "rows is torch.sparse_coo, expected .*to_dense"),
    (torch.tensor([True, False, True, True]), "mask.nonzero"),
    (slice(0, 4, 2), "expected ints and step 1"),
    (slice(1.0, 3.0), "expected ints and step 1"),
    ("all", "rows is str"),
    ([1.5], "rows has 1.5, expected ints"),
    (torch.tensor([3, 1], dtype=torch.uint32), "expected int32 or int64 ids: use rows.long"),
    ([True, False, True], "rows has True, expected ints: pass mask.nonzero"),
    ([torch.tensor(True)], "rows has tensor.True., expected ints"),
    (torch.empty(2, dtype=torch.int64, device="meta"), "rows is on meta, expected"),
]


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("rows, text", BAD, ids=str)
def test_what_is_refused(monkeypatch, device, backend, rows, text):
    monkeypatch.setenv("NF4_BACKEND", backend)
    if isinstance(rows, torch.Tensor) and rows.device.type == "cpu":
        rows = rows.to(device)
    with pytest.raises(UnsupportedState, match=text):
        dequantize(*random_state((4, 320), torch.float16), rows=rows)
    with pytest.raises(UnsupportedState, match="a slice of .* has 12 elements, expected a multiple of 8"):
        dequantize(*random_state((4, 12), torch.float16), rows=[1])


def test_an_out_over_the_ids(device):
    weight, state = random_state((4, 320), torch.float16)
    memory = torch.zeros(1280, dtype=torch.uint8, device=device)
    out, ids = memory.view(state.dtype).view(2, 320), memory.view(torch.int64)[:2]
    with pytest.raises(UnsupportedState, match="out shares memory with rows"):
        dequantize(weight, state, out=out, rows=ids)
    assert not memory.any()


@pytest.mark.parametrize("kind", [slice, torch.arange])
def test_any_number_of_slices_has_one_launch(general, packed, whole, kind):
    """Its guards do not depend on how many slices are selected, or on where a range begins. The whole
    weight has another one."""
    assert same_bits(launch_general.dequantize_tensors(*packed), whole)
    for count in (3, 5, 0, 8, 1):
        rows = kind(count, 2 * count)
        assert same_bits(select(packed, rows), whole[rows])
        assert general.checked == 2


def test_slices_of_24_elements(general):
    """Each takes 12 bytes. The kernel loads bytes for ids and for a misaligned range, words for an aligned
    range."""
    packed = read_state(*random_state((16, 24), torch.bfloat16))
    whole = reference.exact_weight(*packed)
    calls = ([5, 1], 1), (slice(1, 3), 2), (slice(4, 6), 3), (slice(5, 7), 3), ([0, 3], 3)
    for rows, checked in calls:
        assert same_bits(select(packed, rows), whole[rows])
        assert general.checked == checked


def test_a_cached_launch_of_other_slices_does_not_fit(general, packed, whole, device):
    """Guards compare neither the number of ids or of slices of `out`, nor the first stride."""
    ids = torch.tensor([3, 1, 2, 0], device=device)
    out = torch.full_like(whole[:2], torch.nan)
    for _ in range(2):
        assert same_bits(select(packed, ids[:2], out), whole[[3, 1]])
    for given, given_out, text in (
        (ids[::2], out, "rows has shape"),
        (ids[:2], torch.full_like(whole[:3], torch.nan), "out has"),
    ):
        with pytest.raises(UnsupportedState, match=text):
            launch_general.dequantize_tensors(*packed, given_out, Selection(given, 0, 2))


def test_a_list_is_checked_when_it_is_compiled(device):
    weight, state = random_state((8, 64), torch.float16)
    compiled = torch.compile(lambda w, rows: dequantize(w, state, rows=rows) + 0, backend="aot_eager")
    assert same_bits(compiled(weight, [3, 1]), oracle(weight, state)[[3, 1]])
    with pytest.raises(IndexError, match="rows has 8, expected ids from 0 to 7"):
        compiled(weight, [0, 8])


def test_a_stack_made_by_a_parametrization(device):
    """As transformers and PEFT hold experts. (module, "name") selects one, and the error says so."""
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    module = torch.nn.Module()
    module.experts = torch.nn.Parameter(torch.randn(4, 32, 64, dtype=torch.float16, device=device))
    parametrize.replace_parameter_4bit(module, "experts", compress_statistics=True, quant_type="nf4")
    wrapper = torch.nn.Module()
    wrapper.base_layer = module
    with torch.no_grad():
        whole = module.experts
    assert same_bits(dequantize((module, "experts")), whole)
    assert same_bits(dequantize((wrapper, "experts"), rows=[3, 1]), whole[[3, 1]])
    with pytest.raises(UnsupportedState, match=r"\(module, 'name'\)"):
        dequantize(module)
    with pytest.raises(UnsupportedState, match="'gate' of .*Module is not quantized by a parametrization"):
        dequantize((module, "gate"))
