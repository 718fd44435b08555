"""Offloading: tensors that are not in use wait in main memory, or in mapped files on disk."""
