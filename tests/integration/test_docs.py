"""The pages: links lead somewhere, Python blocks run, commands exist, notebooks are whole, the site builds."""

import copy
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, WhisperForCausalLM

import specdec
from docs.badges import IMAGES, badges
from specdec import SpeculativeGenerator
from specdec.cli.app import app
from specdec.models.compat import CACHE
from tests.support import blocks, encoded, gemma4, tiny

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "heads/*.md", "heads/*/*.md", "benchmarks/results/*.md")
    for path in ROOT.glob(pattern)
)
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
FENCED = re.compile(r"^```.*?^```|^    .*?$|`[^`\n]*`", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^    (specdec .*?)(?:\s{2,}#.*)?$", re.M)
WITH_PYTHON = [  # a head's card shows how to use the head, which belongs to one model
    page for page in PAGES if not page.is_relative_to(ROOT / "heads") and BLOCK.search(page.read_text(encoding="utf-8"))
]
MOST_BYTES = 400_000  # of a notebook with its pictures


def name(path):
    return str(path.relative_to(ROOT))


def anchors(path):
    """Those of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_there_are_pages():
    assert len(PAGES) > 30
    assert len(NOTEBOOKS) == 6


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("https://", "http://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{name(page)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{name(page)} links to {link}"


NAMED = sorted({*PAGES, *ROOT.glob("benchmarks/*.md"), *ROOT.glob("hub/*.md")} - {ROOT / "CHANGELOG.md"})
FOLDERS = "specdec|tests|benchmarks|examples|docs|heads|hub"
FILE = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./{{}},*-]*\w\.(?:py|md|sh|json|ipynb|txt|svg))")
MODULE = re.compile(rf"-m ((?:{FOLDERS})(?:\.\w+)+)")


def alternatives(path):
    """`a/{b,c}.py` as a/b.py and a/c.py."""
    found = re.search(r"\{([^}]*)\}", path)
    return [path[: found.start()] + name + path[found.end() :] for name in found[1].split(",")] if found else [path]


@pytest.mark.parametrize("page", NAMED, ids=name)
def test_files_and_modules_that_are_named_exist(page):
    """Capitals stand for a name of the reader's. Pages on removed scripts say so."""
    text = page.read_text(encoding="utf-8")
    if "was removed. `git log" in text:
        text = re.sub(r"benchmarks/\w+\.py", "", text)
    for path in (
        one for found in FILE.findall(text) if not re.search(r"/[A-Z]+\b", found) for one in alternatives(found)
    ):
        assert [*ROOT.glob(path), *(ROOT / "specdec").glob(path)], path
    for module in MODULE.findall(text):
        file = ROOT / module.replace(".", "/")
        assert file.with_suffix(".py").is_file() or (file / "__main__.py").is_file(), module


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_blocks_run(page, tokenizer, monkeypatch, tmp_path):
    """One after the other, with tiny models in place of those that are named, and what a reader would have by then."""
    target = tiny.model("llama")
    monkeypatch.chdir(tmp_path)  # blocks may write files
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: target)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: tokenizer)
    monkeypatch.setattr(
        "specdec.proposers.draft_models.draft_model.load", lambda *args, **kwargs: tiny.model("llama", seed=1)
    )
    monkeypatch.setattr("specdec.proposers.draft_heads.block.load", lambda path: blocks.head())
    monkeypatch.setattr(WhisperForCausalLM, "from_pretrained", lambda *args, **kwargs: encoded.borrowing())
    code = BLOCK.findall(page.read_text(encoding="utf-8"))
    pyplot = pytest.importorskip("matplotlib.pyplot") if any("import plots" in block for block in code) else None
    if pyplot is not None:
        pyplot.switch_backend("Agg")
    names = {
        "torch": torch,
        "model": target,
        "draft_model": tiny.model("llama", seed=1),
        "tokenizer": with_chat_template(tokenizer),
        "inputs": tiny.prompts(9),
        "gemma": gemma4.target() if gemma4.AVAILABLE else target,
        "assistant": gemma4.assistant() if gemma4.AVAILABLE else tiny.model("llama", seed=1),
        "whisper": encoded.model("whisper"),
        "input_features": encoded.inputs("whisper")["input_features"],
        "more_tokens": tiny.prompts(4)["input_ids"],
        "spec": SpeculativeGenerator(target, "ngram"),
        "__name__": "docs",
    }
    for block in code:
        block = block.replace("first.cache", f"first.{CACHE}")  # as docs/memory.md says of older releases
        exec(compile(block, f"a block of {name(page)}", "exec"), names)
    if pyplot is not None:
        pyplot.close("all")


def with_chat_template(tokenizer):
    """A copy of the tokenizer, as one that was tuned for conversations."""
    copied = copy.deepcopy(tokenizer)
    copied.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return copied


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist(page):
    commands = typer.main.get_command(app).commands
    for line in COMMAND.findall(page.read_text(encoding="utf-8")):
        words = shlex.split(line.removesuffix("\\"))[1:]
        options = {option for parameter in commands[words[0]].params for option in parameter.opts}
        unknown = {word for word in words if word.startswith("--")} - options
        assert not unknown, f"{name(page)}: specdec {words[0]} has no {unknown}"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
def test_notebooks_are_kept_whole(notebook):
    """Run from top to bottom, without an error, with pictures that are small, and no folder of whoever ran them."""
    text = notebook.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp|Users)/", json.dumps(outputs))
    assert len(text) < MOST_BYTES


INTEGRATIONS = {  # the README's list, and the tests that each of them stands for
    "pipeline": ["test_pipeline", "test_pipeline_with_an_assistant"],
    "streamers": ["test_text_streamer", "test_text_iterator_streamer", "test_async_text_iterator_streamer"],
    "PEFT": ["test_lora_target_and_its_base_as_draft"],
    "GGUF": ["test_gguf_target"],
    "torchao": ["test_torchao_target", "test_mtp_layers_beside_a_quantised_target"],
    "bitsandbytes": ["test_bitsandbytes_target", "test_mtp_layers_beside_a_quantised_target"],
    "lm-eval": ["test_lm_eval"],
    "TRL": ["test_grpo_rollouts"],
    "datasets": ["test_datasets_map"],
    "gradio": ["test_gradio_chat"],
    "xgrammar": ["parity/test_grammar.py: by_xgrammar"],
    "outlines": ["parity/test_grammar.py: by_outlines"],
    "openai": ["unit/cli/test_serving.py: test_answers_are_plain_decodings"],
    "vision-language": ["parity/test_multimodal.py: test_", "parity/test_multimodal_processors.py: test_"],
    "Whisper": [
        "parity/test_encoder_decoder.py: test_long_sound_",
        "parity/test_encoder_decoder.py: test_the_speech_pipeline",
    ],
}


def test_every_integration_of_the_readme_is_tested_and_every_test_is_in_the_readme():
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Integrations\n")[2].partition("\n## ")[0]
    assert {*re.findall(r"\*\*(.*?)\*\*", section)} == {*INTEGRATIONS}
    source = (ROOT / "tests" / "integration" / "test_integrations.py").read_text(encoding="utf-8")
    named = [name for names in INTEGRATIONS.values() for name in names]
    assert {*re.findall(r"^def (test_\w+)", source, re.M)} == {name for name in named if ":" not in name}
    for name in named:
        file, _, function = name.rpartition(": ")
        text = source if not file else (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {function}" in text


def test_badges_are_those_of_the_tested_releases():
    for name, svg in badges().items():
        assert (IMAGES / f"badge-{name}.svg").read_text(encoding="utf-8") == svg, "run `make pictures`"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 800


def test_every_public_name_is_on_the_api_page():
    """Names that the package exports, and those that users import from a file."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: (.*)$", page, re.M)
    public = {f"specdec.{name}" for name in specdec.__all__}
    files = {
        "specdec.heads.eagle3.checkpoint.load",
        "specdec.heads.eagle3.export.save",
        "specdec.training.recipe.Recipe",
        "specdec.training.run.train",
        "specdec.cli.streamer.ColourStreamer",
        "specdec.cli.server.serve",
        "specdec.evaluation.bench.bench",
    }
    assert public | files <= {*shown}
    assert len(shown) == len({*shown})
    for name in shown:  # the site's builder asks for docstrings, which are there
        module, _, last = name.rpartition(".")
        found = import_module(name) if name == "specdec.evaluation.plots" else getattr(import_module(module), last)
        assert found.__doc__, name
        first = " ".join(inspect.getdoc(found).partition("\n\n")[0].split())
        assert f"| `{name}` | {first} |" in page  # for readers of the file, where directives are not expanded


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    """Without a warning: a page that is in no menu, a link or a name that leads nowhere."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Counters of one or more" in (tmp_path / "api" / "index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_site_in_a_browser(tmp_path):
    """`make screenshots`: a page as a reader sees it on a phone, dark for who prefers that."""
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("no Chromium is installed")
    site = tmp_path / "build" / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (tmp_path / "docs").mkdir()
    script = shutil.copy(ROOT / "docs" / "screenshots.py", tmp_path / "docs")
    subprocess.run([sys.executable, script, "how-it-works"], check=True, capture_output=True)
    pictures = tmp_path / "build" / "screenshots"
    pyplot = pytest.importorskip("matplotlib.pyplot")
    light, dark = (pyplot.imread(pictures / f"how-it-works-phone-{scheme}.png") for scheme in ("light", "dark"))
    assert light.shape == dark.shape
    assert light.mean() > 0.7 > 0.5 > dark.mean()
