"""Tensor parallelism for any module: layers are split over the ranks of the tp axis.

Between units every value is whole on every rank; inside a unit, column-wise layers make parts of
features that row-wise layers sum up again. `proposal` finds the layers (`wiring`, `variants`),
`proof` shows on a copy of a unit (`specimen`) that the split computes what the whole unit computes,
`split` carries it out with the exchanges of `exchange`.
"""
