"""Dequantize 4-bit weights: check this machine, or export a checkpoint in 16 bit."""

import argparse
import logging
import os
import signal
import sys
import warnings

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
    """Run the command line and return its exit status. Ctrl-C ends the process with 130."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] in (["help"], ["version"]):  # `help export` is `export --help`
        arguments = [*arguments[1:], f"--{arguments[0]}"]
    parser = argparse.ArgumentParser(
        "nf4_triton", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"nf4_triton {__version__}")
    commands = parser.add_subparsers(required=True, metavar="doctor | export", dest="command")
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
    exporting.add_argument("out", help="a new or an empty folder")
    for option, text in OPTIONS.items():
        exporting.add_argument(option, action=Once, help=text)
    exporting.add_argument("--unchecked", action="store_true", help="for models unknown to transformers")
    known, unknown = parser.parse_known_args(arguments)
    options = vars(known)
    command = commands.choices[options.pop("command")]
    if unknown:
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status = options.pop("run")(**options)
        print(end="", flush=True)  # nothing where stdout was closed
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)  # Python itself would first free the model and unload torch, which takes seconds
    except BrokenPipeError:  # of `doctor | head -1`; Python flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


class Once(argparse.Action):
    """An option that takes a value and may be given once."""

    def __call__(self, parser, namespace, values, option_string=None):
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is given twice")
        setattr(namespace, self.dest, values)


def export(source, out, skip_modules, shard_size, **options) -> int:
    """Write a checkpoint in 16 bit. Return the exit status."""
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):  # Windows has no SIGHUP
        signal.signal(number, lambda *_: sys.exit(143))  # so that what was written so far is deleted
    try:
        if problem := missing(*NEEDED):
            raise ImportError(problem)
        silence()
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
    print(
        f"{out}: {counts.written} tensors in {counts.dtypes}, {counts.size / 1e6:,.1f} MB;"
        f" {counts.dequantized} dequantized, {counts.merged} merged"
    )
    return 0


def silence():
    """Stop what libraries print in a run that works, except the progress of downloads."""
    warnings.simplefilter("ignore")
    for library in ("bitsandbytes", "torch.utils.flop_counter"):  # the latter misses Triton
        logging.getLogger(library).setLevel(logging.ERROR)

    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as reports

    reports.set_verbosity_error()
    reports.disable_progress_bar()  # all bars of huggingface_hub, too
    enable_progress_bars()


if __name__ == "__main__":
    sys.exit(main())
