"""A process of torch.distributed.run: train under DDP or FSDP without the kernel and with it.

Each process compares its own losses, and must have dequantized with the kernel.
"""

import sys

import torch

from driver import SMALLEST
from helpers import machine
from helpers.bench import training

ENGINES = {"DDP": 0, "FSDP1": 1, "FSDP2": 2}  # the version of FSDP


def compare(fsdp: int, steps=4) -> None:
    """Raise AssertionError if anything differs."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=fsdp) if fsdp else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.use_deterministic_algorithms(True, warn_only=True)
    losses = {}
    for name in training.VARIANTS:
        with training.variant("peft", name) as switch:
            losses[name] = train(accelerator, fsdp, steps)
            assert (training.handled(switch) > 0) == (name == "with")
        accelerator.free_memory()
    accelerator.end_training()
    assert losses["with"] == losses["without"], losses
    assert len(set(losses["with"])) == steps, "nothing is learned"


def train(accelerator, fsdp, steps) -> list[float]:
    """Return the losses of this process, which trains on its own batches."""
    from peft.utils.other import fsdp_auto_wrap_policy

    # FSDP shards only floating point: the packed bytes are stored as bfloat16.
    nf4 = training.NF4 | dict(bnb_4bit_quant_storage=torch.bfloat16 if fsdp else torch.uint8)
    model = training.peft_model(SMALLEST, nf4=nf4, device_map={"": accelerator.device})
    if fsdp:
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    if fsdp != 2:  # the optimizer must see the sharded parameters
        model = accelerator.prepare(model)
    trainer = training.Trainer(model, lr=2e-4)
    if fsdp == 2:  # which shards what the optimizer holds
        trainer.model, trainer.optimizer = accelerator.prepare(model, trainer.optimizer)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for ids in torch.randint(3, 320, (steps, 1, 16), generator=generator).to(trainer.device):
        losses.append(trainer.backward(ids).item())
        trainer.optimizer.step()
    return losses


if __name__ == "__main__":
    machine.prepare()
    compare(int(sys.argv[1]))
