"""The partial plan: the settings that a user fixed; a search keeps them and chooses the others."""

from __future__ import annotations

from enum import Enum
from typing import Any, Self, cast, get_args

from pydantic import (
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from engines.plan.settings import (
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
from profiles.errors import InputError, PlanError, UnknownNameError
from profiles.record import Record
from profiles.record.bounds import (
    MOST_COUNT,
    Batch,
    Count,
    CountOrZero,
    Devices,
    DevicesOrZero,
    Microbatches,
    whole_number,
)


class PartialPlan(Record):
    """Some settings of a plan, those of `Plan`; None leaves one open.

    Attributes:
        zero: the ZeRO stage, 0 to 3: a word for `data_parallel` that leaves HSDP open.

    >>> partial = PartialPlan.parse("tp=2 recompute=full")
    >>> partial.tp, partial.pp, partial.fixes("pp", "recompute"), str(partial)
    (2, None, True, 'tp=2 recompute=full')
    """

    pp: Devices | None = None
    dp_replicate: Devices | None = None
    dp_shard: Devices | None = None
    cp: Devices | None = None
    tp: Devices | None = None
    ep: Devices | None = None
    zero: NonNegativeInt | None = None
    data_parallel: DataParallel | None = None
    microbatch_size: Batch | None = None
    microbatches: Microbatches | None = None
    accumulation: Microbatches | None = None
    schedule: Schedule | None = None
    stages: tuple[str, ...] | None = None
    recompute: Recompute | None = None
    precision: Precision | None = None
    offload: Offload | None = None
    sync_batch_norm: bool | None = None
    compile: bool | None = None
    tensor_styles: TensorStyles | None = None
    aggregation: Aggregation | None = None
    compression: Compression | None = None
    compression_rank: Count | None = None
    updates: Updates | None = None
    sync_every: Count | None = None
    servers: DevicesOrZero | None = None
    backup_workers: DevicesOrZero | None = None
    max_staleness: CountOrZero | None = None
    offload_to: OffloadTo | None = None
    bucket_mib: Count | None = None
    sequence_parallel: bool | None = None
    loss_chunks: Count | None = None
    recompute_blocks: Count | None = None

    @model_serializer(mode="wrap")
    def _without_open(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}

    @classmethod
    def parse(cls, text: str) -> Self:
        """The settings of "key=value" words, and only those.

        Raises:
            UnknownNameError: a key or a choice that does not exist; the near miss is named.
            PlanError: a word that is not key=value, a key given twice, a value out of range.
        """
        return cls.build(_read(text), where="plan")

    @property
    def fixed(self) -> dict[str, Any]:
        """The settings that are fixed, by name."""
        return {name: value for name, value in self if value is not None}

    def fixes(self, *names: str) -> bool:
        """True if any setting among `names` is fixed; without names, if any is at all."""
        return any(getattr(self, name) is not None for name in names or type(self).model_fields)

    def fixing(self, **settings: Any) -> Self:
        """The same with these settings fixed too, or otherwise.

        Raises:
            InputError, UnknownNameError: see `Record.build`.
        """
        return self.build({**self.fixed, **settings}, where="plan")

    def leaving(self, *names: str) -> Self:
        """The same with the settings `names` open."""
        return self.model_copy(update=dict.fromkeys(names))

    def only(self, *names: str) -> Self:
        """The settings among `names` that are fixed, all others open."""
        return type(self)(**{name: getattr(self, name) for name in names})

    @property
    def model_ranks(self) -> int:
        """Ranks that one replica takes at least: pp * cp * tp of those that are fixed."""
        return (self.pp or 1) * (self.cp or 1) * (self.tp or 1)

    @property
    def extra_ranks(self) -> int:
        """Ranks outside the mesh: servers and backup workers."""
        return (self.servers or 0) + (self.backup_workers or 0)

    @property
    def kinds(self) -> tuple[DataParallel, ...] | None:
        """The data-parallel kinds that are left; None for all of them."""
        if self.data_parallel is not None:
            return (self.data_parallel,)
        if self.zero is None:
            return None
        return _KINDS.get(self.zero, ())

    def __str__(self) -> str:
        """As `parse` reads it."""
        return " ".join(f"{name}={format_setting(value)}" for name, value in self.fixed.items())


_KINDS = {
    0: (DataParallel.NONE, DataParallel.REPLICATE),
    1: (DataParallel.ZERO1,),
    2: (DataParallel.ZERO2,),
    3: (DataParallel.FULL_SHARD, DataParallel.HYBRID_SHARD),
}

SETTINGS = tuple(PartialPlan.model_fields)
"""Every setting by name, in the order in which plans are written."""
AFTER_DEGREES = SETTINGS[SETTINGS.index("microbatch_size") :]
"""Those that are neither a degree nor a kind of data parallelism."""
_SYNONYMS = {
    "tensor": "tp",
    "pipeline": "pp",
    "context": "cp",
    "expert": "ep",
    "data": "dp_replicate",
    "dp": "dp_replicate",
    "ddp": "dp_replicate",
    "fsdp": "dp_shard",
    "dtype": "precision",
    "checkpointing": "recompute",
    "gradient_accumulation": "accumulation",
    "batch_size": "microbatch_size",
    "local_steps": "sync_every",
    "parameter_servers": "servers",
    "staleness": "max_staleness",
    "bucket_cap_mb": "bucket_mib",
    "sp": "sequence_parallel",
    "chunked_loss": "loss_chunks",
    "num_output_chunks": "loss_chunks",
    "recompute_num_layers": "recompute_blocks",
}
"""Words that people bring along from other tools, and what they are called here."""
_MAY_BE_ZERO = ("zero", "servers", "backup_workers", "max_staleness")


def _read(text: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if "=" in value:
            raise PlanError(
                f"`{word}` is several settings",
                where=f"plan: {text}",
                hints=[f'separate them by spaces: "{word.replace(",", " ")}"'],
            )
        if not equals or not value:
            raise PlanError(
                f"`{word}` is not a setting",
                where=f"plan: {text}",
                hints=['write settings as "dp_shard=4 microbatches=2"'],
            )
        if key not in SETTINGS:
            called = [f"`{key}` is called `{_SYNONYMS[key]}` here"] if key in _SYNONYMS else []
            raise UnknownNameError(
                "plan setting", key, SETTINGS, where=f"plan: {text}", hints=called
            )
        if key in settings:
            raise PlanError(f"`{key}` is given twice", where=f"plan: {text}")
        settings[key] = _read_value(key, value, where=f"plan: {text}")
    return settings


def _read_value(key: str, value: str, *, where: str) -> Any:
    types = get_args(PartialPlan.model_fields[key].annotation)
    if choices := [kind for kind in types if isinstance(kind, type) and issubclass(kind, Enum)]:
        words = [cast(str, choice.value) for choice in choices[0]]
        if value not in words:
            raise UnknownNameError(key, value, words, where=where)
        return value
    if key == "stages":
        return tuple(value.split(","))
    if key == "tensor_styles":
        pairs = [item.partition(":") for item in value.split(",")]
        if not all(style for _, _, style in pairs):
            raise PlanError(
                f"`{value}` is not a list of styles",
                where=where,
                hints=['write "tensor_styles=PATTERN:STYLE,PATTERN:STYLE"'],
            )
        return tuple((pattern, style) for pattern, _, style in pairs)
    if bool in types:
        if value not in ("true", "false"):
            raise UnknownNameError(key, value, ("true", "false"), where=where)
        return value == "true"
    try:
        return whole_number(value, key, least=key not in _MAY_BE_ZERO, most=MOST_COUNT)
    except InputError as error:
        raise PlanError(error.what, where=where) from None
