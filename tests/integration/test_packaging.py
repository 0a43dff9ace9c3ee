"""The distribution: its name beside PyPI's other one, its version, its extras, and a wheel that works on its own."""

import json
import os
import re
import shutil
import subprocess
import sys
from email.parser import Parser
from importlib.metadata import PathDistribution
from pathlib import Path
from zipfile import ZipFile

import pytest

import specdec
from specdec.heads import registry
from specdec.utils import namesake
from tests.support import tiny
from tests.support.shop import Shop

ROOT = Path(__file__).resolve().parents[2]
SMOKE = """
import json, pathlib, torch, specdec
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     eos_token_id=None, pad_token_id=0)
model = LlamaForCausalLM(config).eval()
prompt = torch.arange(1, 9).repeat(2)[None]
arguments = {"do_sample": False, "max_new_tokens": 12, "attention_mask": torch.ones_like(prompt)}
same = torch.equal(specdec.SpeculativeGenerator(model, "auto").generate(prompt, **arguments),
                   model.generate(prompt, **arguments))
print(json.dumps({"same": same, "folder": str(pathlib.Path(specdec.__file__).parent), "version": specdec.__version__}))
"""


@pytest.fixture
def other(tmp_path, monkeypatch):
    """`other(*files)`: a distribution `specdec` that put these files beside its metadata."""

    def install(*files):
        info = tmp_path / "specdec-0.2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.4\nName: specdec\nVersion: 0.2.0\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        monkeypatch.setattr(namesake, "distribution", lambda name: PathDistribution(info))
        return tmp_path / "specdec"

    return install


def test_the_other_project_in_our_folder_is_an_error(other):
    folder = other("specdec/__init__.py", "specdec/decoder.py", "specdec-0.2.0.dist-info/METADATA")
    with pytest.raises(ImportError, match=r"specdec\" 0\.2\.0 is another project .* `pip uninstall specdec`, then"):
        namesake.refuse_namesake(folder)


@pytest.mark.parametrize(
    "files", [(), ("_specdec.pth",), ("specdec/__init__.py",)], ids=["none", "a link", "elsewhere"]
)
def test_what_lies_elsewhere_is_no_error(other, files):
    other(*files)
    namesake.refuse_namesake(Path(specdec.__file__).parent)


def test_the_version_stands_in_one_place():
    assert 'dynamic = ["version", ' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {specdec.__version__}\n" in cited  # which can't read it from there


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """What the source distribution holds, as a folder."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("sdist")
    build("--sdist", ROOT, folder)
    [archive] = folder.glob("specdec_hf-*.tar.gz")
    shutil.unpack_archive(archive, folder)
    return folder / archive.name.removesuffix(".tar.gz")


def build(kind, source, folder):
    command = [sys.executable, "-m", "build", kind, "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("repository", ["", "https://github.com/someone/specdec"], ids=["no repository", "one"])
def test_an_index_shows_the_readme_without_a_link_that_leads_nowhere(sdist, tmp_path, repository):
    source = shutil.copytree(sdist, tmp_path / "source")
    project = (source / "pyproject.toml").read_text(encoding="utf-8")
    (source / "pyproject.toml").write_text(
        re.sub(r'^repository = ".*?"', f'repository = "{repository}"', project, flags=re.M)
    )
    build("--wheel", source, tmp_path)
    [wheel] = tmp_path.glob("specdec_hf-*.whl")
    with ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith("/METADATA")]
        metadata = Parser().parsestr(files.read(name).decode("utf-8"))
    page, readme = metadata.get_payload(), (ROOT / "README.md").read_text(encoding="utf-8")
    assert metadata["Description-Content-Type"] == "text/markdown"
    link = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
    here, there = link.findall(readme), link.findall(page)
    assert len(here) > 20
    assert ("github.com/OWNER" in page) == (not repository)
    if repository:  # a picture as the file, a page as the repository shows it
        places = {"!": f"{repository}/raw/main/", "": f"{repository}/blob/main/"}
        expected = [
            (picture, words, path if path.startswith("https://") else places[picture] + path)
            for picture, words, path in here
        ]
        assert there == expected
        assert metadata.get_all("Project-URL") == [f"Repository, {repository}"]
    else:
        assert there == [found for found in here if found[2].startswith("https://")]
        assert all(words in page for picture, words, _ in here if not picture)


@pytest.fixture(scope="module")
def installed(sdist, tmp_path_factory):
    """The wheel in an environment of its own that shares the installed dependencies, and nothing of the checkout.

    Its Python, and where it lies.
    """
    folder = tmp_path_factory.mktemp("installed")
    run = {"check": True, "capture_output": True, "text": True, "cwd": folder}
    build("--wheel", sdist, folder)
    [wheel] = folder.glob("specdec_hf-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], **run)
    python = folder / "venv" / "bin" / "python"
    purelib = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(purelib, **run).stdout.strip())
    install = ["--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *install], **run)
    shared = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    (site / "shared.pth").write_text("\n".join(map(str, shared)))
    return python, site


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_works_on_its_own(installed, tmp_path):
    python, site = installed
    run = {"check": True, "capture_output": True, "text": True, "cwd": tmp_path}
    said = json.loads(subprocess.run([str(python), "-I", "-c", SMOKE], **run).stdout.splitlines()[-1])
    assert said == {"same": True, "folder": str(site / "specdec"), "version": specdec.__version__}
    help_text = subprocess.run([str(python), "-I", "-m", "specdec", "--help"], **run).stdout
    assert "doctor" in help_text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_readmes_lines_speculate_and_warn_of_nothing(installed, tmp_path):
    """In the installed wheel, with the transformers of this environment: `make test-newest` runs it on the newest."""
    tokenizer = tiny.letters()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    tiny.on_host("llama").save_pretrained(tmp_path / "model")
    [lines] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    lines, named = re.subn(r"^name = .*$", 'name = "model"', lines, flags=re.M)
    assert named == 1
    counts = "print(spec.report.num_plain_calls, spec.report.num_draft_tokens)"
    code = f"import warnings\nwarnings.simplefilter('always')\n{lines}\n{counts}\n"
    done = subprocess.run([str(installed[0]), "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plain, drafted = map(int, done.stdout.split()[-2:])
    assert plain == 0
    assert drafted > 0
    said = [line for line in done.stderr.splitlines() if re.search(r"specdec|deprecated.*(cache|past_key)", line)]
    assert all("no head is known for model" in line for line in said)  # the README's own model has one


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (ROOT / "heads").exists(), reason="no checkout: the sdist has no heads")
def test_the_wheel_downloads_every_head_that_a_checkout_has(installed, tmp_path):
    """Their sizes and checksums stand in it."""
    code = "from specdec.heads import registry, shipped\nfrom specdec.heads.eagle3.checkpoint import load\n"
    code += "for known in registry.HEADS:\n"
    code += "    if known.files: print(load(shipped.download_head(known.head, known.files)).draft_to_target.numel())\n"
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    with Shop(ROOT / "heads").open() as address:
        environment |= {"SPECDEC_HEADS": address, "SPECDEC_CACHE": str(tmp_path / "cache")}
        command = [str(installed[0]), "-I", "-c", code]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment)
    ours = [known for known in registry.HEADS if known.files]
    assert len(done.stdout.split()) == len(ours) > 1
    for known in ours:
        for name in known.files:
            copy = tmp_path / "cache" / "heads" / known.head / name
            assert copy.read_bytes() == (ROOT / "heads" / known.head / name).read_bytes()
