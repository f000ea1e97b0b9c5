"""The kernel inside real work: QLoRA steps, prefill, dequantizing a model, merging an adapter.

`python -m helpers train-bench`: Llama-3 8B's layers, four of them, with a 32k-vocabulary head, for PEFT with
bitsandbytes and for Unsloth, each in a process of its own (Unsloth changes the others for good). With and
without the kernel alternate round by round. A full run is written to results/<gpu>/training.json.
"""

import argparse
import contextlib
import copy
import json
import tempfile
import time
from pathlib import Path

import msgspec
from tqdm import tqdm

from helpers.machine import child, environment
from helpers.record import results
from helpers.training import runs, tiny_models

NAME = "training"  # of the result file
LIBRARIES = ("peft", "unsloth")
LAYERS, RANK = 4, 16
SIZES = ((1, 128), (1, 512), (1, 2048), (4, 2048))  # sequences, tokens each
QUICK_SIZES = ((1, 128), (1, 2048))
PROMPTS, QUICK_PROMPTS = (2048, 8192), (2048,)  # tokens of one prefill
ARMS = ("without", "with")
ROUNDS, QUICK_ROUNDS = 60, 6  # on a shared host one round's ratio may be 15% off
LONGEST = 45  # seconds; a slower card stops after the round that reaches them, or it would never end
REPEATS = 5  # steps of each arm that are compared bit for bit


def steps_per_sample(tokens: int) -> int:
    """Short steps are timed several at once, so that one sample is some 50 ms at least."""
    return 4 if tokens <= 512 else 2 if tokens <= 2048 else 1


def worker(library: str, folder: str, sizes=SIZES, prompts=PROMPTS, rounds: int = ROUNDS) -> dict:
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
    setup = runs.Setup(folder, library, rank=RANK, context=max(2048, *prompts))
    model = runs.adapted(setup, attention="sdpa")
    adapters = [p for p in model.parameters() if p.requires_grad]
    device = adapters[0].device
    optimizer = torch.optim.AdamW(adapters, lr=1e-5, fused=True)
    # PEFT as trl sets QLoRA up: adapters in bf16. Unsloth keeps them in fp32 and trains under autocast.
    amp = library == "unsloth"
    data = {"load_seconds": time.perf_counter() - start, "autocast": amp, "sizes": []}

    def tokens(rows, length):
        generator = torch.Generator().manual_seed(length)
        return torch.randint(3, model.config.vocab_size, (rows, length), generator=generator).to(device)

    for rows, length in sizes:
        ids = tokens(rows, length)

        def backward(ids=ids):
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss

        def step(backward=backward):
            backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        size = {"rows": rows, "length": length, "tokens": rows * length}
        size |= sameness(arm, backward, optimizer, adapters)
        size |= times(arm, step, rounds, steps_per_sample(rows * length))
        for name in ARMS:
            with arm(name) as switch:
                size[name] = {"ms": size[name], "peak_bytes": _peak(step), **_profile(step)}
                if switch:
                    size["calls"] = _calls(switch, step)
        data["sizes"].append(size)
        print(line(library, msgspec.convert(size, results.TrainingSize)), flush=True)

    def prefill(ids):
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=amp):
            return [model(input_ids=ids).logits]

    def clone(change):
        """A changed copy of the model, outside of the clock."""
        return change(copy.deepcopy(model))

    model.train(device.type == "cpu")  # eval mode there may repack weights for bitsandbytes' CPU product
    todo = []
    for length in prompts:
        ids = tokens(1, length)
        todo.append((f"prefill, {length} tokens", lambda ids=ids: lambda: prefill(ids), rounds // 3))
    if library == "peft":
        todo += [
            ("dequantize the model", lambda: clone(lambda m: m.unload()).dequantize, rounds // 6),
            ("merge the adapter", lambda: clone(lambda m: m).merge_and_unload, rounds // 6),
        ]
    data["operations"] = [operation(name, arm, prepare, max(1, count)) for name, prepare, count in todo]
    for row in data["operations"]:
        print(operation_line(library, msgspec.convert(row, results.Operation)), flush=True)
    return data


def operation(name: str, arm, prepare, rounds: int) -> dict:
    """Times, bits and calls of an operation on a whole model. prepare() -> what is timed and done once."""
    try:
        digests = {}
        for each in ARMS:
            with arm(each) as switch:
                result, run = [], prepare()
                calls = _calls(switch, lambda run=run, result=result: result.append(run()))
                tensors = result[0] if isinstance(result[0], list) else result[0].parameters()
                digests[each] = runs.digest(tensors)
                del result, run, tensors
        row = times(arm, prepare, rounds, prepared=True)
        return {"name": name, **row, "same_bits": digests["with"] == digests["without"], "calls": calls}
    except Exception as error:  # the others are no worse for it
        return {"name": name, "failed": f"{type(error).__name__}: {error}"}


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def sameness(arm, backward, optimizer, adapters) -> dict:
    """Do loss and LoRA gradients of a step have the same bits with and without the kernel?

    With deterministic algorithms only. Where an operation has none ("strict" is False then), attention's
    backward may vary, not every time: each step is repeated, and the different results of an arm are counted.
    """

    def digests(strict):
        seen = {name: set() for name in ARMS}
        for name in ARMS * REPEATS:
            with arm(name), runs.deterministic(strict):
                loss = backward()
                seen[name].add(runs.digest([loss.float(), *(p.grad for p in adapters)]))
                optimizer.zero_grad(set_to_none=True)
        return seen

    strict = True
    try:
        seen = digests(strict)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        optimizer.zero_grad(set_to_none=True)
        strict = False
        seen = digests(strict)
    return {
        "same_bits": seen["with"] == seen["without"],
        "repeatable": len(seen["without"]) == 1,
        "different_results": {name: len(results) for name, results in seen.items()},
        "strict": strict,
    }


def times(arm, step, rounds: int, count: int = 1, prepared: bool = False) -> dict:
    """Milliseconds of `count` steps per round of both arms, alternating which comes first.

    The ratio is of the same round, with a 95% interval of its median, "low" to "high". "rounds": how many
    there was time for. prepared: `step()` is not timed, but makes what is: a step that can be taken once.
    """
    from helpers.measure.clocks import median_interval, percentiles

    seconds = {name: [] for name in ARMS}
    began = time.perf_counter()
    for turn in tqdm(range(-2, rounds), leave=False):  # two rounds to warm up
        for name in ARMS if turn % 2 else ARMS[::-1]:
            with arm(name):
                run = step()  # untimed: what the other arm left in caches is not this one's
                run = run if prepared else step
                _wait()
                start = time.perf_counter()
                for _ in range(count):
                    run()
                _wait()
                if turn >= 0:
                    seconds[name].append((time.perf_counter() - start) / count)
                del run
        if turn >= 0 and time.perf_counter() - began > LONGEST:
            break
    ratios = [a / b for a, b in zip(seconds["without"], seconds["with"], strict=True)]
    low, high = median_interval(ratios)
    row = {name: percentiles([1e3 * value for value in seconds[name]]) for name in ARMS}
    row["speedup"] = percentiles(ratios) | {"low": low, "high": high}
    return row | {"rounds": len(ratios), "steps_a_round": count}


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
    rows, names = runs.gpu_rows(step, steps), runs.DEQUANTIZERS

    def milliseconds(some):
        return sum(row.self_device_time_total for row in some) / 1e3 / steps

    dequantizing = {library: [row for row in rows if name in row.key] for library, name in names.items()}
    others = [row for row in rows if not any(name in row.key for name in names.values())]
    others.sort(key=lambda row: -row.self_device_time_total)
    return {
        "gpu_ms": milliseconds(rows),
        "dequantize_ms": sum(milliseconds(some) for some in dequantizing.values()),
        "dequantize_launches": {
            library: sum(row.count for row in some) / steps for library, some in dequantizing.items()
        },
        "remains": [
            {"kernel": row.key[:100], "ms": milliseconds([row]), "launches": row.count / steps}
            for row in others[:6]
        ],
    }


def _calls(switch, step) -> dict[str, int]:
    """Per step: dequantizations the kernel did, those left to the library, products fused by bitsandbytes."""
    before = switch.counts() if switch else {}
    step()
    after = switch.counts() if switch else {}
    return {
        kind: sum(after[name][kind] - before[name][kind] for name in after)
        for kind in ("kernel", "library", "fused")
    }


def line(library: str, size: results.TrainingSize) -> str:
    """One size of a library's steps."""
    arms, speed, calls = (size.without, size.with_), size.speedup, size.calls
    share = " -> ".join(f"{arm.dequantize_ms / (arm.gpu_ms or 1):.0%}" for arm in arms)
    return (
        f"{library:8} {size.tokens:5} tokens  {arms[0].ms.p50:8.2f} -> {arms[1].ms.p50:8.2f} ms  "
        f"{speed.p50:.3f}x ({speed.low:.3f} to {speed.high:.3f})  "
        f"dequantizing {share} of GPU time  GPU {arms[0].gpu_ms:.2f} -> {arms[1].gpu_ms:.2f} ms  "
        f"caught {calls['kernel']} of {calls['kernel'] + calls['library']}  same bits: {size.same_bits}"
        + ("" if size.repeatable else " (not repeatable without the kernel either)")
    )


def operation_line(library: str, row: results.Operation) -> str:
    """One operation on a whole model."""
    if row.failed:
        return f"{library:8} {row.name}: failed: {row.failed}"
    speed, calls = row.speedup, row.calls
    return (
        f"{library:8} {row.name:22}  {row.without.p50:8.2f} -> {row.with_.p50:8.2f} ms  "
        f"{speed.p50:.3f}x ({speed.low:.3f} to {speed.high:.3f})  "
        f"caught {calls['kernel']} of {calls['kernel'] + calls['library']}  same bits: {row.same_bits}"
    )


def table(data: results.Training) -> str:
    """The whole result as text."""
    if data.not_measured:
        return f"not measured ({data.not_measured})"
    lines = []
    for name, library in data.libraries.items():
        if library.failed:
            lines.append(f"{name}: failed: {library.failed}")
        lines += [line(name, size) for size in library.sizes]
        lines += [operation_line(name, row) for row in library.operations]
    return "\n".join(lines)


def measure(only=LIBRARIES, quick: bool = False) -> dict:
    """Both libraries (or `only` those), each in a new process on the same model."""
    if problem := environment.no_gpu() or environment.old_gpu():
        return {"not_measured": problem}
    data = {"quick": quick, "layers": LAYERS, "rank": RANK, "model": tiny_models.LLAMA3_8B, "libraries": {}}

    def run(folder, *arguments):  # in that folder: Unsloth writes generated modules where it runs
        command = ["-m", "helpers", "train-bench", "--folder", folder, *arguments]
        start = time.perf_counter()
        child.python(command, folder=folder, variables=runs.VARIABLES, timeout=600)
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        data["make_seconds"] = run(folder, "--make")
        for library in only:
            print(f"{library} ...", flush=True)
            out = Path(folder, f"{library}.json")
            try:
                seconds = run(folder, "--worker", library, "--json", str(out), *["--quick"] * quick)
                data["libraries"][library] = json.loads(out.read_text(encoding="utf-8"))
                data["libraries"][library]["seconds"] = seconds
            except (child.ChildFailed, OSError) as error:
                data["libraries"][library] = {"failed": str(error)}
    return data


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds; no result file")
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--json", help="write the result here, not to results/<gpu>/training.json")
    for name in ("--worker", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.make:
        tiny_models.make(args.folder, device="cuda", num_hidden_layers=LAYERS, **tiny_models.LLAMA3_8B)
        return 0
    if args.worker:
        full = (SIZES, PROMPTS, ROUNDS)
        todo = (QUICK_SIZES, QUICK_PROMPTS, QUICK_ROUNDS) if args.quick else full
        Path(args.json).write_text(json.dumps(worker(args.worker, args.folder, *todo)), encoding="utf-8")
        return 0
    data = msgspec.convert(measure(args.only, args.quick), results.Training)
    print(table(data))
    if args.json or not (args.quick or data.not_measured):
        target = Path(args.json or NAME).resolve()
        folder = target.parent if args.json else None
        print(f"written to {results.write(target.stem, data, folder, results.Training)}")
    return int(any(library.failed for library in data.libraries.values()))
