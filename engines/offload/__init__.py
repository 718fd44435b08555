"""Offloading: tensors that are not in use wait in main memory, or in mapped files on disk.

Lives here: the pool of that memory, and what moves into it: activations, optimizer states, shards.
Must not: FSDP2's own offload to main memory, which `engines.data.fsdp` turns on.
"""
