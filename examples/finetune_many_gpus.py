"""QLoRA on several GPUs with the NF4 kernel, by accelerate: DDP, or FSDP with sharded 4-bit weights.

    pip install ".[train]"
    accelerate launch finetune_many_gpus.py --model Qwen/Qwen2.5-0.5B --data TEXT_FILE [--fsdp 1|2]

In a checkout: torchrun --nproc_per_node 2 -m examples.finetune_many_gpus (without --model a tiny random
Llama). The kernel changes no bit: with --compare it trains without it, with it, and in turns of some steps
(the fair way to compare times), and shows that the losses are the same. Without GPUs it runs DDP over CPU
processes, the kernel in Triton's interpreter: set TRITON_INTERPRET=1.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import broadcast_object_list
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

try:
    from nf4_triton import use_nf4_kernel
except ImportError:  # in a checkout
    from helpers.integrate import use_nf4_kernel


def batches(args, rows: int) -> torch.Tensor:
    """Token ids (steps, rows, length) in the order of the text, which repeats as needed."""
    text = "\n".join(f"What is {a} plus {b}? It is {a + b}." for a in range(20) for b in range(20))
    if args.data:
        text = Path(args.data).read_text(encoding="utf-8")
    ids = torch.tensor(AutoTokenizer.from_pretrained(args.model)(text)["input_ids"])
    count = args.steps * rows * args.length
    return ids.repeat(1 + count // len(ids))[:count].view(args.steps, rows, args.length)


def finetune(accelerator, args, turns: list[bool]) -> dict:
    """Of each step the losses of all processes, seconds, whether with the kernel; and decodes by it here.

    turns: for each step, over and over, whether with the kernel."""
    torch.manual_seed(3407)
    # FSDP shards floating point only: it keeps the packed bytes as bfloat16.
    storage = torch.bfloat16 if args.fsdp else torch.uint8
    model = AutoModelForCausalLM.from_pretrained(
        args.model,
        dtype=torch.bfloat16,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=storage,
        ),
        device_map={"": accelerator.device},
    )
    model.config.use_cache = False  # of keys and values, which training does not read again
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    if args.fsdp:
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    model.train()
    if args.fsdp == 1:  # the optimizer must see the sharded parameters
        model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    if args.fsdp == 1:
        optimizer = accelerator.prepare(optimizer)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    record = {"losses": [], "seconds": [], "kernel": [], "decoded": 0, "device": str(accelerator.device)}
    steps = enumerate(batches(args, args.rows * accelerator.num_processes))
    for kernel, turn in itertools.groupby(steps, lambda batch: turns[batch[0] % len(turns)]):
        quiet = not accelerator.is_main_process or any(record["kernel"])
        # The one line that makes the difference. As a plain call, use_nf4_kernel("peft"), it lasts for good.
        with use_nf4_kernel("peft", quiet=quiet) if kernel else contextlib.nullcontext() as switch:
            for step, ids in turn:
                ids = ids[accelerator.process_index :: accelerator.num_processes].to(accelerator.device)
                start = time.perf_counter()
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses = accelerator.gather(loss.detach().reshape(1)).tolist()
                record["seconds"].append(time.perf_counter() - start)
                record["losses"].append(losses)
                record["kernel"].append(kernel)
                accelerator.print(f"step {step + 1}: losses {losses}, {record['seconds'][-1] * 1e3:.1f} ms")
        record["decoded"] += sum(site["kernel"] for site in switch.counts().values()) if switch else 0
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    return record


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model on the Hub or in a folder; left out, a tiny random one")
    parser.add_argument("--data", help="a text file; left out, a few sentences")
    parser.add_argument("--fsdp", type=int, choices=(1, 2), help="shard the weights, by FSDP version 1 or 2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=4, help="sequences a step on each GPU")
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--compare", action="store_true", help="train without the kernel, too, and in turns")
    parser.add_argument("--turn", type=int, default=5, help="steps between two switches when in turns")
    parser.add_argument("--json", help="where to write the records of the processes: FILE.0, FILE.1, ...")
    args = parser.parse_args()
    if args.turn < 1:
        parser.error(f"--turn is {args.turn}, expected one step or more")
    plugin = None
    if args.fsdp:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=args.fsdp,
            use_orig_params=False if args.fsdp == 1 else None,
            cpu_ram_efficient_loading=False,
            sync_module_states=False if args.fsdp == 1 else None,
        )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            from examples import tiny_model

            layers = 2 if torch.cuda.is_available() else 1
            made = [tiny_model.make(folder, layers=layers) if accelerator.is_main_process else None]
            args.model = broadcast_object_list(made)[0]
        runs = {"with": [True]}
        if args.compare:  # the libraries' own algorithms must repeat their results, too
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False
            runs = {"without": [False], **runs, "in turns": [False] * args.turn + [True] * args.turn}
        records = {name: finetune(accelerator, args, turns) for name, turns in runs.items()}
    for name, run in records.items():
        for kernel in sorted(set(run["kernel"])):
            steps = [s for s, with_it in zip(run["seconds"], run["kernel"], strict=True) if with_it == kernel]
            what = f"{name}, the kernel {'on' if kernel else 'off'}"
            accelerator.print(f"{what}: median step {statistics.median(steps) * 1e3:.1f} ms")
    if args.compare:
        same = all(run["losses"] == records["without"]["losses"] for run in records.values())
        accelerator.print(f"losses identical with and without the kernel: {same}")
    if args.json:
        Path(f"{args.json}.{accelerator.process_index}").write_text(json.dumps(records), encoding="utf-8")
    accelerator.end_training()


if __name__ == "__main__":
    main()
