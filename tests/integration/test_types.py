"""Types in user code: what mypy and pyright make of a file that uses the package."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USER = """
from torch import Tensor
from typing import Any
import specdec
from specdec import Context, DraftTree, DynamicTree, NgramProposer, Proposer, Report, RoundTrace, SpeculativeGenerator
from specdec.heads.eagle3.export import save
from specdec.training.initialization.eagle3 import initialize

def use(model: Any, inputs: dict[str, Any], head: Any) -> None:
    spec = SpeculativeGenerator(model)
    fixed = SpeculativeGenerator(model, "draft:some/where", rule="block", on_unsupported="error", draft_length=4)
    text: Tensor = spec.generate(**inputs, max_new_tokens=96, do_sample=False)
    row: Tensor = text[0, 4:]
    report: Report = spec.report
    length: float = report.mean_acceptance_length
    same: specdec.SpeculativeGenerator
    with fixed.installed() as same:
        pass
    with spec.watch() as rounds:
        kept: list[RoundTrace] = rounds
    initialize(model, 100)
    save(head, "folder", "int8")
    SpeculativeGenerator(model, NgramProposer(max_ngram=3))

class Mine(Proposer):
    def propose(self, context: Context) -> DraftTree:
        return context.chain([context.row(b).tolist()[-1:] for b in range(context.batch_size)])
"""
WRONG = [
    'SpeculativeGenerator(model, rule="blok")',
    'SpeculativeGenerator(model, on_unsupported="no")',
    "SpeculativeGenerator(model, 3)",
    "SpeculativeGenerator(model).generates()",
    "number: str = SpeculativeGenerator(model).report.tokens_per_second",
    'save(head, "folder", "gguf")',
    "specdec.Nothing",
]


def checked(tool: list[str], file: Path) -> tuple[int, set[int], str]:
    """Exit code, lines with errors, and what was said."""
    command = [sys.executable, "-m", *tool, str(file)]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "error:" in line and file.name in line]
    return done.returncode, {int(line.split(file.name + ":")[1].split(":")[0]) for line in lines}, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["mypy", "basedpyright"])
def test_user_code_is_checked(tool, tmp_path):
    """Right code passes, every wrong line is found: by the package's own annotations, as it was installed."""
    if find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed")
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nmypy_path = {ROOT}\n[mypy-specdec.*]\nfollow_imports = silent\n"  # as if it were installed
    )
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}"], "typeCheckingMode": "standard"}}')
    options = {
        "mypy": ["mypy", "--config-file", str(tmp_path / "mypy.ini")],
        "basedpyright": ["basedpyright", "--pythonpath", sys.executable],
    }[tool]
    file = tmp_path / "user.py"
    file.write_text(USER)
    code, _, said = checked(options, file)
    assert code == 0, said
    start = len(USER.splitlines()) + 2
    file.write_text(USER + "\ndef wrong(model: Any, head: Any) -> None:\n" + "".join(f"    {line}\n" for line in WRONG))
    _, lines, said = checked(options, file)
    assert lines == set(range(start + 1, start + 1 + len(WRONG))), said
