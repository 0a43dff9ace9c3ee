"""Which folder of the package may import which: never upwards, and no file in a circle; and what is imported when."""

import ast
import json
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import specdec

PACKAGE = Path(__file__).resolve().parents[1] / "specdec"
# A floor is a folder, or files beside the folders; what is not named is of the parts. As in docs/architecture.md.
FLOORS = {
    "specdec.eagle3": "eagle3",
    "specdec.mtp": "mtp",
    "specdec.blocks": "blocks",
    "specdec.proposers": "proposers",
    "specdec": "generator",
    "specdec.generator": "generator",
    "specdec.loop": "generator",
    "specdec.drafting": "generator",
    "specdec.group": "generator",
    "specdec.hub": "generator",
    "specdec.chat": "uses",
    "specdec.serving": "uses",
    "specdec.data": "data",
    "specdec.training": "training",
    "specdec.doctor": "measuring",
    "specdec.diagnosis": "measuring",
    "specdec.ways": "measuring",
    "specdec.turns": "measuring",
    "specdec.bench": "measuring",
    "specdec.tap_probe": "measuring",
    "specdec.demo": "demo",
    "specdec.cli": "cli",
    "specdec.__main__": "cli",
}
MAY_IMPORT = {
    "parts": [],
    "eagle3": ["parts"],
    "mtp": ["parts"],
    "blocks": ["parts", "eagle3"],
    "proposers": ["parts", "eagle3", "mtp", "blocks"],
    "generator": ["parts", "proposers"],
    "uses": ["parts", "generator"],
    "data": ["parts", "proposers", "generator"],
    "training": ["parts", "eagle3", "mtp", "blocks", "proposers", "generator", "data"],
    "measuring": ["parts", "eagle3", "proposers", "generator", "data"],
    "demo": ["parts", "eagle3", "proposers", "generator", "data"],
    "cli": ["parts", "eagle3", "blocks", "proposers", "generator", "data", "training", "measuring", "uses"],
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
        ("registry.py", "def places():\n    from specdec.demo.weights import cache_folder"),
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


# What is imported when

HEAVY = ("torch", "transformers", "accelerate", "numpy", "matplotlib")


def loaded(code: str, *arguments: str) -> tuple[int, set[str]]:
    """Exit code of a process that runs `code`, and the modules that it had imported by then."""
    last = "import atexit, json, sys; atexit.register(lambda: print('\\n' + json.dumps(sorted(sys.modules))))\n"
    done = subprocess.run([sys.executable, "-c", last + code, *arguments], capture_output=True, text=True)
    return done.returncode, set(json.loads(done.stdout.splitlines()[-1]))


COMMAND = "import sys; from specdec.__main__ import main; sys.argv[0] = 'specdec'; main()"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--help", 0),
        ("--version", 0),
        ("bench --help", 0),
        ("generate MODEL text --rule blok", 2),
        ("generate MODEL text --dtype int3", 2),
        ("generate MODEL text --proposer ngrams", 2),
        ("generate /no/such/model text", 2),
        ("chat MODEL --proposer draft:/no/such/model", 2),
        ("serve /no/such/model", 2),
        ("serve-states /no/such/model", 2),
        ("doctor MODEL ngram --prompts /no/such/file", 2),
        ("doctor MODEL ngram --prompts EMPTY", 2),
        ("bench MODEL --prompts EMPTY", 2),
        ("bench MODEL --chart picture.bmp", 2),
        ("regenerate MODEL EMPTY OUT", 2),
        ("regenerate /no/such/model PROMPTS OUT", 2),
        ("train /no/such/model PROMPTS OUT", 2),
        ("train MODEL /no/such/file OUT", 2),
        ("inspect /no/such/head", 2),
        ("export /no/such/head OUT", 2),
        ("export HEAD OUT --layout gguf", 2),
    ],
)
def test_commands_say_what_is_wrong_before_torch_is_imported(command, code, tmp_path):
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "PROMPTS").write_text('{"prompt": "a"}')
    places = {name: str(tmp_path / name) for name in ("EMPTY", "PROMPTS", "OUT")}
    found, modules = loaded(COMMAND, *(places.get(word, word) for word in command.split()))
    assert found == code
    assert not modules & {*HEAVY}


def test_the_package_alone_imports_no_torch():
    _, modules = loaded("import specdec; assert specdec.__version__; dir(specdec)")
    assert not modules & {*HEAVY}


def test_the_packages_names_are_all_there():
    assert {*specdec.__all__} == {*specdec._FILES} <= {*dir(specdec)}
    for name in specdec.__all__:
        assert getattr(specdec, name).__name__ == name
    with pytest.raises(AttributeError, match="'Nothing'"):
        specdec.Nothing  # noqa: B018


@pytest.mark.slow
def test_beside_a_loaded_model_it_imports_of_transformers_what_it_uses():
    """A process that loads and runs a model has imported the rest of what is found here already."""
    theirs = "from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM\n"
    _, before = loaded(theirs)
    _, after = loaded(theirs + "from specdec import SpeculativeGenerator")
    new = {name for name in after - before if name.startswith("transformers.")}
    assert {".".join(name.split(".")[1:3]) for name in new} <= {"models.llama"}  # of which a head's layer is made
    packages = {name.partition(".")[0] for name in after - before}
    assert not packages & {"matplotlib", "rich", "typer", "accelerate", "datasets", "scipy", "pandas", "sklearn"}
