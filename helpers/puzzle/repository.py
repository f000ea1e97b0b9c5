"""Where the notebook's repository is: on disk, where Colab got the notebook from, or at an address given."""

# %% Find the repository id="repository-find" folded=true
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request

REPO_URL = ""  # the public address, https://github.com/OWNER/NAME, once there is one; badges follow it
NOTEBOOK_NAME = "Unsloth_Puzzles_A.ipynb"
SECONDS = 4  # that Colab gets for an answer
# The one form that is used of what Colab says, a notebook on GitHub: owner, repository, branch.
ON_GITHUB = r"https://github\.com/(\w[\w-]*)/(\w[\w.-]*)/blob/(\w[\w.-]*)/[\w./-]+\.ipynb"


def _session_paths():
    """What Colab's list of sessions calls the open notebook: fileId= and a quoted address."""
    server = f"http://{os.environ['COLAB_JUPYTER_IP']}:{os.environ['KMP_TARGET_PORT']}"
    with urllib.request.urlopen(f"{server}/api/sessions", timeout=SECONDS) as answer:
        sessions = json.loads(answer.read(1 << 20))
    return [session["path"].removeprefix("fileId=") for session in sessions]


def _provenance():
    """Where a copy on Drive was made from, in the open notebook's own metadata."""
    from google.colab import _message

    book = _message.blocking_request("get_ipynb", timeout_sec=SECONDS)["ipynb"]
    return [source["file_id"] for source in book["metadata"]["colab"]["provenance"]]


def colab_addresses():
    """[(address to clone, branch)] of this notebook as Colab has them; [] where it has none."""
    texts = []
    for ask in (_session_paths, _provenance):
        with contextlib.suppress(Exception):  # not on Colab, no answer in time, or of another form
            texts += [urllib.parse.unquote(text) for text in ask()]
    matches = [re.fullmatch(ON_GITHUB, text, re.ASCII) for text in texts]
    return list(dict.fromkeys((f"https://github.com/{m[1]}/{m[2]}", m[3]) for m in matches if m))


def _cloned(address, branch=None):
    """The folder of a fresh clone, announced before it is made."""
    folder = tempfile.mkdtemp(prefix="nf4-")
    print(f"cloning {address}{f', branch {branch}' if branch else ''} into {folder}", flush=True)
    command = ["git", "clone", "--quiet", "--depth=1", *[f"--branch={branch}"] * bool(branch)]
    subprocess.run(
        [*command, "--", address, folder], env=os.environ | {"GIT_TERMINAL_PROMPT": "0"},
        stdin=subprocess.DEVNULL, timeout=120, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return folder


def _changed_cells(root):
    """Ids of the kernel's cells in the repository's notebook that did not run here in the same words."""
    history = sys.modules["IPython"].get_ipython().history_manager.input_hist_raw
    ran = {text.strip() for text in history}
    cells = json.loads((root / NOTEBOOK_NAME).read_text(encoding="utf-8"))["cells"]
    kernel = [cell for cell in cells if "kernel" in cell["metadata"].get("tags", ())]
    changed = [cell["id"] for cell in kernel if "".join(cell["source"]).strip() not in ran]
    return changed if kernel else ["all"]


def _complete(root):
    """Install what the repository needs and this Python lacks; torch and triton stay."""
    command = [sys.executable, "-m", "helpers.install"]
    for options in (["--check"], []):
        done = subprocess.run([*command, *options], cwd=root, timeout=900, capture_output=True, text=True)
        if done.returncode == 0:
            return
    raise RuntimeError(" ".join((done.stdout + done.stderr).strip().split("\n")[-3:]))


def _places(address):
    """(function, its arguments) for each place to look at, the nearest first."""
    here = pathlib.Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "helpers" / "nf4" / "kernel.py").exists():
            yield pathlib.Path, (folder,)
    for known in (*colab_addresses(), *([(address,)] if address else [])):
        yield _cloned, known


def find_repository(address=REPO_URL):
    """The folder of this notebook's repository, importable from here on; None where there is none.

    address: what to clone where neither the disk nor Colab has it. Prints what it does, and never raises.
    """
    for find, place in _places(address):
        try:
            root = pathlib.Path(find(*place))
            changed = _changed_cells(root)
            if changed:
                print(f"skipped {place[0]}: its kernel differs from this notebook's ({', '.join(changed)})")
                continue
            _complete(root)
            sys.path.insert(0, str(root))
            print(f"repository: {root}")
            return root
        except Exception as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip().split("\n")[-1]
            print(f"skipped {place[0]}: {type(error).__name__}: {reason}")
    print(
        'No repository of this notebook here: the rest is skipped. find_repository("ITS ADDRESS") clones one.'
    )
    return None
