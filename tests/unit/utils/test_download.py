"""Heads that come from elsewhere: a server on this machine stands for the release page."""

import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import huggingface_hub.constants
import pytest

from specdec import Eagle3Proposer, NgramProposer, SpeculativeGenerator
from specdec.heads import registry, shipped
from specdec.heads.eagle3.export import save
from specdec.heads.registry import NoHead
from specdec.utils import download
from specdec.utils.download import Content, DownloadFailed, checksum, size_of
from tests.support import eagle3, tiny, tiny_llama
from tests.support.shop import Shop

BYTES = bytes(range(200))


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """`shop.address` serves `shop.folder`, which holds a head for the tiny target; nothing is in the cache."""
    folder = tmp_path / "shop"
    save(eagle3.head(tap_ids=(1, 2, 3)), folder / "tiny-head")
    (folder / "file").write_bytes(BYTES)
    monkeypatch.setattr(registry, "HEADS", (tiny_llama.entry(folder / "tiny-head"),))
    monkeypatch.setattr(download, "RETRY_DELAY", 0.0)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    shop = Shop(folder)
    with shop.open() as shop.address:
        monkeypatch.setenv("SPECDEC_HEADS", shop.address)
        yield shop


@pytest.fixture
def target():
    with tiny_llama.target() as made:
        yield made


# A file


def fetched(shop, place, sha256=None, **more):
    """Its bytes, and how many were said to come."""
    came = []
    content = Content(sha256 or checksum(shop.folder / "file"), len(BYTES))
    download.download(f"{shop.address}/file", place / "here", content, came.append, **more)
    assert [path.name for path in place.glob("here*")] == ["here"]
    return (place / "here").read_bytes(), sum(came)


def test_a_file_comes_whole(shop, tmp_path):
    assert fetched(shop, tmp_path) == (BYTES, 200)
    assert shop.asked == [("/file", 0)]


def test_a_line_that_breaks_off_is_taken_up_again(shop, tmp_path):
    shop.breaks_off = [70, 0, 50]
    assert fetched(shop, tmp_path) == (BYTES, 200)
    assert shop.asked == [("/file", start) for start in (0, 70, 70, 120)]


def test_what_is_left_of_an_earlier_call_is_gone_on_from(shop, tmp_path):
    shop.breaks_off = [30, *[0] * (download.TRIES - 1)]
    with pytest.raises(DownloadFailed, match=r"/file could not be downloaded \(the connection was interrupted\)"):
        fetched(shop, tmp_path)
    assert fetched(shop, tmp_path) == (BYTES, 200)
    assert shop.asked[-1] == ("/file", 30)


def test_a_server_that_sends_whole_files_alone(shop, tmp_path):
    shop.ranges, shop.breaks_off = False, [70]
    assert fetched(shop, tmp_path) == (BYTES, 200)


def test_a_wrong_checksum_is_said_and_nothing_is_left(shop, tmp_path):
    with pytest.raises(DownloadFailed, match=r"here has the sha256 \w{64} where 0{64} was expected: it was deleted"):
        fetched(shop, tmp_path, "0" * 64)
    assert not [*tmp_path.glob("here*")]
    assert fetched(shop, tmp_path) == (BYTES, 200)


def test_another_versions_beginning_is_not_gone_on_from(shop, tmp_path):
    (tmp_path / "here.00000000.tmp").write_bytes(b"x" * 50)
    download.download(
        f"{shop.address}/file", tmp_path / "here", Content(checksum(shop.folder / "file"), len(BYTES)), print
    )
    assert (tmp_path / "here").read_bytes() == BYTES


@pytest.mark.parametrize("bytes_there", [120, 400], ids=["shorter", "longer"])
def test_a_file_of_another_size_is_refused(shop, tmp_path, bytes_there):
    content = Content(checksum(shop.folder / "file"), len(BYTES))
    (shop.folder / "file").write_bytes(bytes(bytes_there))
    with pytest.raises(DownloadFailed, match="could not be downloaded" if bytes_there < 200 else "has the sha256"):
        download.download(f"{shop.address}/file", tmp_path / "here", content)
    assert not (tmp_path / "here").exists()
    (shop.folder / "file").write_bytes(BYTES)
    download.download(f"{shop.address}/file", tmp_path / "here", content)
    assert (tmp_path / "here").read_bytes() == BYTES


def test_a_file_that_is_not_there_is_asked_for_once(shop, tmp_path):
    with pytest.raises(DownloadFailed, match="nothing could not be downloaded .*404"):
        download.download(f"{shop.address}/nothing", tmp_path / "here", Content("0", 1))
    assert len(shop.asked) == 1


def test_time_is_up(shop, tmp_path):
    """What came until then is kept."""
    shop.pause = 0.01
    with pytest.raises(DownloadFailed, match="takes too long: the next call resumes"):
        fetched(shop, tmp_path, deadline=time.monotonic() + 0.2)
    shop.pause = 0.0
    assert fetched(shop, tmp_path) == (BYTES, 200)
    assert shop.asked[-1][1] > 0


# A head


def in_cache(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache" / "heads").glob("*"))


@pytest.mark.parametrize("name", ["eagle3", "auto"])
def test_a_head_comes_and_drafts(shop, target, tmp_path, name):
    spec = SpeculativeGenerator(target, name, on_unsupported="error")
    assert isinstance(getattr(spec.proposer, "other", spec.proposer), Eagle3Proposer)
    assert in_cache(tmp_path) == [".tiny-head.lock", "tiny-head"]
    assert sorted(path for path, _ in shop.asked) == ["/tiny-head/config.json", "/tiny-head/model.safetensors"]
    prompt = tiny.prompts(6)["input_ids"]
    out = spec.generate(prompt, do_sample=False, max_new_tokens=12)
    assert out.tolist() == target.generate(prompt, do_sample=False, max_new_tokens=12).tolist()
    shop.asked.clear()
    assert registry.find(target, "eagle3") == str(tmp_path / "cache" / "heads" / "tiny-head")
    assert shop.asked == []


def test_a_head_that_broke_off_has_no_folder_yet(shop, target, tmp_path):
    size = size_of(shop.folder / "tiny-head" / "model.safetensors")
    shop.breaks_off = [10_000, size // 2, *[0] * (download.TRIES - 1)]  # the config comes first, whole
    with pytest.warns(UserWarning, match=r'"auto" drafts with n-grams: .* \(the connection was interrupted'):
        assert isinstance(SpeculativeGenerator(target, "auto").proposer, NgramProposer)
    assert in_cache(tmp_path) == [".tiny-head.lock", "tiny-head.partial"]
    shop.asked.clear()
    assert registry.find(target, "eagle3").endswith("tiny-head")
    assert shop.asked == [("/tiny-head/model.safetensors", size // 2)]


def test_a_head_that_was_changed_is_refused(shop, target, tmp_path):
    weights = shop.folder / "tiny-head" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(NoHead, match="model.safetensors has the sha256 .* was expected: it was deleted"):
        registry.find(target, "eagle3")
    assert in_cache(tmp_path) == [".tiny-head.lock", "tiny-head.partial"]


@pytest.mark.parametrize(
    ("variable", "why"),
    [
        ("HF_HUB_OFFLINE", "HF_HUB_OFFLINE is set, so nothing is downloaded"),
        ("off", "SPECDEC_HEADS is off, so it is not downloaded"),
        ("/no/such/folder", "SPECDEC_HEADS is the folder /no/such/folder, which does not have it"),
        ("", "this installation of specdec names no release page"),
        ("http://127.0.0.1:9", "could not be downloaded .*refused"),
    ],
)
def test_where_nothing_is_downloaded_it_is_said_what_to_do(shop, target, monkeypatch, tmp_path, variable, why):
    if variable == "HF_HUB_OFFLINE":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setenv("SPECDEC_HEADS", variable)
    fix = f"Copy .*model.safetensors.* into {tmp_path / 'cache' / 'heads' / 'tiny-head'}, or set SPECDEC_HEADS to"
    with pytest.raises(NoHead, match=f"the head tiny-head is not on this machine: .*{why}.*{fix}"):
        registry.find(target, "eagle3")
    with pytest.warns(UserWarning, match=f'"auto" drafts with n-grams: .*{why}'):
        assert isinstance(SpeculativeGenerator(target, "auto").proposer, NgramProposer)
    assert not registry.at_hand("tiny-llama", "eagle3", download=True)
    assert shop.asked == []


def test_a_folder_in_place_of_the_release_page(shop, target, monkeypatch):
    monkeypatch.setenv("SPECDEC_HEADS", str(shop.folder))
    assert registry.find(target, "eagle3") == str(shop.folder / "tiny-head")


def test_the_release_page_is_that_of_the_repository(monkeypatch):
    monkeypatch.setenv("SPECDEC_HEADS", "")
    links = ["Documentation, https://x.org", "Repository, https://github.com/someone/specdec"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(shipped, "metadata", lambda name: type("Metadata", (), {"get_all": lambda self, key: links})())
    assert shipped._address() == "https://github.com/someone/specdec/releases/download"

    def nothing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(shipped, "metadata", nothing)
    with pytest.raises(DownloadFailed, match="names no release page"):
        shipped._address()


def test_auto_waits_no_longer_than_a_minute(shop, target, monkeypatch):
    shop.pause = 0.001
    monkeypatch.setattr("specdec.proposers.factory.PATIENCE", 0.3)
    with pytest.warns(UserWarning, match='"auto" drafts with n-grams: .* takes too long'):
        SpeculativeGenerator(target, "auto")


def test_auto_does_not_wait_for_another_process(shop, target, monkeypatch, tmp_path):
    monkeypatch.setattr("specdec.proposers.factory.PATIENCE", 0.1)
    (tmp_path / "cache" / "heads").mkdir(parents=True)
    held = shipped.FileLock(tmp_path / "cache" / "heads" / ".tiny-head.lock", is_singleton=False)
    with held, pytest.warns(UserWarning, match='"auto" drafts with n-grams: .*another process is downloading it'):
        SpeculativeGenerator(target, "auto")


def test_a_cache_that_cannot_be_written_to(shop, target, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(NoHead, match="it cannot be stored in"):
        registry.find(target, "eagle3")


BRING = """
import sys, time
from specdec.heads import shipped
from specdec.utils.download import Content
files = {name: Content(sha256, int(size)) for name, sha256, size in (one.split(":") for one in sys.argv[1:])}
print(shipped.download_head("tiny-head", files))
"""


@pytest.mark.slow
def test_of_several_processes_one_downloads(shop, tmp_path):
    shop.pause = 0.0005
    files = [f"{name}:{content.sha256}:{content.size}" for name, content in registry.HEADS[0].files.items()]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-c", BRING, *files]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert said == [str(tmp_path / "cache" / "heads" / "tiny-head")] * 3
    assert len(shop.asked) == 2
    assert (
        Path(said[0], "model.safetensors").read_bytes()
        == (shop.folder / "tiny-head" / "model.safetensors").read_bytes()
    )
