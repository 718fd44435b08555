"""Data parallelism: replicas (DDP), shards (FSDP2, ZeRO, HSDP), their batches and gradients.

Lives here: what ranks that see different samples split, exchange and average. Must not: splits of
layers, stages or sequences, which have packages of their own, nor gradients sent by hand
(`engines.optional.aggregation`).
"""
