"""On a pretended CUDA device: the text is plain decoding's, a round waits once, and asks for few kernels.

python -m pytest --device pretend tests/integration/test_pretended.py
"""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria

from specdec import DynamicTree, Eagle3Proposer, NgramProposer, SpeculativeGenerator
from specdec.models.compat import CACHE
from specdec.models.draft_attention import with_draft_attention
from tests.support import eagle3, launches, pretend, tiny

pytestmark = pytest.mark.skipif(tiny.DEVICE == "cpu" or torch.cuda.is_available(), reason="pytest --device pretend")

NEW = 24
# Kernels of a round outside of the models, by batch and sampling, before rounds were lean (benchmarks/results).
BEFORE = {
    "ngram": {(1, False): 182, (8, False): 197, (1, True): 226, (8, True): 254},
    "draft chain": {(1, False): 399, (8, False): 427, (1, True): 478, (8, True): 505},
    "eagle3 chain": {(1, False): 383, (8, False): 418, (1, True): 469, (8, True): 570},
    "eagle3 tree": {(1, False): 655, (8, False): 747, (1, True): 840, (8, True): 979},
}
SHARE = {"ngram": 0.3, "draft chain": 0.42, "eagle3 chain": 0.42, "eagle3 tree": 0.5}  # of them that is left


@pytest.mark.parametrize("sampling", [False, True], ids=["T = 0", "T = 1"])
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("automatic", [False, True], ids=["set", "automatic"])
@pytest.mark.parametrize("name", launches.PROPOSERS)
def test_a_round_waits_once_and_asks_for_few_kernels(name, automatic, batch_size, sampling):
    spec = launches.generator(name, automatic)
    books = launches.counted(spec, do_sample=sampling, max_new_tokens=NEW, **launches.prompts(batch_size))
    assert len(books) > 2
    for book in books:
        assert book.count("waits") == 1, book.waits
    if not automatic and name in SHARE:  # which of its two a hybrid drafts with hangs on times
        outside = launches.mean(books, "launches", launches.OUTSIDE)
        assert outside <= SHARE[name] * BEFORE[name][batch_size, sampling]


@pytest.mark.parametrize("sampling", [False, True], ids=["T = 0", "T = 1"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", launches.PROPOSERS)
def test_the_text_is_plain_decodings(name, batch_size, sampling):
    spec, given = launches.generator(name, automatic=False), launches.prompts(batch_size)
    assert written(spec.generate, sampling, **given) == written(spec.model.generate, sampling, **given)
    assert spec.report.num_draft_tokens > 0


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shape", [{"branching": (1, 1, 1)}, {"tree": DynamicTree(depth=3, top_k=3, size=6)}], ids=str)
def test_a_head_with_a_window_drafts_the_same_in_graphs(shape, rows):
    """Also where the text is many windows long, and after a turn; rows that finished early have no memory of it."""
    head, target, _ = eagle3.trained(**eagle3.BRIEFLY)
    head = copy.deepcopy(head)
    head.config = replace(head.config, draft_window=9)
    found, given = {}, tiny.prompts(*(11, 7, 14)[:rows])
    for compile in (False, "auto"):
        spec = SpeculativeGenerator(target, Eagle3Proposer(head, **shape), draft_length=3, compile=compile)
        cache, arguments = DynamicCache(config=target.config), {"do_sample": False, "max_new_tokens": 40}
        with spec.watch() as rounds:
            output = spec.generate(**given, **arguments, **{CACHE: cache})
            first = len(rounds)
            longer = torch.cat([output, output[:, -3:]], 1)
            more = longer.shape[1] - given["attention_mask"].shape[1]
            mask = torch.nn.functional.pad(given["attention_mask"], (0, more), value=1)
            text = spec.generate(longer, attention_mask=mask, **arguments, **{CACHE: cache}).tolist()
        assert text == target.generate(longer, attention_mask=mask, **arguments).tolist()
        drafts = [(one.row, one.position, list(one.tokens)) for one in rounds]
        found[compile] = drafts if rows == 1 else drafts[:first]
    assert found["auto"] == found[False]


@pytest.mark.parametrize("sampling", [False, True], ids=["T = 0", "T = 1"])
@pytest.mark.parametrize("name", launches.PROPOSERS)
def test_ids_on_the_cpu(name, sampling):
    """The text stays where the ids were, with all that is asked about it."""
    spec, given = launches.generator(name, automatic=False), launches.prompts(3)
    plain = written(spec.model.generate, sampling, **given)
    seen = []

    class Watching(LogitsProcessor, StoppingCriteria):
        stateless = True

        def __call__(self, ids, scores, **kwargs):
            seen.append(ids.device.type)
            if isinstance(scores, torch.Tensor):
                seen.append(scores.device.type)
                return scores
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    on_cpu = {key: value.cpu() for key, value in given.items()}
    more = {"logits_processor": [Watching()], "stopping_criteria": [Watching()]}
    for arguments in ({}, more):
        assert written(spec.generate, sampling, **on_cpu, **arguments) == plain
    assert set(seen) == {"cpu"}


@pytest.mark.parametrize("name", launches.PROPOSERS)
def test_a_default_device(name):
    spec, given = launches.generator(name, automatic=True), launches.prompts(3)
    plain = written(spec.model.generate, False, **given)
    torch.set_default_device("cuda")
    try:
        assert written(spec.generate, False, **given) == plain
    finally:
        torch.set_default_device(None)


def test_a_default_device_with_padding_a_returned_cache_and_a_proposer_of_ones_own():
    class Own(NgramProposer):
        pass

    target, given = launches.models()[0], launches.prompts(3)
    given["attention_mask"][0, :2] = 0
    spec = SpeculativeGenerator(target, Own(), draft_length=4, on_unsupported="error")
    arguments = {**given, "do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True}
    plain = target.generate(**arguments).sequences
    torch.set_default_device("cuda")
    try:
        assert torch.equal(spec.generate(**arguments).sequences, plain)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_proposer_of_ones_own_on_either_device(where):
    class Elsewhere(NgramProposer):
        def propose(self, context):
            draft = super().propose(context)
            return type(draft)(draft.tokens.to(where), draft.parents.to(where), chain=draft.chain)

    target, given = launches.models()[0], launches.prompts(3)
    spec = SpeculativeGenerator(target, Elsewhere(), draft_length=4, on_unsupported="error")
    assert written(spec.generate, False, **given) == written(target.generate, False, **given)


def test_attention_to_drafts_launches_less_per_layer():
    """Keys and values are not copied for each query head. torch's conversions of masks are not counted."""
    ids = torch.ones(1, 5, dtype=torch.long, device="cuda")

    def launched(layers, changed):
        mask = torch.ones(1, 1, 5, 5, dtype=torch.bool, device="cuda")
        model = changed(tiny.model("llama", num_hidden_layers=layers))
        with torch.no_grad(), pretend.ledger() as book:
            model(ids, attention_mask=mask, use_cache=False)
        return book.count("launches")

    def per_layer(changed):
        return (launched(6, changed) - launched(2, changed)) / 4

    assert per_layer(with_draft_attention) == per_layer(lambda model: model) - 1


def written(generate, sampling, **kwargs):
    torch.manual_seed(1)
    return generate(do_sample=sampling, max_new_tokens=NEW, **kwargs).tolist()


# The device itself


def test_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="same device"):
        torch.arange(3, device="cuda") + torch.arange(3)


def test_what_waits():
    x = torch.arange(4, device="cuda")
    waits = [
        lambda: x.sum().item(),
        lambda: bool(x[0]),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: x[x > 1],
        lambda: x.nonzero(),
        lambda: torch.tensor([1, 2], device="cuda"),
        lambda: x[[0, 1]],
        torch.cuda.synchronize,
    ]
    for wait in waits:
        with pretend.ledger() as book:
            wait()
        assert book.count("waits") == 1, wait
    with pretend.ledger() as book:
        (x + 1).gather(0, x).clamp(max=2)[1:].view(3)
        torch.tensor([1, 2]).pin_memory().to("cuda", non_blocking=True)
    assert book.count("waits") == 0
    assert (book.count("uploads"), book.count("launches")) == (1, 3)


def test_what_a_copy_brings_is_rubbish_until_it_was_waited_for():
    here = torch.zeros(2, dtype=torch.long).pin_memory()
    event = torch.cuda.Event()
    here.copy_(torch.tensor([3, 4]).to("cuda"), non_blocking=True)
    event.record()
    assert here.tolist() == [pretend.RUBBISH] * 2
    event.synchronize()
    assert here.tolist() == [3, 4]
