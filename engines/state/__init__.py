"""State: parameters, buffers, gradients and optimizer states under their original names.

Lives here: where every tensor lies under a plan (`layout`), whole states, checkpoints, weights of
models on the meta device, and optimizers on replaced parameters. Must not: a training step.
"""
