"""Apply a plan to a model, step by step.

It makes every combination of stages (pp), split layers (tp) and replicas or shards, by the names
that papers and manuals give them:

    PP + TP + DP                 pp=2 tp=2 dp_replicate=2: "3D parallelism"; DDP of a model that
                                 itself spans devices
    DP + PP + TP + ZeRO-1        the same with zero=1: optimizer states sharded over the replicas
    PP x TP x ZeRO-3 or HSDP     dp_shard, or dp_replicate and dp_shard

From the outside in: stages first, so that nothing else is done to parameters that a rank will not
keep. Then layers are split, then blocks recompute and are compiled as they will run, and what is
left on the rank is replicated or sharded over the data axes. Under asynchronous and periodic
updates (servers, local SGD) each rank is a job of its own, but for its exchange. A pipeline records
the model as it was before all this.
"""

from __future__ import annotations

import torch
from torch import nn

from engines.apply.assemble import assemble
from engines.apply.blocks import chunk, compile_, narrow, recompute
from engines.apply.build import Build, Training
from engines.apply.plain import note_spread
from engines.apply.prepare import prepare
from engines.apply.proofs import Proofs
from engines.apply.shard import shard
from engines.apply.split import leave_out, make_stages, split
from engines.apply.validate import require_function, require_seed, validate
from engines.data.finite import OnNonfinite, reaction_of
from engines.data.loss_rule import LossWeight
from engines.data.replica_checksums import DEFAULT_EVERY, require_every
from engines.offload.pool import Folder
from engines.optional.manual_placement import with_devices_of
from engines.parallel import LossFn, ParallelModel, SchedulerFactory
from engines.plan import Plan
from engines.runtime.failures import all_ranks_succeed
from engines.runtime.world import World, join_world, rank_error_context
from engines.state.optimizer import OptimizerFactory
from engines.state.weights import Weights
from profiles.capture.batch.call import Batch
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile
from profiles.record.bounds import require_positive


@rank_error_context("applying the plan")
def apply_plan(
    model: nn.Module,
    plan: Plan,
    *,
    profile: ModelProfile,
    cluster: ClusterProfile,
    loss_fn: LossFn | None = None,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    scheduler: SchedulerFactory | None = None,
    loss_weight: LossWeight | None = None,
    max_grad_norm: float | None = None,
    sample: Batch | None = None,
    weights: Weights | None = None,
    outer_optimizer: OptimizerFactory | None = None,
    world: World | None = None,
    seed: int = 0,
    measure_noise: bool = False,
    on_nonfinite: OnNonfinite | str = OnNonfinite.STOP,
    check_replicas_every: int = DEFAULT_EVERY,
    offload_folder: Folder | None = None,
    proofs: Proofs | None = None,
) -> ParallelModel:
    """Spread `model` as `plan` says, in place; all ranks call it with the same plan.

    Nothing is chosen here: the plan says everything, the profile says which modules are units, and
    a plan that cannot be applied is refused before any work. Rank 0's parameters and buffers are
    sent to all ranks, so the ranks may have built the model from different seeds.

    Args:
        model: any module; its class, names and code stay as they are, but for the class of linear
            layers that multiply in 8 bits (`engines.blocks.eight_bits`). One on the meta device
            gets its values when each rank knows what it keeps: the whole is on no rank.
        profile: of this model, from `profiles.capture.capture`.
        cluster: the devices of this job.
        loss_fn: loss_fn(output, target) for tuple batches, loss_fn(output, batch) for dicts; None
            where the model returns its loss.
        optimizer: a factory, an optimizer built on `model`, or None for AdamW.
        scheduler: a factory: `lambda optimizer: LambdaLR(optimizer, ...)`. What it makes is stepped
            after every step of the optimizer, and is part of checkpoints.
        loss_weight: number of terms that the mean loss of a microbatch is a mean over, where it is
            not what the sample shows (`engines.data.loss_parts`):
            `lambda batch: batch["mask"].sum()`.
        max_grad_norm: clip gradients in `train_step`.
        sample: one local batch, as for `capture`; with tp or cp > 1 the split is proved on it, with
            pp > 1 the stages are tried on its shapes; its values show what the loss is a mean over.
        weights: of a model on the meta device: a path to safetensors files or a checkpoint; tensors
            by name; or init(module), which fills the parameters and buffers that a module holds
            itself and draws from torch's generator only. A rank takes what it keeps, slice by
            slice, and nothing else is read. By default what the constructor did under `deferred()`,
            else the model's own `reset_parameters` and `_init_weights`: with draws seeded by
            `seed` and the parameter, so that all plans start from the same weights.
        outer_optimizer: a factory, for `updates=diloco`; None is the paper's Nesterov momentum.
        seed: of the shuffling in `ParallelModel.shard`, and of initial weights.
        measure_noise: the gradient noise scale, for `ParallelModel.noise_scale`: reads the
            gradients twice more in every step.
        on_nonfinite: a loss or a gradient that is nan or inf, on any rank: "stop" raises before the
            optimizer steps, and says where it began; "skip" leaves the step out on all ranks, with
            a warning; "ignore" does not look. Looking waits for the device in every step. Where
            fp16 scales the loss, gradients that overflow lower the scale and the step is left out;
            that stops at a scale of 1, or at a loss that is not finite.
        check_replicas_every: steps between two comparisons of replicas, whose parameters must be
            the same to the bit; they are compared before every save too. 0: never.
        offload_folder: on a fast local disk, where the plan says `offload_to=disk`. Its files have
            no names, and are gone when the process ends.
        proofs: of splits, the same on all ranks. A split without one, or with the proof of another
            split, is proved here.

    Raises:
        PlanError: the plan is not possible for this model on these ranks.
        PlanMismatchError: ranks have different plans.
        RankMismatchError: ranks have different software, models, losses, settings or optimizers;
            names the first difference. The first batches are compared in the first step.
        RankError: a rank is missing.
        BatchError: the model cannot run on a part of the rows of the sample.
        ModelError: parameters that nothing gives values, `weights` that do not fit, or nothing to
            train.
    """
    world = world or join_world()
    with all_ranks_succeed("checking the arguments", timeout_s=world.timeout_s):
        if max_grad_norm is not None:
            require_positive(max_grad_norm, "max_grad_norm")
        require_function(loss_weight, "loss_weight", 'lambda batch: batch["mask"].sum()')
        require_function(outer_optimizer, "outer_optimizer", "lambda params: SGD(params, lr=0.7)")
        training = Training(
            loss_fn,
            optimizer,
            loss_weight,
            max_grad_norm,
            outer_optimizer,
            require_seed(seed),
            measure_noise,
            reaction_of(on_nonfinite),
            require_every(check_replicas_every),
            scheduler,
        )
    profile = with_devices_of(profile, model)
    build = Build(model, plan, profile, cluster, world, training)
    validate(build)
    prepare(build, sample, weights, offload_folder, proofs or Proofs())
    make_stages(build, sample)
    leave_out(build)
    narrow(build)
    split(build)
    chunk(build)
    recompute(build)
    compile_(build)
    shard(build)
    parallel = assemble(build)
    note_spread(model, plan)
    return parallel
