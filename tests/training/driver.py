"""Short QLoRA runs with the kernel and without, to be compared bit for bit: PEFT, Unsloth, and TRL.

`in_new_process` makes a list of them in a process of its own: Unsloth must be imported first and changes
other libraries for good. Run as a file it is that process.
"""

import contextlib
import gc
import os
import tempfile

import torch

from helpers import machine
from helpers.bench import training
from helpers.bench.training import digest
from helpers.puzzle.checks import gpu_events

SIZES = dict(
    model_type="llama", hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, vocab_size=320,  # what the tokenizer knows, and some
)  # fmt: skip
SMALLEST = SIZES | dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, head_dim=16)
KERNELS = {  # what the profiler calls the kernels that dequantize, by who launches them
    "ours": "_your_dequantize_nf4_kernel",
    "bitsandbytes": "kDequantizeBlockwise",
    "unsloth": "_nf4_dequant_kernel",
}


@contextlib.contextmanager
def deterministic():
    """Use deterministic algorithms inside the block where there are any; fused attention has none."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def switch_on(way: str, library: str):
    """Switch the kernel on, before the model is loaded. Returns a context manager.

    way: "with", "without", or, with TRL, "callback" or "NF4_TRITON=1".
    """
    if way == "NF4_TRITON=1":
        from nf4_triton import autoload

        os.environ["NF4_TRITON"] = "1"
        autoload.load()  # as bitsandbytes does where the wheel is installed
    return training.arm("peft" if library == "trl" else library, "with" if way == "with" else "without")


def load(library, dtype, autocast, lora):
    """Return a random model to train."""
    sizes = SIZES if machine.has_gpu() else SMALLEST
    with tempfile.TemporaryDirectory() as folder:
        training.make_model(folder, **sizes)
        if library == "unsloth":
            return training.unsloth_model(folder, dtype)
        lora = training.LORA | lora
        attention = "eager"  # repeats bit for bit on every card
        return training.peft_model(
            folder, autocast=autocast is not None, lora=lora, dtype=dtype, attn_implementation=attention
        )


def train(
    way: str, library="peft", autocast=None, compiled=False, steps=50, rows=4, length=64, **lora
) -> dict:
    """Train a random model with the kernel switched on in this way, then merge and dequantize it (PEFT).

    autocast: a dtype's name, of the model, too; else it is bf16. Returns what must not depend on the kernel
    as "same", Switch.counts(), and on a GPU the launches of dequantizing kernels in one more step.
    """
    from nf4_triton import Switch

    autocast = getattr(torch, autocast) if autocast else None
    with switch_on(way, library), deterministic():
        model = load(library, autocast or torch.bfloat16, autocast, lora)
        same = {"packed": digest(one for one in model.parameters() if hasattr(one, "quant_state"))}
        # Counting up from random tokens: something to learn.
        starts = torch.randint(3, 200, (steps, rows, 1), generator=torch.Generator().manual_seed(3407))
        batches = (starts + torch.arange(length)) % model.config.vocab_size
        record = {"same": same}
        if library == "trl":
            same["losses"] = by_trl(model, batches, way)
        else:
            trainer = training.Trainer(torch.compile(model) if compiled else model, autocast, lr=1e-3)
            same |= by_hand(trainer, batches)
        same["adapters"] = digest(one for one in model.parameters() if one.requires_grad)
        if machine.has_gpu() and library != "trl":
            record["launches"] = launches(trainer, batches[0])
        record["counts"] = Switch().counts() if way != "without" else {}
        if library == "peft":
            merged = model.merge_and_unload()
            same["merged"] = digest(merged.parameters())
            same["dequantized"] = digest(merged.dequantize().parameters())
    return record


def by_hand(trainer, batches) -> dict:
    """Return the loss and a digest of the gradients of each step."""
    found = {"losses": [], "gradients": []}
    for ids in batches.to(trainer.device):
        found["losses"].append(trainer.backward(ids).item())
        found["gradients"].append(digest(p.grad for p in trainer.adapters))
        trainer.update()
    return found


def by_trl(model, batches, way: str) -> list:
    """Return the losses of an SFTTrainer; way "callback": it switches the kernel on."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from nf4_triton import NF4KernelCallback

    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            folder, max_steps=len(batches), per_device_train_batch_size=batches.shape[1], logging_steps=1,
            learning_rate=1e-3, report_to="none", save_strategy="no", bf16=False, max_length=batches.shape[2],
            gradient_checkpointing=False, use_cpu=not machine.has_gpu(),
        )  # fmt: skip
        trainer = SFTTrainer(
            model,
            settings,
            train_dataset=Dataset.from_dict({"input_ids": batches.flatten(0, 1).tolist()}),
            processing_class=training.tokenizer(),
            callbacks=[NF4KernelCallback(strict=True)] if way == "callback" else [],
        )
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def launches(trainer, ids) -> dict[str, int]:
    """Return how many dequantizing kernels a step launches, by library."""
    names = [name for name, _ in gpu_events(trainer.backward, ids.to(trainer.device), count=1)]
    trainer.optimizer.zero_grad()
    return {who: sum(kernel in name for name in names) for who, kernel in KERNELS.items()}


def train_all(setups: list[dict]) -> list[dict]:
    """Return `train` of each setup."""
    if any(setup["library"] == "unsloth" for setup in setups):
        # Unsloth cuts its loss into as many chunks as free memory allows: one, so that runs compare.
        os.environ |= {"UNSLOTH_CE_LOSS_N_CHUNKS": "1", "UNSLOTH_FUSED_CE_COMPILE_DISABLE": "1"}
        import unsloth  # noqa: F401  it asks to come before transformers and peft
    records = []
    for setup in setups:
        records.append(train(**setup))
        gc.collect()
        if machine.has_gpu():
            torch.cuda.empty_cache()
    return records


def in_new_process(setups: list[dict]) -> list[dict]:
    """Run `train_all` in one new process without network. Raises ChildFailed with its text."""
    return training.in_new_process(__file__, timeout=900, setups=setups)


if __name__ == "__main__":
    training.answer(train_all)
