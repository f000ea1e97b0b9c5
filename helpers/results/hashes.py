"""What code a stored result was measured with: two hashes over the kernel's syntax, not its text.

Docstrings, comments, layout and error texts change nothing. *device* is what is compiled, *host* all else
of the kernel (plans, launch, checks, operator). The decisions taken for the card are stored beside the hashes
and resolved again for that card, so that a choice for another card makes nothing stale.
"""

import ast
import dataclasses
import functools
import hashlib
import re
from types import SimpleNamespace
from unittest import mock

from helpers.machine import ROOT, release

NOTEBOOK = ROOT / "Unsloth_Puzzles_A.ipynb"
KERNEL = ROOT / "helpers" / "nf4" / "kernel.py"
DEVICE_NAMES = ("_constexprs", "_options")  # what is compiled for, though it stands among host code
SHOWN = ("reason", "sms", "capability")  # fields of Settings that say which card it is, and decide nothing


def sections(text: str) -> list[tuple[str, str]]:
    """(part, source) of each section of a module; part is "device", "host" or "card"."""
    _, *found = re.split(r'^# %% .*\bpart="(\w+)".*\n', text, flags=re.M)
    return list(zip(found[::2], found[1::2], strict=True))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, (ast.JoinedStr, ast.BinOp)) or isinstance(getattr(node, "value", None), str)


class _Code(ast.NodeTransformer):
    """Leaves what runs: no docstrings, no texts of errors."""

    def visit_Raise(self, node):
        if isinstance(node.exc, ast.Call):
            node.exc.args = []
        return self.generic_visit(node)

    def visit_Call(self, node):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name.startswith("_require"):
            node.args = [arg for arg in node.args if not _is_text(arg)]
        return self.generic_visit(node)

    def _body(self, node):
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
        return self.generic_visit(node)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Module = _body


def _dump(node) -> str:
    """ast.dump, the same in every Python: fields that some versions add or omit when empty are left out."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind"))
        return type(node).__name__ + str([(n, _dump(v)) for n, v in fields if v not in (None, [])])
    return str([_dump(item) for item in node]) if isinstance(node, list) else repr(node)


def code_hash(statements: list[ast.stmt]) -> str:
    """First 16 hex digits of the SHA-256 over the statements' syntax."""
    module = _Code().visit(ast.Module(body=statements, type_ignores=[]))
    return hashlib.sha256(_dump(module).encode()).hexdigest()[:16]


def split(text: str) -> tuple[str, str]:
    """(device hash, host hash) of the kernel module's text; what decides for cards is in neither."""
    parts = {"device": [], "host": [], "card": []}
    for part, body in sections(text):
        for statement in ast.parse(body).body:
            compiled = getattr(statement, "name", "") in DEVICE_NAMES
            parts["device" if compiled else part].append(statement)
    return code_hash(parts["device"]), code_hash(parts["host"])


@functools.cache
def _now() -> tuple[str, str]:
    return split(KERNEL.read_text(encoding="utf-8"))


def device() -> str:
    return _now()[0]


def host() -> str:
    return _now()[1]


def label() -> str:
    """The kernel as it is now, as a caption shows it: eight digits of each hash."""
    return f"{device()[:8]}.{host()[:8]}"


def deciding(settings: dict) -> dict:
    """Settings without what only says which card it is."""
    return {name: value for name, value in settings.items() if name not in SHOWN}


def stamp() -> dict:
    """Fields of `results.Kernel`: the kernel as it is now, with its decisions for the card at hand."""
    from helpers.nf4 import kernel as nf4_kernel

    settings = dataclasses.asdict(nf4_kernel.settings())
    del settings["reason"]
    return {"label": label(), "device": device(), "host": host(), "settings": settings}


def decisions(environment, sms: int) -> dict:
    """The decisions that the kernel as it is now would take on the card of a stored environment."""
    from helpers.nf4 import kernel as nf4_kernel

    here, facts = machine.capability is not None, {"INTERPRETED": True}
    if here:
        facts = {"INTERPRETED": False, "CHECKED": True, "TRITON": release(environment.triton)[:2]}
    major, minor = machine.capability or (0, 0)
    card = SimpleNamespace(name=environment.gpu, major=major, minor=minor, multi_processor_count=sms)
    with (
        nf4_kernel.force(card=machine.forced),
        mock.patch.multiple(nf4_kernel, **facts),
        mock.patch("torch.cuda.is_available", lambda: here),
        mock.patch("torch.cuda.get_device_properties", lambda _: card),
    ):
        return deciding(dataclasses.asdict(nf4_kernel.settings(next(_unused))))


_unused = iter(range(1 << 20, 1 << 30))  # indices of no card: what the kernel keeps of them is nobody's
