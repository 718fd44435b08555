"""Asynchronous and periodic updates: parameter servers, local SGD and DiLoCo.

Lives here: each rank's exchange (`exchange`, `periodic`, `server_rank`, `worker_rank`), links and
messages, and the server's arithmetic (`server`). Must not: synchronous data parallelism
(`engines.data`).
"""
