"""python -m helpers COMMAND: the tools of this repository; each has its own --help."""

import importlib
import sys

COMMANDS = {  # module and function, what it does
    "doctor": ("__main__", "doctor", "check this machine: versions, correctness; what to fix"),
    "run": ("puzzle.notebook", "run", "run the notebook, print the score and where the files are"),
    "bench": ("bench.bench", "main", "time the kernel against the baselines; training with and without it"),
    "t4": ("t4.sass", "main", "cross-compile for the cards people own; check budgets and loads"),
    "draw": ("results.pages", "main", "fill README, docs, and notebook from the results; file a sent result"),
    "sync": ("puzzle.notebook", "write", "write the modules' sections into the notebook's cells"),
}


def doctor(argv: list[str]) -> int:
    """Run the package's doctor, told about the checkout."""
    from helpers.nf4 import __main__ as package

    if argv:
        return package.main(argv)
    return package.doctor("bash colab_setup.sh", "Next: bash colab_setup.sh run")


def main(argv: list[str]) -> int:
    """Run a command; return its exit status, 2 for an unknown one."""
    if not argv or argv[0] not in COMMANDS:
        unknown = bool(argv) and argv[0] not in ("-h", "--help")
        lines = [f"unknown command: {argv[0]}"] * unknown + ["usage: python -m helpers COMMAND [--help]", ""]
        lines += [f"  {name:8}  {text}" for name, (*_, text) in COMMANDS.items()]
        print("\n".join(lines), file=sys.stderr if unknown else sys.stdout)
        return 2 if unknown or not argv else 0
    from helpers import machine

    module, function, _ = COMMANDS[argv[0]]
    sys.argv[0] = f"python -m helpers {argv[0]}"  # what argparse shows as the program
    try:
        machine.prepare()  # before anything imports triton
        return getattr(importlib.import_module(f"helpers.{module}"), function)(argv[1:])
    except ModuleNotFoundError as error:
        if (error.name or "helpers").split(".")[0] == "helpers":
            raise
        print(f"{error.name} is not installed: bash colab_setup.sh installs it", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
