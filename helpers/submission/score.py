"""python -m helpers score: the protocol, the checks and the marking table of the kernel in this checkout."""

import argparse
from pathlib import Path

from helpers.nf4.kernel import your_dequantize_nf4
from helpers.record import results
from helpers.submission import evidence, marking, protocol


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 when a check failed or a line cost points."""
    parser = argparse.ArgumentParser(description=__doc__.split(": ")[1])
    parser.add_argument("--quick", action="store_true", help="3 repeats of 200 rounds instead of 5 of 1000")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the table and its evidence")
    options = parser.parse_args(argv)
    how = {"rounds": 200, "repeats": 3} if options.quick else {}
    comparison = protocol.compare({your_dequantize_nf4.__name__: your_dequantize_nf4}, **how)
    print(comparison)
    score = marking.mark(comparison, evidence.examine(your_dequantize_nf4))
    print("", score, sep="\n")
    if options.json:
        results.write(options.json.name, score, options.json.parent, schema=results.Score)
    failed = any(one.passed is False for one in score.evidence.values())
    points = [p or 0 for line in score.lines for p in line.points.values()]
    return 1 if failed or min(points) < 0 else 0
