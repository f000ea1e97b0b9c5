"""A short SFTTrainer run with the kernel switched on in one of the ways. Run as a file it is that process."""

import os
import tempfile

import sameness

from helpers import machine
from helpers.bench import training

WAYS = ("without", "use_nf4_kernel", "callback", "NF4_TRITON=1")


def train(way: str) -> dict:
    """Return what must be the same in every way, and how many weights the kernel dequantized."""
    if way == "NF4_TRITON=1":
        os.environ["NF4_TRITON"] = "1"
        from nf4_triton import autoload

        autoload.load()  # as bitsandbytes does where the wheel is installed
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from nf4_triton import NF4KernelCallback, switch, use_nf4_kernel

    if way == "use_nf4_kernel":
        use_nf4_kernel(strict=True)
    sizes = sameness.SIZES if machine.has_gpu() else sameness.SMALLEST
    rows = [[(start + step) % 200 + 3 for step in range(64)] for start in range(16)]
    with tempfile.TemporaryDirectory() as folder, training.deterministic():
        model = training.peft_model(training.make_model(folder, "llama", **sizes))
        settings = SFTConfig(
            f"{folder}/out", max_steps=4, per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-3,
            report_to="none", save_strategy="no", bf16=False, max_length=64, gradient_checkpointing=False,
            use_cpu=not machine.has_gpu(),
        )  # fmt: skip
        trainer = SFTTrainer(
            model,
            settings,
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=training.tokenizer(),
            callbacks=[NF4KernelCallback(strict=True)] if way == "callback" else [],
        )
        trainer.train()
    sites = [site for library in switch.LIBRARIES.values() for site in library.sites]
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "adapters": training.digest(one for one in model.parameters() if one.requires_grad),
        "packed": sameness.packed_bytes(model),
        "kernel": sum(site.counts["kernel"] for site in sites),
    }


if __name__ == "__main__":
    training.answer(train)
