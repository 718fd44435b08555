"""Compute time: rates of a device's kernels, and the seconds of every unit.

Lives here: products by size, attention, norms, waves of tiles, the roofline over them. Must not:
constants that a fit decides (`advisor.cost.calibration`), or communication.
"""
