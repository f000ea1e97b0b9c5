"""Time the export of a random model of Llama-3-8B's shapes with an adapter, and `cp` of the result.

    python docs/time_export.py FOLDER

The base is stored in 4 bit, then in 16 bit, which the export quantizes as training did: both results must
have the same bytes. A time covers the call and a sync. FOLDER takes 22 GB, and 48 GB more during the run.
"""

import filecmp
import functools
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.bench import training  # noqa: E402
from nf4_triton import export_checkpoint  # noqa: E402

BASES = {"model": None, "full": "nf4+double"}  # folder: trained_in


def make(folder):
    """Write the model in 16 bit and in 4 bit, and its adapter."""
    training.random_model(training.WHOLE_LLAMA3_8B).save_pretrained(folder / "full")
    model = training.peft_model(training.WHOLE_LLAMA3_8B, lora=training.LORA | {"init_lora_weights": False})
    model.save_pretrained(folder / "adapter")
    model.unload().save_pretrained(folder / "model")


def seconds(call, *arguments):
    """Return the seconds until everything that a call writes is on the disk."""
    subprocess.run(["sync"], check=True)
    start = time.perf_counter()
    call(*arguments)
    subprocess.run(["sync"], check=True)
    return time.perf_counter() - start


def main(folder):
    if not folder.exists():
        make(folder)
    outs = []
    for base, trained_in in BASES.items():
        out, copy = folder / f"out-{base}", folder / "copy"
        export = functools.partial(export_checkpoint, base=folder / base, trained_in=trained_in)
        took = seconds(export, folder / "adapter", out)
        size = sum(file.stat().st_size for file in out.iterdir()) / 1e9
        cp = seconds(subprocess.run, ["cp", "-r", "--reflink=never", out, copy])
        print(f"{base}, {size:.2f} GB: export {took:.2f} s, cp {cp:.2f} s: {took / cp:.2f}", flush=True)
        shutil.rmtree(copy)
        outs.append(out)
    files = sorted(path.name for path in outs[0].glob("*.safetensors"))
    same, other, missing = filecmp.cmpfiles(*outs, files, shallow=False)
    print(f"{len(same)} of {len(files)} weight files have the same bytes; other: {other + missing}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
