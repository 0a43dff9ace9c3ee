"""Which folder of the package may import which: never upwards, and no file in a circle."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "specdec"
# A floor is a folder, or files beside the folders; what is not named is of the parts. As in docs/architecture.md.
FLOORS = {
    "specdec.eagle3": "eagle3",
    "specdec.proposers": "proposers",
    "specdec": "generator",
    "specdec.generator": "generator",
    "specdec.loop": "generator",
    "specdec.drafting": "generator",
    "specdec.hub": "generator",
    "specdec.chat": "uses",
    "specdec.serving": "uses",
    "specdec.data": "data",
    "specdec.training": "training",
    "specdec.doctor": "measuring",
    "specdec.diagnosis": "measuring",
    "specdec.ways": "measuring",
    "specdec.tap_probe": "measuring",
    "specdec.demo": "demo",
    "specdec.cli": "cli",
    "specdec.__main__": "cli",
}
MAY_IMPORT = {
    "parts": [],
    "eagle3": ["parts"],
    "proposers": ["parts", "eagle3"],
    "generator": ["parts", "proposers"],
    "uses": ["parts", "generator"],
    "data": ["parts", "proposers", "generator"],
    "training": ["parts", "eagle3", "proposers", "generator", "data"],
    "measuring": ["parts", "eagle3", "proposers", "generator", "data"],
    "demo": ["parts", "eagle3", "proposers", "generator", "data"],
    "cli": ["parts", "eagle3", "proposers", "generator", "data", "training", "measuring", "uses"],
}


def imports_of(package: Path) -> dict[str, set[str]]:
    """The modules of a package that each of its modules imports, at its top or inside a function."""
    root = package.parent
    modules = {".".join(path.relative_to(root).with_suffix("").parts): path for path in package.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    return {name: _imported(path, modules) - {name} for name, path in modules.items()}


def _imported(path: Path, modules) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            for alias in node.names:  # a module, or a name in one
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else node.module)
    return found & modules.keys()


def floor(module: str) -> str:
    if module in FLOORS:
        return FLOORS[module]
    folder = module.rpartition(".")[0]
    return "parts" if folder == "specdec" else FLOORS[folder]


def upwards(imports: dict[str, set[str]]) -> list[str]:
    return [
        f"{module} imports {other}"
        for module, others in imports.items()
        for other in sorted(others)
        if floor(other) not in [floor(module), *MAY_IMPORT[floor(module)]]
    ]


def test_no_import_goes_upwards():
    imports = imports_of(PACKAGE)
    assert len(imports) > 60
    assert upwards(imports) == []


def test_no_file_imports_itself_through_others():
    TopologicalSorter(imports_of(PACKAGE)).prepare()  # raises CycleError


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("eagle3/head.py", "from specdec.training import Recipe"),
        ("eagle3/registry.py", "def places():\n    from specdec.demo.weights import cache_folder"),
        ("data/texts.py", "from specdec.eagle3 import load"),
        ("tree.py", "import specdec.proposers.base"),
        ("training/run.py", "from specdec import cli"),
    ],
)
def test_an_import_upwards_is_found(tmp_path, file, line):
    for path in PACKAGE.rglob("*.py"):
        copy = tmp_path / "specdec" / path.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    with (tmp_path / "specdec" / file).open("a") as planted:
        planted.write(f"\n{line}\n")
    module = "specdec." + file.removesuffix(".py").replace("/", ".")
    assert [found for found in upwards(imports_of(tmp_path / "specdec")) if found.startswith(f"{module} imports ")]


def test_a_circle_is_found():
    with pytest.raises(CycleError):
        TopologicalSorter(imports_of(PACKAGE) | {"specdec.tree": {"specdec.acceptance"}}).prepare()
