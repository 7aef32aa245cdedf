"""The network, its tokenizer, and weights in."""
