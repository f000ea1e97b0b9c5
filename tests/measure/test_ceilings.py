import math

import pytest
import torch

from helpers.measure import ceilings

SIZES = (8, 64 * 40, 65_536, 65_536 + 40)  # one word, mid-program, whole programs, one word over


def buffers(numel, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-numel // 64)
    weight = torch.randint(0, 256, (numel // 2, 1), dtype=torch.uint8, generator=generator)
    absmax = torch.randint(0, 256, (blocks,), dtype=torch.uint8, generator=generator)
    absmax2 = torch.randn(-(-blocks // 256), generator=generator)
    return [tensor.to(device) for tensor in (weight, absmax, absmax2)]


def run(kernel, numel, choice, device, dtype=torch.bfloat16):
    """The output with a guard of NaN on both sides, as 32-bit integers."""
    guarded = torch.full((numel + 32,), math.nan, dtype=dtype, device=device)
    kernel(*buffers(numel, device), guarded[16 : 16 + numel], **choice)
    assert guarded[:16].isnan().all() and guarded[16 + numel :].isnan().all()
    return guarded[16 : 16 + numel].view(torch.int32).view(-1, 4)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("choice", ceilings.variants("ceiling_cuda"), ids=str)
def test_triton_ceiling_writes_what_it_read(numel, choice, device):
    expected = ceilings.oracle(*buffers(numel, device), numel, choice["words"], choice["threads"])
    assert torch.equal(run(ceilings.triton_ceiling, numel, choice, device), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("choice", ceilings.variants("ceiling_cuda"), ids=str)
def test_cuda_ceiling_writes_the_same(numel, choice, device):
    if not ceilings.cuda_compiles():
        pytest.skip("this torch does not compile CUDA source")
    mine, theirs = (
        run(kernel, numel, choice, device) for kernel in (ceilings.cuda_ceiling, ceilings.triton_ceiling)
    )
    assert torch.equal(mine, theirs)


def test_every_byte_that_is_read_shows_in_the_output():
    numel, words, threads = 2 * 16_384, 2, 128
    tensors = buffers(numel, "cpu")
    before = ceilings.oracle(*tensors, numel, words, threads).clone()
    for tensor in tensors:
        raw = tensor.view(-1).view(torch.uint8)
        for index in {0, 1, raw.numel() // 2, raw.numel() - 1}:
            raw[index] ^= 255
            assert not torch.equal(ceilings.oracle(*tensors, numel, words, threads), before)
            raw[index] ^= 255


def test_variants_cover_the_launch_choices():
    cuda = ceilings.variants("ceiling_cuda")
    assert {v["words"] for v in cuda} == {1, 2, 4, 8} and {v["threads"] for v in cuda} == {128, 256}
    assert len(cuda) == 16 and len({tuple(v.items()) for v in cuda}) == 16
    assert all(v in cuda for v in ceilings.variants("ceiling_triton"))
    assert all(
        v in ceilings.variants(kind)
        for kind in ("ceiling_cuda", "ceiling_triton")
        for v in ceilings.variants(kind, True)
    )


def test_where_cuda_cannot_be_compiled_the_ceiling_is_tritons(monkeypatch):
    for compiles, kind in ((True, "ceiling_cuda"), (False, "ceiling_triton")):
        monkeypatch.setattr(ceilings, "cuda_compiles", lambda compiles=compiles: compiles)
        name, launches = ceilings.launches(quick=True)
        assert name == kind and [launch.keywords for launch in launches] == ceilings.variants(kind, True)


def test_without_a_gpu_no_cuda_is_compiled():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert not ceilings.cuda_compiles()
