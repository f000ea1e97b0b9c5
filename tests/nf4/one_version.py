"""One row of the version matrix: a QLoRA training step with and without the kernel, in this environment.

python tests/nf4/one_version.py --varied bitsandbytes [--into results/version-matrix.json]
A tiny random Llama, loaded in 4 bit by transformers, with LoRA by PEFT: losses, gradients and merged weights
must be the same bits with the kernel. Runs in Triton's interpreter without a GPU. `nox -s versions` (opt-in)
runs it in fresh environments; the table is docs/compatibility.md.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "bitsandbytes", "peft", "transformers", "accelerate")
SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip


def train(folder, device):
    """Losses of two steps, gradients of the last, and merged weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    torch.manual_seed(0)
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.bfloat16, quantization_config=settings, device_map={"": device}
    )
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    adapter = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.SGD(adapter, lr=0.1), []
    ids = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(0)).to(device)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = [p.grad.clone() for p in adapter]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.merge_adapter()
    return [*losses, *grads, *[p.detach().clone() for p in model.parameters()]]


def row(varied: str) -> dict:
    """What was switched and left here, and whether all bits were the same; "problem" where it did not run."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    result = {"varied": varied, "versions": versions, "switched": [], "left": {}, "same_bits": None}
    result |= {"left_to_library": None, "problem": None, "refused": {}}
    result["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    try:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        result["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu, Triton's interpreter"
        if device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"
        import peft  # noqa: F401
        import transformers

        from helpers.nf4 import use_nf4_kernel

        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(
                torch.bfloat16
            ).save_pretrained(folder)
            with use_nf4_kernel(quiet=True) as switch:
                result["switched"] = [site.name for site in switch.sites if not site.watched]
                result["left"] = switch.left
                result["refused"] = {name: why for name, why in switch.refused.items() if name != "unsloth"}
                with_it = train(folder, device)
                result["left_to_library"] = switch.summary()
            without = train(folder, device)
        result["same_bits"] = len(with_it) == len(without) and all(map(torch.equal, with_it, without))
    except Exception as error:
        last = (str(error).strip().splitlines() or [""])[-1]
        result["problem"] = f"{type(error).__name__}: {last}"[:300]
    return result


def store(file: Path, found: dict) -> None:
    """Put a row in the place of the one for the same versions on the same device."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    key = (found["varied"], found["versions"], found.get("device"))
    rows = [one for one in rows if (one["varied"], one["versions"], one.get("device")) != key]
    text = json.dumps({"rows": [*rows, found]}, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--varied", required=True, help="the package whose version this row is about")
    parser.add_argument("--into", type=Path, help="a result file to put the row into")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT))
    found = row(args.varied)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    if args.into:
        store(args.into, found)
    return 0 if found["same_bits"] else 1


if __name__ == "__main__":
    sys.exit(main())
