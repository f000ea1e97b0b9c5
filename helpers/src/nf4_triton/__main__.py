"""Dequantize 4-bit weights: check this machine, or export a checkpoint in 16 bit."""

import argparse
import os
import shlex
import signal
import sys

from . import __version__
from .doctor import NEEDED, doctor
from .environment import missing

DOCTOR = "say what works here, and what is missing; exit status 1 if the kernel does not work, else 0"
EXPORT = "write a 4-bit checkpoint in 16 bit, or merge a LoRA adapter into its base"
EXAMPLES = """examples:
  nf4_triton doctor
  nf4_triton export outputs/checkpoint-500 merged"""
OPTIONS = {  # option: help
    "--base": "what an adapter is merged into: a folder, a/b, a/b@REVISION (default: what it was trained on)",
    "--trained-in": "nf4, nf4+double, fp4, or fp4+double, if training quantized a 16-bit base on loading",
    "--load-dtype": "the dtype in which that training loaded the base (default: its config's)",
    "--skip-modules": "that training's llm_int8_skip_modules, such as lm_head,o_proj",
    "--dtype": "float16, bfloat16, or float32 (default: as it is stored)",
    "--shard-size": "the most in a file (default: 5GB)",
    "--device": "where to quantize and merge (default: the GPU, if there is one)",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        "nf4_triton", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"nf4_triton {__version__}")
    commands = parser.add_subparsers(required=True, metavar="doctor | export")
    checking = commands.add_parser("doctor", help=DOCTOR, description=DOCTOR)
    checking.set_defaults(run=doctor)
    what = "check the export alone; exit status 1 if it does not work, else 0"
    checking.add_argument("what", nargs="?", choices=["export"], help=what)
    exporting = commands.add_parser(
        "export",
        help=EXPORT,
        description=f"{EXPORT}; exit status 0 if OUT was written, 1 if not",
        epilog=EXAMPLES,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    exporting.set_defaults(run=export)
    exporting.add_argument(
        "source", help="a 4-bit checkpoint or an adapter: a folder, a file, or a name on the hub"
    )
    exporting.add_argument("out", help="a new folder")
    for option, text in OPTIONS.items():
        exporting.add_argument(option, action=Once, help=text)
    exporting.add_argument("--unchecked", action="store_true", help="for models unknown to transformers")
    exporting.add_argument("--adapter", action=Once, help=argparse.SUPPRESS)  # of 1.4.0
    options = vars(parser.parse_args(arguments))
    try:
        status = options.pop("run")(**options)
        print(end="", flush=True)  # nothing where stdout was closed
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # of `doctor | head -1`; Python flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


class Once(argparse.Action):
    """An option that takes a value and may be given once."""

    def __call__(self, parser, namespace, values, option_string=None):
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is given twice")
        setattr(namespace, self.dest, values)


def export(source, out, adapter, skip_modules, shard_size, **options) -> int:
    """Write a checkpoint in 16 bit. Return the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that what was written so far is deleted
        signal.signal(number, lambda *_: sys.exit(143))
    try:
        if adapter or (os.path.exists(out) and not os.path.exists(source)):  # as 1.4.0 had it
            model, out = (source, out) if os.path.exists(source) else (out, source)
            raise ValueError(
                "SOURCE comes first. Type: nf4_triton export "
                + shlex.join([adapter, out, "--base", model] if adapter else [model, out])
            )
        if problem := missing(*NEEDED):
            raise ImportError(f'{problem} Or all of them: pip install "nf4-triton[export]"')
        from . import export_checkpoint

        counts = export_checkpoint(
            source,
            out,
            skip_modules=skip_modules and skip_modules.replace(",", " ").split(),
            shard_size=shard_size or "5GB",
            **options,
        )
    except (ImportError, OSError, ValueError) as error:
        print(*f"Nothing was written: {error}".split(), file=sys.stderr)  # one line
        return 1
    print(f"{out}: {counts.dequantized} of {counts.written} tensors dequantized, {counts.merged} merged")
    return 0


if __name__ == "__main__":
    sys.exit(main())
