"""Data parallelism in one process: nn.DataParallel, a thread for each device."""
