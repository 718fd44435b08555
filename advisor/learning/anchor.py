"""Anchor: one measured step of a model, and by how much each term of its estimate missed.

Runs that are kept (`advisor.learning.learning`) correct a machine's constants by whole steps of any
model. An anchor is of one kind of model, and term by term: forward and backward, the update, what
is sent, the peak of memory. It is applied where runs are, to the facts, so that the estimate of
every other plan and size, the search and its bounds all rest on it:

* matrix products and attention take the measured multiple of their time, and so does the rest of
  computing: memory bandwidth and launches;
* the update takes the measured multiple of the time of its traffic;
* links are those that were timed between computing, collective by collective: a rate and a latency;
* what is left of the step is waiting, for other ranks and for a core, which grows with computing;
* activations are the measured multiple of those that were counted, a process holds what is left.

Constants are kept as seconds per FLOP and byte, not as factors: a machine that is timed anew does
not change what the step said. What differs between plans is trusted twice as far as without a step:
half of the model's own doubt stays, beside the scatter of the measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from pydantic import Field, NonNegativeFloat, PositiveFloat

from advisor.inputs.facts import Facts
from advisor.learning.constants import WIDEST_ERROR, as_measured, measured, slowed, unit_times
from profiles.cache import fingerprint
from profiles.errors import InputError
from profiles.machine.cluster import Anchored, AxisFits, ClusterProfile, Constant, Learned, Link
from profiles.model.profile import ModelProfile
from profiles.record import Document, Record
from profiles.record.bounds import Batch, Devices, Tokens
from profiles.timing.runs import Machine

# What is left of the doubt in a model of computing or sending once one plan was measured: assumed,
# half of it, as of the doubt in a process's context (`advisor.learning.learning.OWN_SHARE`).
LEFT = 1 / 2


class Term(StrEnum):
    """Part of an estimate that is measured separately. Values are the report's words."""

    COMPUTING = "forward and backward"
    PRODUCTS = "matrix products and attention"
    UPDATE = "update"
    SENDING = "communication and waiting"
    STEP = "step"
    ACTIVATIONS = "activations and temporaries"
    PEAK = "peak memory"

    @property
    def is_memory(self) -> bool:
        return self in (Term.ACTIVATIONS, Term.PEAK)


class TermResidual(Record):
    """A term's prediction, with its range, and its measurement: seconds or bytes.

    Attributes:
        low, high: range of the prediction.
        error: half of the measured range, as a fraction.
    """

    predicted: NonNegativeFloat
    low: NonNegativeFloat
    high: NonNegativeFloat
    measured: NonNegativeFloat
    error: NonNegativeFloat = 0.0

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None if nothing was predicted."""
        return self.measured / self.predicted if self.predicted else None

    @property
    def is_outside(self) -> bool:
        """Return True if the measurement lies outside the predicted range."""
        return not self.low <= self.measured <= self.high


class Links(Record):
    """Measured fits of links; see `profiles.machine.bench`."""

    intra: Link | None = None
    inter: Link | None = None
    axes: tuple[AxisFits, ...] = ()

    @classmethod
    def of(cls, cluster: ClusterProfile) -> Links:
        return cls(intra=cluster.intra, inter=cluster.inter, axes=cluster.axes)

    def on(self, cluster: ClusterProfile) -> ClusterProfile:
        """Return `cluster` with these links; its nodes have as many devices as the measured
        ones."""
        known = {
            tier: link for tier, link in (("intra", self.intra), ("inter", self.inter)) if link
        }
        has = {tier: link for tier, link in known.items() if getattr(cluster, tier) is not None}
        return cluster.model_copy(update={**has, "axes": self.axes or cluster.axes})


class Anchor(Document):
    """Residuals of one measured step, applied to other plans and sizes of its model on its
    machines.

    Attributes:
        machine: that it holds for.
        ranks: of the plan; `is_one_rank` says that one of them was run and the others were not.
        model, kind: its name, and a hash of the kinds of its units, by which other sizes are known.
        dtype: what forward and backward ran in.
        stack: the software that ran it.
        optimizer: its name.
        plan: as `Plan.parse` reads it.
        batch, tokens: samples of the step, tokens of each.
        terms: the residuals.
        constants: seconds per FLOP, byte or operation as the step has it.
        links: as they were timed beside the step; None where they were not.
        corrections: what belongs to no constant.
        context_missed_bytes: what a process holds beyond its predicted context, before any run.
        measured_at: UTC.
    """

    machine: Machine
    ranks: Devices
    is_one_rank: bool = False
    model: str
    kind: str
    dtype: str
    stack: str
    optimizer: str
    plan: str
    batch: Batch
    tokens: Tokens | None = None
    terms: dict[Term, TermResidual]
    constants: dict[Constant, PositiveFloat] = Field(default_factory=dict)
    links: Links | None = None
    corrections: Anchored
    context_missed_bytes: float = 0.0
    measured_at: str


def kind_of(model: ModelProfile) -> str:
    """Key shared by all sizes of a model: the classes of its units, and its dtype."""
    return fingerprint(sorted({unit.kind for unit in model.units}), model.dtype)


def anchored(facts: Facts, anchor: Anchor) -> Facts:
    """Apply an anchor to `facts`: constants, corrections, and their errors.

    Raises:
        InputError: the step was one of another kind of model, device or dtype.
    """
    _require_fitting(facts, anchor)
    dtype, step = anchor.dtype, anchor.corrections
    timed = (Term.COMPUTING, Term.STEP)
    scatter = max((anchor.terms[term].error for term in timed if term in anchor.terms), default=0.0)
    origin = f"a step of {anchor.plan} on {anchor.measured_at[:10]}"
    cluster = facts.cluster
    if anchor.links is not None and cluster.devices_per_node == anchor.machine.ranks_per_node:
        cluster = anchor.links.on(cluster)
    cluster = with_constants(cluster, anchor.constants, dtype, error=scatter, origin=origin)
    learned = cluster.learned or Learned()
    context = cluster.device.context_bytes
    moved_bytes = anchor.context_missed_bytes - learned.context_offset_bytes
    if anchor.context_missed_bytes and context.value + moved_bytes > 0:
        error = context.relative_error * LEFT
        changed = measured(context, error, origin=origin)
        changed = changed.model_copy(update={"value": context.value + moved_bytes})
        device = cluster.device.model_copy(update={"context_bytes": changed})
        cluster = cluster.model_copy(update={"device": device})
        offset = {"context_offset_bytes": anchor.context_missed_bytes}
        learned = learned.model_copy(update=offset)
    learned = learned.model_copy(update={"anchored": step})
    return on_cluster(facts, cluster.model_copy(update={"learned": learned}))


def fits(facts: Facts, anchor: Anchor) -> bool:
    """Return True if `anchored` accepts the anchor for these facts."""
    return not list(_misfits(facts, anchor))


def _require_fitting(facts: Facts, anchor: Anchor) -> None:
    misfits = list(_misfits(facts, anchor))
    if misfits:
        raise InputError(
            f"the anchor is of {misfits[0]}",
            where=f"anchor of {anchor.measured_at}: {anchor.model}, {anchor.plan}",
            hints=[
                "measure a step of this model there: `advise check MODEL --anchor`",
                "or leave the anchor out: `--no-anchor`",
            ],
        )


def _misfits(facts: Facts, anchor: Anchor) -> Iterable[str]:
    device = facts.cluster.device.name
    if device != anchor.machine.device:
        yield f"a step on {anchor.machine.device}, the plan is for {device}"
    if kind_of(facts.model) != anchor.kind:
        yield f"{anchor.model}, whose units are of other kinds than those of {facts.model.name}"
    if facts.stack.name != anchor.stack:
        yield f"a step under {anchor.stack}, the plan is under {facts.stack.name}"
    if facts.precision.dtype != anchor.dtype:
        yield f"a step in {anchor.dtype}, the plan is in {facts.precision.dtype}"


def with_constants(
    cluster: ClusterProfile,
    constants: Mapping[Constant, float],
    dtype: str,
    *,
    error: float = 0.0,
    origin: str = "",
) -> ClusterProfile:
    """`cluster` with these seconds per unit as measured ones."""
    units = unit_times(cluster, dtype)
    factors = {c: unit_s / units[c] for c, unit_s in constants.items() if c in units}
    errors = dict.fromkeys(factors, min(WIDEST_ERROR, error))
    return as_measured(slowed(cluster, factors), errors, dtype, origin=origin)


def on_cluster(facts: Facts, cluster: ClusterProfile) -> Facts:
    return facts.model_copy(update={"cluster": cluster})
