"""The EAGLE-3 head: against a naive one, against its own simulation, and through the decoder."""

import pickle
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from specdec import DynamicTree, Eagle3Proposer, SpeculativeGenerator
from specdec.heads.eagle3.config import Eagle3Config
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.eagle3.runner import HeadRunner
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.models.hidden_states import FINAL, Taps
from specdec.proposers.draft_models.draft_nodes import DraftNodes
from specdec.proposers.pacing.estimates import Acceptance
from specdec.proposers.pacing.pacer import Pacer
from specdec.training.evaluate import accepted_lengths, evaluate
from specdec.training.objectives.unroll import unroll
from tests.support import eagle3, families, tiny
from tests.support.diagonal import diagonal
from tests.support.naive_eagle3 import NaiveHead

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


# The head against the naive one


def naive(head, target):
    lm_head = target.get_output_embeddings().weight if head.config.version == 1 else None
    return NaiveHead(head.state_dict(), head.config, target.get_input_embeddings().weight, lm_head)


def first_eagle(seed=0):
    """An EAGLE-1 head: reads the target's final state, drafts through the target's LM head."""
    return eagle3.head("plain", seed, version=1, draft_vocab_size=tiny.VOCAB, fc_bias=True, tap_ids=None, num_layers=1)


@pytest.fixture
def head(request):
    made = {"EAGLE-1": first_eagle, "draft window": lambda: eagle3.head("plain", draft_window=4)}.get(request.param)
    return made() if made else eagle3.head(request.param)


@torch.no_grad()
@pytest.mark.parametrize(
    ("head", "prompts", "lengths"),
    diagonal(
        [*eagle3.VARIANTS, "EAGLE-1", "draft window"],
        {"remembered": (2, 1024), "in parts": (2, 3), "passed": (1000, 1024)},
        {"single": (9,), "ragged": (9, 3, 12, 6)},
    ),
    indirect=["head"],
)
def test_it_computes_what_the_naive_head_does(head, prompts, lengths, monkeypatch):
    """A prompt in two parts, a tree of two depths with siblings, dropped; then more text, and a chain."""
    prompt, at_once = prompts
    monkeypatch.setattr("specdec.heads.base.PROMPT", prompt)
    monkeypatch.setattr("specdec.heads.base.AT_ONCE", at_once)
    target = tiny.model("llama")
    generator = torch.Generator().manual_seed(0)
    B, T = len(lengths), max(lengths) + 5
    wide = 32 * head.config.num_taps
    states = torch.randn(B, T, wide, generator=generator)
    tokens = torch.randint(1, tiny.VOCAB, (B, T), generator=generator)
    runner, reference = HeadRunner(head, BorrowedEmbeddings.by(target, head)), naive(head, target)
    runner.start(B)

    def extend(ends, counts):
        """Feed each row's `counts[b]` tokens before column `ends[b]`."""
        width = max(counts)
        rows = [torch.arange(end - width, end).clamp(min=0) for end in ends]
        index = torch.stack(rows)
        pads = [width - count for count in counts]
        fed = states.gather(1, index[..., None].expand(-1, -1, wide))
        return runner.extend(tokens.gather(1, index), fed, pads)[:, 0]

    def check(logits, ends, paths, rows=range(B)):
        for b in rows:
            end = ends[b]
            wanted = reference.draft(states[b, :end], tokens[b, :end].tolist(), paths[b])
            scale = max(1.0, float(wanted.abs().max()))
            torch.testing.assert_close(logits[b].double() / scale, wanted / scale, **CLOSE)

    half = [length // 2 for length in lengths]
    check(extend(half, half), half, [()] * B)
    ends = list(lengths)
    check(extend(ends, [length - h for length, h in zip(lengths, half, strict=True)]), ends, [()] * B)

    drafted = torch.randint(1, tiny.VOCAB, (B, 5), generator=generator)
    stepped = DraftNodes.none(tokens[:, 0], None).and_then(drafted[:, :2], None)
    logits = runner.grow(drafted[:, :2], None, stepped.depth, stepped.seen, False)
    for n in range(2):
        check(logits[:, n], ends, drafted[:, n : n + 1].tolist())
    above = torch.tensor([[0, 1, 1]]).expand(B, -1)
    stepped = stepped.and_then(drafted[:, 2:], above)
    logits = runner.grow(drafted[:, 2:], above, stepped.depth, stepped.seen, False)
    for n in range(3):
        check(logits[:, n], ends, drafted[:, [int(above[0, n]), 2 + n]].tolist())

    runner.drop_draft()
    ends = [end + 2 for end in ends]
    check(extend(ends, [2] * B), ends, [()] * B)
    stepped = DraftNodes.none(tokens[:, 0], None)
    for depth in range(3):
        parents = None if depth == 0 else torch.full((B, 1), depth - 1)
        stepped = stepped.and_then(drafted[:, depth : depth + 1], parents)
        logits = runner.grow(drafted[:, depth : depth + 1], parents, stepped.depth, stepped.seen, True)
        check(logits[:, 0], ends, drafted[:, : depth + 1].tolist())

    runner.drop_draft()
    gained = [3, 0, 2, 3][:B]  # a row may gain nothing, beside others: it is finished
    ends = [end + more for end, more in zip(ends, gained, strict=True)]
    check(extend(ends, gained), ends, [()] * B, [b for b in range(B) if gained[b]])
    assert runner.lengths == ends


@torch.no_grad()
@pytest.mark.parametrize("name", ["plain", "3.1", "window", "two layers"])
def test_unrolling_is_drafting_everywhere(name):
    """`unroll` (training, simulation) gives the logits that the head has when it drafts the text's own tokens."""
    head, target, T = eagle3.head(name), tiny.model("llama"), 10
    states = torch.randn(1, T, 96, generator=torch.Generator().manual_seed(1))
    text = tiny.prompts(T)["input_ids"]
    steps = list(unroll(head, target.get_input_embeddings()(text), states, 3))
    reference, ids = naive(head, target), text[0].tolist()
    for step, h in enumerate(steps):
        for i in range(0, T - 2 - step, 3):
            wanted = reference.draft(states[0, : i + 1], ids[1 : i + 2], ids[i + 2 : i + 2 + step])
            torch.testing.assert_close(head.logits(h)[0, i].double(), wanted, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", ["plain", "3.1", "window", "qwen3", "two layers"])
def test_rows_that_are_wanted_are_as_if_all_were(name):
    head = eagle3.head(name)
    generator = torch.Generator().manual_seed(1)
    embeds, states = (torch.randn(2, 16, width, generator=generator) for width in (32, 96))
    documents = torch.tensor([[0] * 16, [0] * 7 + [1] * 9])
    wanted = torch.zeros(2, 16, dtype=torch.bool)
    wanted[0, [3, 4, 9]] = wanted[1, 8:13] = True
    every, some = (list(unroll(head, embeds, states, 3, documents, wanted=rows)) for rows in (None, wanted))
    for step, (h, of_some) in enumerate(zip(every, some, strict=True)):
        rows = wanted[:, : h.shape[1]]
        torch.testing.assert_close(of_some[rows], h[rows], **CLOSE)
        assert name == "two layers" or not of_some[0, 10:].any(), step


@torch.no_grad()
def test_packed_documents_do_not_see_each_other():
    head, target = eagle3.head(), tiny.model("llama")
    texts = [tiny.prompts(7, seed=1)["input_ids"], tiny.prompts(9, seed=2)["input_ids"]]
    states = [torch.randn(1, text.shape[1], 96, generator=torch.Generator().manual_seed(3)) for text in texts]
    embed = target.get_input_embeddings()
    documents = torch.tensor([[0] * 7 + [1] * 9])
    packed = list(unroll(head, embed(torch.cat(texts, 1)), torch.cat(states, 1), 3, documents))
    for text, state, start in zip(texts, states, (0, 7), strict=True):
        alone = list(unroll(head, embed(text), state, 3))
        for step, h in enumerate(alone):
            rows = text.shape[1] - 2 - step
            torch.testing.assert_close(packed[step][:, start : start + rows], h[:, :rows], **CLOSE)


# Taps


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "gpt_neox", "mixtral"])
def test_taps_are_hidden_states(name):
    target = tiny.model(name)
    ids = tiny.prompts(8)["input_ids"]
    count = target.config.num_hidden_layers
    with torch.no_grad():
        wanted = target(ids, output_hidden_states=True).hidden_states
    features = eagle3.states_of(target, ids, (0, 1, count - 1, FINAL))
    expected = [wanted[0], wanted[1], wanted[count - 1], wanted[-1]]
    torch.testing.assert_close(features, torch.cat(expected, -1))


def test_tap_of_the_last_layers_output_is_before_the_final_norm():
    target = tiny.model("llama")
    features = eagle3.states_of(target, tiny.prompts(5)["input_ids"], (2,))
    with torch.no_grad():
        wanted = target(tiny.prompts(5)["input_ids"], output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(target.model.norm(features), wanted)


def test_a_model_whose_states_are_taken_can_be_pickled():
    """Heads and MTP layers leave hooks on it for as long as their generator lives."""
    target = tiny.model("llama", seed=5)  # on which nobody else has left hooks: transformers does, too
    listener = Taps(target, (0, 1, 2, FINAL))
    copied, ids = pickle.loads(pickle.dumps(target)), torch.arange(5, device=tiny.DEVICE)[None]
    with listener.listening() as taken:
        target(input_ids=ids)
    assert len(taken) == 4
    assert torch.equal(copied(input_ids=ids).logits, target(input_ids=ids).logits)


def test_taps_that_are_let_go_of_while_a_pass_runs():
    """As garbage collection may, between torch's listing of a layer's hooks and its calling them."""
    target = tiny.model("llama", seed=5)
    held: list[Taps] = []
    handle = target.model.layers[1].register_forward_pre_hook(lambda *_: held.clear())  # the first of the layer's
    held.append(Taps(target, (0, 1, 2, FINAL)))
    with handle:
        target(input_ids=tiny.prompts(5)["input_ids"])
    assert not held


def test_a_tap_that_is_not_there():
    with pytest.raises(ValueError, match="2 layers: there is no tap 3"):
        Taps(tiny.model("llama"), (0, 3))


# Through the decoder, T = 0


@pytest.mark.parametrize(
    ("lengths", "shape", "name"),
    diagonal(
        {"single": (9,), "ragged": (20, 3, 14)},
        {
            "default": {},
            "dynamic": {"tree": DynamicTree(depth=3, top_k=3, size=8)},
            "fixed": {"branching": (3, 2, 1)},
            "chain": {"branching": (1, 1, 1, 1)},
        },
        ["llama", "gemma3", "mistral", "gpt2", "qwen3_moe"],
    ),
)
def test_the_text_is_plain_decodings(lengths, shape, name):
    target = tiny.model(name)
    inputs = tiny.prompts(*lengths)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=20)
    length = 3 if shape else None  # left to the clock, a busy machine may draft nothing
    spec = SpeculativeGenerator(
        target, Eagle3Proposer(eagle3.head(), **shape), draft_length=length, on_unsupported="error"
    )
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=20).tolist() == plain.tolist()
    if shape:
        assert spec.report.num_draft_tokens > 0


@pytest.mark.parametrize("name", eagle3.VARIANTS)
def test_every_variant_drafts(name):
    target = tiny.model("llama")
    inputs = tiny.prompts(9, 4)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=16)
    spec = SpeculativeGenerator(target, Eagle3Proposer(eagle3.head(name)), draft_length=3, on_unsupported="error")
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=16).tolist() == plain.tolist()


@pytest.mark.parametrize(
    "arguments",
    [
        {"prefill_chunk_size": 4},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
        {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_with_other_arguments(arguments):
    target, inputs = tiny.model("llama"), tiny.prompts(9, 4)
    arguments = {"do_sample": False, "max_new_tokens": 12} | arguments
    plain = target.generate(**inputs, **arguments)
    ours = SpeculativeGenerator(target, Eagle3Proposer(eagle3.head()), draft_length=3).generate(**inputs, **arguments)
    if arguments.get("return_dict_in_generate"):
        plain, ours = plain.sequences, ours.sequences
    assert ours.tolist() == plain.tolist()


def test_prompt_given_as_embeddings():
    target = tiny.model("llama")
    embeds = target.get_input_embeddings()(tiny.prompts(9)["input_ids"]).detach()
    plain = target.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=12)
    spec = SpeculativeGenerator(target, Eagle3Proposer(eagle3.head()), draft_length=3, on_unsupported="error")
    assert spec.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=12).tolist() == plain.tolist()


def test_a_head_in_another_precision():
    target, inputs = tiny.model("llama"), tiny.prompts(9)
    spec = SpeculativeGenerator(target, Eagle3Proposer(eagle3.head().bfloat16()), draft_length=3)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=12).tolist() == plain.tolist()


# A trained head: what it accepts is what its simulation says


def chain_rounds(head, target, prompts, draft_length, new_tokens):
    """Rounds the decoder took per prompt, and those the simulation asks for."""
    proposer = Eagle3Proposer(head, branching=(1,) * draft_length)
    spec = SpeculativeGenerator(target, proposer, draft_length=draft_length, on_unsupported="error")
    took, asked = [], []
    for prompt in prompts:
        text = spec.generate(prompt[None], do_sample=False, max_new_tokens=new_tokens)[0]
        took.append(spec.last_report.num_drafts)
        accepted = accepted_lengths(head, target, text, draft_length)
        root, rounds = len(prompt), 0  # the first token comes from the prefill
        while root < len(text) - 2:
            rounds += 1
            root += 1 + accepted[root - 1]
        asked.append(rounds)
    return took, asked


@pytest.mark.slow
def test_a_trained_head_drafts_what_its_simulation_accepts():
    head, target, prompts = eagle3.trained()
    took, asked = chain_rounds(head, target, prompts[:12], 5, 33)
    assert took == asked
    spec = SpeculativeGenerator(target, Eagle3Proposer(head, branching=(1,) * 5), draft_length=5)
    spec.generate(prompts, do_sample=False, max_new_tokens=33, attention_mask=torch.ones_like(prompts))
    assert spec.report.mean_acceptance_length > 3


@pytest.mark.slow
def test_evaluation_measures_and_simulates_the_same(monkeypatch):
    head, target, prompts = eagle3.trained()
    found = evaluate(head, target, list(prompts[:8]), max_new_tokens=33)
    assert found.mean_acceptance_length == pytest.approx(found.simulated_length)
    assert found.warning == ""
    assert found.tree_length > found.mean_acceptance_length
    monkeypatch.setattr(HeadRunner, "extend", shifted_states(HeadRunner.extend))
    broken = evaluate(head, target, list(prompts[:8]), max_new_tokens=33)
    assert "training and decoding compute the head differently" in broken.warning


def shifted_states(runner_extend):
    return lambda self, tokens, states, pads: runner_extend(self, tokens, states.roll(1, 1), pads)


def blind_to_siblings(grow):
    """Drafted nodes do not see the nodes drafted before them."""

    def broken(self, tokens, parents, depth, ancestors, chain):
        n = tokens.shape[1]
        ancestors = ancestors.clone()
        ancestors[..., : ancestors.shape[-1] - n] = False
        return grow(self, tokens, parents, depth, ancestors, False)

    return broken


def late(grow):
    """RoPE positions of drafted nodes are all the first one's."""
    return lambda self, tokens, parents, depth, ancestors, chain: grow(
        self, tokens, parents, torch.zeros_like(depth), ancestors, chain
    )


FAULTS = {
    "shift": (HeadRunner, "extend", shifted_states),
    "mask": (HeadRunner, "grow", blind_to_siblings),
    "rope": (HeadRunner, "grow", late),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_that_check_finds_faults(fault, monkeypatch):
    head, target, prompts = eagle3.trained()
    where, name, breaking = FAULTS[fault]
    monkeypatch.setattr(where, name, breaking(getattr(where, name)))
    took, asked = chain_rounds(head, target, prompts[:12], 5, 33)
    assert took != asked


@pytest.mark.slow
def test_that_check_finds_a_wrong_norm():
    head, target, prompts = eagle3.trained()
    wrong = Eagle3Head(replace(head.config, norm_output=True)).eval()
    wrong.load_state_dict(head.state_dict())
    took, _ = chain_rounds(wrong, target, prompts[:12], 5, 33)
    _, asked = chain_rounds(head, target, prompts[:12], 5, 33)
    assert took != asked


# Bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 16}, "hidden states of 16, this one's have 32"),
        ({"vocab_size": 5000}, "vocabulary of 5000 tokens, the target's has 64"),
        ({"tap_ids": (0, 1, 7)}, "2 layers: there is no tap 7"),
    ],
)
def test_a_head_of_another_target(changes, message):
    config = Eagle3Config(**eagle3.SHAPE | changes)
    with pytest.raises(ValueError, match=message):
        SpeculativeGenerator(tiny.model("llama"), Eagle3Proposer(Eagle3Head(config)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tap_convention": "leaving"}, '"entering" or "output"'),
        ({"draft_vocab_size": 65}, "larger than vocab_size"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"version": 2}, "must be 1"),
    ],
)
def test_a_config_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        Eagle3Config(**eagle3.SHAPE | changes)


@pytest.mark.parametrize("elsewhere", [("model.layers.1", "model.layers.3"), ("model.embed_tokens", "lm_head")])
def test_a_target_whose_parts_lie_apart(elsewhere, tmp_path):
    """accelerate's hooks fetch them for each pass: from the disk here, from other devices where there are some."""
    whole = tiny.model("llama", num_hidden_layers=4)
    whole.save_pretrained(tmp_path / "model")
    parts = [
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in range(4)),
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ]
    places = {part: "disk" if part in elsewhere else "cpu" for part in parts}
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "parts"
    ).eval()
    inputs = tiny.prompts(9, 4)
    plain = whole.generate(**inputs, do_sample=False, max_new_tokens=12)
    spec = SpeculativeGenerator(
        target, Eagle3Proposer(eagle3.head(tap_ids=(1, 2, 3))), draft_length=3, on_unsupported="error"
    )
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=12).tolist() == plain.tolist()
    assert spec.report.num_draft_tokens > 0


def test_drafts_that_come_to_nothing_are_not_started_for_long(monkeypatch):
    """Where no node of a head's tree is worth verifying, its passes were for nothing."""
    target = tiny.model("llama")

    def nothing(pacer, gains, rows):
        return 0

    monkeypatch.setattr(Pacer, "best_length", nothing)
    monkeypatch.setattr(Acceptance, "rate", lambda self, key, prior=None, like=None: 0.01)
    spec = SpeculativeGenerator(target, Eagle3Proposer(eagle3.head()), on_unsupported="error")
    inputs = tiny.prompts(9)
    spec.generate(**inputs, do_sample=False, max_new_tokens=200, min_new_tokens=200)
    assert spec.report.num_drafts <= 2  # to see what verifying one costs
    assert spec.report.num_draft_passes < 100


def test_features_of_layers_that_share_their_keys():
    """Gemma 4 runs these over the tokens alone whose logits are wanted, if it is given their number."""
    changed = families.OVERRIDES["gemma4_text"] | {"vocab_size": tiny.VOCAB, "vocab_size_per_layer_input": tiny.VOCAB}
    config = families._shrunk(Gemma4TextConfig, changed)
    assert config.num_kv_shared_layers
    model = tiny.randomised(config, 0)
    spec = SpeculativeGenerator(model, Eagle3Proposer(eagle3.head("plain", tap_ids=(1, 2, 3))), draft_length=3)
    arguments = {**tiny.prompts(9, 4), "do_sample": False, "max_new_tokens": 12}
    assert spec.generate(**arguments).tolist() == model.generate(**arguments).tolist()
    assert spec.report.num_draft_tokens
