"""One training step as it was seen: operations by place, allocations over time, sums by unit.

Lives here: what capture writes down from tensors and closed forms from shapes, without torch.
Must not: either of the two.
"""
