"""Merge a QLoRA adapter into its base model in 16 bit; the NF4 kernel dequantizes the weights.

pip install ".[train]"    in a checkout of this repository
python merge_to_16bit.py ADAPTER OUT
"""

import argparse


def main(adapter, out):
    import torch
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    from nf4_triton import use_nf4_kernel

    gpu = torch.cuda.is_available()
    bf16 = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if bf16 else torch.float16 if gpu else torch.float32
    base = PeftConfig.from_pretrained(adapter).base_model_name_or_path
    nf4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    nf4 = BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype=dtype)
    how = dict(dtype=dtype, quantization_config=nf4, device_map={"": "cuda" if gpu else "cpu"})
    model = AutoModelForCausalLM.from_pretrained(base, **how)
    with use_nf4_kernel() as switch:  # if the kernel cannot run, it says why; the result is the same
        model = model.dequantize()  # to the weights that the adapter was trained on
    print(switch.summary())
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
    AutoTokenizer.from_pretrained(base).save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("adapter")
    parser.add_argument("out")
    main(**vars(parser.parse_args()))
