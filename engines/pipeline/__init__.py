"""Pipelines for any module: each stage replays the model's own forward for its calls of units.

A cut is a position in the list of calls. The tensors that cross it are read from
`ModelProfile.flow`, so skip connections, encoder outputs and position biases cross like any other.
Lives here: `segments` (calls of a stage), `recording` (shapes), `replay` (one segment's forward),
`stage` and `pipeline` (over torch.distributed.pipelining). Must not: data axes, or a loss function.
"""
