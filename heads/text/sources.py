"""Free texts as they come in Debian's packages, and instructions of a prompts file.

Owns where each source lies in its unpacked package and how its paragraphs are told from the rest. Knows nothing of
prompts.
"""

from __future__ import annotations

import gettext
import gzip
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

LANGUAGES = {
    "cs": "Czech",
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "it": "Italian",
    "ja": "Japanese",
    "nl": "Dutch",
    "pl": "Polish",
    "pt_BR": "Portuguese",
    "ru": "Russian",
    "zh_CN": "Chinese",
}
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6", "title"}
BLOCKS = HEADINGS | {"p", "div", "li", "dd", "dt", "item", "section", "blockquote", "td", "tr"}
NO_TEXT = {"script", "style", "pre", "nav", "header", "footer", "head", "info", "screen", "code-block"}
FILLED = {  # what a story's placeholders stand for
    "first": "Robin",
    "last": "Moreau",
    "ship": "Albatross",
    "origin": "Zug",
    "destination": "Earth",
    "planet": "Mars",
    "system": "Sol",
    "cargo": "medical supplies",
    "tons": "12 tons",
    "commodity": "food",
    "bunks": "4",
    "passengers": "four passengers",
    "date": "Saturday",
    "payment": "40,000 credits",
}
UNTRANSLATED = {"the", "of", "and", "to", "is", "that", "with", "for", "this"}


@dataclass(frozen=True)
class Passage:
    """Paragraphs under one heading. language: a key of `LANGUAGES`."""

    source: str
    language: str
    title: str
    paragraphs: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)


class _Blocks(HTMLParser):
    """HTML or Mallard's XML as a list of (is a heading, text)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[tuple[bool, str]] = []
        self._text: list[str] = []
        self._skipped: list[str] = []
        self._heading = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of_page = {"headerlink", "related", "sphinxsidebar", "footer", "docnav", "navheader", "navfooter", "toc"}
        if tag in NO_TEXT or of_page & set((dict(attrs).get("class") or "").split()):
            self._skipped.append(tag)
        elif self._skipped and tag == self._skipped[-1]:
            self._skipped.append(tag)  # nested: its end is not the skipped one's
        if tag in BLOCKS:
            self._flush()
            self._heading = tag in HEADINGS

    def handle_endtag(self, tag: str) -> None:
        if self._skipped and tag == self._skipped[-1]:
            self._skipped.pop()
        elif tag in BLOCKS:
            self._flush()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._text.append(data)

    def _flush(self) -> None:
        text = " ".join("".join(self._text).split())
        if text:
            self.blocks.append((self._heading, text))
        self._text, self._heading = [], False


def _sections(page: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Headings without their numbers, and the paragraphs under each."""
    parser = _Blocks()
    parser.feed(page)
    title, paragraphs = "", []
    for heading, text in [*parser.blocks, (True, "")]:
        if not heading:
            paragraphs.append(text)
            continue
        paragraphs = [text for text in paragraphs if len(text) > 40]
        if title and paragraphs:
            yield title, tuple(paragraphs)
        title, paragraphs = re.sub(r"^(Chapter|Appendix)?\s*[\dA-Z]*(\.\d+)*\.?\s+(?=\S)", "", text), []


def _pages(source: str, language: str, files: list[Path]) -> Iterator[Passage]:
    for file in sorted(files):
        for title, paragraphs in _sections(file.read_text(encoding="utf-8", errors="replace")):
            if language == "en" or not _is_english(" ".join(paragraphs)):
                yield Passage(source, language, title, paragraphs)


def _is_english(text: str) -> bool:
    """Manuals show what nobody has translated yet in English."""
    words = re.findall(r"[a-z]+", text.lower())
    return sum(word in UNTRANSLATED for word in words) > 0.08 * len(words)


def gnome_help(root: Path) -> Iterator[Passage]:
    for language in LANGUAGES:
        folder = root / "usr/share/help" / ("C" if language == "en" else language) / "gnome-help"
        yield from _pages("gnome-user-docs", language, list(folder.glob("*.page")))


def handbook(root: Path) -> Iterator[Passage]:
    folders = {"en": "en-US", "pt_BR": "pt-BR", "zh_CN": "zh-CN"} | {
        key: f"{key}-{key.upper()}" for key in ("de", "es", "fr", "it", "nl", "pl", "ru")
    }
    for language, name in (folders | {"ja": "ja-JP", "cs": "cs-CZ"}).items():
        folder = root / "usr/share/doc/debian-handbook/html" / name
        yield from _pages("debian-handbook", language, list(folder.glob("*.html")))


def gnucash(root: Path) -> Iterator[Passage]:
    for language in ("en", "de", "it", "ja"):
        folder = root / f"usr/share/doc/gnucash-docs/gnucash-guide-{language}"
        yield from _pages("gnucash-docs", language, list(folder.glob("*.html")))


def debian_faq(root: Path) -> Iterator[Passage]:
    folder = root / "usr/share/doc/debian/FAQ"
    yield from _pages("debian-faq", "en", list(folder.glob("*.en.html")))
    for language in ("de", "fr", "it"):
        yield from _pages("debian-faq", language, list((folder / language).glob("*.html")))


def python_manual(root: Path) -> Iterator[Passage]:
    folder = root / "usr/share/doc/python3.11/html"
    for part in ("faq", "tutorial", "howto", "library"):
        yield from _pages("python3.11-doc", "en", list((folder / part).glob("*.html")))


def sky_cultures(root: Path) -> Iterator[Passage]:
    """Those of Stellarium's that may be changed and sold, by the licence each one names."""
    for folder in sorted((root / "usr/share/stellarium/skycultures").iterdir()):
        licence = re.search(r"license *=(.*)", (folder / "info.ini").read_text(encoding="utf-8"))
        if licence and not re.search(r"\b(NC|ND)\b", licence[1]):
            for language in LANGUAGES:
                yield from _pages("stellarium-data", language, list(folder.glob(f"description.{language}.utf8")))


def wesnoth(root: Path) -> Iterator[Passage]:
    """What the campaigns' people say, each in the languages it has been translated to."""
    for language in LANGUAGES:
        for file in sorted((root / "usr/share/games/wesnoth/1.16/locale" / language / "LC_MESSAGES").glob("*.mo")):
            with file.open("rb") as opened:
                catalogue = gettext.GNUTranslations(opened)._catalog  # type: ignore[attr-defined]
            for english, foreign in sorted((e, f) for e, f in catalogue.items() if isinstance(e, str) and e):
                if 40 < len(english) < 1200 and not re.search(r"[<$|]", english + foreign):
                    yield Passage("wesnoth-1.16-data", language, "", tuple(foreign.split("\n\n")))
                    if language == "fr":  # any one of the languages: each English text once
                        yield Passage("wesnoth-1.16-data", "en", "", tuple(english.rpartition("^")[2].split("\n\n")))


def endless_sky(root: Path) -> Iterator[Passage]:
    for file in sorted((root / "usr/share/games/endless-sky/data").glob("*.txt")):
        for mission in re.split(r"^(?=mission )", file.read_text(encoding="utf-8"), flags=re.M)[1:]:
            title = re.match(r'mission "?([^"\n]*)', mission)[1]  # type: ignore[index]
            told = (_filled(text).strip() for text in re.findall(r"`([^`]*)`", mission))
            paragraphs = tuple(text for text in told if len(text) > 40)
            if paragraphs:
                yield Passage("endless-sky-data", "en", title, paragraphs)


def _filled(text: str) -> str:
    """With words where the game puts names and numbers in."""
    return re.sub(r"<([^>]*)>", lambda found: FILLED.get(found[1], "them"), text)


def dictionary(root: Path, name: str) -> Iterator[Passage]:
    text = gzip.decompress((root / f"usr/share/dictd/{name}.dict.dz").read_bytes()).decode("utf-8", "replace")
    for entry in re.split(r"\n(?=\S)", text):
        title, _, body = entry.partition("\n")
        paragraphs = tuple(" ".join(part.split()) for part in body.replace("{", "").replace("}", "").split("\n\n"))
        told = tuple(part for part in paragraphs if len(part) > 60 and not part.startswith(("[", "(")))
        if told and "%%%" not in title and len(title) < 40:
            yield Passage(f"dict-{name}", "en", title.strip(), told)


def package_descriptions(lists: Path) -> Iterator[Passage]:
    """Debian's, of all packages of main. lists: apt's, of a release whose translations were fetched."""
    for language in LANGUAGES:
        for file in sorted(lists.glob(f"*_main_i18n_Translation-{language.replace('_', '%5f')}*")):
            text = subprocess.run(["/usr/lib/apt/apt-helper", "cat-file", str(file)], capture_output=True, check=True)
            seen = set()
            for entry in text.stdout.decode("utf-8").split("\n\n"):
                found = re.match(r"Package: (.*)\nDescription-md5: .*\nDescription-.*?: (.*)\n((?: .*\n?)*)", entry)
                if found is None:
                    continue
                paragraphs = _description(found[3])
                if paragraphs and paragraphs[0] not in seen and (language == "en" or not _is_english(found[3])):
                    seen.add(paragraphs[0])  # packages of one source share their first paragraph
                    yield Passage("package descriptions", language, f"{found[1]}: {found[2]}", paragraphs)


def _description(lines: str) -> tuple[str, ...]:
    """Paragraphs; lists, which are indented further, lose their lines' ends too."""
    parts = re.split(r"^ \.\n", lines, flags=re.M)
    return tuple(text for part in parts if len(text := " ".join(part.split())) > 60)


def passages(root: Path, lists: Path) -> Iterator[Passage]:
    """All of them."""
    for read in (gnome_help, handbook, gnucash, debian_faq, python_manual, sky_cultures, wesnoth, endless_sky):
        yield from read(root)
    for name in ("foldoc", "jargon"):
        yield from dictionary(root, name)
    yield from package_descriptions(lists)


@dataclass(frozen=True)
class Instruction:
    """A line of a prompts file. passage: the text that it is about, "" where it is about none."""

    kind: str
    prompt: str
    passage: str
    question: str


UNFIT = re.compile(r"\b(sex\w*|naked|nude|rap(e|ed|ist)|porn\w*|suicid\w*)\b", re.I)
ASKED = (
    r"Question:\s*\"?(?P<q>[^\n\"]{15,150}\?)",
    r"answer to the question \"(?P<q>[^\"]{15,150}\?)\" is in",
    r"answer (?:the|this) question: (?P<q>[^\n]{15,150}\?)",
)


def instructions(file: Path) -> Iterator[Instruction]:
    """Of lines with `source` and `prompt`; passages are the longest paragraphs of those whose source is "context"."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            passage = question = ""
            if line["source"] == "context":
                longest = max(line["prompt"].split("\n\n"), key=len)
                passage = re.sub(
                    r"^.{0,200}?(?:\" is in \"|article: |text: |^(?:\w+ ){0,6}\w+ ?: )", "", longest, flags=re.S
                )
                passage = re.sub(r"\n[^\n]{0,80}[^.!?\"\n]\s*$", "", passage)  # what was to be done with it
                passage = "" if UNFIT.search(passage) else passage.strip(' "\n')
                found = next((m for pattern in ASKED if (m := re.search(pattern, line["prompt"]))), None)
                question = found["q"].strip() if found and found["q"] not in passage else ""
            yield Instruction(line["source"], line["prompt"], passage, question)
