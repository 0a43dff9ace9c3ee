"""Code that depends on where a file of the package is. If the file moved, it would break without an error."""

import runpy
import warnings
from pathlib import Path

import specdec
from specdec import DraftModelProposer, NgramProposer, SpeculativeGenerator
from specdec.cli import common, errors
from specdec.engine.hub import generate
from specdec.engine.loop import Loop
from specdec.heads import shipped
from specdec.utils import namesake
from tests.support import tiny

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(specdec.__file__).resolve().parent


def test_only_proposers_from_elsewhere_have_their_drafts_checked(monkeypatch):
    """Checking a draft synchronises the host with the device once a call."""
    checked, first_token = [], Loop._first_token

    def noting(loop, prefill):
        checked.append(not loop._values_checked)
        first_token(loop, prefill)

    monkeypatch.setattr(Loop, "_first_token", noting)
    model = tiny.model("llama")
    for proposer in (NgramProposer(), DraftModelProposer(model), tiny.Garbage()):
        SpeculativeGenerator(model, proposer).generate(**tiny.prompts(5), max_new_tokens=2)
    assert checked == [False, False, True]


def test_the_checkouts_heads_are_found():
    assert shipped.head_folders()[0] == ROOT / "heads"
    assert any((ROOT / "heads").glob("*/config.json"))


def test_commands_know_the_packages_folder():
    assert PACKAGE == errors.PACKAGE
    ours = common.summary("words", UserWarning, str(PACKAGE / "engine" / "loop.py"), 1)
    assert ours == "warning: words\n"
    others = common.summary("words", UserWarning, warnings.__file__, 1)
    assert others != ours
    assert namesake.refuse_namesake.__defaults__ == (PACKAGE,)


def test_the_hubs_folder_imports_the_librarys_generate():
    assert runpy.run_path(str(ROOT / "hub" / "custom_generate" / "generate.py"))["generate"] is generate
