"""`Lenient`: lossy, and by no more than it says."""

import pytest
import torch

from specdec import DraftModelProposer, DynamicTree, Lenient, NgramProposer, SpeculativeGenerator

GREEDY = {"max_new_tokens": 24, "do_sample": False}
PROPOSERS = {
    "chains": DraftModelProposer,
    "trees": lambda draft: DraftModelProposer(draft, tree=DynamicTree(depth=3, top_k=3)),
}


def regrets(model, prompts, text):
    """(B, new): how much better the target's best token is than the text's, in nats."""
    width = prompts["input_ids"].shape[1]
    mask = torch.nn.functional.pad(prompts["attention_mask"], (0, text.shape[1] - width), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(text, attention_mask=mask, position_ids=positions).logits[:, width - 1 : -1]
    return logits.max(-1).values - logits.gather(2, text[:, width:, None])[..., 0]


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize(("gap", "budget"), [(3.0, float("inf")), (3.0, 4.0), (float("inf"), 5.0)])
def test_no_token_and_no_row_loses_more_than_allowed(llama, draft, ragged, proposer, gap, budget):
    def length_of(rule):
        spec = SpeculativeGenerator(llama, PROPOSERS[proposer](draft), draft_length=3, rule=rule)
        return spec.generate(**ragged, **GREEDY), spec.report.mean_acceptance_length

    text, accepted = length_of(Lenient(gap, budget))
    lost = regrets(llama, ragged, text)
    assert float(lost.max()) <= gap + 1e-4
    assert float(lost.sum(1).max()) <= budget + 1e-3
    assert float(lost.sum()) > 0
    assert accepted > length_of("coupled")[1]


@pytest.mark.parametrize("lenient", [Lenient(gap=0.0), Lenient(gap=9.0, budget=0.0)])
def test_who_may_lose_nothing_writes_plain_decoding_s_text(llama, draft, ragged, lenient):
    for arguments in (GREEDY, GREEDY | {"do_sample": True, "temperature": 0.8, "top_p": 0.9}):
        for proposer in (DraftModelProposer(draft), NgramProposer()):
            spec = SpeculativeGenerator(llama, proposer, draft_length=3, rule=lenient, on_unsupported="error")
            texts = []
            for generate in (llama.generate, spec.generate):
                torch.manual_seed(2)
                texts.append(generate(**ragged, **arguments).tolist())
            assert texts[0] == texts[1]


def test_at_higher_temperatures_more_is_accepted(llama, draft, single):
    rates = []
    for rule in ("coupled", Lenient(gap=1.0)):
        spec = SpeculativeGenerator(llama, DraftModelProposer(draft), draft_length=3, rule=rule)
        for seed in range(8):
            torch.manual_seed(seed)
            spec.generate(**single, max_new_tokens=24, do_sample=True)
        rates.append(spec.report.draft_acceptance_rate)
    assert rates[1] > 1.1 * rates[0]


def test_tokens_that_are_ruled_out_stay_so(llama, draft, single):
    banned = list(range(2, 40))
    spec = SpeculativeGenerator(llama, DraftModelProposer(draft), draft_length=3, rule=Lenient(gap=float("inf")))
    text = spec.generate(**single, **GREEDY, suppress_tokens=banned)
    assert not {*text[0, 9:].tolist()} & {*banned}


@pytest.mark.parametrize("wrong", [{"gap": -1.0}, {"budget": float("nan")}])
def test_what_it_refuses(wrong):
    with pytest.raises(ValueError, match="at least 0"):
        Lenient(**wrong)
