"""Train a QLoRA adapter on several GPUs with the NF4 kernel, from a fixed seed: DDP, or FSDP in bf16.

pip install ".[train]"    in a checkout of this repository
accelerate launch --num_processes 2 finetune_many_gpus.py MODEL TEXT_FILE OUT STEPS [fsdp]
"""

import argparse


def main(model, text_file, out, steps, fsdp):
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, set_seed

    from nf4_triton import use_nf4_kernel

    set_seed(3407)
    gpu = torch.cuda.is_available()
    bf16 = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if bf16 else torch.float16 if gpu else torch.float32  # a T4 trains in fp16
    shard = dict(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False)
    plugin = FullyShardedDataParallelPlugin(**shard) if fsdp else None
    mixed = "no" if fsdp or not gpu else "bf16" if bf16 else "fp16"
    accelerator = Accelerator(mixed_precision=mixed, fsdp_plugin=plugin, cpu=not gpu)
    nf4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    nf4 |= dict(bnb_4bit_compute_dtype=dtype, bnb_4bit_quant_storage=dtype if fsdp else torch.uint8)
    how = dict(quantization_config=BitsAndBytesConfig(**nf4), device_map={"": accelerator.device})
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **how)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    lora_model = get_peft_model(base, lora, autocast_adapter_dtype=not fsdp)
    optimizer = torch.optim.AdamW([p for p in lora_model.parameters() if p.requires_grad], lr=2e-4)
    lora_model, optimizer = accelerator.prepare(lora_model, optimizer)
    use_nf4_kernel()  # in each process; if the kernel cannot run, it says why and training continues
    ids = torch.tensor(AutoTokenizer.from_pretrained(model)(open(text_file).read())["input_ids"])
    for step in range(steps):
        start = (step * accelerator.num_processes + accelerator.process_index) * 256 % max(1, len(ids) - 255)
        row = ids[None, start : start + 256].to(accelerator.device)
        loss = lora_model(input_ids=row, labels=row).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step + 1}: loss {loss.item():.4f}")
    state = {name: x for name, x in accelerator.get_state_dict(lora_model).items() if "lora_" in name}
    save = accelerator.unwrap_model(lora_model).save_pretrained
    save(out, state_dict=state, is_main_process=accelerator.is_main_process)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("model", "text_file", "out"):
        parser.add_argument(name)
    parser.add_argument("steps", type=int)
    parser.add_argument("fsdp", nargs="?", choices=["fsdp"])
    main(**vars(parser.parse_args()))
