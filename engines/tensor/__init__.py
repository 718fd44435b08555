"""Tensor parallelism for any module: layers are split over the ranks of the tp axis.

Between units every value is whole on every rank; inside a unit, column-wise layers make parts of
features that row-wise layers sum again.
Lives here: the proposal of a split (`rules`, `variants`, `proposal`), its proof on copies of units
(`unit_kinds` to `split_proof`), the split itself and its `collectives`. Must not: other
axes, or a choice of tp.
"""
