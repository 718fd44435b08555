"""Planners asked about the runs that were measured: time to answer, peak bytes, step time.

    ours                  profile, decide, and price the plan of each script; bytes of tensors
    DeepSpeed             `estimate_zero2/3_model_states_mem_needs`, states alone, for fp16
    Accelerate            `estimate-memory`'s functions on the module under `init_empty_weights`
    torch                 `MemTracker` on fake tensors, `FSDPMemTracker` on a fake process group,
                          `RuntimeEstimator`

Each says as much as it can of the script that does what it models; what it does not count is noted.
"""

from __future__ import annotations

import importlib.util
import os
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from advisor.auto.facts_from_module import facts_from_module
from advisor.cost import estimate
from advisor.decide.choose import choose
from engines.plan import Plan
from engines.runtime.fake_world import fake_world
from profiles.machine.cluster import ClusterProfile
from tests.peers.capacity import tensors_alone
from tests.peers.results import Answer
from tests.peers.run import LINKS, Link
from tests.peers.scripts import OURS, PLAIN
from tests.peers.subjects import ROWS, SUBJECTS, Subject, adam, share

Said = tuple[str, float | None, float | None, str]
"""Script, peak bytes, seconds of a step, note."""


def answers(clusters: dict[str, ClusterProfile]) -> Iterator[Answer]:
    """Ask every planner about every model and link whose machines are known."""
    for name, subject in SUBJECTS.items():
        for link in clusters:
            for planner, ask in PLANNERS.items():
                yield from _asked(planner, ask, name, subject, link, clusters[link])


Ask = Callable[[Subject, Link, ClusterProfile], list[Said]]


def _asked(
    planner: str, ask: Ask, name: str, subject: Subject, link: str, cluster: ClusterProfile
) -> Iterator[Answer]:
    package = {"DeepSpeed": "deepspeed", "Accelerate": "accelerate"}.get(planner.split()[0])
    if package and importlib.util.find_spec(package) is None:
        return
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = ask(subject, LINKS[link], cluster)
    except Exception as error:
        text = (str(error).strip() or "no words").splitlines()[0][:200]
        said = [("", None, None, f"{type(error).__name__}: {text}")]
    seconds = time.perf_counter() - start
    for script, peak, step_s, note in said:
        yield Answer(
            planner=planner,
            subject=name,
            link=link,
            script=script,
            answer_s=round(seconds, 4),
            peak_bytes=peak,
            step_s=step_s,
            note=note,
        )


def _ours(subject: Subject, link: Link, cluster: ClusterProfile) -> list[Said]:
    """Everything from the module on; a rank's tensors are what is measured, not its process."""
    facts = facts_from_module(
        subject.model(),
        share(subject.batch(0), 0, link.ranks),
        loss_fn=subject.loss_fn,
        cluster=tensors_alone(cluster),
        optimizer=adam,
        global_batch_size=ROWS,
    )
    decision = choose(facts)
    size = f"microbatch_size={ROWS // link.ranks}"
    sharded = f"dp_shard={link.ranks}"
    if link.nodes > 1:
        sharded = f"dp_replicate={link.nodes} dp_shard={link.ranks // link.nodes}"
    plans = {
        OURS: decision.plan,
        PLAIN: Plan.parse(f"dp_replicate={link.ranks} {size}"),
        "FSDP2 by hand": Plan.parse(f"{sharded} {size}"),
    }
    said: list[Said] = []
    for script, plan in plans.items():
        cost = estimate(plan, facts)
        said.append((script, cost.peak_bytes, cost.step_s, str(plan) if script == OURS else ""))
    return said


def _deepspeed(subject: Subject, link: Link, _: ClusterProfile) -> list[Said]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    model = subject.model()
    total = sum(p.numel() for p in model.parameters())
    layer = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    job = {"num_gpus_per_node": link.ranks // link.nodes, "num_nodes": link.nodes}
    _, second = estimate_zero2_model_states_mem_needs(total, cpu_offload=False, **job)
    _, third, _ = estimate_zero3_model_states_mem_needs(
        total, layer, cpu_offload=False, cpu_offload_params=False, zero_init=False, **job
    )
    note = "states alone, of fp16 training"
    return [("DeepSpeed ZeRO-2", second, None, note), ("DeepSpeed ZeRO-3", third, None, note)]


def _accelerate(subject: Subject, link: Link, _: ClusterProfile) -> list[Said]:
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with init_empty_weights():
        model = subject.model()
    size, _largest = calculate_maximum_sizes(model)
    usage = estimate_training_usage(size, "float32")
    return [("Accelerate", float(max(usage.values())), None, "states alone, of one device")]


def _mem_tracker(subject: Subject, link: Link, _: ClusterProfile) -> list[Said]:
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = subject.model()
        optimizer = adam(list(model.parameters()))
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        batch = share(subject.batch(0), 0, link.ranks)
        with tracker:
            _two_steps(subject, model, optimizer, batch, tracker.reset_mod_stats)
    return [(PLAIN, _peak(tracker), None, "one process: no buckets")]


def _fsdp_tracker(subject: Subject, link: Link, _: ClusterProfile) -> list[Said]:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with fake_world(0, link.ranks, torch.device("cpu")):
        mesh = init_device_mesh("cpu", (link.ranks,))
        if link.nodes > 1:
            shape = (link.nodes, link.ranks // link.nodes)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = subject.model()
        for block in subject.blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = adam(list(model.parameters()))
        tracker = FSDPMemTracker(model, optimizer)
        batch = share(subject.batch(0), 0, link.ranks)
        with tracker:
            _two_steps(subject, model, optimizer, batch, tracker.reset_mod_stats)
    return [("FSDP2 by hand", _peak(tracker), None, "")]


def _two_steps(
    subject: Subject,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: object,
    between: Callable[[], None],
) -> None:
    """Two: the first makes the optimizer's states."""
    for step in range(2):
        subject.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            between()


def _peak(tracker: object) -> float:
    snapshot = tracker.get_tracker_snapshot("peak")  # type: ignore[attr-defined]
    return float(max(bytes_of["Total"] for bytes_of in snapshot.values()))


def _runtime(subject: Subject, link: Link, _: ClusterProfile) -> list[Said]:
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    if not torch.cuda.is_available():  # it asserts so below autograd, which ends the process
        return [("", None, None, "no answer: its rates are those of CUDA devices")]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = subject.model()
        optimizer = adam(list(model.parameters()))
        batch = share(subject.batch(0), 0, link.ranks)
        estimator = RuntimeEstimator()
        with estimator(estimate_mode_type="operator-level-cost-model"):
            subject.loss(model, batch).backward()
            optimizer.step()
    return [(PLAIN, None, estimator.total_runtime / 1e3, "computing alone")]


PLANNERS: dict[str, Ask] = {
    "ours": _ours,
    "DeepSpeed's estimators": _deepspeed,
    "Accelerate's estimate-memory": _accelerate,
    "torch MemTracker": _mem_tracker,
    "torch FSDPMemTracker": _fsdp_tracker,
    "torch RuntimeEstimator": _runtime,
}
