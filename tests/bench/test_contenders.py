import pytest
import torch

from helpers.bench import contenders, copy_kernel
from helpers.nf4 import launch
from helpers.nf4.reference import DTYPES, dequantize, same_bits

pytest.importorskip("bitsandbytes")


def exact(layer):
    return dequantize(layer.weight, layer.weight.quant_state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_have_their_own_contents_and_the_libraries_agree_on_them(dtype):
    layers = contenders.random_layers((192, 128), dtype, 3)
    for layer in layers:
        expected = exact(layer)
        assert expected.shape == (192, 128) and expected.dtype == dtype and expected.isfinite().all()
        for name, fn in contenders.all_contenders().items():
            assert name == "peft" or same_bits(fn(layer), expected), name  # PEFT takes whole modules only
    tensors = [
        t for x in layers for t in (x.weight, x.weight.quant_state.absmax, x.weight.quant_state.state2.absmax)
    ]
    assert len({t.data_ptr() for t in tensors}) == 9 and not torch.equal(tensors[0], tensors[3])


def test_a_first_launch_gives_the_kernels_arguments_in_order(kernel):
    (layer,) = contenders.random_layers((64, 64), torch.bfloat16, 1)
    _, grid, arguments = contenders.first_launch(layer)
    tensors, values = launch._fields(layer.weight, layer.weight.quant_state)
    *_, constexprs, _ = launch._launch_plain(tensors, values)
    names = list(kernel._your_dequantize_nf4_kernel.arg_names)
    assert len(arguments) == len(names) and names[len(names) - len(constexprs) :] == list(constexprs)
    assert grid == (2, 1, 1) and arguments[7] == 64 * 64 // 8
    pointers = [x.data_ptr() for x in (arguments[0], arguments[2], *arguments[4:7])]
    assert pointers == [x.data_ptr() for x in tensors]


def test_compiled_grid_launches_on_the_tensors_of_each_layer(kernel, monkeypatch):
    """The interpreter in place of Triton's compiled kernel."""
    first, compilations = contenders.first_launch, []

    def launched(layer):
        _, grid, arguments = first(layer)
        compilations.append(layer)
        return {grid: kernel._your_dequantize_nf4_kernel[grid].__call__}, grid, arguments

    if contenders.clocks.ON_GPU:
        launched = first
    monkeypatch.setattr(contenders, "first_launch", launched)
    compiled_grid = contenders.CompiledGrid()
    for layer in contenders.random_layers((64, 64), torch.float16, 3):
        assert same_bits(compiled_grid(layer), exact(layer))
    assert len(compiled_grid.launches) == 1 and len(compilations) <= 1


@pytest.mark.gpu
def test_a_bare_launch_is_exact():
    (layer,) = contenders.random_layers((1024, 4096), torch.bfloat16, 1)
    call = contenders.allocate_and_launch(layer)
    first, second = call(), call()
    assert (
        same_bits(first, exact(layer)) and same_bits(second, first) and first.data_ptr() != second.data_ptr()
    )


def test_wrong_and_unwritten_elements_are_named(device):
    (layer,) = contenders.random_layers((64, 64), torch.float16, 1)
    expected = exact(layer)
    out, problems = expected.clone(), []
    off = expected.clone()
    off.view(torch.int16).view(-1)[-1] ^= 1
    assert contenders.wrong(lambda: out, expected, out), "nothing was written"
    assert not contenders.wrong(lambda: out.copy_(expected), expected, out)
    calls = {
        "right": lambda: expected,
        "one bit": lambda: off,
        "dtype": expected.float,
        "none": int,
        "error": lambda: 1 / 0,
    }
    assert list(contenders.right(calls, expected, problems)) == ["right"]
    assert [text.split(":")[0] for text in problems] == ["one bit", "dtype", "none", "error"]
    assert "ZeroDivisionError" in problems[-1] and "not bit-identical" in problems[0]


@pytest.mark.parametrize("numel", [64, 64 * 40, 2**14 + 64])  # less than a program, part of one, one over
def test_the_copy_kernel_moves_every_byte_and_no_other(device, numel):
    """`written` depends on every byte: see the next test."""
    (layer,) = contenders.random_layers((numel // 64, 64), torch.bfloat16, 1)
    for variant in copy_kernel.VARIANTS:
        guarded = torch.full((numel + 32,), float("nan"), dtype=torch.bfloat16, device=device)
        out = guarded[16 : 16 + numel].view(-1, 64)
        copy_kernel.copy(layer, out, *variant)
        expected = copy_kernel.written(layer, out, *variant)
        assert torch.equal(out.view(torch.int32).view(-1, 4), expected), variant
        assert guarded[:16].isnan().all() and guarded[16 + numel :].isnan().all()


def test_what_the_copy_kernel_must_write_depends_on_every_byte():
    (layer,) = contenders.random_layers((2**15 // 64, 64), torch.float16, 1)
    out, state = torch.empty(2**15 // 64, 64, dtype=torch.float16), layer.weight.quant_state
    before = copy_kernel.written(layer, out, 2, 4).clone()
    for tensor in (layer.weight, state.absmax, state.state2.absmax):
        raw = tensor.view(-1).view(torch.uint8)
        for index in {0, 1, raw.numel() // 2, raw.numel() - 1}:
            raw[index] ^= 255
            assert not torch.equal(copy_kernel.written(layer, out, 2, 4), before)
            raw[index] ^= 255
