"""Machines: devices, memory and links, by name, from files, probed and timed.

Lives here: `ClusterProfile`, its TOML, the probe and the bench. Must not: models.
"""
