"""`Recipe`: from a target and texts it wrote to a trained head, in one command that goes on where it was stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainingArguments

from specdec.eagle3.config import default_taps
from specdec.eagle3.evaluation import Evaluation, evaluate
from specdec.eagle3.objective import frequent_tokens
from specdec.eagle3.states import StateDataset, bytes_per_token, extract
from specdec.eagle3.texts import Text, read_texts
from specdec.eagle3.trainer import Eagle3Trainer, convert
from specdec.taps import decoder_layers

CHECKPOINT_FILES = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth")


@dataclass(frozen=True)
class Recipe:
    """What to train, on what, and how.

    Args:
        target: path or hub id. data: JSONL of texts the target wrote, see `read_texts`. out: folder for all results.
        draft_vocab: tokens the head can draft. intermediate_size: of its MLP; None: the target's.
        steps: drafted tokens to train. length: tokens per packed row. batch_size: rows per update.
        max_texts: use the first so many. held_out: texts at the end of the data that are only evaluated on.
        save_every: updates between checkpoints. device: None: an accelerator if there is one.
    """

    target: str
    data: Path
    out: Path
    draft_vocab: int = 8192
    intermediate_size: int | None = None
    steps: int = 5
    length: int = 512
    epochs: float = 2.0
    learning_rate: float = 4e-4
    batch_size: int = 4
    max_texts: int | None = None
    held_out: int = 16
    save_every: int = 100
    seed: int = 0
    device: str | None = None

    def run(self) -> Evaluation:
        """Extract, train, evaluate; everything in `out`, the head in `out/head`."""
        self.out.mkdir(parents=True, exist_ok=True)
        self._settle()
        tokenizer = AutoTokenizer.from_pretrained(self.target)
        texts = list(islice(read_texts(self.data, tokenizer, self.length), self.max_texts))
        if len(texts) <= self.held_out:
            raise ValueError(f"{self.data} holds {len(texts)} texts and {self.held_out} are held out: none is left")
        training, held_out = texts[: len(texts) - self.held_out], texts[len(texts) - self.held_out :]
        device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        target = AutoModelForCausalLM.from_pretrained(self.target, dtype="auto").to(device).eval()
        self._extract(target, training)
        trainer = self._trainer(target, training, device)
        trainer.train(resume_from_checkpoint=last_checkpoint(self.out / "run"))
        trainer.save_head(self.out / "head", self.target)
        return self._evaluate(trainer, target, held_out)

    def _settle(self) -> None:
        """The same folder must not be used for another recipe: its states and checkpoints would be mixed up."""
        path, mine = self.out / "recipe.json", {key: str(value) for key, value in asdict(self).items()}
        for name in ("out", "device", "save_every"):
            del mine[name]
        theirs = json.loads(path.read_text()) if path.exists() and _is_json(path) else mine
        if theirs != mine:
            name = next(key for key in [*mine, *theirs] if theirs.get(key) != mine.get(key))
            raise ValueError(
                f"{self.out} holds the work of another recipe ({name} was {theirs.get(name)}, is {mine.get(name)}): "
                "choose another folder"
            )
        path.write_text(json.dumps(mine, indent=1))

    def _extract(self, target: PreTrainedModel, texts: Sequence[Text]) -> None:
        taps = default_taps(len(decoder_layers(target)))
        tokens = sum(len(text.ids) for text in texts)
        done = sum(path.stat().st_size for path in (self.out / "states").glob("states-*.safetensors"))
        size, free = tokens * bytes_per_token(target, taps), done + shutil.disk_usage(self.out).free
        print(f"{len(texts)} texts, {tokens} tokens; their states take {size / 1e9:.1f} GB in {self.out / 'states'}")
        if size > 0.95 * free:
            raise ValueError(f"{size / 1e9:.1f} GB of states do not fit on the disk, {free / 1e9:.1f} GB are free")
        with Progress() as bar:
            task = bar.add_task("states", total=tokens)
            extract(target, texts, taps, self.out / "states", progress=lambda done: bar.advance(task, done))

    def _trainer(self, target: PreTrainedModel, texts: Sequence[Text], device: torch.device) -> Eagle3Trainer:
        size = target.config.get_text_config(decoder=True).vocab_size
        vocab, covered = frequent_tokens([(text.ids, text.learn) for text in texts], size, min(self.draft_vocab, size))
        print(f"the {len(vocab)} tokens of the draft vocabulary are {100 * covered:.1f}% of what the target writes")
        torch.manual_seed(self.seed)
        changes = {} if self.intermediate_size is None else {"intermediate_size": self.intermediate_size}
        head = convert(target, vocab, **changes)
        args = TrainingArguments(
            output_dir=str(self.out / "run"),
            per_device_train_batch_size=self.batch_size,
            num_train_epochs=self.epochs,
            learning_rate=self.learning_rate,
            adam_beta2=0.95,
            max_grad_norm=0.5,
            warmup_steps=50,
            lr_scheduler_type="cosine",
            bf16=True,
            use_cpu=device.type == "cpu",
            logging_steps=10,
            save_steps=self.save_every,
            save_total_limit=2,
            seed=self.seed,
            report_to=[],
            dataloader_pin_memory=device.type != "cpu",
        )
        dataset = StateDataset(self.out / "states", self.length)
        return Eagle3Trainer(head, target, args, steps=self.steps, train_dataset=dataset)

    def _evaluate(self, trainer: Eagle3Trainer, target: PreTrainedModel, texts: Sequence[Text]) -> Evaluation:
        head = trainer.head.to(target.device, target.dtype).eval()
        found = evaluate(head, target, [_prompt(text) for text in texts], draft_length=self.steps)
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        content = {"evaluation": asdict(found), "warning": found.warning, "log": logged}
        (self.out / "evaluation.json").write_text(json.dumps(content, indent=1) + "\n")
        return found


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end."""
    whole = [
        path
        for path in folder.glob("checkpoint-*")
        if all((path / name).exists() for name in CHECKPOINT_FILES) and _is_json(path / "trainer_state.json")
    ]
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


def _prompt(text: Text) -> Tensor:
    """What stands before the first token that the target wrote."""
    return text.ids[: max(1, int(text.learn.long().argmax()))]
