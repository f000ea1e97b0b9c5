"""python -m helpers COMMAND: every tool of this repository; each has its own --help."""

import importlib
import sys

from helpers import machine

COMMANDS = {
    "doctor": ("bench.doctor", "check this machine: versions, packages, correctness; what to fix"),
    "run": ("puzzle.run", "execute the notebook, print the score and where the files are"),
    "sync": ("puzzle.sync", "write the modules' sections into the notebook's cells, or back"),
    "score": ("puzzle.score", "the marking table from evidence on this machine"),
    "bench": ("bench.benchmark", "time the kernel against the baselines"),
    "sass": ("t4.sass", "cross-compile for seven generations, count, and read the order of loads"),
    "foreign-ptx": ("t4.foreign_ptx", "run code for a T4 and other cards on this GPU, compare every bit"),
    "train-bench": ("training.train_bench", "the kernel in QLoRA steps, prefill, loading and merging"),
    "several-gpus": ("training.several_gpus", "QLoRA under DDP and FSDP, on every GPU here"),
    "fuzz": ("stress.fuzz", "random layouts, sizes, values and settings against the oracle"),
    "soak": ("stress.soak", "millions of launches: memory, time and bits must not drift"),
    "mutants": ("stress.mutants", "bugs seeded into the kernel, each of which the tests must catch"),
    "libraries": ("stress.libraries", "what each library makes of every layout, odd and broken ones too"),
    "sanitizer": ("stress.sanitizer", "compute-sanitizer over the kernel's edge cases"),
    "bitsandbytes-tests": ("stress.bitsandbytes_tests", "bitsandbytes' own 4-bit tests on this kernel"),
    "draw": ("results.draw", "draw README, docs and the notebook from the result files, or check them"),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print("usage: python -m helpers COMMAND [--help]\n")
        for name, (_, line) in COMMANDS.items():
            print(f"  {name:18}  {line}")
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    sys.argv[0] = f"python -m helpers {argv[0]}"  # what argparse shows as the program
    try:
        machine.prepare()  # before anything imports triton
        return importlib.import_module(f"helpers.{COMMANDS[argv[0]][0]}").main(argv[1:])
    except ModuleNotFoundError as error:
        if (error.name or "helpers").split(".")[0] == "helpers":
            raise
        print(f"{error.name} is not installed: bash colab_setup.sh test installs it", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
