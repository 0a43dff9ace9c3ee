"""The demo: real weights, three prompts, plain and speculative decoding side by side. `python -m examples.demo`."""
