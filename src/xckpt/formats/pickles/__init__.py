"""Pickles as data: an interpreter, its records, and which code would run elsewhere."""
