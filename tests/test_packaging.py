"""The distribution: its name beside PyPI's other one, its version, its extras, and a wheel that works on its own."""

import json
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

import specdec
from specdec import namesake

ROOT = Path(__file__).resolve().parents[1]
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
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {specdec.__version__}\n" in cited  # which can't read it from there


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_works_on_its_own(tmp_path):
    """In an environment of its own that shares the installed dependencies, and nothing of the checkout."""
    pytest.importorskip("build")
    run = {"check": True, "capture_output": True, "text": True, "cwd": tmp_path}
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)], **run)
    [wheel] = tmp_path.glob("specdec_hf-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], **run)
    python = tmp_path / "venv" / "bin" / "python"
    purelib = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(purelib, **run).stdout.strip())
    install = ["--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *install], **run)
    shared = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    (site / "shared.pth").write_text("\n".join(map(str, shared)))
    said = json.loads(subprocess.run([str(python), "-I", "-c", SMOKE], **run).stdout.splitlines()[-1])
    assert said == {"same": True, "folder": str(site / "specdec"), "version": specdec.__version__}
    help_text = subprocess.run([str(python), "-I", "-m", "specdec", "--help"], **run).stdout
    assert "doctor" in help_text
