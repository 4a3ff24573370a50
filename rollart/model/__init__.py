"""The policy network and its tokenizer, shared by engines and trainers."""
