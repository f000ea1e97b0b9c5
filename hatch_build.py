"""Link helpers/nf4 as nf4_triton for `pip install -e .`: hatchling's editable mode cannot rename it."""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class EditableLink(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        if version == "editable":  # pyproject.toml puts build/site on the path of an editable install
            link = Path(self.root, "build", "site", "nf4_triton")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(Path("..", "..", "helpers", "nf4"))
