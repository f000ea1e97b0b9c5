"""Where the kernel pays besides training: a long prompt, generation, loading to 16 bit, merging an adapter.

    python -m examples.where_it_pays [--model MODEL] [--json FILE]

Each is done in turns with the libraries' own code and with the kernel, and must give the same tokens and the
same weights; where the libraries alone do not repeat themselves, as of several prompts at once, the line says
so. Single tokens after the prompt stay with bitsandbytes' own matrix-vector kernel. Without --model a random
Llama: small layers on a CPU (Triton's interpreter: set TRITON_INTERPRET=1), real ones on a GPU.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

try:
    from nf4_triton import use_nf4_kernel
except ImportError:  # in a checkout
    from helpers.integrate import use_nf4_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(model: str):
    """The model in 4 bit (nf4, nested, computing in bf16), ready to generate."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, quantization_config=quantization, device_map={"": DEVICE}
    )
    return model if DEVICE == "cuda" else model.train()  # bitsandbytes repacks a CPU layer in eval mode


def prefill(model, ids):
    """Logits of the last token of each prompt (rows, vocabulary): one pass over all tokens."""
    with torch.no_grad():
        return [model(input_ids=ids, logits_to_keep=1).logits]


def generate(model, ids, tokens=16):
    """Greedy continuation of each prompt: (rows, prompt + tokens) token ids."""
    return [
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    ]


def dequantize(model, ids):
    """Every weight as bf16, as for saving a 16-bit model."""
    return list(model.dequantize().parameters())


def merge(model, ids):
    """An adapter merged into the 4-bit weights: each is decoded, added to and quantized again."""
    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(get_peft_model(model, config).merge_and_unload().parameters())


def measure(task, model: str, rounds: int, rows: int, length: int) -> dict:
    """Seconds of each round without and with the kernel, whether results are the same, and who decoded."""
    ids = torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    record = {"without": [], "with": [], "same": True, "repeats": True}
    for turn in range(2 * rounds + 2):  # the first of each is the warm-up
        name = ("without", "with")[turn % 2]
        if turn == 0 or task in (dequantize, merge):  # which change the model
            loaded = load(model)
        with use_nf4_kernel("peft", quiet=True) if name == "with" else contextlib.nullcontext() as switch:
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            result = task(loaded, ids)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            if switch:
                record["decoded"] = switch.summary()
                record["fused"] = sum(site["fused"] for site in switch.counts().values())
        if turn == 0:
            expected = [one.detach().clone() for one in result]
        same = len(result) == len(expected) and all(map(torch.equal, result, expected))
        record["same" if name == "with" else "repeats"] &= same
        if turn > 1:
            record[name].append(seconds)
        del result
    return record


TASKS = {"prefill": prefill, "generate": generate, "dequantize": dequantize, "merge": merge}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model on the Hub or in a folder; left out, a random one")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1, help="prompts at once (default 1)")
    length = 1024 if DEVICE == "cuda" else 16
    parser.add_argument("--length", type=int, default=length, help="tokens a prompt")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    args = parser.parse_args()
    records = {}
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            from examples import tiny_model

            args.model = tiny_model.make(folder, *((4096, 4) if DEVICE == "cuda" else (128, 1)))
        for name in args.tasks:
            record = records[name] = measure(TASKS[name], args.model, args.rounds, args.rows, args.length)
            without, with_it = (statistics.median(record[arm]) for arm in ("without", "with"))
            print(
                f"{name}: {without * 1e3:.1f} ms -> {with_it * 1e3:.1f} ms ({without / with_it:.2f}x), "
                f"results {'the same' if record['same'] else 'DIFFERENT'}"
                f"{'' if record['repeats'] else ' (without the kernel, rounds differ)'}; "
                f"{record['decoded']}, "
                f"{record['fused']} products were bitsandbytes' own"
            )
    if args.json:
        args.json.write_text(json.dumps(records, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
