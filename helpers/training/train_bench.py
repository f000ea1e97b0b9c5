"""python -m helpers train-bench: QLoRA steps with the kernel and without, on real layer sizes.

Llama-3 8B's layers, four of them, with a 32k-vocabulary head: forward, backward and optimizer step, for PEFT
with bitsandbytes and for Unsloth, each in a process of its own (Unsloth changes the others for good). With
and without alternate round by round. A full run is written to results/<gpu>/training.json.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from helpers.machine import environment
from helpers.training import tiny_models, tiny_training

NAME = "training"  # of the result file
LIBRARIES = ("peft", "unsloth")
LAYERS, RANK = 4, 16
SIZES = ((1, 128), (1, 512), (1, 2048), (4, 2048))  # sequences, tokens each
QUICK_SIZES = ((1, 128), (1, 2048))
ARMS = ("without", "with")
ROUNDS, QUICK_ROUNDS = 60, 6  # on a shared host one round's ratio may be 15% off
LONGEST = 45  # seconds; a slower card stops after the round that reaches them, or it would never end
REPEATS = 5  # steps of each arm that are compared bit for bit


def steps_a_sample(tokens: int) -> int:
    """Short steps are timed several at once, so that one sample is some 50 ms at least."""
    return 4 if tokens <= 512 else 2 if tokens <= 2048 else 1


def worker(library: str, folder: str, sizes=SIZES, rounds: int = ROUNDS) -> dict:
    """All measurements of one library, in this process. Without a GPU the times mean nothing."""
    if library == "unsloth":
        import unsloth  # noqa: F401  it asks to come first
    import torch

    from helpers.nf4.integrate import use_nf4_kernel

    def arm(name):
        if name == "without":
            return contextlib.nullcontext()
        return use_nf4_kernel(library, "bitsandbytes", quiet=True)

    start = time.perf_counter()
    with arm("with") as switch:
        print(switch, flush=True)
    setup = tiny_training.Setup(folder, library, dtype="bfloat16", rank=RANK, context=2048)
    model = tiny_training.adapted(setup, attention="sdpa")
    adapters = [p for p in model.parameters() if p.requires_grad]
    device = adapters[0].device
    optimizer = torch.optim.AdamW(adapters, lr=1e-5, fused=True)
    # PEFT as trl sets QLoRA up: adapters in bf16. Unsloth keeps them in fp32 and trains under autocast.
    amp = library == "unsloth"
    data = {"load_seconds": time.perf_counter() - start, "autocast": amp, "sizes": []}
    for rows, length in sizes:
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(3, model.config.vocab_size, (rows, length), generator=generator).to(device)

        def backward(ids=ids):
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss

        def step(backward=backward):
            backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        found = {"rows": rows, "length": length, "tokens": rows * length}
        found |= _sameness(arm, backward, optimizer, adapters)
        found |= _times(arm, step, rows * length, rounds)
        for name in ARMS:
            with arm(name) as switch:
                found[name]["peak_bytes"] = _peak(step)
                found[name] |= _profile(step)
                if switch:
                    found["calls"] = _calls(switch, step)
        data["sizes"].append(found)
        print(line(library, found), flush=True)
    if library == "peft":
        data["host"] = host_costs(device, 4096 if device.type == "cuda" else 64, min(rounds, 15))
    return data


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _sameness(arm, backward, optimizer, adapters) -> dict:
    """Do loss and LoRA gradients of a step have the same bits with and without the kernel?

    With deterministic algorithms only. Where an operation has none ("strict" is False then), attention's
    backward may vary, not every time: each step is repeated, and the different results of an arm are counted.
    """

    def results(strict):
        seen = {name: set() for name in ARMS}
        for name in ARMS * REPEATS:
            with arm(name), tiny_training.deterministic(strict):
                loss = backward()
                seen[name].add(tiny_training.digest([loss.float(), *(p.grad for p in adapters)]))
                optimizer.zero_grad(set_to_none=True)
        return seen

    strict = True
    try:
        seen = results(strict)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        optimizer.zero_grad(set_to_none=True)
        strict = False
        seen = results(strict)
    return {
        "same_bits": seen["with"] == seen["without"],
        "repeatable": len(seen["without"]) == 1,
        "different_results": {name: len(digests) for name, digests in seen.items()},
        "strict": strict,
    }


def _times(arm, step, tokens: int, rounds: int) -> dict:
    """Milliseconds a step of both arms, alternating which comes first; the ratio is of the same round.

    Of the ratio also a 95% interval of its median, "low" to "high". "rounds": how many there was time for.
    """
    from helpers.measure.clocks import median_interval, percentiles

    count, seconds = steps_a_sample(tokens), {name: [] for name in ARMS}
    began = time.perf_counter()
    for turn in tqdm(range(-2, rounds), desc=f"{tokens} tokens", leave=False):  # two rounds to warm up
        for name in ARMS if turn % 2 else ARMS[::-1]:
            with arm(name):
                step()  # untimed: what the other arm left in caches is not this one's
                _wait()
                start = time.perf_counter()
                for _ in range(count):
                    step()
                _wait()
                if turn >= 0:
                    seconds[name].append((time.perf_counter() - start) / count)
        if turn >= 0 and time.perf_counter() - began > LONGEST:
            break
    ratios = [a / b for a, b in zip(seconds["without"], seconds["with"], strict=True)]
    found = {name: {"ms": {k: v * 1e3 for k, v in percentiles(seconds[name]).items()}} for name in ARMS}
    low, high = median_interval(ratios)
    speedup = percentiles(ratios) | {"low": low, "high": high}
    return found | {"speedup": speedup, "rounds": len(ratios), "steps_a_round": count}


def _peak(step) -> int | None:
    import torch

    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _profile(step, steps: int = 2) -> dict:
    """GPU milliseconds of a step, those of dequantizing kernels, their launches, the largest other kernels.

    bitsandbytes adds the nested offset with a plain elementwise kernel, which is not counted as dequantizing.
    """
    rows, names = tiny_training.gpu_rows(step, steps), tiny_training.DEQUANTIZERS

    def milliseconds(some):
        return sum(row.self_device_time_total for row in some) / 1e3 / steps

    mine = {who: [row for row in rows if name in row.key] for who, name in names.items()}
    others = [row for row in rows if not any(name in row.key for name in names.values())]
    others.sort(key=lambda row: -row.self_device_time_total)
    return {
        "gpu_ms": milliseconds(rows),
        "dequantize_ms": sum(milliseconds(some) for some in mine.values()),
        "dequantize_launches": {who: sum(row.count for row in some) / steps for who, some in mine.items()},
        "remains": [
            {"kernel": row.key[:100], "ms": milliseconds([row]), "launches": row.count / steps}
            for row in others[:6]
        ],
    }


def _calls(switch, step) -> dict:
    """Per step: dequantizations the kernel did, those left to the library, products fused by bitsandbytes."""
    before = switch.counts()
    step()
    after = switch.counts()
    return {
        kind: sum(after[name][kind] - before[name][kind] for name in after)
        for kind in ("kernel", "library", "fused")
    }


def host_costs(device, size: int, rounds: int) -> dict[str, dict]:
    """Host microseconds of each piece between a packed weight (size x size, bf16) and a product, 128 rows."""
    import bitsandbytes as bnb
    import torch
    from torch.nn.functional import linear

    from helpers.nf4 import kernel as nf4_kernel
    from helpers.nf4.integrate import use_nf4_kernel
    from helpers.oracle.layers import quantized_layer
    from helpers.measure.clocks import row, time_interleaved

    inner = 50 if torch.cuda.is_available() else 1
    layer = quantized_layer(size, size, torch.bfloat16, device=device)
    weight, state = layer.weight, layer.weight.quant_state
    x = torch.randn(1, 128, size, device=device, dtype=torch.bfloat16)
    graded, g = x.clone().requires_grad_(), torch.randn_like(x)
    dense, decode = bnb.functional.dequantize_4bit(weight, state), nf4_kernel._your_dequantize_nf4

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a + 0

        @staticmethod
        def backward(ctx, grad):
            return grad

    base_apply = super(torch.autograd.Function, Identity).apply

    def plain():
        with torch._C.DisableTorchFunctionSubclass():
            return weight.data

    def both_ways():
        torch.autograd.grad(bnb.matmul_4bit(graded, weight, quant_state=state), graded, g)

    pieces = {
        "the product alone": lambda: linear(x, dense),
        "the kernel alone": lambda: decode(weight, state),
        "view of a Params4bit": lambda: weight.view(-1, 1),
        "the same bytes as a plain tensor": plain,
        "autograd Function.apply": lambda: Identity.apply(graded),
        "its base apply": lambda: base_apply(graded),
        "PEFT's clone of the result": graded.clone,
    }
    calls = {
        "dequantize_4bit": lambda: bnb.functional.dequantize_4bit(weight, state),
        "matmul_4bit": lambda: bnb.matmul_4bit(graded, weight, quant_state=state),
        "matmul_4bit and its backward": both_ways,
        "Linear4bit.forward": lambda: layer(graded),
    }
    found = {name: row(s) for name, s in time_interleaved(pieces, rounds=rounds, inner=inner).items()}
    times = {arm: {name: [] for name in calls} for arm in ARMS}
    for _ in range(rounds):
        for arm in ARMS:
            switch = use_nf4_kernel("bitsandbytes", quiet=True) if arm == "with" else contextlib.nullcontext()
            with switch:
                for name, s in time_interleaved(calls, rounds=1, inner=inner).items():
                    times[arm][name] += s
    for name in calls:
        found |= {f"{name}, {arm} the kernel": row(times[arm][name]) for arm in ARMS}
    return found


def line(library: str, found: dict) -> str:
    """One row of the table."""
    ms = {arm: found[arm]["ms"]["p50"] for arm in ARMS}
    speed, calls = found["speedup"], found["calls"]
    share = {arm: found[arm]["dequantize_ms"] / (found[arm]["gpu_ms"] or 1) for arm in ARMS}
    total = calls["kernel"] + calls["library"]
    return (
        f"{library:8} {found['tokens']:5} tokens  {ms['without']:8.2f} -> {ms['with']:8.2f} ms  "
        f"{speed['p50']:.3f}x ({speed['low']:.3f} to {speed['high']:.3f})  "
        f"dequantizing {share['without']:.0%} -> {share['with']:.0%} of GPU time  "
        f"GPU {found['without']['gpu_ms']:.2f} -> {found['with']['gpu_ms']:.2f} ms  "
        f"caught {calls['kernel']} of {total}  same bits: {found['same_bits']}"
        + ("" if found["repeatable"] else " (not repeatable without the kernel either)")
    )


def table(data: dict) -> str:
    """The whole result as text."""
    if "not_measured" in data:
        return f"not measured ({data['not_measured']})"
    lines = []
    for library, found in data["libraries"].items():
        if "failed" in found:
            lines.append(f"{library}: failed: {found['failed']}")
            continue
        lines += [line(library, size) for size in found["sizes"]]
        for name, piece in found.get("host", {}).items():
            lines.append(f"  host {piece['p50']:7.2f} us  {name}")
    return "\n".join(lines)


def measure(only=LIBRARIES, quick: bool = False) -> dict:
    """Both libraries (or `only` those), each in a new process on the same model."""
    if problem := environment.no_gpu() or environment.old_gpu():
        return {"not_measured": problem}
    data = {"quick": quick, "layers": LAYERS, "rank": RANK, "model": tiny_models.LLAMA3_8B, "libraries": {}}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        _run(["--make", folder], folder)
        data["make_seconds"] = time.perf_counter() - start
        for library in only:
            out = Path(folder, f"{library}.json")
            start = time.perf_counter()
            command = ["--worker", library, "--folder", folder, "--json", str(out)]
            try:
                _run(command + ["--quick"] * quick, folder)
                data["libraries"][library] = json.loads(out.read_text(encoding="utf-8"))
            except (subprocess.SubprocessError, OSError) as error:
                data["libraries"][library] = {"failed": str(error)}
            data["libraries"][library]["seconds"] = time.perf_counter() - start
    return data


def _run(arguments: list[str], folder: str) -> None:
    """This module in a new process, working in `folder` (Unsloth writes generated modules there)."""
    path = os.pathsep.join(filter(None, (str(environment.ROOT), os.environ.get("PYTHONPATH"))))
    variables = os.environ | tiny_training.OFFLINE | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "helpers.training.train_bench", *arguments]
    subprocess.run(command, cwd=folder, env=variables, check=True, timeout=400)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two sizes, fewer rounds; no result file")
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--json", help="write the result here, not to results/<gpu>/training.json")
    parser.add_argument("--worker", choices=LIBRARIES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--make", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.make:
        tiny_models.make(args.make, device="cuda", num_hidden_layers=LAYERS, **tiny_models.LLAMA3_8B)
        return 0
    if args.worker:
        sizes, rounds = (QUICK_SIZES, QUICK_ROUNDS) if args.quick else (SIZES, ROUNDS)
        data = worker(args.worker, args.folder, sizes, rounds)
        Path(args.json).write_text(json.dumps(data), encoding="utf-8")
        return 0
    from helpers.record import results

    data = measure(args.only, args.quick)
    print(table(data))
    if args.json or not (args.quick or "not_measured" in data):
        target = Path(args.json).resolve() if args.json else None
        written = results.write(target.stem if target else NAME, data, target.parent if target else None)
        print(f"written to {written}")
    return int(any("failed" in found for found in data.get("libraries", {}).values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
