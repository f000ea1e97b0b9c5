"""colab_setup.sh and requirements.txt, with stand-ins for Python, pip, and nvidia-smi."""

import fcntl
import json
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import venv

import pytest
from packaging.requirements import Requirement

from helpers import machine

COLAB = "torch==2.11.0+cu128 triton==3.6.0 transformers==5.15.0 peft==0.20.0 datasets==4.0.0 numpy==2.1.3 "
COLAB += "matplotlib==3.10.0 ipykernel==6.17.1 pytest==8.4.2"  # the public freeze of 2026-08-19
FAKE_PYTHON = """#!/usr/bin/env bash
# Python 3.12: logs its calls, makes environments that hold itself, installs by leaving a mark, parses -c
echo "${0##*/bin/} $*" | head -n 1 >> "$CALLS"
[ "$1" != -c ] || "$REAL_PYTHON" -c "import sys; compile(sys.argv[1], 'given', 'exec')" "$2" || exit 1
case "$*" in
  -V) echo Python 3.12.0 ;;
  "-c import sys; print(*sys"*) echo 3.12 ;;
  "-c import importlib"*" pip") [ ! -e "$0.without-pip" ] ;;
  "-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  "- "*) [ -e "$0.installed" ] || echo "${LACKS-torch>=2.8 (installed: none)}"; : >"$3" ;;
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

    def run(*arguments, gpu=None, cwd=folder, **variables):
        if gpu is not None:
            script(tools / "nvidia-smi", SMI)
        log.write_text("")
        given = {"PATH": str(tools), "CALLS": str(log), "REAL_PYTHON": sys.executable}
        done = subprocess.run(
            ["bash", str(folder / "colab_setup.sh"), *arguments],
            cwd=cwd,
            env=given | {"GPU": gpu or "", "CAPABILITY": "7.5"} | variables,
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
    assert {*"torch triton bitsandbytes unsloth peft transformers jupyter nox mypy".split()} <= set(required)
    for name, version in (one.split("==") for one in COLAB.split()):
        assert required[name].specifier.contains(version), name


def test_a_second_setup_installs_nothing(setup):
    done, calls = setup()
    assert done.returncode == 0 and ".venv/bin/python" in done.stdout, done.stderr
    assert any("download.pytorch.org/whl/cpu" in call for call in calls)
    assert not any(call.endswith(" .") or " -e " in call for call in calls), "a package of this repository"
    done, calls = setup("run", "--quick")
    assert done.returncode == 0 and not any("venv" in call or "install" in call for call in calls)
    assert calls[-1] == "python -m helpers run --quick"


def test_an_environment_that_cannot_be_used_stays_as_it_is(setup):
    mine = setup.folder / ".venv" / "bin" / "python"
    script(mine, "#!/bin/sh\necho Python 3.8.1; exit 1\n")
    done, calls = setup()
    assert "leaving .venv unchanged (Python 3.8.1)" in done.stdout and "3.8.1" in mine.read_text()
    assert "ready: " in done.stdout and ".venv-py3.12/bin/python" in done.stdout


def test_a_named_python_is_used_as_it_is_or_left_alone(setup):
    named = setup.tools / "a python" / "bin" / "python3.10"
    script(named, FAKE_PYTHON)
    done, calls = setup(PYTHON=str(named), LACKS="")
    assert done.stdout.endswith(f"ready: {named}\n") and not any("install" in call for call in calls)
    done, calls = setup(PYTHON=str(named))
    assert done.returncode == 0 and ".venv/bin/python" in done.stdout, done.stderr
    assert not any("python3.10" in call and "install" in call for call in calls)


def test_colab_uses_the_running_python_and_keeps_its_torch(setup):
    colab = {"COLAB_RELEASE_TAG": "x", "PYTHON": str(setup.tools / "python3.10")}
    done, calls = setup("run", **colab)
    assert done.returncode == 1 and "Runtime > Change runtime type > T4 GPU" in done.stderr
    done, calls = setup("run", **colab, LACKS="torch>=2.8 (installed: 2.7.1+cu126)", gpu="Tesla T4")
    assert done.returncode == 1 and "installed: 2.7.1+cu126" in done.stderr and "new runtime" in done.stderr
    two = {"gpu": "Tesla T4\nTesla T4"}  # as Kaggle has
    done, calls = setup("test", "-k", "a b", **colab, **two, LACKS="peft>=0.18 (installed: none)")
    assert done.returncode == 0 and not setup.folder.joinpath(".venv").exists(), done.stderr
    assert [call for call in calls if " install " in call and "--no-deps" in call]  # Unsloth
    assert calls[-1] == "python3.10 -m pytest -n auto --dist worksteal -k a b"


def test_an_empty_answer_of_nvidia_smi_is_no_gpu(setup):
    done, calls = setup(gpu="", CAPABILITY="")
    assert done.returncode == 0 and any("download.pytorch.org/whl/cpu" in call for call in calls)


@pytest.mark.parametrize("option", [["--out", "some where"], ["--out=some where"]])
def test_a_relative_folder_is_the_callers(setup, tmp_path, option):
    _, calls = setup("run", *option, cwd=tmp_path)
    assert calls[-1].endswith(f"{tmp_path}/some where"), calls[-1]


@pytest.mark.parametrize(
    "place, editable, removed",
    [
        ("a checkout", True, True),
        ("moved away", True, True),
        ("another", True, False),
        ("a checkout", False, False),
    ],
)
def test_an_old_editable_install_is_removed(setup, tmp_path, place, editable, removed):
    """It would break `import bitsandbytes`; an install of another folder is the user's."""
    (tmp_path / "another").mkdir()
    (setup.folder / "requirements.txt").write_text("pip\n")
    shutil.copytree(machine.ROOT / "helpers", setup.folder / "helpers", ignore=lambda *_: ["__pycache__"])
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "ours.pth").write_text(sysconfig.get_paths()["purelib"])  # pip
    for name in ("torch", "triton", "bitsandbytes"):
        (site / f"{name}.py").write_text("__version__ = 'stand-in'")
    info = site / "nf4_triton-1.0.0.dist-info"
    info.mkdir()
    url = (tmp_path / place).as_uri()
    files = {
        "METADATA": "Metadata-Version: 2.1\nName: nf4-triton\nVersion: 1.0.0\n",
        "direct_url.json": json.dumps({"url": url, "dir_info": {"editable": editable}}),
        "INSTALLER": "pip\n",
        "RECORD": "".join(f"{info.name}/{name},,\n" for name in ("METADATA", "direct_url.json", "RECORD")),
    }
    for name, text in files.items():
        (info / name).write_text(text)
    done, _ = setup(PYTHON=str(tmp_path / "env" / "bin" / "python"))
    assert ("uninstalling the editable nf4-triton" in done.stdout) == removed, done.stderr
    assert done.returncode == 0 and (info / "METADATA").exists() != removed


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"gpu": "Tesla P100", "CAPABILITY": "6.0"}, "Tesla P100 (compute capability 6.0): the kernel"),
        ({"gpu": "A\nB", "CAPABILITY": "6.0\n6.1"}, "A,B (compute capability 6.1): the kernel"),
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
    assert done.returncode == 0 and "waiting for another set-up in this folder" in done.stdout
