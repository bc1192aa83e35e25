"""Data sets: rows by uid, prompts as tokens, procedural tasks. Torch-free; heavy libraries only in a user's source."""
