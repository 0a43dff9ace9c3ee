"""Gemma 4's assistants: against transformers' own forward pass, and through the decoder."""

import pytest
import torch

from specdec import AssistantProposer, DynamicTree, HybridProposer, SpeculativeGenerator
from specdec.proposers.draft_models.draft_nodes import DraftNodes
from tests.support import gemma4, tiny

pytestmark = pytest.mark.skipif(not gemma4.AVAILABLE, reason="this release of transformers has no such assistant")

SHAPES = {
    "chain": {},
    "fixed": {"branching": (2, 2, 1)},
    "dynamic": {"tree": DynamicTree(depth=3, top_k=3, size=8)},
}
LENGTHS = {"single": (9,), "ragged": (20, 3, 14)}


@torch.no_grad()
def theirs(assistant, target, text, path):
    """Logits (V,) after the drafted tokens `path`, which follow `text`: transformers' assistant, one row, no cache.

    It gets what the target computes for all tokens of the text but the last: the last state, keys and values.
    """
    known = text[None, :-1]
    output = target(known, output_hidden_states=True, return_shared_kv_states=True)
    shared = dict(output.shared_kv_states)
    window = target.config.sliding_window - 1
    shared["sliding_attention"] = tuple(part[:, :, -window:] for part in shared["sliding_attention"])
    state, position = output.hidden_states[-1][:, -1:], torch.tensor([[len(text) - 1]], device=text.device)
    for token in [text[-1], *path]:
        embeds = target.get_input_embeddings()(token.view(1, 1))
        drafted = assistant(
            inputs_embeds=torch.cat([embeds, state], -1), position_ids=position, shared_kv_states=shared
        )
        state = drafted.last_hidden_state
    return drafted.logits[0, -1]


class Watched(AssistantProposer):
    """Compares all logits of a draft with transformers'."""

    def propose(self, context):
        self.texts = [
            context.tokens[b, pad:end] for b, (pad, end) in enumerate(zip(context.pads, context.ends, strict=True))
        ]
        self.active = context.active
        return super().propose(context)

    def _catch_up(self, context):
        logits = super()._catch_up(context)
        self.compare(logits, [[[]]] * len(self.texts))
        return logits

    def _step(self, stepped: DraftNodes):
        logits = super()._step(stepped)
        self.compare(logits, [stepped.paths(b) for b in range(len(self.texts))])
        return logits

    def compare(self, logits, paths):
        for b, text in enumerate(self.texts):
            for n, path in enumerate(paths[b]):
                if self.active[b]:
                    wanted = theirs(self.model, self._target, text, path)
                    known = wanted > wanted.min()  # of tokens in no chosen cluster: below the least of the batch
                    torch.testing.assert_close(logits[b, n][known], wanted[known], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_it_drafts_as_in_transformers(shape, lengths):
    """Through the decoder, in batches and after accepted drafts; the text is plain decoding's."""
    target, inputs = gemma4.target(), tiny.prompts(*lengths)
    proposer = Watched(gemma4.assistant(), **SHAPES[shape])
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    spec = SpeculativeGenerator(target, proposer, draft_length=3, on_unsupported="error")
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=12).tolist() == plain.tolist()
    assert spec.report.num_draft_tokens > 0


def early(monkeypatch):
    """The draft is made one position before the root."""
    catch_up = AssistantProposer._pass

    def broken(self, tokens, above):
        self._position = self._position - 1
        try:
            return catch_up(self, tokens, above)
        finally:
            self._position = self._position + 1

    monkeypatch.setattr(AssistantProposer, "_pass", broken)


def all_seen(monkeypatch):
    """Sliding layers see everything that is still in the cache."""
    monkeypatch.setattr(AssistantProposer, "_seen", lambda self, span: (self._slots[KINDS[span.window]] >= 0)[:, None])


def stale(monkeypatch):
    """The state at the root is that of the first round."""
    keep = AssistantProposer._keep_state
    monkeypatch.setattr(AssistantProposer, "_keep_state", lambda self, c: self._state is None and keep(self, c))


def orphaned(monkeypatch):
    """Every node continues the state of the target."""
    monkeypatch.setattr(
        AssistantProposer,
        "_step",
        lambda self, nodes: self._pass(nodes.newest, self._state.expand(-1, nodes.newest.shape[1], -1)),
    )


KINDS = {None: "full_attention", tiny.WINDOW: "sliding_attention"}


@pytest.mark.parametrize("fault", [early, all_seen, stale, orphaned], ids=lambda fault: fault.__name__)
def test_that_the_comparison_finds_faults(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_it_drafts_as_in_transformers("dynamic", LENGTHS["ragged"])


def test_same_seed_same_text():
    target, inputs = gemma4.target(), tiny.prompts(7, 4, 9)
    spec = SpeculativeGenerator(target, AssistantProposer(gemma4.assistant()), draft_length=3, on_unsupported="error")
    for seed in range(3):
        for sampling in ({"top_k": 0}, {"temperature": 0.8, "top_k": 20}, {"repetition_penalty": 1.3}):
            torch.manual_seed(seed)
            plain = target.generate(**inputs, do_sample=True, max_new_tokens=10, **sampling)
            torch.manual_seed(seed)
            ours = spec.generate(**inputs, do_sample=True, max_new_tokens=10, **sampling)
            assert ours.tolist() == plain.tolist()


SHARED = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": tiny.VOCAB}


@pytest.mark.parametrize("changes", [SHARED, {}], ids=["shared layers", "none shared"])
def test_the_targets_layers(changes):
    """A target whose own last layers share keys and values, and clusters of tokens in the assistant's LM head."""
    target, inputs = gemma4.target(**changes), tiny.prompts(9, 4)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    spec = SpeculativeGenerator(target, Watched(gemma4.assistant(centroids=True)), draft_length=3)
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=12).tolist() == plain.tolist()
    assert spec.report.num_draft_tokens > 0


def test_a_kept_cache_and_n_grams():
    """A second turn, whose prompt is in the cache already; and rounds that n-grams draft."""
    target, prompt = gemma4.target(), tiny.prompts(9)["input_ids"]
    for proposer in (Watched(gemma4.assistant()), HybridProposer(Watched(gemma4.assistant()))):
        spec = SpeculativeGenerator(target, proposer, draft_length=3, on_unsupported="error")
        ids, cache = prompt, None
        for _ in range(2):
            arguments = {"do_sample": False, "max_new_tokens": 8}
            plain = target.generate(ids, **arguments)
            output = spec.generate(ids, past_key_values=cache, return_dict_in_generate=True, **arguments)
            assert output.sequences.tolist() == plain.tolist()
            cache, ids = output.past_key_values, torch.cat([plain, prompt[:, :3]], 1)


def test_a_path_and_a_loaded_model(tmp_path):
    target, inputs = gemma4.target(), tiny.prompts(9)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=8)
    gemma4.assistant().cpu().save_pretrained(tmp_path)
    for proposer in (gemma4.assistant(), f"draft:{tmp_path}", f"ngram+draft:{tmp_path}"):
        spec = SpeculativeGenerator(target, proposer, draft_length=3, on_unsupported="error")
        assert spec.generate(**inputs, do_sample=False, max_new_tokens=8).tolist() == plain.tolist()


def test_an_assistant_of_another_model():
    with pytest.raises(ValueError, match=r"hidden states of 32, the target's have 48"):
        SpeculativeGenerator(tiny.model("llama", hidden_size=48), AssistantProposer(gemma4.assistant()))
    with pytest.raises(
        ValueError, match="full_attention and sliding_attention layers, which LlamaForCausalLM does not"
    ):
        SpeculativeGenerator(tiny.model("llama"), AssistantProposer(gemma4.assistant()))
    with pytest.raises(ValueError, match="needs an assistant of Gemma 4, got LlamaForCausalLM"):
        AssistantProposer(tiny.model("llama"))
    with pytest.raises(ValueError, match="vocabulary of 96 tokens, the target's has 64"):
        SpeculativeGenerator(gemma4.target(), AssistantProposer(gemma4.assistant(vocab_size=96)))


# A trained assistant


def trained(target, texts, prompt=8, updates=150):
    """An assistant that has learnt a target's own texts (B, T), by transformers' forward pass."""
    made = gemma4.assistant().cpu()
    for weight in made.parameters():
        weight.mul_(0.5 if weight.dim() > 1 else 1.0)
    made.requires_grad_(True)
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=updates)
    with torch.no_grad():
        output = target(texts, output_hidden_states=True, return_shared_kv_states=True)
    for _ in range(updates):
        end = int(torch.randint(prompt, texts.shape[1] - 3, ()))
        window = max(0, end - target.config.sliding_window + 1)
        starts = {"full_attention": 0, "sliding_attention": window}
        shared = {k: tuple(part[:, :, starts[k] : end] for part in kv) for k, kv in output.shared_kv_states.items()}
        state, loss = output.hidden_states[-1][:, end - 1 : end], 0.0
        for depth in range(3):
            embeds = target.get_input_embeddings()(texts[:, end + depth, None]).detach()
            position = torch.full((len(texts), 1), end)
            drafted = made(inputs_embeds=torch.cat([embeds, state], -1), position_ids=position, shared_kv_states=shared)
            state = drafted.last_hidden_state
            loss = loss + torch.nn.functional.cross_entropy(drafted.logits[:, 0], texts[:, end + depth + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return made.requires_grad_(False).eval()


@pytest.mark.slow
def test_a_trained_assistant_accepts_what_transformers_drafts():
    target, prompts = gemma4.target().cpu(), tiny.prompts(*[8] * 16)["input_ids"].cpu()
    arguments = {"do_sample": False, "max_new_tokens": 30}
    texts = target.generate(prompts, attention_mask=torch.ones_like(prompts), **arguments)
    assistant = trained(target, texts)
    spec = SpeculativeGenerator(target, assistant, draft_length=3, on_unsupported="error")
    for prompt in prompts[:6]:
        text = spec.generate(prompt[None], **arguments)[0]
        root, rounds = len(prompt), 0  # the first token comes from the prefill
        while root < len(text) - 2:
            rounds, path = rounds + 1, []
            while len(path) < min(3, len(text) - 2 - root):
                path.append(theirs(assistant, target, text[: root + 1], path).argmax())
                if path[-1] != text[root + len(path)]:
                    path.pop()
                    break
            root += 1 + len(path)
        assert spec.last_report.num_drafts == rounds
    assert spec.report.mean_acceptance_length > 1.2
