"""Two processes with prompts of their own and weights in common (FSDP): passes in step, each text plain decoding's."""

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from specdec import DraftModelProposer, Eagle3Proposer, HybridProposer, NgramProposer, SpeculativeGenerator
from tests.support import eagle3, tiny
from tests.support.ranks import together

FAMILIES = ("llama", "gemma3")
LENGTHS = {"the first longer": (28, 12), "the second longer": (5, 30), "one token": (1, 20)}
pytestmark = pytest.mark.slow


def proposers():
    draft = tiny.model("llama", seed=1, num_hidden_layers=1)
    return {
        "ngram": NgramProposer(),
        "draft": DraftModelProposer(draft),
        "eagle3": Eagle3Proposer(eagle3.head(tap_ids=(0, 1, 2))),
        "hybrid": HybridProposer(DraftModelProposer(draft)),
    }


def sharded(family):
    """A model whose weights lie in both processes, outside of its passes."""
    target = tiny.model.__wrapped__(family)
    for layer in target.model.layers:
        fully_shard(layer)
    fully_shard(target)
    return target


def worker(rank: int, folder: Path):
    """Per case: the text here, what plain decoding of the whole model writes here, rounds, tokens drafted."""
    found = {}
    for family in FAMILIES:
        whole, target = tiny.model(family), sharded(family)
        inputs = tiny.prompts(*((9, 4) if rank else (6,)), seed=rank)
        for name, proposer in proposers().items():
            spec = SpeculativeGenerator(target, proposer, draft_length=3, on_unsupported="error")
            for case, lengths in LENGTHS.items():
                for sampling in (False, True):
                    arguments = {**inputs, "do_sample": sampling, "max_new_tokens": lengths[rank]}
                    torch.manual_seed(rank)
                    plain = whole.generate(**arguments)
                    torch.manual_seed(rank)
                    text = spec.generate(**arguments, synced_gpus=True)
                    drafted = spec.last_report.num_draft_tokens
                    found[family, name, case, sampling] = text.tolist(), plain.tolist(), drafted
    stateful = {"logits_processor": [lambda ids, scores: scores]} if rank else {}  # in a batch: as plain decoding
    spec = SpeculativeGenerator(target, "ngram")
    text = spec.generate(**inputs, **stateful, do_sample=False, max_new_tokens=8, synced_gpus=True)
    whole_text = whole.generate(**inputs, do_sample=False, max_new_tokens=8)
    found["plain"] = text.tolist(), whole_text.tolist(), list(spec.last_report.plain_reasons)
    found["wrapper"] = in_fsdp1s_wrapper(rank)
    return found


def in_fsdp1s_wrapper(rank: int):
    """As `found["plain"]`, of FSDP's first version; what is said of its outermost wrapper."""
    whole, target = tiny.model("llama"), tiny.model.__wrapped__("llama")
    for place, layer in enumerate(target.model.layers):
        target.model.layers[place] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
    wrapper = FullyShardedDataParallel(target, device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="got FullyShardedDataParallel; give its .module"):
        SpeculativeGenerator(wrapper, "ngram")
    spec = SpeculativeGenerator(wrapper.module, "ngram")
    arguments = {**tiny.prompts(6), "do_sample": False, "max_new_tokens": 8 + 4 * rank}
    with FullyShardedDataParallel.summon_full_params(wrapper, writeback=False, recurse=False):
        text = spec.generate(**arguments, synced_gpus=True)
    return text.tolist(), whole.generate(**arguments).tolist(), list(spec.last_report.plain_reasons)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return together("tests.unit.models.test_lockstep:worker", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("sampling", [False, True], ids=["T=0", "T=1"])
@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("name", ["ngram", "draft", "eagle3", "hybrid"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_process_writes_its_own_text(found, family, name, case, sampling):
    for process in found:
        text, plain, _ = process[family, name, case, sampling]
        assert text == plain
    assert found[1][family, name, case, sampling][2] > 0


def test_where_one_cannot_speculate_all_decode_plainly(found):
    for process in found:
        text, plain, reasons = process["plain"]
        assert text == plain
        assert len(reasons) == 1
    assert "may follow the text" in found[1]["plain"][2][0]
    assert "another process runs its call as plain decoding" in found[0]["plain"][2][0]


def test_models_in_fsdp1s_wrapper_decode_plainly(found):
    for process in found:
        text, plain, reasons = process["wrapper"]
        assert text == plain
        assert [reason.partition(": ")[2][:38] for reason in reasons] == ["its modules cannot be copied for the p"]
