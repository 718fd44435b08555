"""What is not in use waits outside the device: in main memory, or in mapped files on disk."""
