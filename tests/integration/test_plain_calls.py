"""docs/plain-calls.md has every reason that the code gives for plain decoding, and no other."""

import ast
import inspect
import re
from pathlib import Path
from textwrap import dedent

import pytest

from specdec import SpeculativeGenerator, Unsupported
from specdec.engine.hf import eligibility, length_limits, multimodal, prompt_layout
from specdec.models.exact.exactness import Exactness

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plain-calls.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+?) \| (`.*`) \|$", PAGE, re.M)
SPAN = re.compile(r"`([^`]+)`")
DECIDING = (
    eligibility.decided_before,
    eligibility.why_plain,
    eligibility._inexact_prompt,
    Exactness.problem.fget,
    eligibility._padding_problem,
    eligibility._counting_problem,
    length_limits.rope_problem,
    length_limits.scale_problem,
    multimodal.problem,
    prompt_layout.problem,
    SpeculativeGenerator._decode,
)


def written(node):
    """A string as the code has it, with "..." for its values; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for part in node.values:
        is_name = isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name)
        parts.append("cache" if is_name and part.value.id == "CACHE" else written(part) or "...")
    return "".join(parts)


def reasons():
    """Collect the reasons in the code, with "..." for their values."""
    for function in DECIDING:
        for node in ast.walk(ast.parse(dedent(inspect.getsource(function)))):
            is_reason = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "reason"
            if (is_reason or isinstance(node, ast.Return)) and (text := written(node.value)):
                yield text


def documented():
    models = " ".join(PAGE.partition("## Models")[2].split())
    return [text for _, cell in ROWS for text in SPAN.findall(cell)] + SPAN.findall(models)


def begins(reason, text):
    """Return whether a reason in the code begins as on the page."""
    return re.match(re.escape(text).replace(re.escape("..."), ".*?"), reason) is not None


def test_every_reason_is_on_the_page():
    found = list(reasons())
    assert len(found) > 30
    assert [reason for reason in found if not any(begins(reason, text) for text in documented())] == []


def test_every_reason_of_the_page_is_in_the_code():
    found = list(reasons())
    assert [text for text in documented() if not any(begins(reason, text) for reason in found)] == []


ARGUMENTS = [
    pytest.param(span, SPAN.findall(cell)[0], id=span)
    for given, cell in ROWS
    for span in SPAN.findall(given)
    if re.fullmatch(r"\w+=(\w+|\"\w+\"|[\d.]+|\[+1\]+)", span)
    and span.partition("=")[0] not in {"synced_gpus", *eligibility.SETTINGS}
]
assert len(ARGUMENTS) > 10


@pytest.mark.parametrize(("argument", "reason"), ARGUMENTS)
def test_the_arguments_of_the_page_give_these_reasons(models, single, argument, reason):
    spec = SpeculativeGenerator(models("llama", attn_implementation="eager"), "ngram", on_unsupported="error")
    arguments = eval(f"dict({argument})", {"function": print})
    if argument == 'cache_implementation="quantized"':
        pytest.importorskip("optimum.quanto")
    with pytest.raises(Unsupported) as raised:
        spec.generate(**single, **arguments, max_new_tokens=4)
    assert begins(str(raised.value).removeprefix("cannot speculate: "), reason)


def test_a_grammar_in_a_batch_is_told_to_come_alone(llama, ragged):
    spec = SpeculativeGenerator(llama, "ngram", on_unsupported="error")
    with pytest.raises(Unsupported, match="pass one prompt per call, make it a specdec.GrammarProcessor"):
        spec.generate(**ragged, logits_processor=[lambda ids, scores: scores], max_new_tokens=4)


@pytest.mark.parametrize("rule", ["block", "token", "typical"])
def test_a_grammar_under_another_rule_is_told_which_to_use(llama, single, rule):
    spec = SpeculativeGenerator(llama, "ngram", rule=rule, on_unsupported="error")
    with pytest.raises(Unsupported, match='use rule="coupled", make it a specdec.GrammarProcessor if it is a grammar'):
        spec.generate(**single, logits_processor=[lambda ids, scores: scores], do_sample=True, max_new_tokens=4)
