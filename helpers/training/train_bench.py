"""Times of whole QLoRA training steps, of prefill, dequantizing a model, merging an adapter.

`python -m helpers train-bench`: Llama-3 8B's layers, four of them, with a 32k-vocabulary head, for PEFT with
bitsandbytes and for Unsloth, each in a process of its own (Unsloth changes the others for good). With and
without the kernel alternate round by round. The result is written to results/<gpu>/training.json.
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
PROMPTS = (2048, 8192)  # tokens of one prefill
ARMS = ("without", "with")
ROUNDS = 60  # on a shared host one round's ratio may be 15% off
WARM_UP = 2  # rounds that are not timed
LONGEST = 45  # seconds; a slower card stops after the round that reaches them, or it would never end
REPEATS = 5  # steps of each arm that are compared bit for bit


def steps_per_sample(tokens: int) -> int:
    """Short steps are timed several at once, so that one sample is some 50 ms at least."""
    return 4 if tokens <= 512 else 2 if tokens <= 2048 else 1


def worker(library: str, folder: str, sizes=SIZES, prompts=PROMPTS, rounds: int = ROUNDS) -> dict:
    """All measurements of one library, in this process. Without a GPU the times mean nothing."""
    runs.repeat_cublas()  # read when cuBLAS starts
    if library == "unsloth":
        import unsloth  # noqa: F401  it asks to come first
    import torch

    from helpers.nf4.integrate import use_nf4_kernel

    def arm(name):
        if name == "without":
            return contextlib.nullcontext()
        return use_nf4_kernel(library, "bitsandbytes", quiet=True)

    setup = runs.Setup(folder, library, rank=RANK, context=max(2048, *prompts))
    model = runs.adapted(setup, attention="sdpa")
    adapters = [p for p in model.parameters() if p.requires_grad]
    device = adapters[0].device
    optimizer = torch.optim.AdamW(adapters, lr=1e-5, fused=True)
    # PEFT as trl sets QLoRA up: adapters in bf16. Unsloth keeps them in fp32 and trains under autocast.
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=library == "unsloth")

    def tokens(rows, length):
        generator = torch.Generator().manual_seed(length)
        return torch.randint(3, model.config.vocab_size, (rows, length), generator=generator).to(device)

    data = {"sizes": [], "operations": []}
    for rows, length in sizes:
        ids = tokens(rows, length)

        def backward(ids=ids):
            with autocast:
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss

        def step(backward=backward):
            backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        def warm(step=step):
            step()  # untimed: what the other arm left in caches is not this one's
            return step

        size = {"rows": rows, "length": length, "tokens": rows * length}
        size |= sameness(arm, backward, optimizer, adapters)
        size |= times(arm, warm, rounds, steps_per_sample(rows * length))
        for name in ARMS:
            with arm(name):
                size[name] = {"ms": size[name], "peak_bytes": _peak(step), **_profile(step)}
        with arm("with") as switch:
            step()
            size["calls"] = _calls(switch)
        data["sizes"].append(size)

    def prefill(ids):
        with torch.no_grad(), autocast:
            return [model(input_ids=ids).logits]

    model.train(device.type == "cpu")  # eval mode there may repack weights for bitsandbytes' CPU product
    todo = []
    for length in prompts:
        ids = tokens(1, length)
        todo.append((f"prefill, {length} tokens", lambda ids=ids: lambda: prefill(ids), rounds // 3))
    if library == "peft":
        todo += [
            ("dequantize the model", lambda: copy.deepcopy(model).unload().dequantize, rounds // 6),
            ("merge the adapter", lambda: copy.deepcopy(model).merge_and_unload, rounds // 6),
        ]
    for name, prepare, count in todo:
        data["operations"].append(operation(name, arm, prepare, max(1, count)))
    return data


def operation(name: str, arm, prepare, rounds: int) -> dict:
    """Times, bits and calls of an operation on a whole model. prepare() -> what is timed and done once."""
    try:
        digests, calls = set(), {}
        for each in ARMS:
            with arm(each) as switch:
                run = prepare()
                result = run()
                digests.add(runs.digest(result if isinstance(result, list) else result.parameters()))
                calls = _calls(switch) if switch else {}
                del run, result
        return {"name": name, **times(arm, prepare, rounds), "same_bits": len(digests) == 1, "calls": calls}
    except Exception as error:  # the others are no worse for it
        return {"name": name, "failed": f"{type(error).__name__}: {error}"}


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


def times(arm, prepare, rounds: int, count: int = 1) -> dict:
    """Milliseconds of what `prepare()` returns, in both arms, alternating which comes first.

    A round times `count` runs of it. The ratio is of the same round, with a 95% interval of its median, "low"
    to "high". "rounds": how many there was time for.
    """
    from helpers.measure.clocks import median_interval, percentiles, synchronize

    seconds = {name: [] for name in ARMS}
    began = time.perf_counter()
    for turn in tqdm(range(-WARM_UP, rounds), leave=False):
        for name in ARMS if turn % 2 else ARMS[::-1]:
            with arm(name):
                run = prepare()
                synchronize()
                start = time.perf_counter()
                for _ in range(count):
                    run()
                synchronize()
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
    others = sorted(runs.gpu_rows(step, steps), key=lambda row: -row.self_device_time_total)

    def milliseconds(*rows):
        return sum(row.self_device_time_total for row in rows) / 1e3 / steps

    found = {"gpu_ms": milliseconds(*others), "dequantize_ms": 0.0, "dequantize_launches": {}}
    for library, name in runs.DEQUANTIZERS.items():
        rows = [row for row in others if name in row.key]
        others = [row for row in others if name not in row.key]
        found["dequantize_ms"] += milliseconds(*rows)
        found["dequantize_launches"][library] = sum(row.count for row in rows) / steps
    found["remains"] = [
        {"kernel": row.key[:100], "ms": milliseconds(row), "launches": row.count / steps}
        for row in others[:6]
    ]
    return found


def _calls(switch) -> dict[str, int]:
    """Dequantizations by the kernel, those left to the library, products fused by bitsandbytes."""
    counts = switch.counts().values()
    return {kind: sum(site[kind] for site in counts) for kind in ("kernel", "library", "fused")}


def table(data: results.Training) -> str:
    """The whole result as text."""
    if data.not_measured:
        return f"not measured ({data.not_measured})"
    lines = []
    for name, library in data.libraries.items():
        rows = [(f"{size.tokens} tokens", size.without.ms, size.with_.ms, size) for size in library.sizes]
        rows += [(row.name, row.without, row.with_, row) for row in library.operations if not row.failed]
        for what, without, with_, row in rows:
            speed, calls = row.speedup, row.calls
            same = row.same_bits if getattr(row, "repeatable", True) else "not repeatable without it either"
            lines.append(
                f"{name:8} {what:22} {without.p50:8.2f} -> {with_.p50:8.2f} ms  "
                f"{speed.p50:.3f}x ({speed.low:.3f} to {speed.high:.3f})  "
                f"caught {calls['kernel']} of {calls['kernel'] + calls['library']}  same bits: {same}"
            )
        failed = [(f"{name} {row.name}", row.failed) for row in library.operations]
        lines += [f"{what}: failed: {why}" for what, why in [*failed, (name, library.failed)] if why]
    return "\n".join(lines)


def measure() -> dict:
    """Both libraries, each in a new process on the same model."""
    if problem := environment.no_gpu() or environment.old_gpu():
        return {"not_measured": problem}
    data = {"layers": LAYERS, "rank": RANK, "model": tiny_models.LLAMA3_8B, "libraries": {}}
    with tempfile.TemporaryDirectory() as folder:

        def run(work):  # in that folder: Unsloth writes generated modules where it runs
            command = ["-m", "helpers", "train-bench", "--worker", work]
            child.python(command, folder=folder, variables=runs.VARIABLES, timeout=600)

        run("make")
        for library in LIBRARIES:
            print(f"{library} ...", flush=True)
            try:
                run(library)
                data["libraries"][library] = json.loads(Path(folder, f"{library}.json").read_text("utf-8"))
            except child.ChildFailed as error:
                data["libraries"][library] = {"failed": str(error)}
    return data


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the result here, not to results/<gpu>/training.json")
    parser.add_argument("--worker", choices=("make", *LIBRARIES), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker == "make":
        tiny_models.make(".", device="cuda", num_hidden_layers=LAYERS, **tiny_models.LLAMA3_8B)
    elif args.worker:
        data = worker(args.worker, str(Path.cwd()))
        Path(f"{args.worker}.json").write_text(json.dumps(data), encoding="utf-8")
    if args.worker:
        return 0
    data = msgspec.convert(measure(), results.Training)
    print(table(data))
    if args.json or not data.not_measured:
        target = Path(args.json or NAME).resolve()
        folder = target.parent if args.json else None
        print(f"written to {results.write(target.stem, data, folder, results.Training)}")
    return int(any(library.failed for library in data.libraries.values()))
