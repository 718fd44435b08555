"""Traces: what one forward and backward is seen to do, unit by unit.

Lives here: modes that attribute operations, memory behind tensors, values on their way between
units, layers, repeated blocks. Must not: the choice of a way to look (`profiles.capture.ladder`).
"""
