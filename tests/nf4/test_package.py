"""The wheel, installed into a folder of its own and used as a user would, with no checkout on the path."""

import ast
import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import machine
from helpers.nf4.integrate import LIBRARIES

pytest.importorskip("bitsandbytes")
pytest.importorskip("hatchling", reason="hatchling builds the wheel: it is in requirements.txt, group test")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that `pip install --target` filled from the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = folder.glob("nf4_triton-*-py3-none-any.whl")
    target = folder / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, str(target), str(wheel)], check=True, capture_output=True, timeout=60)
    return target


def python(installed, code, **variables):
    """Run a script with the wheel on the path and away from the checkout; what it printed."""
    alone = {
        "PYTHONPATH": str(installed),
        "NF4_TRITON": None,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = machine.python(["-c", code], variables=alone | variables, folder=installed, timeout=120)
    return done.err + done.out


STEP = """
import importlib.util, sys, torch, bitsandbytes
assert importlib.util.find_spec("helpers") is None, "the checkout is on the path"

def step():
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer = layer.to("cuda" if torch.cuda.is_available() else "cpu")
    a = torch.nn.Parameter(torch.randn(128, 128, device=layer.weight.device).bfloat16())
    optimizer = torch.optim.SGD([a], lr=0.1)
    losses = []
    for _ in range(3):
        loss = layer(torch.ones(256, 128, device=a.device).bfloat16() @ a).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        losses.append(loss.item())
    return losses
"""


@pytest.fixture(scope="module")
def plain(installed):
    """What a script prints that trains a step without the kernel and with it, and asks the doctor."""
    return python(
        installed,
        STEP
        + """
print([name for name in sys.modules if name.startswith("nf4_triton")])
without = step()
print("without:", without)
import nf4_triton, nf4_triton.__main__
from nf4_triton import use_nf4_kernel, dequantize
with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
    assert step() == without and without[2] < without[0], without
counts = switch.counts()["bitsandbytes.functional.dequantize_4bit"]
assert counts["kernel"] == 3 and not counts["library"], counts
print(nf4_triton.__file__)
nf4_triton.__main__.main(["doctor"])
""",
    )


def test_a_training_step_and_the_doctor(installed, plain):
    assert str(installed) in plain and "dequantizations went through the library; results the same" in plain
    assert plain.rstrip().endswith("It works here.")
    assert len(plain.splitlines()) < 17


def test_the_variable_switches_at_the_first_use(installed, plain):
    """No line of the script names nf4_triton. Losses as without the variable, which imports nothing of it."""
    names = "[n for n in sys.modules if n.startswith('nf4_triton')]"
    with_it = python(installed, STEP + f"print({names}); print('without:', step())", NF4_TRITON="1")
    (losses,) = [line for line in plain.splitlines() if line.startswith("without:")]
    assert with_it.splitlines()[-1] == losses
    assert "['nf4_triton', 'nf4_triton.autoload']" in plain and "NF4_TRITON=1" not in plain
    assert "['nf4_triton', 'nf4_triton.autoload']" in with_it  # nothing more until the first use
    assert with_it.count("NF4_TRITON=1: The NF4 kernel decodes in") == 1


NOWHERE = {
    "no Triton": (
        "import sys; sys.modules['triton'] = None\n",
        "Triton 3.3 or newer, and triton is not inst",
    ),
    "no GPU": ("import os; os.environ['TRITON_INTERPRET'] = '0'\n", "bitsandbytes: No CUDA GPU"),
}


@pytest.mark.parametrize("world", NOWHERE)
def test_where_it_cannot_work_the_variable_says_so_in_a_line_and_all_else_works(installed, world):
    if world == "no GPU":
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
    before, text = NOWHERE[world]
    printed = python(installed, before + STEP + "print('trained', step()[0] > 0)", NF4_TRITON="1")
    lines = [line for line in printed.splitlines() if text in line]
    assert len(lines) == 1 and printed.count("NF4_TRITON=1:") == 1, printed
    assert "trained True" in printed and "Traceback" not in printed


def test_the_package_imports_nothing_of_ours_and_no_library_before_it_is_asked_for():
    for file in (ROOT / "helpers" / "nf4").glob("*.py"):
        code = ast.parse(file.read_text(encoding="utf-8"))
        for node in code.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}"] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {name.split(".")[0] for name in names} & set(LIBRARIES), file
        for node in ast.walk(code):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert not [name for name in names if name.split(".")[0] in ("helpers", "examples", "tests")], (
                file
            )


def test_help_is_a_manual_page_and_types_are_complete():
    import helpers.nf4 as package

    page = pydoc.render_doc(package, renderer=pydoc.plaintext)
    for name in package.__all__:
        thing = getattr(package, name)
        assert name in page and inspect.getdoc(thing)
        for function in [thing] if inspect.isfunction(thing) else []:
            signature = inspect.signature(function)
            kinds = [p.annotation for p in signature.parameters.values()] + [signature.return_annotation]
            assert inspect.Signature.empty not in kinds, name
            if signature.parameters:
                assert "Raises" in function.__doc__ or "is an error" in function.__doc__, name
    assert "NF4_TRITON=1" in page and (Path(package.__file__).parent / "py.typed").exists()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_a_checkout_and_the_wheel_offer_the_same():
    import helpers.integrate
    import helpers.nf4

    assert sorted(helpers.integrate.__all__) == sorted(helpers.nf4.__all__)
    for name in helpers.nf4.__all__:
        assert getattr(helpers.integrate, name) is getattr(helpers.nf4, name)
