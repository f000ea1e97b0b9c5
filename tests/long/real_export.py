"""Time the export of a random 4-bit model of Llama-3-8B's shapes with an adapter beside `cp` of its result.

    python tests/long/real_export.py FOLDER [--layers 32] [--pairs 3]

A pair is export + sync, then cp + sync. FOLDER gets 6 GB, and 32 more during a pair.
"""

import argparse
import json
import shutil
import subprocess
import threading
import time
from pathlib import Path

import torch
from bitsandbytes.functional import quantize_4bit
from safetensors.torch import save_file
from transformers import LlamaConfig

from nf4_triton import export_checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = LlamaConfig(  # of Llama-3-8B
    architectures=["LlamaForCausalLM"],
    dtype="bfloat16",
    vocab_size=128256,
    intermediate_size=14336,
    num_key_value_heads=8,
)
SHAPES = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}


def random(*shape):
    return (torch.randn(shape, device=DEVICE) / 64).bfloat16()


def make(folder, layers):
    """Write the model, a file a layer, and its adapter. All layers have the same values."""
    model, adapter = folder / "model", folder / "adapter"
    model.mkdir(parents=True)
    adapter.mkdir()
    layer, lora = {f"{name}_layernorm.weight": random(4096) for name in ("input", "post_attention")}, {}
    for name, shape in SHAPES.items():
        codes, state = quantize_4bit(random(*shape), quant_type="nf4", compress_statistics=True)
        layer |= {f"{name}.weight": codes}
        layer |= {f"{name}.weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
        lora |= {f"{name}.lora_A.weight": random(16, shape[1]), f"{name}.lora_B.weight": random(shape[0], 16)}
    files = {"ends": {name: random(128256, 4096) for name in ("model.embed_tokens.weight", "lm_head.weight")}}
    files["ends"]["model.norm.weight"] = random(4096)
    tensors = {}
    for number in range(layers):
        start = f"model.layers.{number}."
        files[str(number)] = {start + name: tensor for name, tensor in layer.items()}
        tensors |= {f"base_model.model.{start}{name}": x.float().clone() for name, x in lora.items()}
    for name, content in files.items():
        save_file(content, model / f"{name}.safetensors")
    index = {"weight_map": {name: f"{file}.safetensors" for file in files for name in files[file]}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    CONFIG.num_hidden_layers = layers
    CONFIG.save_pretrained(model)
    save_file(tensors, adapter / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": list(SHAPES)}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))


def timed(call, *arguments):
    """Return (seconds until all is on the disk, GB of anonymous memory at the peak beyond before)."""

    def held():
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) / 1e6

    def watch():
        while not ended.wait(0.005):
            seen.append(held())

    subprocess.run(["sync"], check=True)
    seen, ended = [held()], threading.Event()
    watching = threading.Thread(target=watch)
    watching.start()
    start = time.perf_counter()
    call(*arguments)
    subprocess.run(["sync"], check=True)
    seconds = time.perf_counter() - start
    ended.set()
    watching.join()
    return seconds, max(seen) - seen[0]


def main(folder, layers, pairs):
    model, adapter, out, copy = (folder / name for name in ("model", "adapter", "out", "copy"))
    if not folder.exists():
        make(folder, layers)
    for _ in range(pairs):
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        seconds, peak = timed(export_checkpoint, out, model, adapter)
        gpu = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0
        size = sum(file.stat().st_size for file in out.iterdir()) / 1e9
        cp, _ = timed(subprocess.run, ["cp", "-r", "--reflink=never", out, copy])
        print(f"{size:.2f} GB: export {seconds:.2f} s, cp {cp:.2f} s: {seconds / cp:.2f}")
        print(f"peak of anonymous memory {peak:.2f} GB, of the GPU {gpu:.2f} GB", flush=True)
        shutil.rmtree(out)
        shutil.rmtree(copy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3)
    main(**vars(parser.parse_args()))
