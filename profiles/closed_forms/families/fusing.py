"""Roles of kernels in chains of operations that compilers fuse."""

from __future__ import annotations

from profiles.model.work import FusibleKind
from profiles.trace.chains import Fusing

FUSIBLE = Fusing()
ACTIVATION = Fusing(hint=FusibleKind.GATE)
GATHER = Fusing(hint=FusibleKind.ROUTER)
SOFTMAX = Fusing(is_softmax=True)
DRAW = Fusing(draws=True)
ATTENTION = Fusing(is_fusible=False, is_attention=True)
# What compilers leave to a kernel of its own: products, sorting, sums into places.
ALONE = Fusing(is_fusible=False)
