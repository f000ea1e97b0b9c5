"""Train a QLoRA adapter on one GPU with the NF4 kernel, from a fixed seed.

pip install ".[train]"    in a checkout of this repository
CUDA_VISIBLE_DEVICES=0 python finetune_one_gpu.py MODEL TEXT_FILE OUT [STEPS]
"""

import argparse


def main(model, text_file, out, steps):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        BitsAndBytesConfig,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    from nf4_triton import use_nf4_kernel

    set_seed(3407)
    gpu = torch.cuda.is_available()
    bf16 = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if bf16 else torch.float16 if gpu else torch.float32  # a T4 trains in fp16
    nf4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    nf4 = BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype=dtype)
    how = dict(dtype=dtype, quantization_config=nf4, device_map={"": "cuda" if gpu else "cpu"})
    base = AutoModelForCausalLM.from_pretrained(model, **how)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    ids = AutoTokenizer.from_pretrained(model)(open(text_file).read())["input_ids"]
    rows = [ids[start : start + 256] for start in range(0, max(1, len(ids) - 255), 256)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    settings = dict(per_device_train_batch_size=4, learning_rate=2e-4, bf16=bf16, fp16=gpu and not bf16)
    settings |= dict(use_cpu=not gpu, save_strategy="no", report_to="none", logging_steps=1)
    settings = TrainingArguments(out, max_steps=steps, **settings)
    trainer = Trainer(get_peft_model(base, lora), settings, train_dataset=data)
    with use_nf4_kernel() as switch:  # if the kernel cannot run, it says why and training continues
        trainer.train()
    print(switch)
    trainer.model.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("model", "text_file", "out"):
        parser.add_argument(name)
    parser.add_argument("steps", nargs="?", type=int, default=100)
    main(**vars(parser.parse_args()))
