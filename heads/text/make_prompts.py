"""Prompts that are like the use: translation, summarization, retrieval, long contexts, several turns, system messages.

    python make_prompts.py UNPACKED LISTS INSTRUCTIONS OUT --avoid BENCHMARK

Owns the mix and how passages become prompts. The README says where the texts come from; phrasings stand in `phrasings`.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import phrasings
from shards import identity
from sources import LANGUAGES, Instruction, Passage, instructions, passages

MIX = {
    "translation": 3300,
    "summarization": 2300,
    "retrieval": 2500,
    "conversation": 1900,
    "long": 1200,
    "question": 800,
}
WITH_SYSTEM = 0.12  # of all prompts
FOREIGN = {"de": 35, "fr": 16, "es": 13, "it": 10, "pt_BR": 7, "ru": 5, "ja": 4, "zh_CN": 3, "pl": 3, "nl": 2, "cs": 2}
PROSE = {"wesnoth-1.16-data": 4, "package descriptions": 3, "gnome-user-docs": 2}  # shares in translation; others: 1
CONTEXTS = {  # shares of passages; others: 1
    "instructions": 6,
    "endless-sky-data": 4,
    "package descriptions": 3,
    "python3.11-doc": 3,
    "debian-handbook": 3,
    "dict-foldoc": 3,
    "gnome-user-docs": 2,
    "gnucash-docs": 2,
    "dict-jargon": 1,
    "stellarium-data": 1,
    "debian-faq": 1,
    "wesnoth-1.16-data": 0,  # sentences without an order
}
NGRAM = 8  # words that a prompt must not share with one of a benchmark


def size(text: str) -> int:
    """About so many tokens, in any language."""
    return len(text.encode()) // 4


class Maker:
    """Each method makes one prompt: the sources of its texts, and the user's turns."""

    def __init__(self, texts: Sequence[Passage], asked: Sequence[Instruction], seed: int):
        self.random = random.Random(seed)
        self._passages: dict[tuple[str, str], list[Passage]] = defaultdict(list)  # by source and language
        for text in texts:
            self._passages[text.source, text.language].append(text)
        given = {one.passage: one for one in asked if size(one.passage) > 60}  # one of those that share a passage
        self._given = {passage: one.question for passage, one in given.items()}
        self._passages["instructions", "en"] = [Passage("instructions", "en", "", (text,)) for text in given]
        self._asked: dict[str, list[Instruction]] = defaultdict(list)
        for one in asked:
            if not one.passage and size(one.prompt) < 300:
                self._asked[one.kind].append(one)
        self._places = {key: self.random.sample(range(len(own)), len(own)) for key, own in self._passages.items()}

    # Drawing

    def _phrase(self, phrases: Sequence[str]) -> str:
        """The first, or any."""
        return phrases[0] if self.random.random() < 0.25 else self.random.choice(phrases)

    def _place(self, source: str, language: str) -> int:
        """Each passage once before any comes again."""
        places = self._places[source, language]
        if not places:
            count = len(self._passages[source, language])
            places += self.random.sample(range(count), count)
        return places.pop()

    def _source(self, language: str, shares: dict[str, int], least: int = 30) -> str:
        there = [source for (source, spoken), own in self._passages.items() if spoken == language and len(own) > least]
        return self.random.choices(there, [shares.get(source, 1) for source in there])[0]

    def _text(self, low: int, high: int, language: str = "en") -> tuple[Passage, str]:
        """A passage and, where it is short, those behind it, of `low` to `high` tokens; where it began."""
        wanted = self.random.uniform(low, high)
        while True:
            source = self._source(language, CONTEXTS)
            own, place = self._passages[source, language], self._place(source, language)
            text = ""
            for passage in own[place : place + 12]:
                alone = source in ("instructions", "dict-jargon", "dict-foldoc", "endless-sky-data")
                title = f"{passage.title}\n\n" if passage.title and not alone else ""
                for part in (title + passage.paragraphs[0], *passage.paragraphs[1:]):
                    if size(text) + size(part) <= min(wanted * 1.2, high):
                        text += "\n\n" * bool(text) + part
                if size(text) >= wanted or alone:
                    break
            if low <= size(text) <= high:
                return own[place], text

    def _foreign(self) -> str:
        return self.random.choices(list(FOREIGN), list(FOREIGN.values()))[0]

    def _question(self, passage: Passage) -> str:
        if own := self._given.get(passage.text):
            return own
        title = passage.title.strip().rstrip(".:¶")
        if title.endswith("?"):
            return title
        verb = title.split(" ")[0].lower()
        if verb in phrasings.VERBS and passage.source not in phrasings.QUESTIONS:
            return phrasings.HOW.format(title=verb + title[len(verb) :])
        name, _, about = title.partition(": ")
        phrases = phrasings.QUESTIONS.get(passage.source, phrasings.QUESTIONS[""])
        return self.random.choice(phrases).format(title=title, name=name, about=about.rstrip("?"))

    # Kinds

    def translation(self) -> tuple[set[str], list[str]]:
        """Into English two times of three; a sentence as often as a paragraph or two."""
        foreign, inwards = self._foreign(), self.random.random() < 0.65
        spoken, wanted = (foreign, "en") if inwards else ("en", foreign)
        if self.random.random() < 0.04:
            wanted = self.random.choice([key for key in FOREIGN if key != spoken])
        while True:
            source = self._source(spoken, PROSE)
            passage = self._passages[source, spoken][self._place(source, spoken)]
            if self.random.random() < 0.6:
                text = self.random.choice(_sentences(self.random.choice(passage.paragraphs)))
            else:
                text = "\n\n".join(passage.paragraphs[: self.random.choice((1, 1, 2))])
            if 8 <= size(text) <= 250:
                break
        phrases = phrasings.TRANSLATE
        if wanted == "en" and self.random.random() < 0.1:
            phrases = phrasings.TRANSLATE_TO_ENGLISH.get(spoken, phrases)
        names = {"source": LANGUAGES[spoken], "target": LANGUAGES[wanted]}
        return {source}, [self._phrase(phrases).format(text=text, **names)]

    def summarization(self) -> tuple[set[str], list[str]]:
        """150 to 900 words; one of eight in another language."""
        language = self._foreign() if self.random.random() < 0.125 else "en"
        passage, text = self._text(180, self.random.choice((400, 700, 1100)), language)
        phrases = phrasings.SUMMARIZE
        if self.random.random() < 0.6:
            phrases = phrasings.SUMMARIZE_IN.get(language, phrases)
        return {passage.source}, [self._phrase(phrases).format(text=text)]

    def retrieval(self) -> tuple[set[str], list[str]]:
        """A question over one to five passages; one of twelve is not answered in them."""
        found = self._found()
        asked = self._text(60, 300)[0] if self.random.random() < 0.08 else found[0][0]
        texts = [text for _, text in found]
        self.random.shuffle(texts)
        prompt = self._phrase(phrasings.RETRIEVE).format(passages=self._listed(texts), question=self._question(asked))
        return {passage.source for passage, _ in found}, [prompt]

    def _found(self) -> list[tuple[Passage, str]]:
        """Passages, the first being the one to ask about; some are neighbours of it, others are of any source."""
        count = self.random.choices((1, 2, 3, 4, 5), (25, 20, 25, 15, 15))[0]
        high = 420 if count == 1 else 200
        first, text = self._text(50, high)
        found = [(first, text)]
        for _ in range(count - 1):
            if self.random.random() < 0.5:
                found.append(self._text(50, high))
                continue
            other = self.random.choice(self._passages[first.source, "en"])
            found.append((other, " ".join(other.text.split()[:110])))
        return found

    def _listed(self, texts: Sequence[str]) -> str:
        if len(texts) > 1 and self.random.random() < 0.4:
            return "\n\n".join(f"[{number}] {text}" for number, text in enumerate(texts, start=1))
        return self.random.choice(("\n", "\n\n")).join(texts)

    def long(self) -> tuple[set[str], list[str]]:
        passage, text = self._text(500, 1400)
        phrases = phrasings.DOCUMENT if passage.title else phrasings.DOCUMENT[:-1]
        prompt = self.random.choice(phrases).format(text=text, title=passage.title)
        return {passage.source}, [prompt]

    def question(self) -> tuple[set[str], list[str]]:
        """Without a text to answer from."""
        shares = {"dict-foldoc": 4, "gnome-user-docs": 3, "package descriptions": 2, "python3.11-doc": 2}
        while True:
            source = self._source("en", shares)
            passage = self._passages[source, "en"][self._place(source, "en")]
            if passage.title and source not in ("endless-sky-data", "stellarium-data"):
                return {source}, [self._question(passage)]

    def conversation(self) -> tuple[set[str], list[str]]:
        """Two to four turns."""
        about = self.random.choices(("instruction", "passage", "translation", "retrieval"), (50, 25, 13, 12))[0]
        if about == "instruction":
            kind = self.random.choices(("code", "math", "writing", "general", "question"), (28, 12, 30, 15, 15))[0]
            sources, turns = {"instructions"}, [self.random.choice(self._asked[kind]).prompt]
            kind = kind if kind in phrasings.TALK else "general"
        elif about == "retrieval":
            found = self._found()[:3]
            asked = [self._question(passage) for passage, _ in found]
            sources = {passage.source for passage, _ in found}
            turns = [phrasings.RETRIEVE[0].format(passages=self._listed([t for _, t in found]), question=asked[0])]
            turns, kind = turns + asked[1:], "passage"
        else:
            sources, turns = self.translation() if about == "translation" else self.summarization()
            kind = about
        count = self.random.choices((2, 3, 4), (60, 28, 12))[0]
        follow = self.random.sample(phrasings.TALK[kind], max(0, count - len(turns)))
        if phrasings.ASK in follow:
            follow.insert(follow.index(phrasings.ASK) + 1, phrasings.ANSWER)
        languages = [name for key, name in LANGUAGES.items() if key in ("de", "fr", "es", "it", "ja")]
        follow = [turn.format(language=self.random.choice(languages)) for turn in follow]
        return sources, (turns + follow)[:4]


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?…])\s+(?=[^\sa-z])|(?<=[。！？])", text.strip())  # noqa: RUF001


def _ngrams(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return zip(*(words[i:] for i in range(NGRAM)), strict=False)


def prompts(maker: Maker, avoided: set[tuple[str, ...]], seed: int) -> Iterator[dict[str, object]]:
    """The whole mix, shuffled, so that its beginning is like the rest."""
    drawn, seen = random.Random(seed), set()
    kinds = [kind for kind, count in MIX.items() for _ in range(count)]
    drawn.shuffle(kinds)
    dropped = 0
    for kind in kinds:
        while True:
            sources, turns = getattr(maker, kind)()
            system = drawn.random() < WITH_SYSTEM
            messages = [{"role": "system", "content": drawn.choice(phrasings.SYSTEM)}] * system
            messages += [{"role": "user", "content": turn} for turn in turns]
            if not avoided.isdisjoint(ngram for turn in turns for ngram in _ngrams(turn)):
                dropped += 1
            elif identity(messages) not in seen and size("".join(turns)) <= 1450:
                break
        seen.add(identity(messages))
        yield {"id": identity(messages), "kind": kind, "sources": sorted(sources), "messages": messages}
    print(f"{dropped} prompts were dropped that share {NGRAM} words with a benchmark's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("unpacked", type=Path, help="folder that the packages were unpacked to")
    parser.add_argument("lists", type=Path, help="apt's lists, with translations of the packages' descriptions")
    parser.add_argument("instructions", type=Path, help="prompts file (.jsonl.gz) with source and prompt")
    parser.add_argument("out", type=Path, help="JSONL to write, compressed (.xz)")
    parser.add_argument("--avoid", type=Path, help="benchmark (JSONL with turns) whose prompts must not be among them")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    avoided = set()
    if options.avoid:
        for line in options.avoid.read_text(encoding="utf-8").splitlines():
            avoided |= {ngram for turn in json.loads(line)["turns"] for ngram in _ngrams(turn)}
    texts = list(passages(options.unpacked, options.lists))
    maker = Maker(texts, list(instructions(options.instructions)), options.seed)
    count: Counter[str] = Counter()
    with lzma.open(options.out, "wt", encoding="utf-8") as file:
        for prompt in prompts(maker, avoided, options.seed):
            count[str(prompt["kind"])] += 1
            file.write(json.dumps(prompt, ensure_ascii=False) + "\n")
    print(dict(count))


if __name__ == "__main__":
    main()
