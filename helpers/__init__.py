"""Everything around the notebook. nf4_triton lies in helpers/src and needs no installation here."""

import importlib.util
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parent / "src"
sys.path.insert(0, str(SRC))
found = importlib.util.find_spec("nf4_triton")  # of sys.modules, if it is imported already
if not Path(found.origin).is_relative_to(SRC):
    raise ImportError(
        f"nf4_triton was imported from {Path(found.origin).parent}, expected {SRC / 'nf4_triton'}: "
        "import helpers first, or start Python in this checkout"
    )
