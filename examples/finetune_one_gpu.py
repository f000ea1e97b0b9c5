"""Train a QLoRA adapter on one GPU with the NF4 kernel.

pip install "nf4-triton[train]"
CUDA_VISIBLE_DEVICES=0 python finetune_one_gpu.py MODEL TEXT_FILE OUT [STEPS]
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer, TrainingArguments

from nf4_triton import NF4KernelCallback

GPU = torch.cuda.is_available()
BF16 = GPU and torch.cuda.is_bf16_supported(including_emulation=False)
DTYPE = torch.bfloat16 if BF16 else torch.float16 if GPU else torch.float32  # a T4 trains in fp16


def main(name, text_file, out, steps="100"):
    nf4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    nf4 = BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype=DTYPE)
    how = dict(dtype=DTYPE, quantization_config=nf4, device_map={"": "cuda" if GPU else "cpu"})
    model = AutoModelForCausalLM.from_pretrained(name, **how)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    ids = AutoTokenizer.from_pretrained(name)(open(text_file).read())["input_ids"]
    rows = [ids[start : start + 256] for start in range(0, max(1, len(ids) - 255), 256)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=int(steps),
        per_device_train_batch_size=4,
        learning_rate=2e-4,
        bf16=BF16,
        fp16=GPU and not BF16,
        use_cpu=not GPU,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
    )
    # The callback turns the kernel on during training. If it cannot run, it says why and training continues.
    Trainer(model, arguments, train_dataset=data, callbacks=[NF4KernelCallback()]).train()
    model.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 3 else sys.exit(__doc__)
