"""The demo: real weights, three prompts, plain and speculative decoding side by side. Run `python -m examples.demo`."""
