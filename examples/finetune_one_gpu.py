"""Train a QLoRA adapter with the NF4 kernel, from a fixed seed. Merge it in 16 bit, and generate an answer.

pip install ".[export]"    in a checkout of this repository
CUDA_VISIBLE_DEVICES=0 python finetune_one_gpu.py MODEL TEXT_FILE OUT [STEPS]
MODEL is in 16 bit. OUT gets the adapter, OUT-16bit the merged model. Without a GPU it trains on the CPU.
"""

import argparse
import os


def main(model, text_file, out, steps, adapter_only):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        BitsAndBytesConfig,
        Trainer,
        TrainingArguments,
        pipeline,
        set_seed,
    )

    from nf4_triton import export_checkpoint, use_nf4_kernel

    set_seed(3407)
    gpu = torch.cuda.is_available()
    bf16 = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if bf16 else torch.float16 if gpu else torch.float32  # a T4 trains in fp16
    nf4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    nf4 = BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype=dtype)
    how = dict(dtype=dtype, quantization_config=nf4, device_map={"": "cuda" if gpu else "cpu"})
    base = AutoModelForCausalLM.from_pretrained(model, **how)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    text = open(text_file).read()
    ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
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
    if adapter_only:
        return
    merged = f"{out}-16bit"
    # Onto the weights that training saw: it quantized MODEL on loading.
    export_checkpoint(out, merged, trained_in="nf4+double", load_dtype=dtype)
    answer = pipeline("text-generation", merged, device="cuda" if gpu else "cpu")
    print(answer(text[:40], max_new_tokens=20)[0]["generated_text"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("model", "text_file", "out"):
        parser.add_argument(name)
    parser.add_argument("steps", nargs="?", type=int, default=100)
    parser.add_argument("--adapter-only", action="store_true", help="do not merge")
    options = parser.parse_args()
    if not os.path.exists(options.text_file):
        parser.error(f"{options.text_file} does not exist: pass a text file to train on")
    if os.path.exists(f"{options.out}-16bit") and not options.adapter_only:
        parser.error(f"{options.out}-16bit exists: delete it, choose another OUT, or pass --adapter-only")
    main(**vars(options))
