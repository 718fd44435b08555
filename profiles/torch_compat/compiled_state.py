"""State that a compiled forward writes in place, as its backward is to see it."""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy


class _KeepsState(CustomGraphPass):
    """Lets a graph read a copy of each input that it writes into.

    torch (2.13, all backends) saves such an input for the backward and computes again from it what
    the forward computed: from the state after the write, so that a counter or a running scale that
    a block changes and multiplies by gives wrong gradients. The copy is saved in its place.
    """

    def __call__(self, graph: fx.Graph) -> None:
        first = next((node for node in graph.nodes if node.op != "placeholder"), None)
        writes = (n for n in graph.nodes if n.target is torch.ops.aten.copy_.default)
        for write in list(writes):
            state = write.args[0]
            readers = [n for n in state.users if n is not write and n.op != "output"]
            if state.op != "placeholder" or not readers:
                continue
            with graph.inserting_before(first):
                copy = graph.call_function(torch.ops.aten.clone.default, (state,))
            copy.meta = dict(state.meta) | {"recompute": CheckpointPolicy.MUST_SAVE}
            for reader in readers:
                reader.replace_input_with(state, copy)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


KEEPS_STATE = {"joint_custom_post_pass": _KeepsState()}
"""Options of torch.compile."""
