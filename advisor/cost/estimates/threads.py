"""One process with a thread for each of n devices (nn.DataParallel); the first one collects all.

With P bytes of parameters, G of gradients, X of a microbatch's inputs and Y of its outputs on one
device, over links with latency a and b seconds a byte, every forward and its backward take

    scatter     (n-1) (a + X b)     inputs leave the first device, one after another
    replicate   a + P b             parameters are broadcast again, as the optimizer changed them
    gather      (n-1) (a + Y b)     outputs arrive at the first device, which computes the loss
    backward    (n-1) (a + Y b)     their gradients are scattered
    reduce      a + G b             gradients are summed there, after the backward

all of it exposed: autograd reaches the broadcast last (torch/nn/parallel/_functions.py). DDP sends
2 (n-1)/n G once a step, overlapped with the backward. One interpreter launches the operations of
all devices, one at a time: a unit takes n times its launches if they take longer than its compute.
The first device holds the batch, all outputs and their loss, and the sum of gradients in addition
to its own; the others have no optimizer states and wait for its step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from advisor.cost.breakdown import Estimate
from advisor.cost.compute.unit_times import Computing, added_s, busy_s, optimizer_s
from advisor.cost.context import CostContext
from advisor.cost.estimates.assemble import assemble
from advisor.cost.estimates.updates import alone
from advisor.cost.load.loads import Loads
from advisor.cost.memory.peak import peak
from engines.plan import Plan
from profiles.machine.cluster import Collective, Device
from profiles.model.profile import LOSS, ModelProfile, Numerics


@dataclass(frozen=True, slots=True)
class ScatterGather:
    """Tensors gathered on the first device in one forward and backward, in bytes and seconds.

    Attributes:
        input_bytes, output_bytes: of one device's microbatch.
        loss_bytes: saved and temporary bytes of the loss, for one device's outputs.
        loss_s: seconds of the loss.
    """

    input_bytes: float
    output_bytes: float
    loss_bytes: float
    loss_s: float

    @classmethod
    def of(
        cls, model: ModelProfile, numerics: Numerics, *, samples: int, bytes_per_s: float
    ) -> ScatterGather:
        """Outputs are those of the last unit before the loss."""
        last = next((u for u in reversed(model.units) if u.name != LOSS), None)
        loss = next((u.cost(numerics) for u in model.units if u.name == LOSS), None)
        saved = moved = 0.0
        if loss is not None:
            saved = loss.activation_bytes.at(samples)
            saved += max(
                loss.forward_transient_bytes.at(samples), loss.backward_transient_bytes.at(samples)
            )
            moved = loss.forward_moved_bytes.at(samples) + loss.backward_moved_bytes.at(samples)
        return cls(
            input_bytes=model.batch_bytes.at(samples),
            output_bytes=last.cost(numerics).output_bytes.at(samples) if last else 0.0,
            loss_bytes=saved,
            loss_s=moved / bytes_per_s,
        )


def launching_s(loads: Loads, computing: Computing, device: Device, *, devices: int) -> float:
    """Seconds added to a device's forward and backward by launching for `devices` devices."""
    seconds = 0.0
    for unit, time in zip(loads.entries, computing.times, strict=True):
        parts = [unit] if unit.glue is None else [unit, unit.glue]
        launch_s = devices * device.launch_s.value
        forward = launch_s * sum(part.forward_kernels for part in parts)
        backward = launch_s * sum(part.backward_kernels for part in parts)
        added = max(0.0, forward - time.forward_s) + max(0.0, backward - time.backward_s)
        if time.recompute_s:
            added += max(0.0, forward - time.recompute_s)
        seconds += time.count * added
    return seconds


def threaded(model: CostContext, plan: Plan) -> Estimate:
    """Estimate a plan whose replicas are threads."""
    facts, own, others = model.facts, alone(plan), plan.dp_replicate - 1
    assert plan.microbatch_size is not None
    device, forwards = facts.cluster.device, plan.forwards
    loads, ledger = model.own_loads(own), model.ledger()
    update = model.update(own, 0, len(facts.model.units))
    computing = model.computing(own, loads)
    added = added_s(loads, computing.times, share=1.0, device=device, devices=plan.dp_replicate)
    copied = ScatterGather.of(
        facts.model,
        model.numerics(plan),
        samples=plan.microbatch_size,
        bytes_per_s=device.memory_bandwidth_bytes_per_s.value,
    )

    def send(purpose: str, size: float, count: int) -> float:
        seconds = ledger.charge(
            Collective.SEND_RECV, purpose, size, group_size=plan.dp_replicate, count=count
        )
        return count * seconds

    sent_s = send("scattered inputs", copied.input_bytes, others * forwards)
    sent_s += send("parameters of replicas", loads.parameter_bytes, forwards)
    sent_s += send("outputs and their gradients", copied.output_bytes, 2 * others * forwards)
    sent_s += send("gradients of replicas", loads.gradient_bytes, forwards)
    alone_busy = busy_s(replace(computing, added=added), forwards)
    busy = replace(
        alone_busy,
        compute_s=alone_busy.compute_s + others * forwards * copied.loss_s,
        launch_s=forwards * launching_s(loads, computing, device, devices=plan.dp_replicate)
        + (forwards - 1) * added.launch_s,
    )
    # A process reads the batch of all devices; each device counts its part.
    batch_bytes = model.batch_bytes(own) * plan.dp_replicate
    first = others * (copied.output_bytes + copied.loss_bytes)
    memory = peak(
        own,
        loads,
        update=update,
        device=device,
        batch_bytes=batch_bytes,
        exchange_bytes=first + loads.gradient_bytes,
    )
    return assemble(
        model,
        plan,
        memory=memory,
        busy=busy,
        update_s=optimizer_s(own, update, device=device, ranks=1, waiting=busy.waiting),
        exposed_s=sent_s,
        overlapped_s=0.0,
        sent_s=sent_s,
        idle_s=0.0,
        computing=computing,
        ledger=ledger,
    )
