"""Profiles without running anything: from a config or a table's shape to a `ModelProfile`.

Lives here: kinds of transformers and convolutional networks, counted. Must not: torch.
"""
