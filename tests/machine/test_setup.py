"""colab_setup.sh, requirements.txt and what they promise."""

import concurrent.futures
import fcntl
import os
import re
import shutil
import subprocess
import sys

import pytest

from helpers.__main__ import COMMANDS
from helpers import machine, install

COLAB = {  # the public freeze of 2026-08-19
    "torch": "2.11.0+cu128",
    "triton": "3.6.0",
    "transformers": "5.15.0",
    "peft": "0.20.0",
    "datasets": "4.0.0",
    "numpy": "2.1.3",
    "matplotlib": "3.10.0",
    "ipykernel": "6.17.1",
    "pytest": "8.4.2",
}
T4, P100 = "Tesla T4", "Tesla P100-PCIE-16GB"


@pytest.fixture
def plain(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("COLAB_", "KAGGLE_", "NF4_")) or name == "PYTHON":
            monkeypatch.delenv(name)
    return monkeypatch


def test_colab_satisfies_every_range():
    required = install.requirements(*install.GROUPS)
    assert set(COLAB) <= set(required)
    gaps = install.missing({name: required[name] for name in COLAB}, COLAB)
    assert not gaps


def test_every_exclusion_and_exact_bound_has_its_reason():
    lines = machine.ROOT.joinpath("requirements.txt").read_text().splitlines()
    for above, line in zip(lines, lines[1:], strict=False):
        if not line.startswith("#") and any(sign in line for sign in ("!=", "<=", "<2.", "<0.")):
            assert above.startswith("#"), line
    assert not any("==" in line.split(";")[0] for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("gpus", [[], [T4]])
def test_unsloth_is_wanted_only_beside_a_gpu(plain, gpus, capsys):
    plain.setattr(machine, "nvidia_smi", lambda fields: gpus)
    plain.setattr(install, "installed", dict)
    assert install.main(["--check", "--group", "run"]) == 1
    absent = set(re.findall(r"^missing: ([\w-]+)", capsys.readouterr().out, re.M))
    assert {"torch", "nbclient"} <= absent and "pytest" not in absent
    unsloth = {"unsloth", "unsloth_zoo", "trl", "datasets"}
    assert unsloth <= absent if gpus else not unsloth & absent


def test_missing_names_absent_and_unfit_packages():
    required = install.requirements()
    found = {name: "0" for name in required} | {"torch": "2.11.0+cu128"}
    del found["peft"]
    gaps = install.missing(required, found)
    assert "torch" not in gaps and {"peft", "triton"} <= set(gaps)


def test_a_forgotten_gpu_in_colab_stops_the_setup_with_the_menu(plain):
    plain.setenv("COLAB_GPU", "0")
    with pytest.raises(install.SetupError, match="Runtime > Change runtime type > T4 GPU"):
        install.check_machine([])
    plain.setenv("NF4_ALLOW_CPU", "1")
    install.check_machine([])


@pytest.fixture
def smi(plain, tmp_path):
    """smi(field, answers): what nvidia-smi prints of that field, a line each."""

    def says(field, *answers):
        lines = "".join(f"echo '{answer}'\n" for answer in answers)
        (tmp_path / "nvidia-smi").write_text(f'#!/bin/sh\n[ "$1" = --query-gpu={field} ] || exit 9\n{lines}')
        (tmp_path / "nvidia-smi").chmod(0o755)

    plain.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return says


@pytest.mark.parametrize("answers", [("7.5",), ("6.0", "7.5"), ("[N/A]",), ("12.0",), ()])
def test_a_gpu_new_enough_or_not_known_does_not_stop_the_setup(smi, answers):
    smi("compute_cap", *answers)
    install.check_machine([P100, T4])


def test_a_gpu_too_old_stops_the_setup(smi, plain):
    smi("compute_cap", "6.0")
    plain.setenv("KAGGLE_URL_BASE", "x")
    with pytest.raises(install.SetupError, match=r"P100.*sm_60.*sm_75.*GPU T4 x2"):
        install.check_machine([P100])


def test_nvidia_smi_is_read(smi):
    smi("name", T4, "GRID, A100X")
    assert machine.nvidia_smi("name") == [T4, "GRID, A100X"]
    smi("another")
    assert machine.nvidia_smi("name") == []


@pytest.mark.parametrize(
    "arguments, advice",
    [
        (["--index-url", "http://127.0.0.1:9/simple", "--retries", "1"], "did not answer"),
        (["--no-index"], "No version of it fits"),
    ],
)
def test_a_failing_pip_is_explained(plain, tmp_path, arguments, advice, capfd):
    plain.setattr(install, "LOG", tmp_path / "setup.log")
    with pytest.raises(install.SetupError, match=advice):
        install.pip("a package", *arguments, "no-such-package-here", "--isolated")
    assert "no-such-package-here" in capfd.readouterr().err  # pip's own error is not hidden


def test_a_disk_that_fills_up_is_explained():
    assert "disk is full" in install.diagnose("OSError: [Errno 28] No space left on device")


def test_colabs_torch_is_never_replaced(plain):
    plain.setenv("COLAB_GPU", "1")
    plain.setattr(machine, "version_of", lambda name: "2.6.0+cu124")
    plain.setattr(install, "pip", lambda *arguments, **options: pytest.fail("pip was called"))
    with pytest.raises(install.SetupError, match=r"torch 2\.6\.0.*left alone.*new runtime"):
        install.install_torch([T4])


@pytest.mark.parametrize("cpu_index_works", [True, False])
def test_without_a_gpu_torch_is_the_cpu_build(plain, cpu_index_works):
    calls = []

    def pip(what, *arguments):
        calls.append(arguments)
        if install.CPU_INDEX in arguments and not cpu_index_works:
            raise install.SetupError("the index did not answer")

    plain.setattr(machine, "version_of", lambda name: None)
    plain.setattr(install, "pip", pip)
    install.install_torch([])
    assert {install.CPU_INDEX, "--isolated"} <= set(calls[0])
    assert calls[1:] == ([] if cpu_index_works else [(install.CPU_TORCH,)])


def test_a_cpu_build_of_torch_beside_a_gpu_is_replaced(plain):
    calls = []
    plain.setattr(machine, "version_of", lambda name: "2.13.0+cpu")
    plain.setattr(install, "pip", lambda what, *arguments: calls.append(arguments[1:]))
    install.install_torch([])
    assert calls == []
    install.install_torch([T4])
    assert calls == [("--force-reinstall", "--no-deps"), ()]


def test_a_second_setup_installs_nothing_and_looks_again(plain, capsys):
    plain.setattr(machine, "nvidia_smi", lambda fields: [])
    plain.setattr(install, "missing", lambda required, versions: {})
    plain.setattr(install, "install", lambda required, gpus: pytest.fail("asked to install"))
    assert install.main([]) == 0 and "bitsandbytes" in capsys.readouterr().out
    plain.setattr(install, "VERIFY", "raise ImportError('libcuda is gone')")
    assert install.main([]) == 1 and "libcuda is gone" in capsys.readouterr().err


FAKE_PYTHON = """#!/usr/bin/env bash
# stands for Python 3.12: it logs its calls, and makes environments that hold itself
echo "$0 $*" >> "$CALLS"
case "$1 $2" in
  "-V "*) echo "Python 3.12.0" ;;
  "-c import sys; print(*sys"*) echo 3.12 ;;
  "-m venv") mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && touch "$4/pyvenv.cfg" ;;
  "-m helpers.install") [ "$3" != --check ] || exit 1 ;;
esac
"""
TOOLS = "bash env dirname grep mkdir cp touch rm sed head cat flock".split()


@pytest.fixture
def checkout(plain, tmp_path):
    """setup(*arguments, **variables) -> (CompletedProcess, calls), in a copy with only fake Pythons."""
    folder, tools = tmp_path / "a checkout", tmp_path / "bin"
    folder.mkdir()
    tools.mkdir()
    shutil.copy(machine.ROOT / "colab_setup.sh", folder)
    for name in ("python3.13", "python3.10"):
        (tools / name).write_text(FAKE_PYTHON)
        (tools / name).chmod(0o755)
    for name in TOOLS:
        (tools / name).symlink_to(shutil.which(name))

    def setup(*arguments, **variables):
        log = tmp_path / "calls"
        log.write_text("")
        done = subprocess.run(
            ["bash", "colab_setup.sh", *arguments],
            cwd=folder,
            env={"PATH": str(tools), "CALLS": str(log), **variables},
            capture_output=True,
            text=True,
        )
        return done, log.read_text().replace(str(tmp_path), "").splitlines()

    setup.folder, setup.tools = folder, tools
    return setup


def test_the_newest_python_makes_the_environment_once(checkout):
    done, calls = checkout()
    assert done.returncode == 0 and "ready" in done.stdout, done.stderr
    assert "/bin/python3.13 -m venv --without-pip .venv" in calls
    assert calls[-1] == "/a checkout/.venv/bin/python -m helpers.install --group run --group test"
    done, calls = checkout("run", "--quick")
    assert done.returncode == 0 and not any("-m venv" in call for call in calls)
    assert calls[-1] == "/a checkout/.venv/bin/python -m helpers run --quick"


def test_a_named_python_of_another_version_leaves_the_environment_alone(checkout):
    checkout()
    mine = checkout.folder / ".venv" / "mine"
    mine.touch()
    other = checkout.tools / "python3.10"
    other.write_text(FAKE_PYTHON.replace("3.12", "3.10"))
    for _ in range(2):
        done, calls = checkout("test", "-k", "one two", PYTHON=str(other))
        assert done.returncode == 0 and mine.exists(), done.stderr
        assert (
            calls[-1] == "/a checkout/.venv-py3.10/bin/python -m pytest -n auto --dist worksteal -k one two"
        )
    assert not any("-m venv" in call for call in calls)


def broken(folder):
    """A `.venv` of a Python that is gone."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to("/no/such/python")


def no_environment(folder):
    folder.mkdir()


def too_old(folder):
    broken(folder)
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").write_text('#!/bin/sh\n[ "$1" != -V ] || echo Python 3.8.1\nexit 1\n')
    (folder / "bin" / "python").chmod(0o755)


@pytest.mark.parametrize("make", [broken, no_environment, too_old])
def test_a_folder_that_cannot_be_used_stays_as_it_is(checkout, make):
    make(checkout.folder / ".venv")
    (checkout.folder / ".venv" / "mine").write_text("kept")
    done, calls = checkout("run")
    assert done.returncode == 0 and ".venv is not used and stays as it is" in done.stdout, done.stderr
    assert (checkout.folder / ".venv" / "mine").read_text() == "kept"
    assert calls[-1] == "/a checkout/.venv-py3.12/bin/python -m helpers run"


def test_an_environment_without_pip_is_kept_and_gets_it(checkout):
    """As `uv venv` makes it."""
    (checkout.folder / ".venv" / "bin").mkdir(parents=True)
    (checkout.folder / ".venv" / "mine").touch()
    python, pip = checkout.folder / ".venv" / "bin" / "python", checkout.folder / "pip"
    without = f'case "$*" in *"-m ensurepip") touch "{pip}" ;; *" pip") [ -e "{pip}" ]; exit ;; esac'
    python.write_text(FAKE_PYTHON + without)
    python.chmod(0o755)
    done, calls = checkout()
    assert done.returncode == 0 and pip.exists() and not any("-m venv" in call for call in calls), done.stderr
    assert (checkout.folder / ".venv" / "mine").exists()


def test_where_pip_cannot_be_had_one_line_says_so(checkout):
    for name in ("python3.13", "python3.10"):
        python = checkout.tools / name
        python.write_text(FAKE_PYTHON + 'case "$*" in *" pip" | *ensurepip) exit 1 ;; esac')
    done, _ = checkout()
    assert done.returncode == 1 and done.stderr.count("\n") == 2
    assert ".venv has no pip and none could be added: sudo apt install python3-venv" in done.stderr


def test_a_second_setup_waits_for_the_first(checkout):
    (checkout.folder / "build").mkdir()
    with open(checkout.folder / "build" / "setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            second = pool.submit(checkout)
            with pytest.raises(concurrent.futures.TimeoutError):
                second.result(timeout=0.7)
            assert not (checkout.folder / ".venv").exists()
            fcntl.flock(lock, fcntl.LOCK_UN)
            done, _ = second.result(timeout=30)
    assert done.returncode == 0 and "another set-up is at work in this folder" in done.stdout
    done, _ = checkout()
    assert "another" not in done.stdout


@pytest.fixture
def real(plain, tmp_path):
    """run(*arguments, **options): colab_setup.sh with this Python, in a copy that installs nothing."""
    folder = tmp_path / "copy"
    shutil.copytree(machine.ROOT / "helpers", folder / "helpers")
    shutil.copy(machine.ROOT / "colab_setup.sh", folder)
    (folder / "helpers" / "machine" / "install.py").write_text("print('installed')\n")

    def run(*arguments, command=("bash", "colab_setup.sh"), cwd=folder, env=os.environ):
        env = {**env, "PYTHON": sys.executable}
        return subprocess.run([*command, *arguments], cwd=cwd, env=env, capture_output=True, text=True)

    run.folder = folder
    return run


def test_a_foreign_helpers_safe_paths_and_cdpath_change_nothing(real, tmp_path):
    """A module of that name first on the path, PYTHONSAFEPATH=1, and a checkout's namesake on CDPATH."""
    foreign = tmp_path / "foreign"
    (foreign / "copy").mkdir(parents=True)
    (foreign / "helpers.py").write_text("raise SystemExit('the wrong helpers')\n")
    hostile = {"PYTHONPATH": str(foreign), "PYTHONSAFEPATH": "1", "CDPATH": str(foreign)}
    done = real(
        "run", "--help", command=("bash", "copy/colab_setup.sh"), cwd=tmp_path, env=os.environ | hostile
    )
    assert done.returncode == 0 and "usage: python -m helpers run" in done.stdout, done.stdout + done.stderr


def test_without_a_home_or_a_name(real):
    """A container's bare user: a uid that no passwd file knows, and no HOME."""
    bare_user = ("unshare", "--user", "--map-user=54321")
    if not shutil.which("unshare") or subprocess.run([*bare_user, "true"], capture_output=True).returncode:
        pytest.skip("user namespaces are needed to become such a user")
    tool = real.folder / "helpers" / f"{COMMANDS['run'][0].replace('.', '/')}.py"
    tool.write_text(
        "import getpass, pathlib, torch\ndef main(argv):\n    print(pathlib.Path.home(), getpass.getuser())\n"
    )
    done = real("run", command=(*bare_user, "bash", "colab_setup.sh"), env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    assert f"{real.folder}/build/home uid54321" in done.stdout


def test_a_named_python_that_has_everything_is_used_as_it_is(checkout):
    complete = checkout.tools / "python3.10"
    complete.write_text(FAKE_PYTHON.replace("|| exit 1", "|| exit 0"))
    done, calls = checkout(PYTHON=str(complete))
    assert done.returncode == 0 and not checkout.folder.joinpath(".venv").exists()
    assert calls[-1] == "/bin/python3.10 -m helpers.install --check"


def test_in_colab_the_running_python_is_used(checkout):
    python = str(checkout.tools / "python3.10")
    done, calls = checkout("run", PYTHON=python, COLAB_RELEASE_TAG="release")
    assert done.returncode == 0 and not checkout.folder.joinpath(".venv").exists()
    assert calls[-2:] == [
        "/bin/python3.10 -m helpers.install --group run",
        "/bin/python3.10 -m helpers run",
    ]


def test_without_a_suitable_python_the_setup_says_so(checkout):
    for name in ("python3.13", "python3.10"):
        (checkout.tools / name).write_text("#!/bin/sh\nexit 1\n")
    done, _ = checkout()
    assert done.returncode == 1 and "no Python 3.10 to 3.13 found" in done.stderr
    done, _ = checkout(PYTHON=str(checkout.tools / "python3.10"))
    assert done.returncode == 1 and "is not Python 3.10 to 3.13" in done.stderr


def test_a_failed_installation_stops_everything(checkout):
    python = checkout.tools / "python3.13"
    python.write_text(
        FAKE_PYTHON.replace(
            "esac", '  "-m helpers.install") ;;\nesac\n[ "$2" != helpers.install ]'
        )
    )
    done, calls = checkout("run")
    assert done.returncode != 0 and "helpers.install" in calls[-1]


def test_an_unknown_word_shows_how_to_use_it(checkout):
    done, calls = checkout("tset")
    assert done.returncode == 2 and "bash colab_setup.sh test" in done.stdout and not calls
