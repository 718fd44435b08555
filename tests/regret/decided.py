"""The decision for a case: its facts, the splits that its model proves, the plans to run."""

from __future__ import annotations

from pathlib import Path

import torch

from advisor.auto.facts_from_module import facts_from_module
from advisor.decide.choose import choose
from advisor.decide.decide import decide
from advisor.decide.offload import with_disk
from advisor.decide.tree import TreeTrace, in_leaf
from advisor.inputs.facts import Facts
from advisor.search.legal import Styles
from engines.plan import Plan
from engines.tensor.proposal import propose_styles
from profiles.capture.batch.call import Batch
from profiles.errors import PlanError
from profiles.machine.cluster import ClusterProfile
from tests.regret.cases import Case, limited
from tests.regret.models import adam
from tests.regret.picked import plans_of
from tests.regret.report import Result

SEED = 18


def decided(case: Case, cluster: ClusterProfile, *, most: int) -> Result:
    """The decision for a case on `cluster`, and the plans to run."""
    roomy = limited(cluster, cluster.device.memory_bytes.value)
    if case.leaf == "offload":
        roomy = with_disk(roomy, Path.cwd())
    nbytes = case.budget.nbytes(facts_of(case, roomy))
    facts = facts_of(case, limited(roomy, nbytes))
    styles = proved_styles(case, facts)
    decision = choose(facts, styles=styles)
    choice = decide(facts, styles=styles, compares=True)
    plans, legal = plans_of(decision, choice, styles=styles, seed=SEED, most=most)
    return Result(
        name=case.name,
        cluster=facts.cluster,
        leaf=decision.trace.leaf,
        families=decision.trace.families,
        dissent=decision.dissent,
        plans=tuple(map(str, plans)),
        legal=legal,
    )


def facts_of(case: Case, cluster: ClusterProfile) -> Facts:
    """The case's training on these machines."""
    subject = case.subject
    torch.manual_seed(1)
    return facts_from_module(
        subject.build(),
        sample_of(case),
        loss_fn=subject.loss_fn,
        cluster=cluster,
        global_batch_size=case.rows,
        optimizer=adam,
    )


def sample_of(case: Case) -> Batch:
    """One rank's rows, two at least: the batch dimension is told from two sizes."""
    return case.subject.batch(max(2, case.rows // case.ranks))


def proved_styles(case: Case, facts: Facts) -> Styles:
    """Splits of layers as `auto_parallelize` would prove them, by tp degree."""
    known: dict[int, tuple[tuple[str, str], ...]] = {}

    def styles(tp: int) -> tuple[tuple[str, str], ...]:
        if tp not in known:
            try:
                known[tp] = propose_styles(
                    case.subject.build(),
                    sample_of(case),
                    size=tp,
                    profile=facts.model,
                    has_target=case.subject.loss_fn is not None,
                ).styles
            except PlanError:
                known[tp] = ()
        return known[tp]

    return styles


def is_in_leaf(plan: Plan, result: Result) -> bool:
    """True if the leaf that the decision came to names the plan's family."""
    trace = TreeTrace(
        steps=(),
        leaf=result.leaf,
        advice="",
        families=result.families,
        not_weighed=(),
        devices_per_node=result.cluster.devices_per_node,
    )
    return in_leaf(plan, trace)
