"""The packages of specdec and what they import: the rule, the arrows between them, and the picture of the docs.

    python docs/structure.py [PICTURE.svg]

prints every arrow with the number of imports it stands for, and draws them if a file is named.
`tests/integration/test_imports.py` enforces the rule.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "specdec"
# Each package may import from the packages before it. Packages of one line do not import each other.
ORDER = (
    ("utils",),
    ("sampling",),
    ("models",),
    ("heads",),
    ("proposers",),
    ("engine",),
    ("data",),
    ("training", "evaluation"),
    ("cli",),
)
# The same within a package: each file or folder may import from those before it.
INNER_ORDERS = {
    "models": ("cache", "*"),
    "proposers": (
        "pacing",
        "context",
        "draft_check",
        "base",
        ("lookup", "draft_models"),
        "draft_heads",
        "hybrid",
        "factory",
    ),
    "training": ("teacher", ("objectives", "initialization"), "run"),
}
FORBIDDEN = {"specdec.engine.hf": ("specdec.engine.loop", "specdec.engine.generator")}
PURPOSES = {
    "utils": "names users choose from, paths, downloads, copies between devices",
    "sampling": "draft trees, acceptance rules, noise, logits processors",
    "models": "running a model over ragged rows and draft trees; its cache",
    "heads": "draft heads: modules, checkpoints, runners, the registry",
    "proposers": "what drafts, behind one interface; how far",
    "engine": "one generate() call: generator, loop, verifier, report",
    "data": "conversations, texts, regenerated answers",
    "training": "from texts to a head",
    "evaluation": "proposers measured in turns, diagnosis, plots",
    "cli": "the commands, the chat, the server",
}


def imports_of(package: Path) -> dict[str, set[str]]:
    """The modules of a package that each of its modules imports, at its top or inside a function."""
    root = package.parent
    modules = {".".join(path.relative_to(root).with_suffix("").parts): path for path in package.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    return {name: _imported(path, modules) - {name} for name, path in modules.items()}


def _imported(path: Path, modules: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}: imports must be absolute")
            for alias in node.names:  # a module, or a name in one
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else str(node.module))
    return found & modules.keys()


def package_of(module: str) -> str:
    """The package of a module: "engine" for specdec.engine.hf.call, "" for specdec itself and specdec.__main__."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in PURPOSES else ""


def is_before(name: str, other: str, order: tuple[str | tuple[str, ...], ...]) -> bool:
    """Return True if a name comes before another in an order.

    "*" stands for all names that are not listed, which may import each other. An inner order without "*" says nothing
    about names that are not listed; `ORDER` allows none.
    """
    lines = [(line,) if isinstance(line, str) else line for line in order]
    places = {one: place for place, line in enumerate(lines) for one in line}
    unlisted = places.get("*")
    place, other_place = places.get(name, unlisted), places.get(other, unlisted)
    if place is None or other_place is None:
        return order is not ORDER
    return place < other_place or place == other_place == unlisted


def violations(imports: dict[str, set[str]]) -> list[str]:
    """The imports that break the rule, as sentences."""
    return [
        f"{module} imports {other}"
        for module, others in sorted(imports.items())
        for other in sorted(others)
        if _is_upward(module, other)
    ]


def _is_upward(module: str, other: str) -> bool:
    importer, imported = package_of(module), package_of(other)
    if not importer:
        return False
    if not imported:
        return other != "specdec"  # __version__ and the public names
    if importer != imported:
        return not is_before(imported, importer, ORDER)
    if any(module.startswith(f"{folder}.") and other in others for folder, others in FORBIDDEN.items()):
        return True
    order = INNER_ORDERS.get(importer, ("*",))
    inner, other_inner = module.split(".")[2], other.split(".")[2]
    return inner != other_inner and not is_before(other_inner, inner, order)


def arrows(imports: dict[str, set[str]]) -> Counter[tuple[str, str]]:
    """The number of imports from one package to another."""
    pairs = ((package_of(module), package_of(other)) for module, others in imports.items() for other in others)
    return Counter(
        (importer, imported) for importer, imported in pairs if importer and imported != importer and imported
    )


def picture(counts: Counter[tuple[str, str]]) -> str:
    """An SVG: the packages in their order, an arc for each arrow."""
    names = [name for line in reversed(ORDER) for name in line]
    step, left, width = 46, 16, 470
    heights = {name: 24 + step * place for place, name in enumerate(names)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{step * len(names) + 20}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for importer, imported in sorted(counts):
        top, bottom = heights[importer] + 14, heights[imported] + 14
        reach = left + width + 24 + (bottom - top) * 0.75
        parts.append(
            f'<path d="M{left + width} {top} C{reach:.0f} {top} {reach:.0f} {bottom} {left + width} {bottom}" '
            'fill="none" stroke="#4477aa" stroke-opacity="0.6" stroke-width="1.5">'
            f"<title>{importer} imports {imported}</title></path>"
        )
    for name, top in heights.items():
        parts.append(
            f'<rect x="{left}" y="{top}" width="{width}" height="30" rx="4" fill="#eef3f8" stroke="#4477aa"/>'
            f'<text x="{left + 10}" y="{top + 20}" font-weight="bold">{name}</text>'
            f'<text x="{left + 100}" y="{top + 20}" fill="#333">{PURPOSES[name]}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main(arguments: list[str]) -> None:
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        sys.exit("usage: python docs/structure.py [PICTURE.svg]")
    imports = imports_of(PACKAGE)
    counts = arrows(imports)
    for (importer, imported), count in sorted(counts.items()):
        print(f"{importer:>10} -> {imported:<10} {count:3}")
    print(f"{len(PURPOSES)} packages, {len(imports)} modules, {len(counts)} arrows")
    for sentence in violations(imports):
        print(f"against the rule: {sentence}")
    if arguments:
        Path(arguments[0]).write_text(picture(counts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
