"""Texts in files: written one by one, read where they lie."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.data.packed_dataset import PackedTexts, packed
from specdec.data.texts import Text, end_to_end, load_texts, save_texts

LENGTHS = (3, 7, 1, 4)


def some():
    return [Text(torch.arange(length) + 70_000, torch.arange(length) > length // 2) for length in LENGTHS]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(
        torch.equal(one.ids, two.ids) and torch.equal(one.learn, two.learn) and one.ids.dtype == torch.long
        for one, two in zip(ours, theirs, strict=True)
    )


def test_texts_are_written_one_by_one_and_read_again(tmp_path):
    file = tmp_path / "texts.safetensors"
    assert same(save_texts(iter(some()), file), some())
    assert load_file(file)["ids"].dtype == torch.int32
    assert [path.name for path in tmp_path.iterdir()] == ["texts.safetensors"]
    texts = load_texts(file)
    assert same(texts[1:3], some()[1:3])
    assert torch.equal(texts[-1].ids, some()[-1].ids)
    with pytest.raises(IndexError):
        texts[4]


def test_files_of_before_are_read(tmp_path):
    save_file(end_to_end(some()), tmp_path / "texts.safetensors")
    assert same(load_texts(tmp_path / "texts.safetensors"), some())


def test_a_file_that_was_not_written_to_its_end_is_none(tmp_path):
    def broken():
        yield some()[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_texts(broken(), tmp_path / "texts.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"junk"])
def test_a_damaged_file_is_named(content, tmp_path):
    (tmp_path / "texts.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"texts\.safetensors cannot be read \(SafetensorError.*it is damaged"):
        load_texts(tmp_path / "texts.safetensors")


def test_rows_are_texts_in_order():
    assert packed(torch.tensor([3, 4, 9, 2, 5, 1]), 7).tolist() == [0, 2, 3, 5, 6]
    rows = PackedTexts(some(), 4)  # 3, 4 of 7, 1, 4
    assert [len(row["ids"]) for row in rows] == [3, 4, 1, 4]
    assert rows.num_tokens == 12
    assert rows[-1]["ids"].tolist() == rows[3]["ids"].tolist() == some()[3].ids.tolist()
    with pytest.raises(IndexError):
        rows[4]


RESIDENT = """
import sys
from specdec.data.texts import load_texts
from specdec.data.packed_dataset import PackedTexts

def own():  # bytes that are this process's alone: pages of files are the system's
    status = open("/proc/self/status").read()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])

before = own()
rows = PackedTexts(load_texts(sys.argv[1]), 512)
tokens = sum(len(rows[i]["ids"]) for i in range(len(rows)))
print(tokens, own() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_lies_in_a_file_is_in_no_process_own_memory(tmp_path):
    count, length = 20_000, 1000
    many = {"ids": torch.ones(count * length, dtype=torch.int32), "lengths": torch.full((count,), length)}
    save_file(many | {"learn": torch.ones(count * length, dtype=torch.bool)}, tmp_path / "texts.safetensors")
    command = [sys.executable, "-c", RESIDENT, str(tmp_path / "texts.safetensors")]
    tokens, taken = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert tokens == count * 512
    assert taken < 20e6  # of 100 MB
