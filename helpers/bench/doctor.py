"""`python -m helpers doctor` until helpers/__main__.py calls the package's doctor itself."""

from helpers.nf4.__main__ import doctor


def main(argv: list[str] | None = None) -> int:
    return doctor(fix="bash colab_setup.sh", more="`python -m helpers bench` measures how fast it is.")
