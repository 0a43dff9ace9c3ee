"""The README's badges: the releases of Python, transformers and torch that CI runs.

    python -m docs.badges

writes them to docs/images. `tests/integration/test_docs.py` compares the files with what this script draws.
"""

from __future__ import annotations

import re
from pathlib import Path

from specdec.utils.releases import TESTED

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
CHARACTER, MARGIN, HEIGHT = 6.6, 6, 20  # pixels
BADGE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" aria-label="{label}: {value}">
<rect width="{width}" height="{height}" rx="3" fill="#4b5563"/>
<path d="M{split} 0h{right}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{right}z" fill="#1d6fb8"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{label_x}" y="14" textLength="{label_width}">{label}</text>
<text x="{value_x}" y="14" textLength="{value_width}">{value}</text>
</g>
</svg>
"""


def badges() -> dict[str, str]:
    """Return the SVG of each badge by its name."""
    python = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert python
    ranges = {name: f"{oldest} to {newest}" for name, (oldest, newest) in TESTED.items()}
    return {label: badge(label, value) for label, value in {"python": f"{python[1]}+", **ranges}.items()}


def badge(label: str, value: str) -> str:
    """Return a badge as SVG: a label on grey, its value on blue."""
    label_width, value_width = round(CHARACTER * len(label)), round(CHARACTER * len(value))
    split = label_width + 2 * MARGIN
    width = split + value_width + 2 * MARGIN
    return BADGE.format(
        width=width,
        height=HEIGHT,
        split=split,
        right=width - split - 3,
        label=label,
        value=value,
        label_width=label_width,
        value_width=value_width,
        label_x=split / 2,
        value_x=(split + width) / 2,
    )


if __name__ == "__main__":
    for name, svg in badges().items():
        (IMAGES / f"badge-{name}.svg").write_text(svg, encoding="utf-8")
