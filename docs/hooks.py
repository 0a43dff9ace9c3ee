"""The site holds what lies beside `docs/` in the repository: tables, the heads' cards, the notebooks.

Pages link to them as they lie there (`../benchmarks/results/x.md`), which works in a checkout, too.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
HEADS = ("heads/README.md", "heads/*/README.md", "heads/*/*.png", "heads/*/*.json", "heads/*/recipe.sh")
BESIDE = ("benchmarks/results/*.md", *HEADS, "examples/*")
DOCS = re.compile(r"\]\((?:\.\./)+docs/")
FOLDERS = re.compile(r"\]\((?:\.\./)+(benchmarks|heads|examples)/")


def on_files(files, config):
    """Take in the files beside `docs/`, under their own paths."""
    for pattern in BESIDE:
        for path in filter(Path.is_file, sorted(ROOT.glob(pattern))):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """In the site, `docs/` is the root."""
    up = "../" * page.file.src_uri.count("/")
    return DOCS.sub(rf"]({up}", FOLDERS.sub(rf"]({up}\1/", markdown))
