"""Which causal-LM families' passes over drafts are captured as one full graph per size; no code is generated.

    python -m tests.support.captured [family ...]

Tiny and random, a ragged batch of 2, random and mostly right drafts of two sizes in 50 rounds or more.
"""

from __future__ import annotations

import sys
import warnings

import torch
import transformers

from specdec import SpeculativeGenerator
from specdec.models import static_forward
from tests.support import families
from tests.support.families import LENGTHS, tiny_model
from tests.support.tiny import Garbage, prompts, specdec_warnings

ROUNDS = 50
SIZES = (2, 4)  # nodes; drafts of 1 and of 2 or 3 tokens


class TwoSizes(Garbage):
    """Drafts of 1 to 3 tokens in turn."""

    def propose(self, context):
        self.size = 1 + self._number(2)
        return super().propose(context)


def try_capture(name: str) -> str:
    """Empty where a family is captured; else why it is not, or what went wrong."""
    try:
        model = tiny_model(name)
    except Exception as error:
        return f"cannot be built tiny: {type(error).__name__}"
    torch.compiler.reset()
    spec = SpeculativeGenerator(model, TwoSizes(), draft_length=3, compile=True)
    if not spec.capability.trees:
        return "no trees"
    inputs = prompts(*LENGTHS[-1], vocab=families._vocabulary(model))
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    rounds = 0
    with specdec_warnings() as warned, torch._dynamo.config.patch(error_on_recompile=True):
        while rounds < ROUNDS and not warned:
            ours = spec.generate(**inputs, max_new_tokens=20, do_sample=False)
            if not torch.equal(ours, plain):
                return "WRONG: its text is not plain decoding's"
            if spec.report.num_plain_calls:
                return "runs as plain decoding"
            rounds += spec.last_report.num_rounds
            taken = spec._sessions.own.static_forward
            if taken is None or taken.refused:
                break
    if warned:
        return warned[0].partition("without graphs: ")[2]
    sizes = {nodes for key in taken._captured for nodes in [dict(key[-3:]).get("input_ids", (0, 0))[1]]}
    return "" if len(taken) == len(taken._captured) == len(SIZES) else f"WRONG: {len(taken)} graphs, sizes {sizes}"


def main(names: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    static_forward.BACKEND = "eager"
    for name in names:
        try:
            reason = try_capture(name)
        except Exception as error:
            reason = f"WRONG: {type(error).__name__}: {str(error)[:100]}"
        print(f"{name}: {reason or 'captured'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or families.NAMES)
