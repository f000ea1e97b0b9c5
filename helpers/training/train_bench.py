"""Times of whole QLoRA training steps, of prefill, dequantizing a model, merging an adapter.

`python -m helpers train-bench`: Llama-3 8B's layers, four of them, with a 32k-vocabulary head, for PEFT with
bitsandbytes and for Unsloth, each in a process of its own (Unsloth changes the others for good). With and
without the kernel alternate round by round. The result is written to results/<gpu>/training.json.
"""

import argparse
import contextlib
import copy
import functools
import json
import tempfile
import time
from pathlib import Path

from helpers import machine
from helpers.results import store as results, tables
from helpers.training import runs, tiny_models

LIBRARIES = {"peft": "PEFT + bitsandbytes", "unsloth": "Unsloth"}
LAYERS, RANK = 4, 16
# Sequences, tokens each, and steps timed at once, so that one sample is some 50 ms at least.
SIZES = ((1, 128, 4), (1, 512, 4), (1, 2048, 2), (4, 2048, 1))
PROMPTS = (2048, 8192)  # tokens of one prefill
ARMS = ("without", "with")
ROUNDS = 60  # on a shared host one round's ratio may be 15% off
WARM_UP = 2  # rounds that are not timed
LONGEST = 12  # seconds for each size or operation, with its warm-up: the round that reaches them is the last
REPEATS = 5  # steps of each arm that are compared bit for bit


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

    model = runs.adapted(folder, library, "bfloat16", RANK, max(2048, *prompts), attention="sdpa")
    adapters = [p for p in model.parameters() if p.requires_grad]
    device = adapters[0].device
    optimizer = torch.optim.AdamW(adapters, lr=1e-5, fused=True)
    # PEFT as trl sets QLoRA up: adapters in bf16. Unsloth keeps them in fp32 and trains under autocast.
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=library == "unsloth")

    def tokens(rows, length):
        generator = torch.Generator().manual_seed(length)
        return torch.randint(3, model.config.vocab_size, (rows, length), generator=generator).to(device)

    def backward(ids):
        with autocast:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    def step(ids):
        backward(ids)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def warm(ids):
        step(ids)  # untimed: what the other arm left in caches is not this one's
        return functools.partial(step, ids)

    def prompt(length):
        ids = tokens(1, length)

        def prefill():
            with torch.no_grad(), autocast:
                return [model(input_ids=ids).logits]

        return prefill

    data = {"sizes": [], "operations": []}
    for rows, length, count in sizes:
        ids = tokens(rows, length)
        size = {"rows": rows, "length": length, "tokens": rows * length}
        size |= sameness(arm, functools.partial(backward, ids), optimizer, adapters)
        size |= times(arm, functools.partial(warm, ids), rounds, count)
        for name in ARMS:
            with arm(name) as switch:
                step(ids)
                calls = _calls(switch)
                size[name] = {"ms": size[name], **_profile(functools.partial(step, ids))}
        data["sizes"].append(size | {"calls": calls})

    model.train(device.type == "cpu")  # eval mode there may repack weights for bitsandbytes' CPU product
    todo = [(f"prefill, {length} tokens", functools.partial(prompt, length), 3) for length in prompts]
    if library == "peft":
        todo += [
            ("dequantize the model", lambda: copy.deepcopy(model).unload().dequantize, 6),
            ("merge the adapter", lambda: copy.deepcopy(model).merge_and_unload, 6),
        ]
    for name, prepare, fewer in todo:
        data["operations"].append(operation(name, arm, prepare, max(1, rounds // fewer)))
    return data


def operation(name: str, arm, prepare, rounds: int) -> dict:
    """Times, bits and calls of an operation on a whole model. prepare() -> what is timed and done once."""
    try:
        digests = set()
        for each in ARMS:
            with arm(each) as switch:
                run = prepare()
                result = run()
                digests.add(runs.digest(result if isinstance(result, list) else result.parameters()))
                calls = _calls(switch)
                del run, result
        return {"name": name, **times(arm, prepare, rounds), "same_bits": len(digests) == 1, "calls": calls}
    except Exception as error:  # the others are no worse for it
        return {"name": name, "failed": f"{type(error).__name__}: {error}"}


def sameness(arm, backward, optimizer, adapters) -> dict:
    """Do loss and LoRA gradients of a step have the same bits with and without the kernel?

    With deterministic algorithms only. Where an operation has none ("strict" is False then), attention's
    backward may vary, not every time: each step is repeated, and the different results of an arm are counted.
    """

    for strict in (True, False):
        seen = {name: set() for name in ARMS}
        try:
            for name in ARMS * REPEATS:
                with arm(name), runs.deterministic(strict):
                    loss = backward()
                    seen[name].add(runs.digest([loss.float(), *(p.grad for p in adapters)]))
                    optimizer.zero_grad(set_to_none=True)
            break
        except RuntimeError as error:
            if not strict or "deterministic" not in str(error):
                raise
            optimizer.zero_grad(set_to_none=True)
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
    from helpers.bench.clocks import median_interval, synchronize

    seconds = {name: [] for name in ARMS}
    began = time.perf_counter()
    for turn in range(-WARM_UP, rounds):
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
    row = {name: results.percentiles([1e3 * value for value in seconds[name]]) for name in ARMS}
    row["speedup"] = results.percentiles(ratios) | {"low": low, "high": high}
    return row | {"rounds": len(ratios), "steps_a_round": count}


def _profile(step, steps: int = 2) -> dict:
    """GPU milliseconds of a step, and those of dequantizing kernels.

    bitsandbytes adds the nested offset with a plain elementwise kernel, which is not counted as dequantizing.
    """
    from helpers.puzzle.checks import gpu_events

    decoding = tuple(runs.DEQUANTIZERS.values())
    events = [(name, 1e3 * seconds / steps) for name, seconds, _ in gpu_events(step, steps)]
    return {
        "gpu_ms": sum(ms for _, ms in events),
        "dequantize_ms": sum(ms for name, ms in events if any(kernel in name for kernel in decoding)),
    }


def _calls(switch) -> dict[str, int]:
    """Dequantizations by the kernel, those left to the library, products fused by bitsandbytes."""
    counts = switch.counts().values() if switch else ()
    return {kind: sum(site[kind] for site in counts) for kind in ("kernel", "library", "fused")}


def _cells(without: results.Spread, with_: results.Spread, row) -> list[str]:
    """Milliseconds of both arms, the speedup, what the kernel caught, and whether the bits were the same."""
    speed, calls, same = row.speedup, row.calls, "yes" if row.same_bits else "NO"
    if not getattr(row, "repeatable", True):
        same = "not repeatable without it"
    times = [f"{arm.p50:.1f}" for arm in (without, with_)]
    caught = f"{calls['kernel']} of {calls['kernel'] + calls['library']}"
    few = f", all of {row.rounds} rounds" if row.rounds < 6 else ""  # too few for 95%
    return [*times, f"{speed.p50:.3f} ({speed.low:.3f} to {speed.high:.3f}{few})", caught, same]


def steps(data: results.Training) -> tables.Table:
    """One row a library and number of tokens."""
    head = ["", "tokens per step", "ms without", "ms with", "speedup (95% interval)", "GPU time dequantizing"]
    rows = [[*head, "caught", "same bits"]]
    for library, measured in data.libraries.items():
        for size in measured.sizes:
            arms = (size.without, size.with_)
            *times, caught, same = _cells(*(arm.ms for arm in arms), size)
            shares = " -> ".join(f"{arm.dequantize_ms / arm.gpu_ms:.0%}" for arm in arms)
            rows.append([LIBRARIES[library], f"{size.tokens:,}", *times, shares, caught, same])
    return rows


def operations(data: results.Training) -> tables.Table:
    """What else a whole model goes through, with and without the kernel."""
    rows = [["with a whole model", "ms without", "with", "speedup (95% interval)", "caught", "same bits"]]
    for library, measured in data.libraries.items():
        for row in measured.operations:
            cells = ["failed", "", "", "", row.failed] if row.failed else _cells(row.without, row.with_, row)
            rows.append([f"{LIBRARIES[library]}: {row.name}", *cells])
    return rows


def measure() -> Path:
    """Both libraries, each in a new process on the same model; stored after each."""
    data = {"layers": LAYERS, "rank": RANK, "model": tiny_models.LLAMA3_8B, "libraries": {}}
    with tempfile.TemporaryDirectory() as folder:

        def run(work):  # in that folder: Unsloth writes generated modules where it runs
            command = ["-m", "helpers", "train-bench", "--worker", work]
            machine.python(command, folder=folder, variables=runs.VARIABLES, timeout=600)

        run("make")
        for library in LIBRARIES:
            print(f"{library} ...", flush=True)
            try:
                run(library)
                data["libraries"][library] = json.loads(Path(folder, f"{library}.json").read_text("utf-8"))
            except machine.ChildFailed as error:
                print(f"{library}: failed: {error}")
                data["libraries"][library] = {"failed": str(error)}
            path = results.write("training", data)
    return path


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", choices=("make", *LIBRARIES), help=argparse.SUPPRESS)
    work = parser.parse_args(argv).worker
    if work == "make":
        tiny_models.make(".", device="cuda", num_hidden_layers=LAYERS, **tiny_models.LLAMA3_8B)
    elif work:
        Path(f"{work}.json").write_text(json.dumps(worker(work, str(Path.cwd()))), encoding="utf-8")
    elif problem := machine.no_gpu() or machine.old_gpu():
        print(f"not measured ({problem})")
    else:
        path = measure()
        data = results.read(path.name, path.parent).data
        print(tables.text(steps(data)), tables.text(operations(data)), f"written: {path}", sep="\n\n")
        return int(any(library.failed for library in data.libraries.values()))
    return 0
