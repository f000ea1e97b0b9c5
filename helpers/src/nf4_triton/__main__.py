"""Dequantize 4-bit weights: check this machine, or export a checkpoint in 16 bit."""

import argparse
import importlib
import importlib.util
import logging
import os
import signal
import sys
import warnings

from . import __version__, environment
from .environment import missing

LIBRARIES = ("unsloth", "axolotl", "transformers", "peft")  # Unsloth wants to be imported first
SHOWN = (*environment.PACKAGES, "unsloth_zoo", "accelerate", "trl", "axolotl")
NEEDED = "torch numpy huggingface_hub safetensors tqdm transformers peft bitsandbytes".split()
VARIABLES = ("NF4_TRITON", "NF4_BACKEND", "NF4_FORCE", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")

DOCTOR = "check this machine, time the kernel, and say what to do; exit status 1 if the kernel does not work"
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
    parser = argparse.ArgumentParser(
        "nf4_triton", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"nf4_triton {__version__}")
    commands = parser.add_subparsers(required=True, metavar="doctor | export", dest="command")
    commands.add_parser("doctor", help=DOCTOR).set_defaults(run=doctor)
    exporting = commands.add_parser(
        "export", help=EXPORT, epilog=EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    exporting.set_defaults(run=export)
    exporting.add_argument(
        "source", help="a 4-bit checkpoint or an adapter: a folder, a file, or a name on the hub"
    )
    exporting.add_argument("out", help="a new folder")
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


def import_libraries() -> None:
    """Import what is installed of LIBRARIES, and say what cannot be imported."""
    for name in LIBRARIES:
        try:
            if importlib.util.find_spec(name):
                importlib.import_module(name)
        except (Exception, SystemExit) as error:  # the others can still be switched
            print(f"Cannot import {name}: {type(error).__name__}: {error}")


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
            raise ImportError(f'{problem} Or all of them: pip install "nf4-triton[export]"')
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
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as reports

    warnings.simplefilter("ignore")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    reports.set_verbosity_error()
    reports.disable_progress_bar()  # all bars of huggingface_hub, too
    enable_progress_bars()


def doctor() -> int:
    """Print what is here, whether the kernel works, and what to do. Return the exit status."""
    print(f"nf4_triton {__version__}")
    try:
        print_facts()
        problem = check()
    except (Exception, SystemExit) as error:  # whatever is broken here is the answer
        problem = f"{type(error).__name__}: {error}"
    if problem:
        print(f"It does not work here: {problem}")
        return 1
    return 0


def print_facts() -> None:
    """Print the versions, the environment variables that matter, and the GPUs."""
    versions = environment.versions(SHOWN).items()
    print(", ".join(f"{name} {version or '(not installed)'}" for name, version in versions))
    found = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    print(f"Environment: {', '.join(found) or 'none of ' + ', '.join(VARIABLES)}")
    if missing("torch"):
        return
    import torch

    facts = environment.describe()
    gpu = "none"
    if facts["card"]:
        gpu = f"{torch.cuda.device_count()}, {facts['card']}; CUDA {facts['cuda']}"
    if facts["driver"]:
        gpu += f"; driver {facts['driver']}"
    print(f"GPU: {gpu}; CPU: {facts['cpu'] or 'unknown'}")


def check() -> str | None:
    """Test the kernel by use_nf4_kernel(), which compares bits, and time it on a GPU.

    Returns what is wrong and what to do, or None.
    """
    lacking = missing("torch", "bitsandbytes")
    if missing("torch"):
        return lacking
    from . import backend

    backend.choose(None)  # raises for an unknown NF4_BACKEND
    if problem := environment.cannot_run():
        until = "Until then dequantize() uses PyTorch, and the libraries their own functions."
        return " ".join(filter(None, (problem, lacking, until)))
    if lacking:
        print(f"The kernel can run here, but the test of its bits needs bitsandbytes. {lacking}")
        return None
    import_libraries()
    todo = "Do: use an NVIDIA GPU. Triton's interpreter checks the kernel; the libraries are faster."
    if not environment.interpreted():
        from . import speed

        # Before the switch replaces what it is compared with.
        todo = speed.verdict(speed.compare())

    from . import use_nf4_kernel

    with use_nf4_kernel(quiet=True) as switch:
        print(switch)
        if not switch.on:
            return "no function of a library can be replaced."
    print(f"Tested: bit-identical to these functions in float16 and bfloat16.\n{todo}")
    return None


if __name__ == "__main__":
    sys.exit(main())
