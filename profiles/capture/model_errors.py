"""Errors of a model's code while it is traced, in words: where, and on what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from profiles.capture.batch.tree import describe
from profiles.capture.frames import model_line, summary, user_line
from profiles.capture.subject import TracedModel
from profiles.errors import AdvisorError, ModelError, a_type
from profiles.model.profile import GLUE
from profiles.model.source import ValueRead
from profiles.torch_compat import data_dependent_errors


class LimitExceeded(Exception):
    """A real run takes more memory or time than a look may."""


class CannotFollow(ModelError):
    """The model raised while it was traced. Whether it does so in a real run is not known.

    Attributes:
        read: the innermost code of the model in the traceback.
        needs_values: it is the fake tensors that have no result.
    """

    read = ValueRead(unit=GLUE)
    needs_values = False


@contextmanager
def explained(subject: TracedModel, what: str) -> Iterator[None]:
    """Turn whatever the model raises into a `ModelError` that says where and on what."""
    try:
        yield
    except (AdvisorError, LimitExceeded):
        raise
    except data_dependent_errors() as error:
        raise _cannot_follow(
            subject,
            error,
            f"{what}: it looks at values of tensors, which are not known here"
            f" (`{getattr(error, 'func', error)}`)",
            [
                "take branches and sizes from shapes, not from values (.item(), nonzero, masks as"
                " indices)"
            ],
        ) from error
    except Exception as error:
        hints = list(_hints(subject, error))
        raise _cannot_follow(subject, error, f"{what}: {summary(error)}", hints) from error


def _cannot_follow(
    subject: TracedModel, error: Exception, what: str, hints: Sequence[str]
) -> CannotFollow:
    innermost = _innermost_module(subject, error)
    cannot = CannotFollow(what, where=_where(subject, error, innermost), hints=hints)
    cannot.read = ValueRead(
        unit=subject.owners[id(innermost)] if innermost is not None else GLUE,
        line=model_line(error),
        operation=_operation(error),
    )
    cannot.needs_values = isinstance(error, data_dependent_errors())
    return cannot


def _operation(error: Exception) -> str:
    """The operator that fake tensors have no result for; else the class of the error."""
    operator = getattr(error, "func", None)
    packet = getattr(operator, "overloadpacket", None)
    return packet.__name__.strip("_") if packet is not None else type(error).__name__


def _hints(subject: TracedModel, error: Exception) -> Iterator[str]:
    sample, has_loss = subject.sample, subject.loss_fn is not None
    if isinstance(error, TypeError) and isinstance(sample, tuple | list) and not has_loss:
        yield (
            f"without a loss_fn all {len(sample)} elements of the sample are inputs; with one the"
            " last is its target"
        )


def _where(subject: TracedModel, error: Exception, innermost: nn.Module | None) -> str:
    """The line of the user's code, the innermost module of the traceback, and the sample."""
    lines = [f"sample: {describe(subject.sample)}"]
    if innermost is not None:
        path = _paths(subject)[id(innermost)]
        lines.insert(0, f"in `{path or '(the model itself)'}`, {a_type(innermost)}")
    line = user_line(error)
    if line is not None:
        lines.insert(0, line)
    return "\n".join(lines)


def _paths(subject: TracedModel) -> dict[int, str]:
    return {id(module): path for path, module in subject.model.named_modules()}


def _innermost_module(subject: TracedModel, error: Exception) -> nn.Module | None:
    """The module of the model whose code is deepest in the traceback."""
    paths = _paths(subject)
    innermost: nn.Module | None = None
    trace = error.__traceback__
    while trace is not None:
        candidate = trace.tb_frame.f_locals.get("self")
        innermost = candidate if id(candidate) in paths else innermost
        trace = trace.tb_next
    return innermost
