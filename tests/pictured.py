"""Tiny models that take pictures, and prompts with random ones, as their processors would hand them over."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests import families, tiny

PICTURE = 90  # the token in whose place a piece of a picture goes
GRID = (1, 4, 6)  # frames, rows and columns of patches, of models that take pictures of any shape
SIDE = 32  # pixels, of those that take squares
# How a family's vision part is made small beyond what `families` makes small, and how many tokens a picture then is.
BY_GRID = {
    "qwen2_vl": {},
    "qwen2_5_vl": {"out_hidden_size": 32, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"out_hidden_size": 32, "deepstack_visual_indexes": [0, 1]},
    "qwen3_vl_moe": {"out_hidden_size": 32, "deepstack_visual_indexes": [0, 1]},
    "qwen3_5": {"out_hidden_size": 32},
    "glm4v": {"out_hidden_size": 32},
}
SQUARES = {
    "llava": ({"patch_size": 16, "image_size": SIDE}, 4),
    "gemma3": ({"patch_size": 8, "image_size": SIDE}, 4),
    "smolvlm": ({"patch_size": 8, "image_size": SIDE}, 4),
    "internvl": ({"patch_size": (8, 8), "image_size": (SIDE, SIDE)}, 4),
}
FAMILIES = [*BY_GRID, *SQUARES]


def model(name: str, seed: int = 0) -> PreTrainedModel:
    config = families.tiny_config(name)
    text, vision = config.get_text_config(decoder=True), config.vision_config
    for key, value in (BY_GRID.get(name) or SQUARES.get(name, ({}, 0))[0]).items():
        setattr(vision, key, value)
    if name in BY_GRID:
        text.rope_parameters["mrope_section"] = [2, 1, 1]  # halves of a head, shared by the planes
    if name == "gemma3":
        config.mm_tokens_per_image, text.sliding_window = 4, 8
    if name == "smolvlm":
        config.scale_factor = 2
    marks = [
        key for key in vars(config) if key.endswith(("_token_id", "_token_index")) and key[:3] not in ("pad", "eos")
    ]
    for number, key in enumerate(sorted(marks, key=lambda key: not key.startswith("image_token"))):
        setattr(config, key, PICTURE + number)
    torch.manual_seed(seed)
    made = AutoModelForImageTextToText.from_config(config).float().eval()
    made.generation_config.pad_token_id, made.generation_config.eos_token_id = tiny.PAD, None
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() >= 2:
                weight.mul_(4) if weight.any() else weight.normal_()  # Gemma 3 begins with pictures of zeros
    return made


def prompts(name: str, *lengths: int, pictures: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Left-padded: a token before each picture, and the others. lengths: tokens of text in each row."""
    config = families.tiny_config(name)
    generator = torch.Generator().manual_seed(seed)
    size = GRID[1] * GRID[2] // 4 if name in BY_GRID else SQUARES[name][1]
    width = max(lengths) + pictures * size
    ids = torch.full((len(lengths), width), tiny.PAD)
    for row, length in enumerate(lengths):
        text = torch.randint(2, 80, (length,), generator=generator)
        seen = torch.full((size,), PICTURE)
        parts = [part for at in range(pictures) for part in (text[at : at + 1], seen)]
        ids[row, width - length - pictures * size :] = torch.cat([*parts, text[pictures:]])
    count = pictures * len(lengths)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids != tiny.PAD).long()}
    if name in BY_GRID:
        vision = config.vision_config
        patches = count * GRID[1] * GRID[2]
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        inputs["pixel_values"] = torch.randn(patches, values, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([GRID] * count)
        inputs["mm_token_type_ids"] = (ids == PICTURE).long()
    else:
        inputs["pixel_values"] = torch.randn(count, 3, SIDE, SIDE, generator=generator)
        if name == "gemma3":
            inputs["token_type_ids"] = (ids == PICTURE).long()
        if name == "smolvlm":
            inputs["pixel_values"] = inputs["pixel_values"].unflatten(0, (len(lengths), pictures))
    return inputs
