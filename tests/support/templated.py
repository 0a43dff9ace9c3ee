"""Tokenizers of characters and marks, each with a chat template of a kind that is in use.

The templates are minimal: each does what its model's own does with answers, and no more.
"""

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AddedToken, PreTrainedTokenizerFast

THOUGHT = "<think>", "</think>"  # added, but not special, as in Qwen3 and DeepSeek-R1
CHATML = "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LATER = "{% if not loop.last %}{{ c.split('</think>')[-1].lstrip() }}{% else %}{{ c }}{% endif %}"
REFUSED = "{% if '<|channel|>' in m.content %}{{ raise_exception('channel tags in the content') }}{% endif %}"
OWN = "<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"

# Each kind's marks, the first of them the tokenizer's end token, and its template.
KINDS = {
    "chatml": (("<|im_end|>", "<|im_start|>"), CHATML + ASK),
    "chatml with another end": (("</s>", "<|im_end|>", "<|im_start|>"), CHATML + ASK),
    # Qwen3: the last answer is shown with its thinking, earlier ones without.
    "strips earlier thinking": (
        ("<|im_end|>", "<|im_start|>", *THOUGHT),
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{% set c = m.content %}"
        "{% if m.role == 'assistant' %}" + LATER + "{% else %}{{ c }}{% endif %}<|im_end|>\n{% endfor %}" + ASK,
    ),
    "strips all thinking": (
        ("<|im_end|>", "<|im_start|>", *THOUGHT),
        CHATML.replace("m.content", "m.content.split('</think>')[-1].lstrip()") + ASK,
    ),
    # DeepSeek-R1's distilled models: the prompt begins the thinking, which no answer is shown with.
    "r1": (
        ("<end>", "<User>", "<Assistant>", *THOUGHT),
        "{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}{% else %}<Assistant>"
        "{{ m.content.split('</think>')[-1] }}<end>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<Assistant><think>\n{% endif %}",
    ),
    "gpt-oss": (
        ("<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        + REFUSED
        + "<|start|>assistant<|channel|>final<|message|>"
        "{{ m.content }}{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
        "{% else %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    ),
    "llama 3": (
        ("<|eot_id|>", "<|begin|>", "<|head|>"),
        "<|begin|>{% for m in messages %}<|head|>{{ m.role + '\n\n' + m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|head|>assistant\n\n{% endif %}",
    ),
    "phi-3": (
        ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"),
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    ),
    "gemma": (
        ("<eos>", "<start_of_turn>", "<end_of_turn>"),
        "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ),
    # SmolLM3: the prompt's empty thinking is not the answer's.
    "generation": (
        ("<|im_end|>", "<|im_start|>", *THOUGHT),
        "{% for m in messages %}{% if m.role == 'assistant' %}" + OWN + "{% else %}"
        "<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}",
    ),
    "without an end": (
        ("</s>",),
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    ),
}


def tokenizer(kind):
    """The tokenizer of a kind; its template can be exchanged, as every call makes one."""
    marks, template = KINDS[kind]
    characters = ["?", *"\n abcdefghijklmnopqrstuvwxyz:", *(chr(code) for code in range(33, 58) if code != 63)]
    inner = Tokenizer(WordLevel({c: i for i, c in enumerate(characters)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=marks[0])
    made.add_tokens([AddedToken(mark, special=mark not in THOUGHT, normalized=False) for mark in marks[1:]])
    made.chat_template = template
    return made


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def turns(*contents):
    """A conversation: the user's content, the assistant's, and so on."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
