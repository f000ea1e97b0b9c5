"""The scripts a user copies, run as the user would run them."""

import json
import os
import subprocess
import sys

import pytest

from helpers.machine import environment

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
SMALL = ["--steps", "2", "--rows", "1", "--length", "16"]


def run(command, out, timeout=240):
    """Run a Python module of the repository from its root; the text it printed."""
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command, "--compare", "--json", str(out)],
        cwd=environment.ROOT, env=variables, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def processes(count, *options):
    launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    return [*launch, "-m", "examples.finetune_many_gpus", *options]


def test_one_gpu(tmp_path):
    """The whole of it on a GPU; two tiny steps in the interpreter elsewhere."""
    gpu = environment.has_gpu()
    printed = run(["examples.finetune_one_gpu", *([] if gpu else SMALL)], tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["with"]["losses"] == found["without"]["losses"]
    assert "losses identical with and without the kernel: True" in printed
    assert "bitsandbytes.functional.dequantize_4bit" in printed


def test_several_processes_on_the_cpu(tmp_path):
    """DDP by accelerate over two CPU processes, in the interpreter. accelerate runs FSDP on GPUs only."""
    if environment.has_gpu():
        pytest.skip("on a GPU machine accelerate takes the GPUs: see test_several_gpus")
    printed = run(processes(2, *SMALL, "--turn", "1"), tmp_path / "found.json")
    check(tmp_path, 2)
    assert "losses identical with and without the kernel: True" in printed


@pytest.mark.gpu
@pytest.mark.parametrize("options", [[], ["--fsdp", "1"], ["--fsdp", "2"]], ids=["ddp", "fsdp1", "fsdp2"])
def test_several_gpus(tmp_path, options):
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs, this machine has {count}")
    printed = run(processes(count, *options), tmp_path / "found.json")
    assert "losses identical with and without the kernel: True" in printed
    for rank, found in enumerate(check(tmp_path, count)):
        assert found["with"]["device"] == f"cuda:{rank}"


def check(folder, count):
    """Each process decoded with the kernel when it was to, and all losses are those without it."""
    found = [json.loads((folder / f"found.json.{rank}").read_text()) for rank in range(count)]
    for one in found:
        assert one["with"]["losses"] == one["without"]["losses"] == found[0]["with"]["losses"]
        assert one["in turns"]["losses"] == one["without"]["losses"]
        assert one["with"]["decoded"] > one["in turns"]["decoded"] > one["without"]["decoded"] == 0
    return found
