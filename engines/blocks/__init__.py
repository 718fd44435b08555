"""Blocks: what is done to a repeated block or to its forward on one rank.

Lives here: recompute, torch.compile, autocast, the wrapping of forwards that they share, and head
and loss by chunks. Must not: anything that sends a message to another rank.
"""
