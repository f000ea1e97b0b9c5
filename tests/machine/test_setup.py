"""colab_setup.sh and requirements.txt, with stand-ins for Python, pip, and nvidia-smi."""

import fcntl
import shutil
import signal
import subprocess
import threading

import pytest
from packaging.requirements import Requirement

from helpers import machine

COLAB = "torch==2.11.0+cu128 triton==3.6.0 transformers==5.15.0 peft==0.20.0 datasets==4.0.0 numpy==2.1.3 "
COLAB += "matplotlib==3.10.0 ipykernel==6.17.1 pytest==8.4.2"  # the public freeze of 2026-08-19
FAKE_PYTHON = """#!/usr/bin/env bash
# Python 3.12: logs its calls, makes environments that hold itself, installs by leaving a mark
echo "${0##*/bin/} $*" | head -n 1 >> "$CALLS"
case "$*" in
  -V) echo Python 3.12.0 ;;
  "-c import sys; print(*sys"*) echo 3.12 ;;
  "-c import importlib"*" pip") [ ! -e "$0.without-pip" ] ;;
  "-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  "- "*) [ -e "$0.installed" ] || echo "${LACKS-torch>=2.7 (installed: none)}"; : >"$3" ;;
  *"pip "*install*) eval "${PIP:-:}"; touch "$0.installed" ;;
esac
"""
SMI = '#!/bin/sh\ncase "$1" in *name) echo "$GPU" ;; *compute_cap) echo "$CAPABILITY" ;; esac\n'
TOOLS = "bash env dirname grep mkdir cp touch rm sed head cat flock mktemp uname sort tail paste".split()


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def setup(tmp_path):
    """setup(*arguments, **variables) -> (CompletedProcess, calls of Python), in a copy of the checkout with
    only stand-ins on PATH."""
    folder, tools, log = tmp_path / "a checkout", tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    for name in ("colab_setup.sh", "requirements.txt"):
        shutil.copy(machine.ROOT / name, folder)
    for name in ("python3.13", "python3.10"):
        script(tools / name, FAKE_PYTHON)
    for name in TOOLS:
        (tools / name).symlink_to(shutil.which(name))

    def run(*arguments, gpu="", **variables):
        if gpu:
            script(tools / "nvidia-smi", SMI)
        log.write_text("")
        done = subprocess.run(
            ["bash", "colab_setup.sh", *arguments],
            cwd=folder,
            env={"PATH": str(tools), "CALLS": str(log), "GPU": gpu, "CAPABILITY": "7.5"} | variables,
            capture_output=True,
            text=True,
            timeout=60,
            start_new_session=True,
            # Started in the background, the tests ignore Ctrl-C, and bash cannot trap it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        return done, log.read_text().splitlines()

    run.folder, run.tools = folder, tools
    return run


def test_requirements_name_all_and_fit_colab():
    lines = machine.ROOT.joinpath("requirements.txt").read_text().splitlines()
    required = {one.name: one for one in map(Requirement, (x for x in lines if x and not x.startswith("#")))}
    assert {*"torch triton bitsandbytes unsloth peft transformers jupyter".split()} <= set(required)
    for name, version in (one.split("==") for one in COLAB.split()):
        assert required[name].specifier.contains(version), name


def test_the_newest_python_makes_the_environment_once(setup):
    done, calls = setup()
    assert done.returncode == 0 and "ready" in done.stdout, done.stderr
    assert "python3.13 -m venv --without-pip .venv" in calls
    cpu, rest = [call for call in calls if "pip" in call and "install" in call]
    assert "--isolated" in cpu and "download.pytorch.org/whl/cpu" in cpu
    assert "-r " in rest and "-c " in rest
    done, calls = setup("run", "--quick")
    assert done.returncode == 0 and not any("venv" in call or "install" in call for call in calls)
    assert calls[-1] == "python -m helpers run --quick"


def test_an_environment_that_cannot_be_used_stays_as_it_is(setup):
    mine = setup.folder / ".venv" / "bin" / "python"
    script(mine, "#!/bin/sh\necho Python 3.8.1; exit 1\n")
    done, calls = setup()
    assert ".venv stays as it is (Python 3.8.1)" in done.stdout and "3.8.1" in mine.read_text()
    assert "ready: " in done.stdout and ".venv-py3.12/bin/python" in done.stdout


def test_a_named_python_is_used_as_it_is_or_left_alone(setup):
    named = str(setup.tools / "python3.10")
    done, calls = setup(PYTHON=named, LACKS="")
    assert done.stdout.endswith(f"ready: {named}\n") and not any("install" in call for call in calls)
    done, calls = setup(PYTHON=named)
    assert done.returncode == 0 and ".venv/bin/python" in done.stdout
    assert not any("python3.10" in call and "install" in call for call in calls)


def test_colab_uses_the_running_python_and_keeps_its_torch(setup):
    colab = {"COLAB_RELEASE_TAG": "x", "PYTHON": str(setup.tools / "python3.10")}
    done, calls = setup("run", **colab)
    assert done.returncode == 1 and "Runtime > Change runtime type > T4 GPU" in done.stderr
    done, calls = setup("run", **colab, LACKS="torch>=2.7 (installed: 2.6.0+cu124)", gpu="Tesla T4")
    assert done.returncode == 1 and "installed: 2.6.0+cu124" in done.stderr and "new runtime" in done.stderr
    done, calls = setup("test", "-k", "a b", **colab, LACKS="peft>=0.18 (installed: none)", gpu="Tesla T4")
    assert done.returncode == 0 and not setup.folder.joinpath(".venv").exists(), done.stderr
    first, unsloth = [call for call in calls if " install " in call]
    assert "-r " in first and "-c " in first and "--no-deps -r" in unsloth
    assert calls[-1] == "python3.10 -m pytest -n auto --dist worksteal -k a b"
    assert any(call.startswith("python3.10 - ") and call.endswith(" all") for call in calls)  # what is kept


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"gpu": "Tesla P100", "CAPABILITY": "6.0"}, "Tesla P100 (compute capability 6.0): the kernel"),
        ({"PYTHON": "/no/such/python"}, "no Python 3.10 to 3.13 found"),
        ({"PIP": "echo Connection refused; exit 1"}, "the package index did not answer"),
        ({"PIP": "echo OSError: No space left on device; exit 1"}, "the disk is full"),
        ({"PIP": "echo ERROR: no matching distribution; exit 1"}, "pip could not install"),
    ],
)  # fmt: skip
def test_a_failure_says_why(setup, variables, message):
    done, _ = setup(**variables)
    assert done.returncode == 1 and f"SET-UP FAILED: {message}" in done.stderr


@pytest.mark.parametrize(
    "arguments, status, text",
    [
        ("--help", 0, "bash colab_setup.sh test"),
        ("run --help", 0, "bash colab_setup.sh test"),
        ("tset", 2, ": tset\n"),
        ("run --quik", 2, ": --quik\n"),
        ("setup now", 2, ": now\n"),
    ],
)
def test_help_and_unknown_words_come_before_any_set_up(setup, arguments, status, text):
    done, calls = setup(*arguments.split())
    assert done.returncode == status and text in done.stdout + done.stderr and not calls


def test_ctrl_c_ends_in_one_line(setup):
    done, _ = setup(PIP="echo Traceback; kill -INT 0; sleep 30")
    assert done.returncode == 130 and done.stderr == "\nInterrupted. Run the same command again to go on.\n"


def test_a_second_setup_waits_for_the_first(setup):
    (setup.folder / "build").mkdir()
    with open(setup.folder / "build" / "setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.5, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        done, _ = setup()
    assert done.returncode == 0 and "another set-up is at work in this folder" in done.stdout
