import json
import subprocess
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace

import pytest

from helpers.puzzle import repository

BLOB = "https://github.com/Some-One/nf4.triton/blob/main/Unsloth_Puzzles_A.ipynb"
SESSION = [{"path": "fileId=" + urllib.parse.quote(BLOB, safe=""), "kernel": {}}]
KERNEL = ["x = 1\n", "y = 2"]


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    """An empty folder, no Colab, and a notebook that ran KERNEL."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.delenv("COLAB_JUPYTER_IP", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(repository, "SECONDS", 1)
    history = SimpleNamespace(input_hist_raw=["", "import os", *KERNEL])
    shell = SimpleNamespace(history_manager=history)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


@pytest.fixture
def colab(monkeypatch):
    """colab(answer) starts a session server that says `answer`; None: it accepts and never answers."""
    servers = []

    def start(answer):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if answer is None:
                    time.sleep(5)
                    return
                body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(200 if self.path == "/api/sessions" else 404)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        monkeypatch.setenv("COLAB_JUPYTER_IP", "127.0.0.1")
        monkeypatch.setenv("KMP_TARGET_PORT", str(server.server_port))

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def drive(monkeypatch):
    """drive(answer): what Colab's front end says when asked for the notebook; an exception is raised."""

    def start(answer):
        def blocking_request(name, request="", timeout_sec=5):
            assert name == "get_ipynb" and timeout_sec <= 10
            if isinstance(answer, Exception):
                raise answer
            return answer

        module = ModuleType("google.colab")
        module._message = SimpleNamespace(blocking_request=blocking_request)
        monkeypatch.setitem(sys.modules, "google.colab", module)

    return start


def make_repository(folder, kernel=KERNEL, installs=True):
    """A git repository with a notebook of these kernel cells and an installer that ends well, or does not."""
    cells = [{"id": f"kernel-{i}", "metadata": {"tags": ["kernel"]}, "source": source.splitlines(True)}
             for i, source in enumerate(kernel)]  # fmt: skip
    for name, text in {
        repository.NOTEBOOK_NAME: json.dumps(
            {"cells": [*cells, {"id": "end", "metadata": {}, "source": []}]}
        ),
        "helpers/__init__.py": "",  # as the real one, which else would win wherever it is on the path
        "helpers/machine/__init__.py": "",
        "helpers/nf4/kernel.py": "",
        "helpers/machine/install.py": "" if installs else "raise SystemExit('no network here')",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    return folder


@pytest.fixture
def github(monkeypatch, tmp_path):
    """github(**how) puts a repository where git looks for that of BLOB."""

    def publish(**how):
        make_repository(tmp_path / "github" / "Some-One" / "nf4.triton", **how)
        monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
        monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{(tmp_path / 'github').as_uri()}/.insteadOf")
        monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")

    return publish


def test_colabs_session_names_the_repository(colab, github, capsys):
    colab(SESSION)
    github()
    root = repository.find_repository()
    assert root is not None and (root / repository.NOTEBOOK_NAME).exists()
    assert sys.path[0] == str(root)
    shown = capsys.readouterr().out
    assert shown.startswith("cloning https://github.com/Some-One/nf4.triton, branch main into")


def test_a_copy_on_drive_names_the_repository(colab, drive, github):
    colab([{"path": "fileId=1AbCdEf"}])
    drive({"ipynb": {"metadata": {"colab": {"provenance": [{"file_id": BLOB}]}}}})
    assert repository.colab_addresses() == [("https://github.com/Some-One/nf4.triton", "main")]
    github()
    assert repository.find_repository() is not None


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff not JSON",
        b"",
        {"path": SESSION[0]["path"]},
        [1, None],
        [{"name": "no path"}],
        [{"path": "fileId=" + text} for text in (
            "1AbCdEf", BLOB.replace("https", "http"), BLOB.replace("github.com", "github.com.example.org"),
            BLOB.replace("blob", "raw"), BLOB + "?x=1", BLOB + "\n", BLOB.replace("main", "--upload-pack=x"),
            BLOB.replace("Some-One", "-one"), BLOB.replace(".ipynb", ".py"),
            "https://github.com@example.org/a/b/blob/main/c.ipynb", "https://github.com/a/../blob/main/c.ipynb",
        )],
        None,
    ],
)  # fmt: skip
@pytest.mark.parametrize("message", [{}, {"ipynb": {"metadata": {}}}, None, TimeoutError("no front end")])
def test_no_other_answer_is_used(colab, drive, answer, message, capsys):
    colab(answer)
    drive(message)
    started = time.monotonic()
    assert repository.find_repository() is None
    assert time.monotonic() - started < 4
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1 and shown.startswith("No repository of this notebook here")


def test_without_colab_the_disk_comes_first_then_the_address(tmp_path, monkeypatch, capsys):
    there = make_repository(tmp_path / "address")
    assert repository.find_repository(there.as_uri()) is not None
    assert capsys.readouterr().out.startswith(f"cloning {there.as_uri()} into")
    on_disk = make_repository(tmp_path / "on disk")
    (on_disk / "below").mkdir()
    monkeypatch.chdir(on_disk / "below")
    assert repository.find_repository(there.as_uri()) == on_disk
    assert capsys.readouterr().out == f"repository: {on_disk}\n"


def test_a_server_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setenv("COLAB_JUPYTER_IP", "127.0.0.1")
    monkeypatch.setenv("KMP_TARGET_PORT", "9")
    assert repository.find_repository() is None
    assert capsys.readouterr().out.startswith("No repository")


def test_a_repository_with_another_kernel_is_named_and_skipped(colab, github, capsys, tmp_path):
    colab(SESSION)
    github(kernel=["x = 1", "y = 3"])
    good = make_repository(tmp_path / "good")
    root = repository.find_repository(good.as_uri())
    shown = capsys.readouterr().out
    assert root is not None and f"cloning {good.as_uri()}" in shown
    assert (
        "skipped https://github.com/Some-One/nf4.triton: its kernel differs from this notebook's (kernel-1)"
        in shown
    )


@pytest.mark.parametrize("fault", ["absent", "no kernel cells", "cannot install", "not in a notebook"])
def test_whatever_fails_is_said_in_a_line(fault, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "address"
    if fault != "absent":
        make_repository(folder, [] if fault == "no kernel cells" else KERNEL, fault != "cannot install")
    if fault == "not in a notebook":
        monkeypatch.delitem(sys.modules, "IPython")
    assert repository.find_repository(folder.as_uri()) is None
    _, skipped, last = capsys.readouterr().out.splitlines()
    assert skipped.startswith(f"skipped {folder.as_uri()}: ") and last.startswith("No repository")
    assert sys.path[0] != str(folder)
