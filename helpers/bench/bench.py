"""python -m helpers bench: time the kernel against every library, section by section.

All contenders take turns in one process, and none is timed before its result is bit-identical to the plain
torch reference. A section is printed and stored under results/<card>/ as soon as it is done, so a run that is
cut short keeps what it has. Without a GPU results are compared at small sizes, and no time is shown.
"""

import argparse
import dataclasses
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import pandas
import torch

from helpers import machine
from helpers.bench import clocks, compiled, contenders, experts, gpu, host, training
from helpers.bench.contenders import why
from helpers.results import store
from helpers.results.store import Row


@dataclasses.dataclass(frozen=True)
class Scope:
    """What a run covers. Sizes are in elements."""

    # 2**22, 2**24, and 58,720,256 are the puzzle's weights, 2**20 and 2**24 1K and 4K square.
    sizes: tuple[int, ...] = (
        *(2**16, 2**18, 2**20, 2**22, 2**23, 2**24, 2**25),
        *(58_720_256, 117_440_512, 234_881_024, 603_979_776),
    )
    settings: tuple = ((2**20, "bf16"), (2**24, "bf16"), (2**24, "fp16"), (234_881_024, "bf16"))
    # (experts, out, in): gate and up, and down of Qwen3 30B-A3B; gate and up of Qwen3.5 35B-A3B, gpt-oss 20B
    experts: tuple = ((128, 1536, 2048), (128, 2048, 768), (256, 1024, 2048), (32, 5760, 2880))
    active: tuple[int, ...] = (4, 8, 32)  # experts of a stack
    layer: tuple[int, int] = host.LAYER  # of times on the host, and of compiled code
    tokens: tuple[int, ...] = (64, 512, 2048)
    weights: int = 24  # under one torch.compile
    rounds: int = 20
    inner: int = 100  # calls a round of host times; far below the launch queue's depth


FULL = Scope()
ON_CPU = Scope(
    sizes=(2**10, 2**12),
    settings=((2**10, "bf16"),),
    experts=((2, 64, 256),),
    active=(1,),
    layer=(128, 64),
    tokens=(8,),
    weights=2,
    rounds=2,
    inner=1,
)

SECTIONS: dict[str, Callable[[Scope, list[str]], Iterator[Row]]] = {
    "gpu_time": gpu.time_sizes,
    "settings": gpu.time_settings,
    "host_time": host.time_host,
    "compiled": compiled.time_compiled,
    "experts": experts.time_experts,
    "training": training.time_training,
}
DEFAULT = tuple(name for name in SECTIONS if name != "training")  # which trains for minutes


def text(rows: list[Row]) -> str:
    """Return a table with a line for each row: median, lowest, highest. Without a GPU no time is shown."""
    if not clocks.ON_GPU:
        return "\n".join(f"{row.case:32} {row.contender:24} bit-identical, not timed" for row in rows)
    lines = [(row.case, row.contender, row.unit, row.median, row.low, row.high) for row in rows]
    frame = pandas.DataFrame(lines, columns=["case", "contender", "unit", "median", "low", "high"])
    return frame.to_string(index=False, float_format="{:.4g}".format)


def run_section(name: str, scope: Scope) -> tuple[list[Row], list[str]]:
    """Return a section's rows, as far as it comes, and what went wrong in it."""
    rows, problems = [], []
    try:
        for row in SECTIONS[name](scope, problems):
            rows.append(row)
    except Exception as error:
        traceback.print_exc()
        problems.append(why(error))
    utils = sys.modules.get("unsloth.kernels.utils")
    if getattr(utils, "_USE_NF4_KERNELS", True) is False:
        problems.append("unsloth_today: Unsloth gave up its fused kernel and took its classic path")
    if clocks.ON_GPU:
        torch.cuda.empty_cache()
    return rows, problems


def main(argv: list[str] | None = None) -> int:
    """Run, print and store the sections. Returns 1 if a contender was wrong or a section failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m helpers bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(SECTIONS),
        default=DEFAULT,
        metavar="SECTION",
        help=f"any of {', '.join(SECTIONS)}; by default all but training",
    )
    into = "folder under results/ in place of this card's, such as nvidia-h200-triton-3.9 for another Triton"
    parser.add_argument("--into", metavar="FOLDER", help=into)
    options = parser.parse_args(argv)
    if not clocks.ON_GPU:
        print(f"{machine.no_gpu()}\nResults are compared at small sizes; nothing is timed or stored.")
    for library, reason in contenders.missing().items():
        print(f"{library}: not measured (needs {reason})")
    failed = False
    for name in options.only:
        start = time.perf_counter()
        rows, problems = run_section(name, FULL if clocks.ON_GPU else ON_CPU)
        print(f"\n{name}, {time.perf_counter() - start:.0f} s\n{text(rows)}")
        for problem in problems:
            print("FAILED", problem)
        failed |= bool(problems)
        if rows and clocks.ON_GPU:
            path = store.write(name, rows, options.into, note="; ".join(problems))
            print(f"stored in {path}", flush=True)
    return int(failed)
