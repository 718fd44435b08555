"""The plan: all decisions about the parallelization of a model, as a value.

Policies emit plans, engines obey them or refuse. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Self

from pydantic import model_validator

from engines.plan.partial_plan import AFTER_DEGREES, PartialPlan
from engines.plan.settings import (
    AXES,
    Aggregation,
    Compression,
    DataParallel,
    Offload,
    OffloadTo,
    Precision,
    Recompute,
    Schedule,
    TensorStyles,
    Updates,
    format_setting,
)
from profiles.errors import FileError, PlanError, UnknownNameError
from profiles.record import Document, json_file
from profiles.record.bounds import (
    Batch,
    Count,
    CountOrZero,
    Devices,
    DevicesOrZero,
    Microbatches,
)


class Plan(Document):
    """A plan: degrees of parallelism over ranks, and the cut of a step into microbatches.

    `Plan()` is one device with no tricks. The world size is pp * tp * cp * dp_replicate * dp_shard,
    plus servers and backup workers.
    The data-parallel kind follows from the degrees unless named: `dp_shard > 1` is ZeRO-3, with
    `dp_replicate > 1` as well it is HSDP; `zero=1` or `zero=2` shards optimizer states (and
    gradients) over the `dp_replicate` ranks.

    Attributes:
        pp, tp, cp, ep, dp_replicate, dp_shard: degrees of the mesh axes.
        data_parallel: see its class.
        microbatch_size: samples per forward of one replica; None takes what the batch gives.
        microbatches: microbatches in flight per round of a pipeline; pieces of the batch otherwise.
        accumulation: rounds per optimizer step; gradients are exchanged at the end of the last one
            wherever sharding allows.
        recompute, precision, offload: see their classes.
        sync_batch_norm: batch normalisation over the microbatches of all replicas together.
        compile: torch.compile of every block.
        schedule, stages: pipeline order; names of the units that begin stages 1, 2, ...
        tensor_styles: (module pattern, style) pairs for tensor parallelism.
        aggregation, compression: how DDP sends gradients; see their classes.
        compression_rank: of PowerSGD's factors: a matrix of n x m is sent as rank * (n + m).
        updates: when parameters are updated, see its class.
        sync_every: steps after which replicas that update on their own average.
        servers: ranks that hold parameters and step them: the first ones of the job.
        backup_workers: workers besides the `dp_replicate` whose gradients a step waits for; the
            last gradients to arrive are dropped.
        max_staleness: steps that a worker may be ahead of the slowest; None sets no bound.
        offload_to: the place of offloaded tensors, see its class.
        bucket_mib: gradients of DDP that go in one message, MiB (`bucket_cap_mb` of torch).
        sequence_parallel: norms, dropout and residual sums of split blocks over the tp axis too, by
            tokens (arXiv:2205.05198).
        loss_chunks: parts of a microbatch's tokens for which head and cross-entropy are computed
            one after the other, gradients with them; 1 makes whole logits.
        recompute_blocks: blocks of each stage that are recomputed (`recompute_num_layers` of
            Megatron-LM): the first ones, whose activations wait longest; None for all of them.

    >>> plan = Plan.parse("dp_shard=4 microbatches=2")
    >>> plan.data_parallel.value, plan.world_size, str(plan)
    ('full_shard', 4, 'dp_shard=4 microbatches=2')
    """

    pp: Devices = 1
    dp_replicate: Devices = 1
    dp_shard: Devices = 1
    cp: Devices = 1
    tp: Devices = 1
    ep: Devices = 1
    data_parallel: DataParallel = DataParallel.NONE
    microbatch_size: Batch | None = None
    microbatches: Microbatches = 1
    accumulation: Microbatches = 1
    recompute: Recompute = Recompute.NONE
    precision: Precision = Precision.FP32
    offload: Offload = Offload.NONE
    sync_batch_norm: bool = False
    compile: bool = False
    schedule: Schedule | None = None
    stages: tuple[str, ...] = ()
    tensor_styles: TensorStyles = ()
    aggregation: Aggregation = Aggregation.BACKEND
    compression: Compression = Compression.NONE
    compression_rank: Count = 1
    updates: Updates = Updates.SYNCHRONOUS
    sync_every: Count = 1
    servers: DevicesOrZero = 0
    backup_workers: DevicesOrZero = 0
    max_staleness: CountOrZero | None = None
    offload_to: OffloadTo = OffloadTo.HOST
    bucket_mib: Count = 25
    sequence_parallel: bool = False
    loss_chunks: Count = 1
    recompute_blocks: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _infer_data_parallel(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        zero = data.pop("zero", None)
        if zero is not None and "data_parallel" in data:
            raise PlanError("`zero` and `data_parallel` say the same thing: give one of them")
        if "data_parallel" not in data:
            data["data_parallel"] = _kind(
                zero, _degree(data, "dp_replicate"), _degree(data, "dp_shard")
            )
        return data

    @model_validator(mode="after")
    def _kind_matches_degrees(self) -> Self:
        kind, replicate, shard = self.data_parallel, self.dp_replicate, self.dp_shard
        degrees = f"dp_replicate={replicate} dp_shard={shard}"
        if kind is DataParallel.NONE and replicate * shard > 1:
            raise PlanError(f"data_parallel=none has one replica, the degrees say {degrees}")
        if kind is DataParallel.HYBRID_SHARD and min(replicate, shard) == 1:
            raise PlanError(
                f"hybrid_shard shards and replicates, the degrees say {degrees}",
                hints=["give both degrees, or leave `data_parallel` out"],
            )
        if kind is DataParallel.FULL_SHARD and replicate > 1:
            raise PlanError(
                f"full_shard (ZeRO-3) shards over dp_shard, the degrees say {degrees}",
                hints=[f"write `dp_shard={replicate * shard}`, or both degrees for HSDP"],
            )
        if kind in (DataParallel.REPLICATE, DataParallel.THREADS) and shard > 1:
            raise PlanError(f"{kind} keeps everything whole, the degrees say {degrees}")
        if kind in (DataParallel.ZERO1, DataParallel.ZERO2) and shard > 1:
            raise PlanError(
                f"ZeRO-1 and ZeRO-2 shard over dp_replicate, the degrees say {degrees}",
                hints=[f"write `dp_replicate={replicate * shard} zero={kind[-1]}`"],
            )
        return self

    def recomputing(self, kind: Recompute) -> Self:
        """The same with this recompute, of all blocks."""
        return self.model_copy(update={"recompute": kind, "recompute_blocks": None})

    def as_partial(self) -> PartialPlan:
        """Every setting fixed: nothing is left to choose."""
        names = (name for name in PartialPlan.model_fields if name != "zero")
        return PartialPlan(**{name: getattr(self, name) for name in names})

    @property
    def world_size(self) -> int:
        model = self.pp * self.tp * self.cp
        return model * (self.data_degree + self.backup_workers) + self.servers

    @property
    def data_degree(self) -> int:
        """Replicas that see different parts of the batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def is_ddp_alone(self) -> bool:
        """True if the ranks of a step are replicas and nothing else, and forwards exchange
        nothing: counts and losses are sent while they compute."""
        is_alone = self.is_replicated and self.world_size == self.dp_replicate
        return is_alone and self.updates_in_step and not self.sync_batch_norm

    @property
    def is_replicated(self) -> bool:
        """True if several ranks hold the same part of the model whole, and average its gradients:
        replicas, and ranks that share the tokens of a sample."""
        is_whole = self.data_parallel in (DataParallel.NONE, DataParallel.REPLICATE)
        return is_whole and self.dp_replicate * self.cp > 1

    @property
    def forwards(self) -> int:
        """Microbatches per replica and optimizer step."""
        return self.microbatches * self.accumulation

    @property
    def in_flight(self) -> int:
        """Microbatches of one round of a pipeline: the stages of `naive` take turns on each."""
        return 1 if self.schedule is Schedule.NAIVE else self.microbatches

    @property
    def shards_experts(self) -> bool:
        """True if FSDP2 shards a rank's experts among the ranks that hold the same ones."""
        kind = self.data_parallel
        has_copies = self.data_degree * self.cp > self.ep > 1
        return has_copies and kind.is_sharded and kind is not DataParallel.HYBRID_SHARD

    @property
    def updates_in_step(self) -> bool:
        """True if replicas exchange gradients in every step, among themselves."""
        return self.updates is Updates.SYNCHRONOUS and not self.servers

    @property
    def global_batch_size(self) -> int | None:
        """Samples per optimizer step; None where the plan leaves the microbatch open."""
        if self.microbatch_size is None:
            return None
        return self.microbatch_size * self.forwards * self.data_degree

    @property
    def fingerprint(self) -> str:
        """Short hash of the content; equal plans have equal fingerprints on every machine."""
        data = self.model_dump(mode="json")
        fields = type(self).model_fields
        said = {n: v for n, v in data.items() if n not in _ADDED or v != fields[n].default}
        text = json.dumps(said, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """The non-default settings as `Plan.parse` reads them."""
        words = [self.said(*AXES, "ep")]
        kind = self.data_parallel
        if kind is not _kind(None, self.dp_replicate, self.dp_shard):
            zero = {DataParallel.ZERO1: 1, DataParallel.ZERO2: 2, DataParallel.FULL_SHARD: 3}
            words.append(f"zero={zero[kind]}" if kind in zero else f"data_parallel={kind}")
        words.append(self.said(*AFTER_DEGREES))
        return " ".join(filter(None, words)) or "dp_replicate=1"

    def said(self, *names: str) -> str:
        """The settings among `names` that are not the default, as `Plan.parse` reads them.

        >>> Plan.parse("pp=2 tp=4 microbatches=8").said("pp", "cp", "tp")
        'pp=2 tp=4'
        """
        fields, words = type(self).model_fields, []
        for name in names:
            value = getattr(self, name)
            if value != fields[name].default:
                words.append(f"{name}={format_setting(value)}")
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Self:
        """A plan from "key=value" words; settings that are not named keep their defaults.

        Raises:
            UnknownNameError: a key or a choice that does not exist; the near miss is named.
            PlanError: settings that contradict each other.
        """
        return cls.build(PartialPlan.parse(text).fixed, where="plan")

    def to_json(self) -> str:
        data = self.model_dump(mode="json")
        return json.dumps({**data, "hash": self.fingerprint}, indent=2) + "\n"

    @classmethod
    def from_object(cls, data: dict[str, Any], *, where: str | None = None) -> Self:
        stated = data.get("hash")
        content = {name: value for name, value in data.items() if name != "hash"}
        plan = super().from_object(content, where=where)
        if stated is not None and stated != plan.fingerprint:
            raise FileError(
                f"the plan was changed by hand: hash {str(stated)[:32]}, content"
                f" {plan.fingerprint}",
                where=where,
                hints=["delete the `hash` line if the change is meant"],
            )
        return plan


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a JSON file: a plan that was saved, or the plan of a saved decision.

    Raises:
        FileError: the file is missing, broken, or holds neither.
    """
    data = json_file(path)
    inner = data.get("plan")
    if isinstance(inner, dict):
        return Plan.from_object(inner, where=f"{path}: plan")
    return Plan.from_object(data, where=str(path))


def read_settings(text: str) -> PartialPlan:
    """The settings that a user fixed: "key=value" words, or every one of the plan in a .json file.

    Raises:
        FileError: see `load_plan`. UnknownNameError, PlanError: see `PartialPlan.parse`.
    """
    return load_plan(text).as_partial() if text.endswith(".json") else PartialPlan.parse(text)


_ADDED = AFTER_DEGREES[AFTER_DEGREES.index("aggregation") :]
"""Settings that came later: a plan that leaves them alone keeps the hash that it had before."""


def _degree(data: dict[str, Any], name: str) -> int:
    value = data.get(name, 1)
    return value if isinstance(value, int) else 1


def _kind(zero: Any, replicate: int, shard: int) -> DataParallel:
    """The data-parallel kind that a ZeRO stage (None: not named) and the degrees mean."""
    if zero is None:
        if shard > 1:
            return DataParallel.HYBRID_SHARD if replicate > 1 else DataParallel.FULL_SHARD
        return DataParallel.REPLICATE if replicate > 1 else DataParallel.NONE
    match zero:
        case 0:
            return DataParallel.REPLICATE if replicate * shard > 1 else DataParallel.NONE
        case 1:
            return DataParallel.ZERO1
        case 2:
            return DataParallel.ZERO2
        case 3:
            hybrid = shard > 1 and replicate > 1
            return DataParallel.HYBRID_SHARD if hybrid else DataParallel.FULL_SHARD
    raise UnknownNameError("ZeRO stage", str(zero), ("0", "1", "2", "3"))
