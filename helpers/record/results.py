"""Result files: JSON with `environment`, `kernel_hash` and `data`, one folder a card under results/."""

import json
from pathlib import Path

from helpers.record import hashes
from helpers.machine import environment


def write(name: str, data, folder: Path | None = None) -> Path:
    """Store `data` (JSON-serializable) with today's environment and kernel hash. `folder` defaults to this
    card's folder under results/. Returns the file's path."""
    folder = Path(folder) if folder else environment.result_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.removesuffix('.json')}.json"
    content = {"environment": environment.describe(), "kernel_hash": hashes.kernel_hash(), "data": data}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def read(name: str, folder: Path) -> dict:
    """The whole file (`environment`, `kernel_hash`, `data`). Raises FileNotFoundError."""
    return json.loads((Path(folder) / f"{name.removesuffix('.json')}.json").read_text(encoding="utf-8"))


def stale(path: Path) -> bool:
    """True if the file was measured with other kernel cells than the notebook has now."""
    return json.loads(Path(path).read_text(encoding="utf-8"))["kernel_hash"] != hashes.kernel_hash()
