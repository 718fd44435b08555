"""Pipelines for any module: each stage replays the model's own forward for its calls of units.

A cut is a position in the list of calls. What crosses it is read from `ModelProfile.flow`, so skip
edges, encoder outputs and position biases travel by themselves; `recording` knows their shapes,
`replay` runs a part of the forward, `stage` dresses it for torch.distributed.pipelining.
"""
