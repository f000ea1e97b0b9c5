"""A process of torch.distributed.run: train under DDP or FSDP without the kernel and with it.

Losses must be the same in every process, and each must dequantize with the kernel.
"""

import sys

import torch
from driver import deterministic  # beside this file

from helpers import machine
from helpers.bench import training

ENGINES = {"DDP": 0, "FSDP1": 1, "FSDP2": 2}  # the version of FSDP


def compare(folder, fsdp: int, steps=4) -> None:
    """Raise AssertionError if anything differs."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = None
    if fsdp:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=fsdp,
            use_orig_params=False if fsdp == 1 else None,
            cpu_ram_efficient_loading=False,
            sync_module_states=False if fsdp == 1 else None,
        )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not machine.has_gpu())
    losses, handled = {}, {}
    with deterministic():
        for name in training.ARMS:
            losses[name], handled[name] = train(accelerator, folder, fsdp, steps, name)
    accelerator.end_training()
    assert losses["with"] == losses["without"], losses
    assert len({str(step) for step in losses["with"]}) == steps, "nothing is learned"
    assert handled["with"] and not handled["without"], handled


def train(accelerator, folder, fsdp, steps, name) -> tuple[list, int]:
    """Return the losses of all processes at each step, and how often the kernel dequantized in this one."""
    from peft.utils.other import fsdp_auto_wrap_policy

    # FSDP shards floating point only: it keeps the packed bytes as bfloat16.
    nf4 = training.NF4 | dict(bnb_4bit_quant_storage=torch.bfloat16 if fsdp else torch.uint8)
    model = training.peft_model(folder, nf4=nf4, device_map={"": accelerator.device})
    size = (steps, accelerator.num_processes, 1, 16)
    batches = torch.randint(3, 320, size, generator=torch.Generator().manual_seed(3407))
    if fsdp:
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    if fsdp == 1:  # the optimizer must see the sharded parameters
        model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    if fsdp == 1:
        optimizer = accelerator.prepare(optimizer)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    with training.arm("peft", name) as switch:
        for batch in batches:
            ids = batch[accelerator.process_index].to(accelerator.device)
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).tolist())
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    return losses, training.handled(switch)


if __name__ == "__main__":
    machine.prepare()
    compare(sys.argv[1], int(sys.argv[2]))
