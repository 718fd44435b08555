"""Closed form of transformer shapes: a `ModelProfile` from sizes alone, without a module.

Lives here: what a block of a shape multiplies, moves and keeps, operation by operation, with what
fused kernels would save of it. Not here: configs of transformers
(`profiles.closed_forms.families`), anything that a plan decides.
"""

from profiles.closed_forms.transformer.profile import transformer_profile as transformer_profile
from profiles.closed_forms.transformer.shape import TransformerShape as TransformerShape
