"""Checkpoints: a folder for each save, in one format for every plan and world size.

Lives here: the files of a checkpoint, how they are written, verified and read, and which states of
a training they hold. Not here: how tensors lie under a plan (`engines.state`).
"""
