"""`choose`, with layers split as the module's code allows.

A profile does not show hard-coded feature counts, which prevent a split. The splits of a decision
are checked on the module; if the check gives other splits, the decision is repeated with those, so
that estimate and engine agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.console import say
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.inputs.stacks import is_of_engines
from advisor.search.legal import styles_of
from engines.plan import PartialPlan
from engines.tensor.styles import NAMING, Style
from profiles.errors import PlanError
from profiles.model.profile import ModelProfile

if TYPE_CHECKING:
    from advisor.inputs.models import LoadedModel

Pairs = tuple[tuple[str, str], ...]
"""As `Plan.tensor_styles`."""
Check = Callable[[int, bool], Pairs]
"""The styles that a module can have over so many ranks, with blocks split by tokens or not."""


def choose_checked(facts: Facts, *, policy: Policy, partial: PartialPlan, check: Check) -> Decision:
    """Call `choose` with the styles of `check` for the chosen tp.

    Other software splits its own modules in its own way, which our engines do not check.

    Raises:
        PlanError, NoPlanError: as `choose`.
    """
    if not is_of_engines(facts.stack):
        return choose(facts, policy=policy, partial=partial)
    by_rules = styles_of(facts, by_tokens=partial.sequence_parallel)
    checked: dict[int, Pairs] = {}
    while True:
        decision = choose(
            facts,
            policy=policy,
            partial=partial,
            styles=lambda tp: checked[tp] if tp in checked else by_rules(tp),
        )
        tp = decision.plan.tp
        if tp == 1 or tp in checked or partial.fixes("tensor_styles"):
            return decision
        styles = check(tp, decision.plan.sequence_parallel)
        if cuts(styles) == cuts(decision.plan.tensor_styles):
            return decision
        checked[tp] = styles


def cuts(pairs: Iterable[tuple[str, str]]) -> frozenset[tuple[str, Style]]:
    """Entries that split layers. What names parts of modules is free, and `apply_plan` finds it."""
    read = ((pattern, Style.parse(text)) for pattern, text in pairs)
    return frozenset((pattern, style) for pattern, style in read if style.kind not in NAMING)


def check_of(loaded: LoadedModel, profile: ModelProfile) -> Check:
    """Try units on fake tensors, for a model that is available but not to be trained."""

    def check(tp: int, by_tokens: bool) -> Pairs:
        from engines.tensor.proposal import propose_styles
        from engines.tensor.rules import proposed_styles
        from engines.tensor.token_rules import split_tokens

        try:
            return propose_styles(
                loaded.module,
                loaded.sample,
                size=tp,
                profile=profile,
                has_target=loaded.loss_fn is not None,
                by_tokens=by_tokens,
                shapes_only=True,
            ).styles
        except PlanError:
            return ()
        except Exception as error:  # the model's own code
            say(f"note: the split of layers over tp={tp} was not tried: {error}")
            styles = proposed_styles(profile, tp)
            return split_tokens(profile, styles, tp) if by_tokens else styles

    return check
