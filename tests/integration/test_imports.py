"""Imports between packages follow the rule of `docs/structure.py`; commands start without torch."""

import json
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

import specdec
from docs.structure import INNER_ORDERS, ORDER, PACKAGE, PURPOSES, arrows, imports_of, main, picture, violations


def test_no_import_goes_upwards():
    imports = imports_of(PACKAGE)
    assert len(imports) > 150
    assert violations(imports) == []


def test_the_packages_are_those_of_the_rule():
    listed = [name for line in ORDER for name in line]
    assert {*listed} == {*PURPOSES} == {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert {path.name for path in PACKAGE.iterdir() if path.is_file()} == {"__init__.py", "__main__.py", "py.typed"}
    for package, order in INNER_ORDERS.items():
        for line in order:
            for name in (line,) if isinstance(line, str) else line:
                assert (
                    name == "*" or (PACKAGE / package / name).is_dir() or (PACKAGE / package / f"{name}.py").is_file()
                )


def test_packages_hold_no_code_of_their_own():
    """Importing a package imports none of its modules: the command line must not import torch."""
    with_old_names = {PACKAGE / "training", PACKAGE / "proposers"}  # for one release: `specdec.utils.moved`
    for path in PACKAGE.rglob("__init__.py"):
        assert path.parent in {PACKAGE, *with_old_names} or path.read_text() == "", path


def test_the_picture_shows_every_arrow():
    counts = arrows(imports_of(PACKAGE))
    assert len(counts) <= 40
    drawn = picture(counts)
    assert all(f"<title>{importer} imports {imported}<" in drawn for importer, imported in counts)
    assert (PACKAGE.parent / "docs" / "images" / "structure.svg").read_text() == drawn, "run `make structure`"


def test_an_option_is_no_file_to_draw_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (["--help"], ["a.svg", "b.svg"]):
        with pytest.raises(SystemExit, match="usage"):
            main(arguments)
    assert not [*tmp_path.iterdir()]


def test_no_file_imports_itself_through_others():
    TopologicalSorter(imports_of(PACKAGE)).prepare()  # raises CycleError


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("heads/eagle3/head.py", "from specdec.training.recipe import Recipe"),
        ("heads/registry.py", "def places():\n    from specdec.data.texts import Text"),
        ("data/texts.py", "from specdec.evaluation.bench import bench"),
        ("sampling/draft_tree.py", "import specdec.proposers.base"),
        ("training/run.py", "from specdec import cli"),
        ("evaluation/bench.py", "from specdec.training.run import train"),
        ("models/cache/kv_cache.py", "from specdec.models.runner import ModelRunner"),
        ("proposers/pacing/pacer.py", "from specdec.proposers.context import Context"),
        ("proposers/lookup/base.py", "from specdec.proposers.draft_models.draft_model import DraftModelProposer"),
        ("engine/hf/call.py", "from specdec.engine.loop import Loop"),
        ("training/teacher/base.py", "from specdec.training.objectives.losses import LOSSES"),
        ("utils/paths.py", "from specdec import __main__"),
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
    assert [found for found in violations(imports_of(tmp_path / "specdec")) if found.startswith(f"{module} imports ")]


def test_a_circle_is_found():
    with pytest.raises(CycleError):
        TopologicalSorter(
            imports_of(PACKAGE) | {"specdec.sampling.draft_tree": {"specdec.sampling.acceptance"}}
        ).prepare()


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
        ("train MODEL EMPTY OUT", 2),
        ("train MODEL BROKEN OUT", 2),
        ("train MODEL BROKEN OUT --dry-run", 2),
        ("train MODEL PROMPTS OUT --held-out-data BROKEN", 2),
        ("train MODEL UNKNOWN OUT", 2),
        ("train MODEL PROMPTS EMPTY", 2),  # a file
        ("train MODEL PROMPTS EMPTY/OUT", 2),
        ("train MODEL PROMPTS NOTES", 2),
        ("train MODEL PROMPTS NOTES --dry-run", 2),
        ("regenerate MODEL BROKEN OUT", 2),
        ("regenerate MODEL PROMPTS BROKEN", 2),
        ("regenerate MODEL PROMPTS PROMPTS", 2),
        ("regenerate MODEL PROMPTS EMPTY/OUT", 2),
        ("regenerate MODEL PROMPTS ANSWERS", 2),  # of another target
        ("inspect /no/such/head", 2),
        ("export /no/such/head OUT", 2),
        ("export HEAD OUT --layout gguf", 2),
        ("export HEAD EMPTY", 2),
        ("export HEAD NOTES", 2),
    ],
)
def test_commands_say_what_is_wrong_before_torch_is_imported(command, code, tmp_path):
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "PROMPTS").write_text('{"prompt": "a"}')
    (tmp_path / "BROKEN").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "UNKNOWN").write_text('{"question": "a", "answer": "b"}')
    (tmp_path / "ANSWERS").write_text('{"id": 0, "target": "OTHER", "messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "NOTES").mkdir()
    (tmp_path / "NOTES" / "notes.txt").write_text("mine")
    places = {
        name: str(tmp_path / name) for name in ("EMPTY", "PROMPTS", "BROKEN", "UNKNOWN", "ANSWERS", "NOTES", "OUT")
    }
    words = ("/".join(places.get(part, part) for part in word.split("/")) for word in command.split())
    found, modules = loaded(COMMAND, *words)
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
