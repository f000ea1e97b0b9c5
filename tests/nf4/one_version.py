"""The version matrix: a QLoRA training step with and without the kernel, in one environment after the other.

    python tests/nf4/one_version.py --varied bitsandbytes --into results/version-matrix.json
    python tests/nf4/one_version.py --table      the rows into docs/compatibility.md

A tiny random Llama, loaded in 4 bit by transformers, with LoRA by PEFT: losses, gradients and merged weights
must be the same bits with the kernel. Without a GPU it runs in Triton's interpreter. `nox -s versions`
(opt-in: it downloads gigabytes) makes a row in an environment of its own for each version of MATRIX.
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
# What is asked for; a version without a row is shown as not measured.
MATRIX = {
    "bitsandbytes": ("0.45.5", "0.46.1", "0.47.0", "0.48.2", "0.49.2", "0.50.0", "0.50.1", "0.50.2"),
    "peft": ("0.15.2", "0.16.0", "0.17.1", "0.18.1", "0.19.1", "0.20.0", "0.21.2"),
    "transformers": ("4.51.3", "4.53.3", "4.55.4", "4.57.6", "5.3.0", "5.10.4", "5.17.0", "5.23.0"),
    "torch": ("2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    "triton": ("3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0"),
    "python": ("3.10", "3.11", "3.12", "3.13"),
}
STORED, SHOWN = ROOT / "results" / "version-matrix.json", ROOT / "docs" / "compatibility.md"
MARKS = "<!-- versions -->", "<!-- /versions -->"
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


def store(file: Path, record: dict) -> None:
    """Put a row in the place of the one for the same versions on the same device."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    key = (record["varied"], record["versions"], record.get("device"))
    rows = [one for one in rows if (one["varied"], one["versions"], one.get("device")) != key]
    text = json.dumps({"rows": [*rows, record]}, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def line(name: str, version: str, rows: list[dict]) -> str:
    """One version as a line of the table, from the row to prefer; the last cell says what else differed."""
    usual = baseline(rows)
    rows = [row for row in rows if matches(name, version, row)]
    if not rows:
        return f"| {name} {version} | not measured | | |"
    row = max(rows, key=lambda row: preference(name, row))
    differs = [] if row["device"] == usual["device"] else [row["device"]]
    for other in ("python", *PACKAGES):
        if other != name and row["versions"].get(other) != usual["versions"].get(other):
            differs.append(f"{other} {row['versions'].get(other)}")
    where = ", ".join(differs)
    if row["same_bits"] is None:
        return f"| {name} {version} | not measured: {why(row)} | | {where} |"
    if not row["switched"]:
        return f"| {name} {version} | not switched: {why(row)} | | {where} |"
    functions = ", ".join(f"`{site.rpartition('.')[2]}`" for site in row["switched"])
    same = "same" if row["same_bits"] else "**other**"
    by_library, total = row["left_to_library"].split()[0:3:2]
    return f"| {name} {version} | {functions} | {same}; {by_library} of {total} | {where} |"


def baseline(rows: list[dict]) -> dict:
    """The row with the newest bitsandbytes of the matrix, from which the others differ."""
    rows = [row for row in rows if matches("bitsandbytes", MATRIX["bitsandbytes"][-1], row)]
    return max(rows, key=lambda row: (row["varied"] == "bitsandbytes", *preference("", row)))


def preference(name: str, row: dict) -> tuple:
    """Rows that ran, on a GPU, about this package or about bitsandbytes, newest last."""
    about = (row["varied"] == name, row["varied"] == "bitsandbytes")
    return row["same_bits"] is not None, "cpu" not in row["device"], *about, row["date"]


def matches(name: str, version: str, row: dict) -> bool:
    """Is the row about this version, or did it at least run with it?"""
    have = row["versions"].get(name, "").split("+")[0]
    same = have == version or name == "python" and have.startswith(f"{version}.")
    return same and (row["varied"] == name or row["same_bits"] is not None)


def why(row: dict) -> str:
    """Why nothing was measured or switched, in a line."""
    reasons = list(dict.fromkeys(row["refused"].values())) or [row["problem"] or "unknown"]
    return reasons[0].replace("|", "/").split("`")[0][:120].strip()


def table() -> str:
    """The matrix as Markdown."""
    rows = json.loads(STORED.read_text(encoding="utf-8"))["rows"]
    usual = baseline(rows)
    versions = ", ".join(f"{name} {version}" for name, version in usual["versions"].items())
    lines = [f"Unless a row says otherwise: {usual['device']}; {versions}.", ""]
    lines += ["| version | replaced | bits; decoded by the library | otherwise with |"]
    lines += ["| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(line(name, v, rows) for name, versions in MATRIX.items() for v in versions)])


def shown(text: str) -> str:
    """The page with today's table between its marks."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}"


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--varied", choices=MATRIX, help="the package whose version this row is about")
    parser.add_argument("--into", type=Path, help="a result file to put the row into")
    parser.add_argument("--table", action="store_true", help=f"write the table into {SHOWN.name}")
    args = parser.parse_args(argv)
    if args.table:
        SHOWN.write_text(shown(SHOWN.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    if not args.varied:
        parser.error("expected --varied or --table")
    sys.path.insert(0, str(ROOT))
    record = row(args.varied)
    print(json.dumps(record, indent=1, ensure_ascii=False))
    if args.into:
        store(args.into, record)
    return 0 if record["same_bits"] else 1


if __name__ == "__main__":
    sys.exit(main())
