"""`describe`: text summary of a checkpoint, as `specdec inspect` prints it."""

from __future__ import annotations

from specdec.heads.checkpoint import Understood

SURE = {"config": "from its config", "weights": "from its weights", "assumed": "ASSUMED"}


def describe(checkpoint: Understood) -> str:
    """List every config field with its source, and every tensor that is used, ignored or borrowed."""
    lines = [f"{checkpoint.path}: {checkpoint.format}", "", "fields"]
    width = max(len(field.name) for field in checkpoint.fields)
    for field in checkpoint.fields:
        note = f"; {field.note}" if field.note else ""
        lines.append(f"  {field.name:{width}}  {field.value}  ({SURE[field.source]}{note})")
    lines += ["", "tensors used"]
    width = max(map(len, checkpoint.used))
    lines += [f"  {name:{width}}  {list(shape)}" for name, shape in sorted(checkpoint.used.items())]
    lines += ["", "tensors ignored"] + [f"  {name}: {why}" for name, why in sorted(checkpoint.ignored.items())]
    if not checkpoint.ignored:
        lines.append("  none")
    missing = [f"{name} (the target's is used)" for name in checkpoint.borrowed]
    return "\n".join([*lines, "", "not in the files", *(f"  {name}" for name in missing or ["nothing"])])
