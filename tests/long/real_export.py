"""Time the export of a random 4-bit model of Llama-3-8B's shapes with an adapter beside `cp` of its result.

    python tests/long/real_export.py FOLDER [--layers 32] [--pairs 3]

FOLDER holds 6 GB of input, and 32 GB while it runs. A pair is export + sync, then cp + sync.
"""

import argparse
import json
import shutil
import subprocess
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from nf4_triton import export_checkpoint
from nf4_triton.reference import NF4_VALUES

SHAPES = {
    **{f"self_attn.{name}_proj": (4096, 4096) for name in "qo"},
    **{f"self_attn.{name}_proj": (1024, 4096) for name in "kv"},
    **{f"mlp.{name}_proj": (14336, 4096) for name in ("gate", "up")},
    "mlp.down_proj": (4096, 14336),
}
VOCABULARY, RANK = 128256, 16
CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", dtype="bfloat16", vocab_size=VOCABULARY,
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
    tie_word_embeddings=False,
)  # fmt: skip
LORA = dict(peft_type="LORA", r=RANK, lora_alpha=32, target_modules=[name.split(".")[1] for name in SHAPES])


def quantized(name, shape):
    """Return the tensors of a random double-quantized NF4 weight."""
    blocks = shape[0] * shape[1] // 64
    state = dict(
        quant_type="nf4", blocksize=64, dtype="bfloat16", shape=shape, nested_blocksize=256,
        nested_dtype="float32", nested_offset=0.02,
    )  # fmt: skip
    tensors = {
        "": torch.randint(256, (shape[0] * shape[1] // 2, 1), dtype=torch.uint8),
        ".absmax": torch.randint(256, (blocks,), dtype=torch.uint8),
        ".nested_absmax": torch.full((-(-blocks // 256),), 0.02),
        ".quant_map": torch.tensor(NF4_VALUES),
        ".nested_quant_map": torch.linspace(-1, 1, 256),
        ".quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return {name + part: tensor for part, tensor in tensors.items()}


def make(folder, layers):
    """Write the model, a file a layer, and its adapter."""
    model, adapter = folder / "model", folder / "adapter"
    model.mkdir(parents=True)
    adapter.mkdir()
    files, lora = {}, {}
    ends = {
        name: torch.randn(VOCABULARY, 4096).bfloat16()
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    files["ends.safetensors"] = list(ends) + ["model.norm.weight"]
    save_file(ends | {"model.norm.weight": torch.ones(4096).bfloat16()}, model / "ends.safetensors")
    for layer in range(layers):
        tensors, start = {}, f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{start}{name}.weight"] = torch.ones(4096).bfloat16()
        for name, shape in SHAPES.items():
            tensors |= quantized(f"{start}{name}.weight", shape)
            key = f"base_model.model.{start}{name}.lora_"
            lora[f"{key}A.weight"] = torch.randn(RANK, shape[1]) / 64
            lora[f"{key}B.weight"] = torch.randn(shape[0], RANK) / 64
        save_file(tensors, model / f"{layer}.safetensors")
        files[f"{layer}.safetensors"] = list(tensors)
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    save_file(lora, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(LORA))


def held():
    """Return this process's anonymous memory in GB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1e6


def timed(call, *arguments):
    """Return (seconds until what a call wrote is on the disk, peak of anonymous memory in GB)."""
    subprocess.run(["sync"], check=True)
    peak, ended = [held()], threading.Event()

    def watch():
        while not ended.wait(0.005):
            peak.append(max(held(), peak.pop()))

    watching = threading.Thread(target=watch)
    watching.start()
    start = time.perf_counter()
    call(*arguments)
    subprocess.run(["sync"], check=True)
    seconds = time.perf_counter() - start
    ended.set()
    watching.join()
    return round(seconds, 2), round(peak[0], 2)


def copy(source, target):
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)


def main(folder, layers, pairs):
    folder = Path(folder)
    if not folder.exists():
        make(folder, layers)
    out, second = folder / "out", folder / "copy"
    for _ in range(pairs):
        before = round(held(), 2)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        seconds, peak = timed(export_checkpoint, out, folder / "model", folder / "adapter")
        gpu = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
        size = sum(file.stat().st_size for file in out.iterdir()) / 1e9
        cp, _ = timed(copy, out, second)
        print(
            f"{size:.2f} GB: export {seconds} s, cp {cp} s, {seconds / cp:.2f}x; memory before {before} GB,"
            f" peak {peak} GB; GPU peak {gpu} GB",
            flush=True,
        )
        shutil.rmtree(out)
        shutil.rmtree(second)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3)
    main(**vars(parser.parse_args()))
