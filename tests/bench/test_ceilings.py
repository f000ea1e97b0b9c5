import math

import pytest
import torch

from helpers.bench import ceilings

SIZES = (8, 64 * 40, 65_536, 65_536 + 40)  # one word, mid-program, whole programs, one word over


def buffers(numel, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-numel // 64)
    weight = torch.randint(0, 256, (numel // 2, 1), dtype=torch.uint8, generator=generator)
    absmax = torch.randint(0, 256, (blocks,), dtype=torch.uint8, generator=generator)
    absmax2 = torch.randn(-(-blocks // 256), generator=generator)
    return [tensor.to(device) for tensor in (weight, absmax, absmax2)]


def run(launch, numel, device, dtype=torch.bfloat16):
    """The output with a guard of NaN on both sides, as 32-bit integers."""
    guarded = torch.full((numel + 32,), math.nan, dtype=dtype, device=device)
    launch(*buffers(numel, device), guarded[16 : 16 + numel])
    assert guarded[:16].isnan().all() and guarded[16 + numel :].isnan().all()
    return guarded[16 : 16 + numel].view(torch.int32).view(-1, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("numel", SIZES)
def test_every_launch_choice_writes_what_it_read(numel, device):
    launches = ceilings.launches()
    if not launches:
        pytest.skip("this torch does not compile CUDA source")
    for launch in launches:
        expected = ceilings.oracle(
            *buffers(numel, device), numel, launch.keywords["words"], launch.keywords["threads"]
        )
        assert torch.equal(run(launch, numel, device), expected), launch.keywords


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


def test_the_launch_choices_are_covered(monkeypatch):
    monkeypatch.setattr(ceilings, "_cuda_kernel", lambda *choice: None)
    every, quick = ([launch.keywords for launch in ceilings.launches(some)] for some in (False, True))
    assert {one["words"] for one in every} == {1, 2, 4, 8} and {one["threads"] for one in every} == {128, 256}
    assert len(every) == 16 and len({tuple(one.items()) for one in every}) == 16
    assert 1 < len(quick) < 16 and all(one in every for one in quick)


def test_without_a_gpu_there_is_no_ceiling():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert ceilings.launches() == []
