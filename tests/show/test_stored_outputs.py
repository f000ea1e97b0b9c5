"""The notebook and README show what is stored, and the stored outputs are of one complete run."""

import json
import re

import nbformat
import pytest

from helpers.machine import environment
from helpers.record import hashes, results

ROOT = environment.ROOT
STORED = sorted((ROOT / "results").glob("*/*.json"))
COPIES = sorted((ROOT / "results").glob("*/*.ipynb"))
PLACES = r"(?<![\w.])/(root|home/\w+|tmp)/"


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(hashes.NOTEBOOK, as_version=4)


@pytest.mark.parametrize("path", COPIES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_stored_copy_of_the_notebook_says_what_it_is(path):
    """Of a run with forced decisions: of this kernel, complete, labelled, small, and beside its score."""
    copy = nbformat.read(path, as_version=4)
    facts = copy.metadata["nf4"]["environment"]
    assert copy.metadata["nf4"]["kernel_hash"] == hashes.kernel_hash(), "run it again with NF4_FORCE"
    assert facts["gpu"] and facts["forced"] and path.parent.name.endswith(f"-forced-{facts['forced']}")
    assert environment.forced_text(facts["forced"]) in copy.cells[0].source
    code = [cell for cell in copy.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [cell.id for cell in code for output in cell.outputs if output.output_type == "error"]
    assert path.stat().st_size <= 1_500_000 and not re.search(PLACES, path.read_text())
    for name in ("score", "notebook"):
        assert results.read(name, path.parent)["environment"]["forced"] == facts["forced"]


def shown(notebook, cell_id):
    """What a cell of the stored notebook printed."""
    cell = next(cell for cell in notebook.cells if cell.id == cell_id)
    return "".join(output.text for output in cell.outputs if output.output_type == "stream").strip()


def test_the_notebook_shows_the_estimate_and_the_forced_run_of_the_stored_files(notebook):
    from helpers.show import notebook as shows
    from helpers.t4 import estimate

    total = next(line for line in shows.run_all_estimate().splitlines() if line.startswith("  in all"))
    assert total in shown(notebook, "t4-estimate"), (
        "run again after the last benchmark: helpers run --in-place"
    )
    read = {p.stem: json.loads(p.read_text())["data"] for p in STORED if p.parent.name == "nvidia-h200"}
    low, high = estimate.estimate_run_all(read, environment.REPEATS_SM75)["total_s"]
    assert 0 < low < high and f"{low:.0f} to {high:.0f}" in total
    assert shown(notebook, "t4-forced") == shows.stored_forced(), "run --in-place after the forced run"


def test_cells_that_show_stored_files_show_them_as_they_are(notebook):
    from helpers.show import notebook as shows
    from helpers.submission import execute

    assert set(execute.FROM_FILES) <= {cell.id for cell in notebook.cells}
    again = "run: python -m helpers run --redraw"
    for cell_id, text in (("ceiling", shows.floor()), ("t4-stored", shows.stored_t4())):
        assert shown(notebook, cell_id) == text, again
    for cell_id, table in (
        ("steps", shows.steps()),
        ("targets", shows.stored_targets()),
        ("gemm", shows.stored_gemm()),
    ):
        cell = next(cell for cell in notebook.cells if cell.id == cell_id)
        assert cell.outputs[-1].data["text/plain"] == repr(table), again


def test_the_notebook_times_the_protocol_as_often_as_the_estimate_says(notebook):
    cell = next(cell for cell in notebook.cells if cell.id == "protocol")
    assert "repeats=environment.protocol_repeats()" in cell.source and "else 1000" in cell.source


def test_the_outputs_are_those_of_one_complete_run_of_these_cells(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [cell.id for cell in code for output in cell.outputs if output.output_type == "error"]
    stamp = notebook.metadata["nf4"]
    assert stamp["kernel_hash"] == hashes.kernel_hash(), "run: python -m helpers run --in-place"


def test_the_notebook_is_laid_out_for_colab(notebook):
    assert notebook.metadata.accelerator == "GPU" and notebook.metadata.colab.gpuType == "T4"
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    text = json.dumps(notebook)
    assert len(text) < 2_000_000
    assert not re.search(PLACES, text), "paths of a machine in the outputs"


def test_readme_and_notebook_name_the_same_repository(notebook):
    setup = next(cell.source for cell in notebook.cells if "REPO_URL" in cell.source)
    url = re.search(r'^REPO_URL = "(.*?)"', setup, re.M).group(1)
    badge = r"\[!\[Open In Colab\]\([^)]*\)\]\(([^)]*)\)"
    for text in ((ROOT / "README.md").read_text(), notebook.cells[0].source):
        link = re.search(badge, text).group(1)
        if url:
            name = url.removeprefix("https://github.com/").removesuffix(".git")
            assert link == f"https://colab.research.google.com/github/{name}/blob/main/{hashes.NOTEBOOK.name}"
        else:
            assert link.startswith("#"), "no public address yet: the badge must not point anywhere else"


def test_the_readme_shows_the_stored_figures(notebook):
    from helpers.show import readme

    text = readme.README.read_text()
    assert readme.render(text) == text, "run: python -m helpers.show.readme"
    names = ("fuzz", "mutants_gpu", "bitsandbytes_own")
    fuzz, seeded, own = (results.read(name, ROOT / "results" / "nvidia-h200")["data"] for name in names)
    assert fuzz["failed"] == 0 and f"{fuzz['cases']:,} cases, none failed" in text
    assert f"{seeded['caught']} of {len(seeded['mutants'])} caught on the H200" in text
    soak = ROOT / "results" / "nvidia-h200" / "soak.json"
    if soak.exists():
        found = results.read(soak.name, soak.parent)["data"]
        assert (
            not found["grown"]
            and f"nothing grew, {found['wrong']} of {found['layers']:,} layers wrong" in text
        )
    else:
        assert "`python -m helpers.stress.soak`; not stored for this state of the cells" in text
    for who, name in (("unsloth_default", "Unsloth today"), ("unsloth_classic", "classic")):
        low, _, high = results.read("machine_code", ROOT / "results" / "t4-predicted")["data"][
            "ratios_on_t4"
        ][who]
        assert f"{low:.2f} to {high:.2f} over {name}" in text
    sanitizer = (ROOT / "results" / "nvidia-h200" / "sanitizer.txt").read_text()
    (launches,) = set(re.findall(r"(\d+) launches of the edge cases, 0 wrong", sanitizer))
    assert f"over {launches} launches of the edge cases, clean" in text
    assert sanitizer.count("exit 0;") == 4 and hashes.kernel_hash() in sanitizer
    shown = next(cell for cell in notebook.cells if cell.id == "t4-ptx").outputs[0].text
    elements = int(re.search(r"0 of (\d+) elements differ", shown).group(1))
    assert f"0 of {elements:,} elements differ" in text


def test_a_table_without_its_place_in_the_readme_is_missed():
    from helpers.show import readme

    with pytest.raises(ValueError, match="<!-- gemm -->"):
        readme.render(readme.README.read_text().replace("<!-- /gemm -->", ""))
