"""What README and docs tell a reader to run, open or believe is there."""

import ast
import re
from pathlib import Path

import pytest

import helpers.nf4
from helpers import __main__ as commands
from helpers.machine import ROOT
from helpers.results import appendix, draw

HAND_WRITTEN = {path: draw.MARKED.sub("", path.read_text(encoding="utf-8")) for path in draw.documents()}
PAGES = [*HAND_WRITTEN, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
TESTS = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py")}
COMING = "results/tesla-t4/"  # the first run on a T4 writes it
each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)


def text_of(path: Path) -> str:
    """A page without what is drawn: stored results may be of days when files had other names."""
    return HAND_WRITTEN.get(path) or path.read_text(encoding="utf-8")


def in_code(text: str) -> list[str]:
    """What stands in backticks, and each line of a fenced block without its comment."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    lines = [line.split("  #")[0].split(" # ")[0].strip() for block in blocks for line in block.splitlines()]
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)) + lines


def names_a_test(name: str) -> bool:
    file, *parts = name.rpartition("/")[2].split("::")
    return file in TESTS and all(re.search(rf"^ *(class|def) {part}\b", TESTS[file], re.M) for part in parts)


@each_page
def test_cited_tests_exist(path):
    text = text_of(path)
    cited = re.findall(r"(?<![\w/])(?:tests/[\w/]+/)?test_\w+\.py(?:::\w+)*", text)
    missing = [name for name in cited if not names_a_test(name)]
    bare = [name for name in in_code(text) if re.fullmatch(r"Test[A-Z]\w+|test_\w+", name)]
    missing += [name for name in bare if not any(re.search(rf"\b{name}\b", one) for one in TESTS.values())]
    assert not missing


def test_a_test_that_is_not_there_is_seen():
    assert names_a_test("tests/show/test_docs.py::test_cited_tests_exist")
    assert not names_a_test("test_docs.py::test_cited") and not names_a_test("test_nothing.py")


def there(line: str, help_of) -> bool:
    """Are the command of a line, its file and its options there? Of what is not ours nothing is known."""
    words = re.sub(r"[<>()\[\]|;]", " ", line).split()
    for at, (before, option, name) in enumerate(zip(words, words[1:], words[2:], strict=False)):
        rest = words[at + 3 :]
        if option == "-m" and "python" in before and name == "helpers" and rest and rest[0] != "$tool":
            if rest[0] not in commands.COMMANDS:
                return False
            options = [word.split("=")[0] for word in rest[1:] if word.startswith("--")]
            if not all(re.search(rf"{one}\b", help_of(rest[0])) for one in options):
                return False
        example = ROOT / f"{name.replace('.', '/')}.py"
        if option == "-m" and name.startswith("examples.") and not example.is_file():
            return False
    return "bash" not in words[:-1] or (ROOT / words[words.index("bash") + 1]).is_file()


@pytest.fixture
def help_of(capsys):
    def text(command):
        with pytest.raises(SystemExit):
            commands.main([command, "--help"])
        return capsys.readouterr().out

    return text


@each_page
def test_cited_commands_and_their_options_are_there(path, help_of):
    assert not [line for line in in_code(text_of(path)) if not there(line, help_of)]


@pytest.mark.parametrize(
    "line, found",
    [
        ("python -m helpers bench --quick", True),
        ("python -m helpers bench --quicker", False),
        ("python -m helpers benchmark", False),
        (".venv/bin/python -m examples.finetune_one_gpu", True),
        (".venv/bin/python -m examples.finetune", False),
        ("bash colab_setup.sh test", True),
        ("X=1 bash colab.sh", False),
        ("pip install .", True),
    ],
)
def test_a_command_that_is_not_there_is_seen(line, found, help_of):
    assert there(line, help_of) is found


@each_page
def test_links_and_result_files_lead_somewhere(path):
    text = text_of(path)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    files = [
        name for name in in_code(text) if re.fullmatch(r"(results|helpers|tests|examples)/[\w./-]+", name)
    ]
    missing = [link for link in links if not (path.parent / link).exists()]
    missing += [name for name in files if not (ROOT / name).exists() and not name.startswith(COMING)]
    assert not missing


@each_page
def test_python_blocks_name_what_the_package_has(path):
    for block in re.findall(r"```python\n(.*?)```", text_of(path), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                assert node.module == "nf4_triton"
                assert {name.name for name in node.names} <= set(helpers.nf4.__all__)


@each_page
def test_a_page_is_of_today_and_of_no_machine(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(root|home/\w+|tmp|work)/", text), "paths of a machine"
    assert not re.search(r"\bcommit [0-9a-f]{7}", text), "figures of an old commit"


def test_the_readme_is_a_screen_and_a_bit():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 125


def test_every_block_is_shown_in_one_page_or_the_notebook_alone():
    """Nothing is said twice, and what can be drawn is shown. The claim, which README opens with, is also
    the notebook's; badges and the figures of a T4 stand where they are needed."""
    marks = [mark for path in HAND_WRITTEN
             for mark in re.findall(r"<!-- (\w+) -->", path.read_text(encoding="utf-8"))]  # fmt: skip
    assert sorted(marks) == sorted(set(marks))
    notebook = draw.NOTEBOOK.read_text(encoding="utf-8")
    assert not [name for name in appendix.BLOCKS if name not in marks and f"<!-- {name} -->" not in notebook]
