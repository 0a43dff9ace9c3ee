"""Drafts from a memory of texts: what is found, what is forgotten, what other calls gain from it."""

import copy
import random
import threading

import pytest
import torch
from safetensors.torch import save_file

from specdec import DraftModelProposer, HybridProposer, SpeculativeGenerator, SuffixProposer, TextMemory
from specdec.proposers.lookup.suffix import _grown, _ranked
from specdec.proposers.lookup.text_memory import LEVELS, LONGEST, PLACES, Match
from specdec.proposers.pacing.pacer import Pacer
from tests.support import tiny


def remembering(*texts, capacity=200_000):
    memory = TextMemory(capacity)
    for text in texts:
        memory.write(memory.new(), text)
    return memory


def asked(memory, text, length=4):
    number = memory.new()
    memory.write(number, text)
    return memory.matches(number, length)


# The memory


def longest(texts, own):
    """By brute force: how many tokens `own` ends in stand anywhere else with something behind them."""
    best = 0
    for i, text in enumerate([*texts, own]):
        for end in range(1, len(text)):
            same = 0
            while same < min(LONGEST, end, len(own)) and text[end - 1 - same] == own[-1 - same]:
                same += 1
            if i < len(texts) or end < len(own):
                best = max(best, same)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_match_is_found(seed):
    """Few enough texts that no n-gram has more places than are kept."""
    draw = random.Random(seed)
    alphabet = range(draw.choice([2, 5, 30]))
    texts = [draw.choices(alphabet, k=draw.randint(1, 14)) for _ in range(3)]
    own = draw.choices(alphabet, k=draw.randint(1, 10))
    if seed % 2:  # a passage again
        own += texts[0][: draw.randint(1, 14)]
    assert sum(map(len, texts)) + len(own) < PLACES
    found = asked(remembering(*texts), own)
    assert max((match.length for match in found), default=0) == longest(texts, own)


def test_what_followed_comes_with_it():
    memory = remembering([1, 2, 3, 4, 5, 6, 7], [9, 2, 3, 4, 8, 8])
    found = asked(memory, [0, 1, 2, 3, 4], length=3)
    assert [(match.length, match.following) for match in found] == [(4, [5, 6, 7])]
    found = asked(memory, [0, 2, 3, 4], length=3)
    assert [(match.length, match.following) for match in found] == [(3, [8, 8]), (3, [5, 6, 7])]  # the latest first


def test_a_text_that_repeats_itself_goes_on_from_the_match():
    [match, *_] = asked(TextMemory(), [1, 2, 3, 1, 2, 3, 1, 2], length=7)
    assert match.following == [3, 1, 2, 3, 1, 2, 3]


def test_a_match_is_followed_where_it_goes_on():
    """A likely place is looked at first, whatever has become of its n-grams."""
    memory = remembering([1, 2, 3, 4, 5, 6, 7, 8])
    for _ in range(3 * PLACES):
        memory.write(memory.new(), [5, 6, 9])  # now the short n-grams' places are others'
    number = memory.new()
    memory.write(number, [1, 2, 3, 4])
    [match] = memory.matches(number, 2)
    memory.write(number, [5, 6])
    found = memory.matches(number, 2, [(match.text, match.end + 2)])
    assert (found[0].length, found[0].following) == (6, [7, 8])


def test_the_least_recently_used_texts_go():
    memory = remembering([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], capacity=15)
    assert asked(memory, [1, 2, 3, 4])[0].following == [5]  # used: the other one goes first
    assert not asked(memory, [6, 7, 8, 9])
    assert asked(memory, [1, 2, 3])[0].following[0] == 4


def test_texts_of_one_call_do_not_make_room_for_each_other():
    memory = TextMemory(capacity=4)
    old, first, second = memory.new(), memory.new(), memory.new()
    memory.write(old, [9, 9, 9])
    for text in (first, second):
        memory.write(text, [1, 2, 3, 4], keep=(first, second))
    assert list(memory.texts()) == [[1, 2, 3, 4], [1, 2, 3, 4]]
    memory.write(memory.new(), [5])
    assert list(memory.texts()) == [[5]] or len(memory) <= 5


def test_rows_of_a_batch_draft_without_capacity(llama):
    """Each row from its own text, which stays while the call runs."""
    prompt = tiny.prompts(12, 9)
    drafted = []
    for capacity in (0, 200_000):
        spec = SpeculativeGenerator(llama, SuffixProposer(TextMemory(capacity)), draft_length=4, on_unsupported="error")
        spec.generate(**prompt, do_sample=False, max_new_tokens=40)
        drafted.append(spec.report.num_draft_tokens)
    assert drafted[0] == drafted[1] > 0


def test_nothing_is_left_of_what_is_forgotten():
    draw, memory = random.Random(0), TextMemory(capacity=300)
    for i in range(10_000):
        memory.write(memory.new(), draw.choices(range(50), k=1 + i % 20))
        assert len(memory) <= 300
    kept = sum(len(text) for text in memory.texts())
    assert kept == len(memory)
    places = [place for places in memory._places.values() for place in places]
    assert {text for text, _ in places} <= set(memory._texts)
    assert len(places) <= len(LEVELS) * kept
    assert all(memory._places.values())


def test_a_text_that_breaks_off_while_it_is_written_counts_as_far_as_it_goes():
    def interrupted():
        yield from (1, 2, 3)
        raise KeyboardInterrupt

    memory = TextMemory(capacity=5)
    with pytest.raises(KeyboardInterrupt):
        memory.write(memory.new(), interrupted())
    assert len(memory) == sum(map(len, memory.texts())) == 3
    for text in ([4, 5, 6], [7, 8]):
        memory.write(memory.new(), text)
    assert len(memory) == sum(map(len, memory.texts())) == 5


def test_a_text_longer_than_the_capacity_is_kept_while_it_is_written():
    memory = TextMemory(capacity=0)
    assert asked(memory, [1, 2, 3, 1, 2])[0].following[0] == 3
    assert not asked(memory, [1, 2])
    assert len(memory) == 2


def test_it_is_saved_and_loaded(tmp_path):
    texts = [[1, 2, 3, 4, 5], [7, 8, 9]]
    remembering(*texts).save(tmp_path / "texts")
    loaded = TextMemory.load(tmp_path / "texts")
    assert list(loaded.texts()) == texts
    assert asked(loaded, [2, 3, 4])[0].following == [5]
    assert list(TextMemory.load(tmp_path / "texts", capacity=4).texts()) == [[7, 8, 9]]
    remembering([1, 2]).save(tmp_path / "texts")
    assert list(TextMemory.load(tmp_path / "texts").texts()) == [[1, 2]]
    assert [file.name for file in tmp_path.iterdir()] == ["texts"]


def test_other_files_are_refused(tmp_path):
    save_file({"tokens": torch.zeros(1)}, tmp_path / "weights")
    (tmp_path / "broken").write_bytes(b"?")
    for name in ("weights", "broken"):
        with pytest.raises(ValueError, match=r"TextMemory\.save"):
            TextMemory.load(tmp_path / name)
        before = (tmp_path / name).read_bytes()
        with pytest.raises(ValueError, match="would be overwritten: choose another name"):
            remembering([1, 2, 3]).save(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    with pytest.raises(ValueError, match="capacity"):
        TextMemory(-1)


# What is drafted of it


def test_continuations_become_a_tree_the_likeliest_first():
    pacer = Pacer(length=6)
    found = _grown([Match(0, 9, 4, [1, 2]), Match(1, 9, 4, [1, 3]), Match(2, 9, 4, [1, 3]), Match(3, 9, 2, [5])], 9)
    for key, accepted in ((found.children[1], True), (found.children[5], False)):
        for _ in range(20):
            pacer.acceptance.observe(key.key, accepted)
    ranked = _ranked(found, 6, pacer, chains_only=False)
    assert ranked[0][1:] == (1, -1)
    assert sorted((token, parent) for _, token, parent in ranked) == [(1, -1), (2, 0), (3, 0), (5, -1)]
    assert [chance for chance, *_ in ranked] == sorted((chance for chance, *_ in ranked), reverse=True)
    assert [token for _, token, _ in _ranked(found, 1, pacer, chains_only=True)] == [1]
    assert found.children[1].children[3].key != found.children[1].children[2].key  # two places of three against one


ARGUMENTS = {"do_sample": False, "max_new_tokens": 40}


def passes(spec, inputs, **more):
    spec.report.reset()
    output = spec.generate(**inputs, **ARGUMENTS | more)
    return spec.report.num_row_rounds, output


@pytest.mark.parametrize("lengths", [(9,), (9, 1, 5)])
def test_a_call_gains_from_earlier_ones(llama, lengths):
    inputs = tiny.prompts(*lengths)
    expected = llama.generate(**inputs, **ARGUMENTS)
    memory = TextMemory()
    first, again = (
        passes(SpeculativeGenerator(llama, SuffixProposer(memory), draft_length=8), inputs) for _ in range(2)
    )
    assert first[1].equal(expected)
    assert again[1].equal(expected)
    assert again[0] <= first[0] / 2
    forgetful = SuffixProposer(TextMemory(capacity=0))
    alone, later = (passes(SpeculativeGenerator(llama, forgetful, draft_length=8), inputs)[0] for _ in range(2))
    assert later == alone == first[0] or len(lengths) > 1  # rows of a batch know each other's texts


def test_rows_gain_from_each_other(llama, single):
    """Four samples of one prompt, the same text: those that run behind need not wait for each other."""
    spec = SpeculativeGenerator(llama, SuffixProposer(), draft_length=8)
    rows = {name: value.repeat(2, 1) for name, value in single.items()}
    both = spec.generate(**rows, **ARGUMENTS)
    assert both[0].equal(both[1])
    assert len(spec.proposer.memory) > both.shape[1]


def test_threads_share_one_memory(llama):
    inputs = [tiny.prompts(5 + i % 3, seed=i % 4) for i in range(12)]
    expected = [llama.generate(**one, **ARGUMENTS) for one in inputs]
    spec = SpeculativeGenerator(llama, SuffixProposer(TextMemory(capacity=150)), draft_length=4)
    found = {}

    def work(start):
        for i in range(start, 12, 4):
            found[i] = spec.generate(**inputs[i], **ARGUMENTS)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[i].equal(expected[i]) for i in range(12))


def test_another_tokenizers_texts_are_refused(llama):
    with pytest.raises(ValueError, match="another tokenizer"):
        SpeculativeGenerator(llama, SuffixProposer(remembering([1, 10_000])))


def test_a_memory_of_its_own_ends_with_the_vocabulary():
    model = copy.deepcopy(tiny.model("llama"))
    spec = SpeculativeGenerator(model, "suffix")
    spec.generate(torch.tensor([[3, 4, 50, 60, 63, 3, 4]]), do_sample=False, max_new_tokens=8)
    model.resize_token_embeddings(40)
    arguments = {"input_ids": torch.tensor([[3, 4, 5, 3, 4]]), "do_sample": False, "max_new_tokens": 8}
    assert spec.generate(**arguments).tolist() == model.generate(**arguments).tolist()


def test_placeholders_beyond_the_vocabulary_stay_in_the_memory():
    """As image tokens of Mllama, which have embeddings but no logits."""
    model = tiny.model("llama", seed=8)
    model.set_input_embeddings(torch.nn.Embedding.from_pretrained(torch.randn(72, 32)))
    prompt = {"input_ids": torch.tensor([[5, 70, 6, 5, 70, 6]])}
    proposer, wanted = SuffixProposer(), model.generate(**prompt, do_sample=False, max_new_tokens=6)
    for _ in range(2):
        spec = SpeculativeGenerator(model, proposer, on_unsupported="error")
        torch.testing.assert_close(spec.generate(**prompt, do_sample=False, max_new_tokens=6), wanted)


def test_it_looks_up_beside_a_draft_model(llama, draft, single):
    proposer = HybridProposer(DraftModelProposer(draft), SuffixProposer())
    spec = SpeculativeGenerator(llama, proposer, draft_length=4)
    expected = llama.generate(**single, **ARGUMENTS)
    for _ in range(2):
        assert spec.generate(**single, **ARGUMENTS).equal(expected)
    assert "SuffixProposer" in SpeculativeGenerator(llama, "suffix").proposer.drafted_by
