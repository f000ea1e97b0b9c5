"""QLoRA on one GPU with TRL's SFTTrainer and the NF4 kernel: train, save the adapter, merge it.

    pip install ".[train]" trl datasets
    python finetune_one_gpu.py --model Qwen/Qwen2.5-0.5B-Instruct --out my-model

In a checkout: python -m examples.finetune_one_gpu (without --model a tiny random Llama). The kernel changes
no bit: --without trains the same model with the libraries' own code, and prints the same losses.
Without a GPU it runs, slowly, in Triton's interpreter: set TRITON_INTERPRET=1.
"""

import argparse
import contextlib
import json
import random
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, set_seed
from trl import SFTConfig, SFTTrainer

try:
    from nf4_triton import trainer_callback, use_nf4_kernel
except ImportError:  # in a checkout
    from helpers.integrate import trainer_callback, use_nf4_kernel

QUANTIZATION = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def sums(count: int) -> Dataset:
    """Sums of two numbers below 100, in words a model can learn from: put your own data here."""
    draw = random.Random(3407)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return Dataset.from_list([{"text": f"What is {a} plus {b}? It is {a + b}."} for a, b in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model on the Hub or in a folder; left out, a tiny random one")
    parser.add_argument("--out", default="finetuned", help="where the adapter and the merged model go")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=8, help="sequences a step")
    parser.add_argument("--without", action="store_true", help="train with the libraries' own code")
    args = parser.parse_args()
    out = Path(args.out)
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            from examples import tiny_model

            args.model = tiny_model.make(folder)
        set_seed(3407)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=torch.bfloat16, quantization_config=QUANTIZATION, device_map={"": device}
        )
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        trainer = SFTTrainer(
            model,
            args=SFTConfig(
                output_dir=str(out / "trainer"), max_steps=args.steps, logging_steps=1, report_to="none",
                per_device_train_batch_size=args.rows, learning_rate=2e-3, save_strategy="no",
                bf16=True, use_cpu=device == "cpu", gradient_checkpointing=False, disable_tqdm=True,
            ),
            train_dataset=sums(args.steps * args.rows),
            processing_class=tokenizer,
            peft_config=LORA,
            # The line that makes the difference: the kernel, from the begin of training to its end.
            callbacks=[] if args.without else [trainer_callback()],
        )  # fmt: skip
        start = time.perf_counter()
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"{len(losses)} steps in {time.perf_counter() - start:.1f} s, losses {losses}")
        trainer.save_model(str(out / "adapter"))
        tokenizer.save_pretrained(str(out / "adapter"))

        # Merging decodes every weight once, adds the adapter and quantizes again.
        with contextlib.nullcontext() if args.without else use_nf4_kernel("peft", quiet=True):
            tuned = AutoPeftModelForCausalLM.from_pretrained(
                out / "adapter",
                dtype=torch.bfloat16,
                quantization_config=QUANTIZATION,
                device_map={"": device},
            )
            start = time.perf_counter()
            merged = tuned.merge_and_unload()
            print(f"merged in {time.perf_counter() - start:.2f} s")
        merged.save_pretrained(out / "merged")
        tokenizer.save_pretrained(out / "merged")
        (out / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
        print(f"the adapter is in {out / 'adapter'}, the merged model in {out / 'merged'}")


if __name__ == "__main__":
    main()
