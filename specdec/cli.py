"""The command line: thin commands over the library."""

from __future__ import annotations

import typer

app = typer.Typer(help="Speculative decoding for Hugging Face models.", no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Speculative decoding for Hugging Face models."""


@app.command()
def generate(
    target: str = typer.Argument(help="Path or hub id of the target model."),
    prompt: str = typer.Argument(help="What to say to it; goes through the chat template where the model has one."),
    proposer: str = typer.Option("ngram", help='What drafts: "ngram" or "draft:PATH_OR_ID".'),
    max_new_tokens: int = typer.Option(256, min=1, help="Tokens to write at most."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 is greedy."),
) -> None:
    """Write a continuation token by token, then print the report."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    from specdec import SpeculativeGenerator

    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()
    spec = SpeculativeGenerator(model, proposer)
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    spec.generate(
        **inputs.to(model.device),
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True),
        **sampling,
    )
    typer.echo(f"\n{spec.last_report}")


if __name__ == "__main__":
    app()
