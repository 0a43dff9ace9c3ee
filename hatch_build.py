"""The README as a package index shows it: there is no repository around it, and its relative links would lead nowhere.

With `repository` set in pyproject.toml they lead there; without, they are their words, and pictures are left out.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?://)([^)\s]+)\)")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


PLACEHOLDER = "https://github.com/OWNER/specdec"  # the README's address of the repository


class FrontPage(MetadataHookInterface):
    """Sets what pyproject.toml calls dynamic."""

    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = self.config["repository"]
        metadata["readme"] = {"content-type": "text/markdown", "text": on_its_own(text, repository)}
        metadata["urls"] = {"Repository": repository} if repository else {}


def on_its_own(text: str, repository: str) -> str:
    """repository: where pages lie under `blob/main/` and files under `raw/main/`, as on GitHub; "" for none."""
    if not repository:
        return LINK.sub(r"\1", PICTURE.sub("", text))
    text = text.replace(PLACEHOLDER, repository)
    text = PICTURE.sub(rf"![\1]({repository}/raw/main/\2)", text)
    return LINK.sub(rf"[\1]({repository}/blob/main/\2)", text)
