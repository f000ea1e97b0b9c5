"""colab_setup.sh with stand-ins for Python and nvidia-smi; requirements.txt and the install cell."""

import re
import shutil
import subprocess
import sys

import nbformat
import pytest
from packaging.requirements import Requirement

from helpers import machine

FAKE_PYTHON = """#!/usr/bin/env bash
# logs its calls; makes environments that hold itself; parses what it is given
echo "${0##*/bin/} $*" | head -n 1 >> "$CALLS"
[ "$1" != -c ] || "$REAL_PYTHON" -c "import sys; compile(sys.argv[1], 'given', 'exec')" "$2" || exit 1
case "$*" in
  "-c import torch") [ -e "$0.installed" ] ;;
  "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip list"*) printf '%s\\n' torch==2.99 torchao==0.10.0 datasets==4.0.0 peft==0.1 ;;
  *packaging*) exec "$REAL_PYTHON" "$@" ;;
  *" -c /dev/fd/"*) echo kept: $(cat "${@: -1}") >> "$CALLS" ;;
  *"pip "*install*) eval "${PIP:-:}"; touch "$0.installed" ;;
  "-c"*) echo versions ;;
esac
"""
TOOLS = "bash env dirname grep mkdir cp touch sed head tail cat uname".split()


@pytest.fixture
def install_cell():
    """The names in the notebook's install cell before it installs."""
    cells = nbformat.read(machine.NOTEBOOK, as_version=4).cells
    (source,) = (cell.source for cell in cells if cell.id == "machine")
    names = {}
    exec(source.partition("\ninstall(")[0], names)
    return names


@pytest.mark.parametrize("name, group", [("NEEDED", ""), ("FOR_UNSLOTH", "gpu"), ("UNSLOTH", "unsloth")])
def test_the_install_cell_asks_for_what_requirements_ask_for(install_cell, name, group):
    """NEEDED are some of the plain lines."""
    text = machine.ROOT.joinpath("requirements.txt").read_text()
    lines = re.findall(r'^([a-z].*?)(?: ; extra == "(.*)")?$', text, re.M)
    required = {Requirement(line) for line, extra in lines if extra == group}
    asked = set(map(Requirement, install_cell[name]))
    assert asked <= required and (not group or asked == required)


def test_the_install_cell_keeps_what_is_in_its_range(install_cell, monkeypatch):
    commands = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command[5:]) or done)
    install_cell["version"] = {"torch": "2.99", "datasets": "4.0.0", "peft": "0.1"}.get
    install_cell["install"](["datasets<5", "peft>=0.18", "trl"])
    assert commands == [["torch==2.99", "datasets==4.0.0", "peft>=0.18", "trl"]]


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
    script(tools / "python3", FAKE_PYTHON)
    for name in TOOLS:
        (tools / name).symlink_to(shutil.which(name))

    def run(*arguments, cwd=folder, **variables):
        log.write_text("")
        given = {"PATH": str(tools), "CALLS": str(log), "REAL_PYTHON": sys.executable, "HOME": str(tmp_path)}
        done = subprocess.run(
            ["bash", str(folder / "colab_setup.sh"), *arguments],
            cwd=cwd,
            env=given | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done, log.read_text().splitlines()

    run.folder, run.tools = folder, tools
    return run


def test_a_second_setup_needs_no_network(setup, tmp_path):
    done, calls = setup(COLAB_API_TOKEN="of a user of Colab's API")  # that is not Colab
    assert "what they need; progress is in build/setup.log ...\n" in done.stdout
    assert done.stdout.endswith(f"ready: {setup.folder}/.venv/bin/python\n"), done.stderr
    assert any("download.pytorch.org/whl/cpu" in call for call in calls)
    assert any(call.endswith("install --no-deps --no-build-isolation -e .") for call in calls)
    done, calls = setup("run", "--in-place", "some where", cwd=tmp_path)
    assert done.returncode == 0 and not any("venv .venv" in call or "install" in call for call in calls)
    assert calls[-1] == "python -m helpers run --in-place some where"
    assert "\nNo score without a GPU: " in done.stdout
    (setup.folder / "requirements.txt").write_text("torch>=2.8\nnew>=1\n")
    assert any(" install torch>=2.8 new>=1" in call for call in setup()[1])


@pytest.mark.parametrize("folder, variables", [("an env", {"PYTHON": "an env/bin/python"}), (".venv", {})])
def test_an_environment_that_it_did_not_make_is_used_as_it_is(setup, folder, variables):
    mine = setup.folder / folder / "bin" / "python"
    script(mine, FAKE_PYTHON)
    done, calls = setup(**variables)
    assert done.stdout.endswith(f"ready: {mine}\n") and not any("install" in call for call in calls)


def test_an_environment_without_packages_is_told_what_to_install(setup):
    script(setup.folder / "python", f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    text = setup(PYTHON="./python")[0].stderr
    assert text.count("\n") == 2
    assert "python: No module named 'torch'. Nothing is installed in an environment of yours" in text


def test_colab_uses_the_running_python_and_keeps_its_torch(setup):
    done, calls = setup("run", COLAB_RELEASE_TAG="release-colab")
    assert done.returncode == 1 and "T4 GPU" in done.stderr and not calls
    script(setup.tools / "nvidia-smi", "#!/bin/sh\necho GPU 0: Tesla T4; echo GPU 1: Tesla T4\n")  # Kaggle's
    done, calls = setup("test", "-k", "a b", KAGGLE_KERNEL_RUN_TYPE="Interactive")
    assert done.returncode == 0 and not setup.folder.joinpath(".venv").exists(), done.stderr
    kept = calls.index("kept: torch==2.99 datasets==4.0.0")  # peft is too old
    assert "jupyter" not in calls[kept - 1]
    assert any(" install --no-deps unsloth>" in call for call in calls)
    assert calls[-1] == "python3 -m pytest -n auto --dist worksteal -k a b"


def test_uv_installs_where_it_is_on_path(setup):
    fake = '#!/usr/bin/env bash\necho "uv $*" >> "$CALLS"\n[ "$1" != venv ] || python3 -m venv .venv\n'
    script(setup.tools / "uv", fake)
    done, calls = setup()
    python = setup.folder / ".venv" / "bin" / "python"
    assert done.returncode == 0 and calls[0].startswith("uv venv --seed"), done.stderr
    assert any(call.startswith(f"uv pip install --python {python} torch>=") for call in calls)


def test_a_failure_shows_what_pip_said_and_what_to_do(setup):
    done, _ = setup(PIP="echo WARNING: Retrying; echo ERROR: no matching distribution; exit 1")
    assert done.returncode == 1 and done.stderr.count("\n") == 2
    assert ": ERROR: no matching distribution (all of it: build/setup.log). Is there a network" in done.stderr


def test_a_python_that_is_too_old_is_named(setup):
    script(setup.tools / "python3", "#!/bin/sh\necho Python 3.8.1; exit 1\n")
    assert "no Python 3.10 to 3.13 with venv found (Python 3.8.1)" in setup()[0].stderr


@pytest.mark.parametrize("arguments, status", [("--help", 0), ("run --help", 0), ("setup now", 2)])
def test_help_and_wrong_commands_come_before_any_set_up(setup, arguments, status):
    done, calls = setup(*arguments.split())
    assert done.returncode == status and not calls
