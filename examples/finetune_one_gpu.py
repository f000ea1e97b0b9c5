"""QLoRA on one GPU (PEFT and bitsandbytes) with the NF4 kernel. From the repository's root:

python -m examples.finetune_one_gpu --model MODEL --data TEXT_FILE
    MODEL: a causal language model on the Hugging Face Hub or in a folder; left out, a tiny random one.
    With --compare it trains without the kernel first, then with it, and shows that the losses are the same.
Without a GPU it runs (slowly) in Triton's interpreter: set TRITON_INTERPRET=1.
"""

import argparse
import contextlib
import json
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.training import tiny_models, tiny_training
from helpers.nf4.integrate import use_nf4_kernel


def windows(model: str, data: str | None, count: int, rows: int, length: int):
    """`count` batches (rows, length) of token ids, in the order of the text, which repeats as needed."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = Path(data).read_text(encoding="utf-8") if data else tiny_models.TEXT
    ids = torch.tensor(tokenizer(text)["input_ids"])
    ids = ids.repeat(1 + count * rows * length // len(ids))
    return ids[: count * rows * length].view(count, rows, length)


def finetune(args, kernel: bool):
    """Losses and seconds of each step."""
    torch.manual_seed(3407)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The one line that makes the difference. As a plain call, use_nf4_kernel("peft"), it lasts until the end.
    with use_nf4_kernel("peft") if kernel else contextlib.nullcontext():
        model = AutoModelForCausalLM.from_pretrained(
            args.model,
            dtype=torch.bfloat16,
            quantization_config=tiny_models.quantization(torch.bfloat16),
            device_map={"": device},
        )
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, config, autocast_adapter_dtype=False).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
        losses, seconds = [], []
        for ids in windows(args.model, args.data, args.steps, args.rows, args.length).to(device):
            start = time.perf_counter()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            print(f"step {len(losses)}: loss {losses[-1]:.6f}, {seconds[-1] * 1e3:.1f} ms")
    return losses, seconds


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model on the Hub or in a folder; left out, a tiny random one")
    parser.add_argument("--data", help="a text file; left out, a few sentences")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=4, help="sequences a step")
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--compare", action="store_true", help="train without the kernel first")
    parser.add_argument("--json", help="where to write losses and seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.model = args.model or str(tiny_models.make(folder))
        found = {}
        with tiny_training.deterministic() if args.compare else contextlib.nullcontext():
            if args.compare:
                found["without"] = finetune(args, kernel=False)
            found["with"] = finetune(args, kernel=True)
    if args.compare:
        print(f"losses identical with and without the kernel: {found['with'][0] == found['without'][0]}")
    if args.json:
        rows = {name: {"losses": losses, "seconds": seconds} for name, (losses, seconds) in found.items()}
        Path(args.json).write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
