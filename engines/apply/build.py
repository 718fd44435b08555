"""The state that the steps of applying a plan pass on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from engines.context.context import Context
from engines.context.proof import SequenceProof
from engines.data.finite import OnNonfinite
from engines.data.loss_rule import LossParts, LossWeight
from engines.experts.experts import Experts
from engines.legality import numerics
from engines.offload.pool import OffloadPool
from engines.parallel import LossFn, SchedulerFactory
from engines.plan import Plan
from engines.runtime.mesh import Mesh
from engines.runtime.world import World
from engines.state.layout import Layout
from engines.state.materialise import DeferredWeights
from engines.state.optimizer import OptimizerFactory, ParameterNames
from engines.tensor.split import TensorSplit
from engines.tensor.split_proof import SplitProof
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile, Numerics

if TYPE_CHECKING:
    from engines.pipeline.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Training:
    """The training that the user asks for."""

    loss_fn: LossFn | None
    optimizer: torch.optim.Optimizer | OptimizerFactory | None
    loss_weight: LossWeight | None
    max_grad_norm: float | None
    outer_optimizer: OptimizerFactory | None
    seed: int
    measure_noise: bool
    on_nonfinite: OnNonfinite
    check_replicas_every: int
    scheduler: SchedulerFactory | None


@dataclass(slots=True)
class Build:
    """State of applying a plan; every step reads it and adds to it.

    Attributes:
        model, plan, profile, cluster, world, training: arguments of `apply_plan`. `nn.DataParallel`
            drives its devices from one process: `plan` is then that of the process.
        requested: the plan as it was given.
        mesh, layout: coordinates of this rank, and how its tensors lie.
        names: first names of the parameters as they were given.
        loss_fn: `training.loss_fn`, with its target where the output is.
        layers, sequence: proofs of the splits; None if the plan splits none.
        parts: rule that combines the losses of parts of a batch.
        pool, weights, pipeline, tensor, experts, context: built if the plan asks for them.
        runner: what is called for a forward.
    """

    model: nn.Module
    plan: Plan
    profile: ModelProfile
    cluster: ClusterProfile
    world: World
    training: Training
    requested: Plan = field(init=False)
    loss_fn: LossFn | None = field(init=False)
    mesh: Mesh = field(init=False)
    layout: Layout = field(init=False)
    names: ParameterNames = field(init=False)
    runner: Callable[..., object] = field(init=False)
    layers: SplitProof | None = None
    sequence: SequenceProof | None = None
    parts: LossParts = field(default_factory=LossParts)
    pool: OffloadPool | None = None
    weights: DeferredWeights | None = None
    pipeline: Pipeline | None = None
    tensor: TensorSplit | None = None
    experts: Experts | None = None
    context: Context | None = None

    def __post_init__(self) -> None:
        self.requested = self.plan
        self.loss_fn = self.training.loss_fn

    @property
    def numerics(self) -> Numerics:
        return numerics(self.plan, self.profile)

    @property
    def mixed(self) -> torch.dtype | None:
        """The 16-bit dtype that forwards compute in on fp32 parameters; None: as built."""
        is_built = self.numerics is Numerics.AS_BUILT
        return None if is_built else getattr(torch, self.plan.precision.dtype)

    @property
    def is_placed(self) -> bool:
        """True if its author put parts of the model on several devices, where they stay."""
        return len(self.profile.devices) > 1

    @property
    def local(self) -> frozenset[str] | None:
        """First names of the parameters of this rank's stages; None without stages: all."""
        return self.pipeline.local if self.pipeline is not None else None
