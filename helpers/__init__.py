"""Everything around the notebook. nf4_triton lies in helpers/src and needs no installation here."""

import sys
from pathlib import Path

SRC = Path(__file__).resolve().parent / "src"
sys.path.insert(0, str(SRC))
