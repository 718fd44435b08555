"""Tensor parallelism for any module: layers are split over the ranks of the tp axis.

Between units every value is whole on every rank; inside a unit, column-wise layers make parts of
features that row-wise layers sum up again.
"""
