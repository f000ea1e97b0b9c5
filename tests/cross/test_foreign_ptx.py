"""PTX of other cards on this GPU: every bit compared, every fault seen."""

import pytest
import torch

from helpers.cross import foreign_ptx

pytest.importorskip("bitsandbytes")


@pytest.mark.gpu
@pytest.mark.parametrize("arch", (75, 80, 86, 89, 90))  # whose PTX a Hopper GPU runs
def test_ptx_of_other_cards_is_exact(arch, capsys):
    if torch.cuda.get_device_capability() < divmod(arch, 10):
        pytest.skip(f"needs a GPU of sm_{arch} or newer")
    assert foreign_ptx.report([arch]) == 0
    assert "21 of 21 cases exact" in capsys.readouterr().out
