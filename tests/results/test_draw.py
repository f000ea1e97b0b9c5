"""README, docs and the notebook show what is stored, and the notebook's outputs are of one complete run."""

import json
import re
import shutil

import nbformat
import pytest

from helpers.machine import ROOT
from helpers.bench import compiled as parts
from helpers.results import goals, hashes, names, old_store as results
from helpers.results.old_store import Compile, CompileCase, Times
from helpers.results import appendix, draw
from helpers.puzzle import marking, repository, sync

PLACES = r"(?<![\w.])/(root|home/\w+|tmp|work)/"
FORCED = sorted((ROOT / "results").glob("*-forced-*"))


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(sync.NOTEBOOK, as_version=4)


def test_everything_shows_the_stored_results():
    assert draw.draw(check=True) == [], "run: python -m helpers draw"


def test_the_notebook_alone_has_its_pictures(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert set(re.findall(r"<!-- figure (\w+) -->", text)) == set(draw.FIGURES)
    for cell in notebook.cells:
        shown = re.findall(r"!\[[^\]]+\]\(attachment:(.*?)\)", cell.source)
        assert shown == list(cell.get("attachments", ()))
        assert "](http" not in cell.source.replace("](https://", "") and "![](" not in cell.source


@pytest.fixture
def blocks(monkeypatch):
    """Blocks and pictures of this test alone."""
    picture = type("Picture", (), {"alt": "what it shows", "png": lambda self: b"bytes"})
    monkeypatch.setattr(draw, "block", {"one": "first\n\nlines", "none": ""}.__getitem__)
    monkeypatch.setattr(draw, "figure", {"some": picture()}.__getitem__)


def test_blocks_and_pictures_are_drawn_between_their_marks(blocks):
    text = "a\n<!-- one -->\nold\n<!-- /one -->\nb\n<!-- none -->\nold\n<!-- /none -->\n"
    text += "<!-- figure some -->\n<!-- /figure some -->\nc<!-- versions -->\nkept\n<!-- /versions -->"
    drawn = draw.render(text, lambda name: f"folder/{name}.png")
    assert drawn == (
        "a\n<!-- one -->\nfirst\n\nlines\n<!-- /one -->\nb\n<!-- none -->\n<!-- /none -->\n"
        "<!-- figure some -->\n![what it shows](folder/some.png)\n<!-- /figure some -->\nc"
        "<!-- versions -->\nkept\n<!-- /versions -->"
    )
    assert draw.render(drawn, lambda name: f"folder/{name}.png") == drawn


@pytest.mark.parametrize("text", ["<!-- one -->\n", "<!-- /one -->", "<!-- one -->\n<!-- /figure one -->"])
def test_a_mark_without_its_end_is_refused(blocks, text):
    with pytest.raises(ValueError, match="without its end"):
        draw.render(text, str)


def test_an_unknown_block_is_refused(blocks):
    with pytest.raises(KeyError, match="other"):
        draw.render("<!-- other -->\n<!-- /other -->", str)


def test_a_document_that_shows_something_else_is_named_and_mended(monkeypatch, tmp_path, blocks, capsys):
    readme, book = tmp_path / "README.md", tmp_path / "book.ipynb"
    readme.write_text("<!-- one -->\n<!-- /one -->\n<!-- figure some -->\n<!-- /figure some -->\n")
    text = nbformat.v4.new_markdown_cell("<!-- figure some -->\n<!-- /figure some -->\n")
    nbformat.write(nbformat.v4.new_notebook(cells=[text]), book)
    monkeypatch.setattr(draw, "documents", lambda: [readme])
    monkeypatch.setattr(draw, "NOTEBOOK", book)
    monkeypatch.setattr(draw, "FIGURE_FOLDER", tmp_path / "figures")
    assert draw.main(["--check"]) == 1 and "README.md, book.ipynb" in capsys.readouterr().out
    assert "first" not in readme.read_text() and not (tmp_path / "figures").exists()
    assert draw.main([]) == 0 and draw.main(["--check"]) == 0
    assert "![what it shows](figures/some.png)" in readme.read_text()
    assert (tmp_path / "figures" / "some.png").read_bytes() == b"bytes"
    cell = nbformat.read(book, 4).cells[0]
    assert cell.attachments["some.png"]["image/png"] == "Ynl0ZXM="
    (tmp_path / "figures" / "some.png").unlink()
    assert draw.main(["--check"]) == 1


@pytest.mark.parametrize("address", ["", "https://github.com/someone/some-thing"])
def test_the_badge_appears_with_the_address(monkeypatch, address):
    monkeypatch.setattr(appendix, "REPO_URL", address)
    link = "https://colab.research.google.com/github/someone/some-thing/blob/main/Unsloth_Puzzles_A.ipynb"
    assert (f"]({link})" in appendix.badge()) if address else appendix.badge() == ""


def test_no_other_link_to_colab_stands_anywhere(notebook):
    """Where the address is unknown, only the puzzle is linked; else every link is the badge's."""
    texts = [path.read_text() for path in draw.documents()] + [json.dumps(notebook.cells)]
    links = {
        link for text in texts for link in re.findall(r"colab\.research\.google\.com/github/[\w./-]*", text)
    }
    expected = {appendix.badge().rpartition("(https://")[2].rstrip(")")} - {""}
    assert links == expected and repository.REPO_URL == appendix.REPO_URL


def test_what_a_call_saves_is_split_by_what_the_gpu_saves(result):
    for case in result.data.host.cases:
        for name, us in (("kernel", 20.0), ("unsloth_today", 41.0)):
            case.synchronized[name].p50 = us
    for case in result.data.gpu.sizes:
        for name, us in (("kernel", 5.0), ("unsloth_today", 6.0)):
            if case.rows and case.numel == 58_720_256:
                case.rows[name].p50 = us
    assert appendix.saved(result.data, "unsloth_today") == (21.0, 1 / 21)


@pytest.mark.parametrize("missing", ["", parts.NO_BODY])
def test_what_compiling_adds_is_told_apart(monkeypatch, result, missing):
    monkeypatch.setattr(appendix, "stored", lambda name, card=names.CARD: result)

    def rows(**us):
        return {name: Times(p50=2 * value, rounds=7) for name, value in us.items() if name != missing}

    eager = rows(**{parts.DECODED: 10.0, "kernel": 19.0, parts.LAUNCHES: 15.0})
    chain = {"kernel": 30.0, parts.NO_GUARDS: 25.0, parts.NO_ASSERTS: 21.0, parts.NO_BODY: 13.0}
    failures = {f"{missing} compiled": "why"} if missing else {}
    compiled = rows(**chain, **{parts.PRODUCTS: 11.5})
    case = CompileCase(tokens=64, backward=False, eager=eager, compiled=compiled, failures=failures)
    found = Compile(weights=2, shape=(1, 1), dtype="bfloat16", cases=[case], call_eager={}, call_compiled={})
    result.data.compile = found
    before = appendix.compiled()
    assert before.startswith("| 2 weights and products") and "guards" not in before
    found.parts = case
    table, says = appendix.compiled().removeprefix(before + "\n\n").split("\n\n")
    body, rest = ("-", "-") if missing else ("8.0", "1.5")
    assert [line[2:-2].split(" | ")[1:] for line in table.splitlines()[2:]] == [
        ["5.0", "", ""], ["4.0", "", ""], [body, "9.0", "5.0"], ["11.5", "10.0", "10.0"], [rest, "", ""],
        ["30.0", "19.0", "15.0"],
    ]  # fmt: skip
    if missing:
        assert says == f"Not measured: {missing} compiled: why."
    else:
        assert says == (
            "Of the 11.0 us that compiling adds a weight, guards are 5.0 and asserts 4.0; a graph that does "
            "only launches would take 15.0 us, 15.0 less. Timed in turns of its own, after the table above, "
            "on a shared host: compare within it."
        )


@pytest.mark.parametrize("name", ["benchmark", "protocol"])
def test_the_first_run_on_a_t4_takes_the_place_of_its_prediction(monkeypatch, tmp_path, name):
    """Also one of the notebook alone, of which only the protocol is stored."""
    for card in (names.CARD, "t4-simulated"):
        shutil.copytree(ROOT / "results" / card, tmp_path / card)
    monkeypatch.setattr(appendix, "RESULTS", tmp_path)
    assert "Tesla T4, predicted" in appendix.cards()
    seconds = {"kernel": 3.0, "unsloth_today": 3.6, "unsloth_classic": 4.5}
    entries = {key: dict(label=key, seconds=[value], per_config={}) for key, value in seconds.items()}
    timed = dict(entries=entries, rounds=9, repeats=1, checked_against="x", device="cuda", configs=[])
    result = results.now({"benchmark": dict(quick=True, protocol=timed), "protocol": timed}[name])
    facts = dict(gpu="Tesla T4", date="2030-01-02T03:04:05", forced=None)
    result.environment = results.msgspec.structs.replace(result.environment, **facts)
    result.kernel = appendix.stored("benchmark").kernel
    results.save(name, result, tmp_path / names.T4)
    row = appendix.cards().splitlines()[-1]
    quick = ", quick run" if name == "benchmark" else ""
    assert row == f"| Tesla T4, 2030-01-02{quick} ({results.EARLIER}) | 3.000 | 1.20 | 1.50 | not measured |"


def test_goals_are_counted_by_verdict(monkeypatch, result):
    monkeypatch.setattr(appendix, "stored", lambda name, card=names.CARD: result)
    all_of_them = [goal.met for goal in goals.goals(result.data)]
    counts = [int(number) for number in re.findall(r"\b\d+\b", appendix.goals_met())]
    assert counts == [len(all_of_them), *(all_of_them.count(met) for met in (True, False, None))]


def test_training_in_short_has_a_row_for_each_number_of_tokens(monkeypatch, training):
    monkeypatch.setattr(appendix, "stored", lambda name, card=names.CARD: training)
    rows = appendix.BLOCKS["training_short"]().splitlines()[2:]
    assert rows[0] == "| 128 tokens | 1.0 -> 1.0 (1.20) | not measured |" and len(rows[: rows.index("")]) == 2


def test_operations_that_failed_say_why(monkeypatch, training):
    monkeypatch.setattr(appendix, "stored", lambda name, card=names.CARD: training)
    assert "Not measured in the stored run" in appendix.BLOCKS["operations"]()
    spread = results.Spread(p20=1.0, p50=2.0, p80=3.0, low=1.5, high=2.5)
    timed = dict(without=spread, with_=spread, speedup=spread, rounds=9, calls={"kernel": 7, "library": 1})
    training.data.libraries["peft"].operations = [
        results.Operation(name="merge", same_bits=True, **timed),
        results.Operation(name="prefill", failed="out of memory"),
    ]
    text = appendix.BLOCKS["operations"]()
    assert "merge | 2.0 | 2.0 | 2.000 (1.500 to 2.500) | 7 of 8 | yes |" in text
    assert "prefill | failed |  |  |  | out of memory |" in text


def test_long_runs_that_are_not_stored_are_not_claimed(monkeypatch, tmp_path):
    monkeypatch.setattr(appendix, "RESULTS", tmp_path)
    assert appendix.stress().count("| not measured | no result file |") == 5
    assert appendix.logs() == "not measured"


def test_a_log_of_an_earlier_kernel_is_called_one(monkeypatch, tmp_path):
    monkeypatch.setattr(appendix, "RESULTS", tmp_path)
    for name, label in (("now", hashes.label()), ("before", "0123abcd")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sanitizer.txt").write_text(f"kernel {label}: clean\n")
    before, now = appendix.logs().split("\n\n")[::2]
    assert results.EARLIER in before and results.EARLIER not in now


def test_the_claim_gives_the_ratios_of_the_notebooks_run(monkeypatch):
    seconds = {"mine": 1.0, "unsloth_today": 1.5, "unsloth_classic": 2.5}
    entries = {name: dict(label=name, seconds=[value], per_config={}) for name, value in seconds.items()}
    timed = dict(entries=entries, rounds=9, repeats=1, checked_against="x", device="cuda", configs=[])
    score = dict(headline="", totals={"today": 13, "classic": 14}, maximum=14, lines=[], also={}, evidence={})
    facts = appendix.stored("score")
    stored = {
        "score": results.msgspec.convert(score, marking.Score),
        "protocol": results.msgspec.convert(timed, results.Protocol),
    }

    def kept(name, card=names.CARD):
        return results.Result(environment=facts.environment, kernel=facts.kernel, data=stored[name])

    monkeypatch.setattr(appendix, "stored", kept)
    monkeypatch.setattr(appendix, "t4_in_words", lambda: "T4")
    claim = appendix.claim()
    assert claim.startswith("**13 of 14 points on an NVIDIA H200: the official protocol runs 1.50 times")
    assert "and 2.50 times as fast as its classic path" in claim and "Stored run: NVIDIA" in claim


def test_the_notebook_is_laid_out_for_colab(notebook):
    assert notebook.metadata.accelerator == "GPU" and notebook.metadata.colab.gpuType == "T4"
    ids = [cell.id for cell in notebook.cells]
    text = json.dumps(notebook)
    assert len(set(ids)) == len(ids) and len(text) < 2_000_000
    assert not re.search(PLACES, text), "paths of a machine"
    headings = [line for cell in notebook.cells if cell.cell_type == "markdown"
                for line in cell.source.splitlines() if line.startswith("## ")]  # fmt: skip
    assert [int(line.split()[1].rstrip(".")) for line in headings] == list(range(1, len(headings) + 1))
    assert "](#" not in text, "only #scrollTo works in Colab"
    own = [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and not set(cell.metadata.get("tags", ())) & set(sync.MODULES)
    ]
    assert len(own) <= 10 and max(len(line) for cell in own for line in cell.source.splitlines()) <= 110


@pytest.mark.release
def test_the_outputs_are_those_of_one_complete_run_of_these_cells(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [cell.id for cell in code for output in cell.outputs if output.output_type == "error"]
    stamp = notebook.metadata["nf4"]
    assert stamp["kernel"] == hashes.label() and stamp["environment"]["gpu"], (
        "run: python -m helpers run --in-place"
    )


@pytest.mark.parametrize("path", (ROOT / "results").glob("*/score.json"), ids=lambda path: path.parent.name)
def test_every_stored_score_is_of_its_type_and_keeps_every_figure(path):
    def unread(stored, read):
        """What of a file's content is not in what was read of it."""
        if isinstance(stored, dict):
            return [x for key in stored for x in unread(stored[key], read.get(key))]
        if isinstance(stored, list):
            return [x for pair in zip(stored, read, strict=True) for x in unread(*pair)]
        return [] if stored == read else [stored]

    score = appendix.stored("score", path.parent.name).data
    assert not unread(json.loads(path.read_text())["data"], results.msgspec.to_builtins(score))


@pytest.mark.parametrize("folder", FORCED, ids=lambda path: path.name)
def test_results_of_forced_decisions_say_so(folder):
    card = folder.name.rpartition("-forced-")[2]
    assert all(results.read(name, folder).environment.forced == card for name in ("score", "notebook"))
