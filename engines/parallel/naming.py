"""Names of parameters, buffers and cuts, as in the user's own module: a part of ParallelModel."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from engines.pipeline.cuts import Cut, cuts
from engines.plan import Plan
from engines.state.layout import Layout
from profiles.model.profile import ModelProfile


class NamingMixin:
    """A part of ParallelModel."""

    plan: Plan
    module: nn.Module
    _layout: Layout
    _profile: ModelProfile

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Original names; what this rank holds."""
        named = self.module.named_parameters(prefix, recurse, remove_duplicate)
        start = len(prefix) + 1 if prefix else 0
        return ((name, p) for name, p in named if self._layout.holds(name[start:]))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Original names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Tensors that cross each cut for one microbatch: the plan's, else the sample."""
        samples = self.plan.microbatch_size or self._profile.samples
        return cuts(self.plan, self._profile.flow, samples=samples)

    def extra_repr(self) -> str:
        return "\n".join([f"plan: {self.plan}", *map(str, self.cuts)])
