"""Makers of model directories, and the tokenizer adapter over such a directory. All of it needs transformers."""
