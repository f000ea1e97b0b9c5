"""Train a QLoRA adapter on several GPUs with the NF4 kernel, using DDP, or FSDP on GPUs with bf16.
pip install "nf4-triton[train]"
accelerate launch --num_processes 2 finetune_many_gpus.py MODEL TEXT_FILE OUT STEPS [fsdp]
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from nf4_triton import use_nf4_kernel

GPU = torch.cuda.is_available()
BF16 = GPU and torch.cuda.is_bf16_supported(including_emulation=False)
DTYPE = torch.bfloat16 if BF16 else torch.float16 if GPU else torch.float32  # a T4 trains in fp16


def main(name, text_file, out, steps, fsdp=None):
    shard = dict(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False)
    plugin = FullyShardedDataParallelPlugin(**shard) if fsdp else None
    mixed = "no" if fsdp or not GPU else "bf16" if BF16 else "fp16"
    accelerator = Accelerator(mixed_precision=mixed, fsdp_plugin=plugin, cpu=not GPU)
    nf4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    nf4 |= dict(bnb_4bit_compute_dtype=DTYPE, bnb_4bit_quant_storage=DTYPE if fsdp else torch.uint8)
    how = dict(quantization_config=BitsAndBytesConfig(**nf4), device_map={"": accelerator.device})
    model = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPE, **how)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=not fsdp)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    use_nf4_kernel()  # in each process; if the kernel cannot run, it says why and training continues
    ids = torch.tensor(AutoTokenizer.from_pretrained(name)(open(text_file).read())["input_ids"])
    for step in range(int(steps)):
        start = (step * accelerator.num_processes + accelerator.process_index) * 256 % max(1, len(ids) - 255)
        row = ids[None, start : start + 256].to(accelerator.device)
        loss = model(input_ids=row, labels=row).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step + 1}: loss {loss.item():.4f}")
    state = {name: x for name, x in accelerator.get_state_dict(model).items() if "lora_" in name}
    save = accelerator.unwrap_model(model).save_pretrained
    save(out, state_dict=state, is_main_process=accelerator.is_main_process)


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 4 else sys.exit(__doc__)
