"""python -m helpers.show.readme: draws README.md's tables anew from the stored result files.

Each table stands between `<!-- name -->` and `<!-- /name -->`; the text around them is written by hand.
`--check` changes nothing and fails where README.md shows other figures than the files.
"""

import argparse
import re
import sys
from pathlib import Path

from helpers.machine import environment
from helpers.record import results, tables, goals
from helpers.show import notebook, plots
from helpers.stress import compare_libraries
from helpers.submission import scoring

README = environment.ROOT / "README.md"
RESULTS = environment.ROOT / "results"
CARD = "nvidia-h200"


def _read(name: str, folder: str = CARD) -> dict:
    return results.read(name, RESULTS / folder)


def protocol() -> str:
    result = _read("benchmark")
    return f"{plots.caption(result)}\n\n{tables.markdown(tables.protocol(result))}"


def score() -> str:
    """The marking table that the notebook's stored run computed."""
    data = _read("score")["data"]
    rows = [["criterion", *scoring.HEADS.values(), "evidence"]]
    for line in data["lines"]:
        points = [line["points"][column] for column in scoring.COLUMNS]
        rows.append([line["name"], *("-" if p is None else f"{p:+d}" if p else "0" for p in points)])
        rows[-1].append(line["evidence"])
    totals = [f"{data['totals'][column]} of {data['maximum']}" for column in scoring.COLUMNS]
    return f"**{data['headline']}**\n\n{tables.markdown([*rows, ['sum', *totals, '']])}"


def bench_targets() -> str:
    return tables.markdown(goals.table(_read("benchmark")))


def other_cards() -> str:
    """The marking table's sum and the bars of every other card with results of its own."""
    texts = []
    for path in sorted(RESULTS.glob("*/benchmark.json")):
        if (card := path.parent.name) == CARD:
            continue
        result = _read("benchmark", card)
        texts += [f"{_read('score', card)['data']['headline']} The bars:", plots.caption(result)]
        rows = goals.table(result)  # without those that are the same on every card
        texts.append(tables.markdown([row for row in rows if not row[0].startswith(("SASS", "compiles"))]))
    return "\n\n".join(texts)


def limits() -> str:
    return "\n".join(f"- {line}" for line in notebook.limits(_read("benchmark")))


def gemm() -> str:
    return tables.markdown(tables.gemm(_read("benchmark")))


def training() -> str:
    """One row a library and number of tokens."""
    result = _read("training")
    head = ["", "tokens per step", "ms without", "ms with", "speedup (95% interval)", "GPU time dequantizing"]
    rows = [[*head, "caught", "same bits"]]
    for library, found in result["data"]["libraries"].items():
        for size in found["sizes"]:
            speed, calls = size["speedup"], size["calls"]
            share = [size[arm]["dequantize_ms"] / size[arm]["gpu_ms"] for arm in ("without", "with")]
            rows.append([
                {"peft": "PEFT + bitsandbytes", "unsloth": "Unsloth"}[library],
                str(size["tokens"]),
                *(f"{size[arm]['ms']['p50']:.1f}" for arm in ("without", "with")),
                f"{speed['p50']:.3f} ({speed['low']:.3f} to {speed['high']:.3f})",
                f"{share[0]:.0%} -> {share[1]:.0%}",
                f"{calls['kernel']} of {calls['kernel'] + calls['library']}",
                ("yes" if size["same_bits"] else "NO") if size["repeatable"] else "not repeatable without it",
            ])  # fmt: skip
    return f"{plots.caption(result)}\n\n{tables.markdown(rows)}"


def several_gpus() -> str:
    rows = [["engine", "GPUs", "ms per step without", "with", "speedup (p20 to p80)", "losses"]]
    for engine, row in _read("several_gpus")["data"]["engines"].items():
        if "failed" in row:
            rows.append([engine, "failed", "", "", "", ""])
            continue
        times = [f"{row['step_ms'][arm]['p50']:.1f}" for arm in ("without", "with")]
        speed, same = row["speedup"], "identical" if row["same_losses"] else "DIFFER"
        speed = f"{speed['p50']:.2f} ({speed['p20']:.2f} to {speed['p80']:.2f})"
        rows.append([engine, str(row["processes"]), *times, speed, f"{same}, {row['steps']} steps"])
    return tables.markdown(rows)


def libraries() -> str:
    """The layouts on which not everyone is exact; the others in a sentence."""
    head, rule, *rows = compare_libraries.table(_read("libraries")["data"]).splitlines()
    exact = [row for row in rows if set(row.strip("| ").split(" | ")[1:]) == {"exact"}]
    rest = f"Of {len(rows)} layouts, everyone is exact on {len(exact)}. The other {len(rows) - len(exact)}:"
    return "\n".join([rest, "", head, rule, *(row for row in rows if row not in exact)])


def estimate() -> str:
    return f"```\n{notebook.run_all_estimate()}\n```"


TABLES = (
    protocol,
    score,
    bench_targets,
    limits,
    other_cards,
    gemm,
    training,
    several_gpus,
    libraries,
    estimate,
)


def render(text: str) -> str:
    """README.md's text with every table drawn anew. Raises ValueError where a table has no place in it."""
    for table in TABLES:
        name = table.__name__
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"README.md needs one <!-- {name} --> with its <!-- /{name} -->")
        text = pattern.sub(lambda found, table=table: f"{found[1]}{table()}\n{found[2]}", text)
    return text


def main(argv: list[str] | None = None, path: Path = README) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m helpers.show.readme", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="change nothing, fail where figures are stale")
    arguments = parser.parse_args(argv)
    before = path.read_text(encoding="utf-8")
    after = render(before)
    if arguments.check:
        print("README.md shows the stored figures" if after == before else "README.md is stale")
        return int(after != before)
    path.write_text(after, encoding="utf-8")
    print("README.md drawn anew" if after != before else "README.md was up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
