"""Software: stack of a row's run.

A row's `stack` column names a preset of `profiles/workload/stacks.toml`. Without one, the
framework that the row names (in `framework`, `source` or `source_ref`) and the date of its release
choose one from `PRESETS`; without a framework, features that only some programs have choose the
family, the preset is marked generic, and the range is wider. A row's own columns for attention,
compilation, sequence parallelism or optimizer override the preset.

recompute     Megatron and its descendants recomputed whole layers before selective recompute
              (arXiv:2205.05198, May 2022), selectively after; with FlashAttention (from 2023)
              that repeats next to nothing. FSDP programs checkpoint on request; torchtitan's
              recipes select operators. More if that does not fit (`recompute`).
dropout       0.1 in the recipes of GPT-3, BERT and T5 (Megatron-LM's default), none where units are
              gated: recipes since LLaMA.
attention     FlashAttention: the default from 2023 (FlashAttention-2, July 2023); not for bert and
              t5, whose padding masks its kernels did not support.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from advisor.predict.rows import TableRow
from advisor.predict.setup import Software
from profiles.closed_forms.transformer import TransformerShape
from profiles.model.work import AttentionKernel
from profiles.workload.stack import Loss, Stack, States, stack_named, stacks

# Megatron-Core's own FSDP came with 0.11 (early in 2025); earlier runs with sharded weights used
# DeepSpeed.
OWN_FSDP = 2025.0
SELECTIVE_RECOMPUTE = 2022.35
FLASH_DEFAULT = 2023.5
OVERLAP_GRADIENTS = 2023.5
# NeMo's and Megatron-Bridge's recipes capture CUDA graphs of static parts on Grace hosts:
# cuda_graph_scope attn, mamba, moe_router and moe_preprocess, all of dense layers.
GRAPHS, GRAPHED = 2025.7, 0.8
# Values of the column `arch` for vision networks. If no optimizer is named they train with SGD,
# except attention models.
ATTENTIVE = frozenset({"vit", "deit", "swin"})
CONVOLUTIONAL = ATTENTIVE | {
    "resnet", "resnext", "cnn", "nasnet", "unet", "vgg", "alexnet", "inception", "googlenet",
    "densenet", "mobilenet", "efficientnet", "convnext", "regnet",
}  # fmt: skip

_YEARS = (
    ("V100", 2020.0),
    ("T4", 2021.0),
    ("A100", 2022.5),
    ("A800", 2023.5),
    ("H100", 2024.5),
    ("H200", 2025.0),
    ("B200", 2025.8),
    ("GB", 2025.8),
)
_WORDS = (
    (r"llm-?foundry|composer", "foundry"),
    (r"torchtitan", "torchtitan"),
    (r"internevo", "internevo"),
    (r"nanotron", "nanotron"),
    (r"megatron-?deepspeed", "megatron-deepspeed"),
    (r"nemo|mbridge|megatron-?bridge", "nemo"),
    (r"megatron|mcore", "megatron"),
    (r"deepspeed", "deepspeed"),
    (r"tensorflow|\btf\b", "tensorflow"),
    (r"fsdp|fairscale|accelerate|lightning|\btrl\b|hugging ?face|transformers", "fsdp"),
    (r"\bddp\b|pytorch|horovod|gpipe", "ddp"),
)


# NVIDIA container releases, YY.MM, date the software; `source_date` dates the table.
_RELEASE = re.compile(r"\b(?:container|nemo)[ -](2\d)\.(0[1-9]|1[0-2])\b", re.IGNORECASE)


# Presets of each family by the date from which they apply, newest first.
PRESETS: Mapping[str, tuple[tuple[float, str], ...]] = MappingProxyType(
    {
        "megatron": (
            (2024.5, "megatron-core-0.12"),
            (2023.3, "megatron-core-0.5"),
            (2022.3, "megatron-2022"),
            (0.0, "megatron-2020"),
        ),
        "nemo": ((2024.0, "nemo"), (2023.3, "megatron-core-0.5"), (0.0, "megatron-2022")),
        "megatron-deepspeed": ((0.0, "megatron-deepspeed"),),
        "deepspeed": ((0.0, "deepspeed"),),
        "torchtitan": ((0.0, "torchtitan"),),
        "foundry": ((0.0, "llm-foundry"),),
        "internevo": ((0.0, "internevo"),),
        "nanotron": ((0.0, "nanotron"),),
        "fsdp": ((0.0, "huggingface"),),
        "ddp": ((0.0, "torch"),),
        "tensorflow": ((0.0, "torch-compiled"),),
    }
)


def _named(row: TableRow) -> str | None:
    """Framework that a row names, if any."""
    for text in (row.framework, row.source, row.source_ref):
        for pattern, family in _WORDS:
            if text and re.search(pattern, text.lower()):
                return family
    return None


def family_of(row: TableRow) -> str:
    """Software family of a row."""
    named = _named(row)
    if named is not None:
        lent = named == "megatron" and (row.zero_stage or "") == "3"
        return "megatron-deepspeed" if lent and (year_of(row) or 0) < OWN_FSDP else named
    if (row.zero_stage or "") in ("3", "hsdp") and (row.tp or 1) * (row.pp or 1) == 1:
        return "fsdp"
    if (row.zero_stage or "") in ("2", "3") and (row.pp or 1) == 1:
        # DeepSpeed's pipeline does not support stages beyond ZeRO-1.
        return "deepspeed"
    if (row.tp or 1) * (row.pp or 1) * (row.ep or 1) > 1:
        return "megatron"
    return "ddp"


def year_of(row: TableRow) -> float | None:
    """Release date in years, e.g. 2022.25 for the end of March 2022; None if the row has none."""
    if (release := _RELEASE.search(f"{row.source or ''} {row.source_ref or ''}")) is not None:
        return 2000 + float(release[1]) + float(release[2]) / 12
    date = re.search(r"(20[0-4]\d)(?:-(\d\d))?", re.sub(r"\b[0-9a-f]{7,10}\b", "", _date(row)))
    if date is None:
        return None
    return float(date[1]) + (float(date[2]) / 12 if date[2] else 0.5)


def eight_bit(row: TableRow) -> bool:
    """Return True if the optimizer stores both moments in 8 bits, as bitsandbytes does."""
    return re.search(r"8-?bit", (row.optimizer or "").lower()) is not None


def software_of(
    row: TableRow, *, dtype: str, device: str, shape: TransformerShape | None
) -> tuple[Software, list[str]]:
    """Return the software of a row that trains a model of `shape`, and the assumptions made.

    Raises:
        UnknownNameError: the column `stack` names no preset.
    """
    family, year = family_of(row), year_of(row)
    assumed: list[str] = []
    if year is None:
        year = _usual_year(device)
        assumed.append(f"software of {year:g}")
    stack = stack_named(row.stack) if row.stack else _preset(family, year, shape)
    if row.stack is None:
        assumed.append(f"stack {stack.name}")
    change: dict[str, object] = {"is_generic": row.stack is None and _named(row) is None}
    if shape is not None:
        attention, is_given = _attention(row, stack, family, year, device)
        change["attention"] = attention
        if not is_given:
            scores = "with" if attention.keeps_scores else "without"
            assumed.append(f"attention {scores} kept scores")
    megatron = family in _MEGATRONS
    recompute = _recompute(row, family, year, megatron)
    if row.recompute is None:
        assumed.append(f"recompute {recompute}")
    sequence = stack.sequence_parallel and (row.tp or 1) > 1
    if row.sequence_parallel is not None:
        sequence = row.sequence_parallel == "y"
    elif (row.tp or 1) > 1:
        assumed.append(f"sequence parallel {'on' if sequence else 'off'}")
    change["sequence_parallel"] = sequence
    if (row.compile or "n").lower() not in ("n", "no", "none", "false", "0"):
        change["compiled"] = True
        change["loss"] = Loss.FUSED if stack.loss is Loss.MATERIALISED else stack.loss
    if dtype in ("float32", "tfloat32"):
        change["states"] = States(weight=4, gradient=4, master=0) if stack.states else None
        change["reduce_bytes"] = None
    elif (
        stack.states is not None and dtype == "float16" and megatron and year < SELECTIVE_RECOMPUTE
    ):
        change["states"] = States(weight=2, gradient=2, master=4)
        change["reduce_bytes"] = 2.0
        if stack.gather_bytes is not None:
            change["gather_bytes"] = stack_named("deepspeed").gather_bytes  # of its fp16 optimizers
    elif stack.name.startswith("deepspeed") and row.zero_stage == "3":
        change["overlap_gradients"] = True  # overlap_comm is true by default there
    elif family == "deepspeed" and dtype == "bfloat16":
        change["states"] = stacks()["deepspeed-bf16"].states
    if family == "deepspeed" and (row.tp or 1) > 1:
        # Layers that DeepSpeed splits are Megatron-LM's (its `mpu`).
        change["host_work"] = stack_named("megatron-2020").host_work
    if family == "nemo" and year >= GRAPHS and device.startswith(_GRACE):
        change["cuda_graphs"] = GRAPHED
    change["product_dtype"] = None if dtype in ("bfloat16", "float32") else dtype
    stack = _changed(stack, change)
    offload = row.offload if row.offload not in (None, "n") else "none"
    return Software(
        family=family, year=year, stack=stack, recompute=recompute, offload=str(offload)
    ), assumed


def _changed(stack: Stack, change: Mapping[str, object]) -> Stack:
    """Return a preset with changed flags, which its name lists."""
    other = {name: value for name, value in change.items() if getattr(stack, name) != value}
    if not other:
        return stack
    flags = ", ".join(f"{name}={value}" for name, value in sorted(other.items()))
    return stack.model_copy(update={**other, "name": f"{stack.name} ({flags})"})


def folded(stack: Stack) -> Stack:
    """Return the stack with unsplit experts, sharded over the tp axis as well."""
    return _changed(stack, {"folds_experts": True, "splits_experts": False})


_STOCK = ("ddp", "fsdp", "tensorflow")
_GRACE = ("GB200", "GB300")
_MEGATRONS = ("megatron", "megatron-deepspeed", "nemo")


def _preset(family: str, year: float, shape: TransformerShape | None) -> Stack:
    """Return the newest preset of a family at this date."""
    name = next(preset for since, preset in PRESETS[family] if year >= since)
    if name == "nemo" and shape is not None and shape.experts:
        name = "nemo-moe"
    return stack_named(name)


def _attention(
    row: TableRow, stack: Stack, family: str, year: float, device: str
) -> tuple[AttentionKernel, bool]:
    """The kernel, and whether the row says so."""
    kernel = (row.attention or "").lower()
    flash = AttentionKernel.FLASH2 if year >= FLASH_DEFAULT else AttentionKernel.FLASH1
    if any(word in kernel for word in ("flash", "cudnn", "sdpa")):
        if stack.attention is AttentionKernel.FLASH3 or "3" in kernel or "cudnn" in kernel:
            flash = AttentionKernel.FLASH3
        elif stack.attention is AttentionKernel.FLASH1:
            flash = AttentionKernel.FLASH1  # the only kernel of this release
        return flash, True
    if kernel:
        return AttentionKernel.SCORES, True
    own = stack.attention or AttentionKernel.FLASH2
    if row.arch in ("bert", "t5", "transformer_xl") or device.startswith(_WITHOUT_FLASH):
        # Fused softmax came with Megatron-LM; stock torch modules are unfused.
        fused = AttentionKernel.SCORES if family in _STOCK else AttentionKernel.FUSED_SOFTMAX
        own = own if own.keeps_scores else fused
    elif year < FLASH_DEFAULT and not own.keeps_scores and stack.attention is None:
        own = AttentionKernel.SCORES
    return own, False


# FlashAttention requires matrix units of Ampere or later; its first release also supported Turing.
_WITHOUT_FLASH = ("V100", "P100", "P40", "GTX", "T4", "Quadro", "TITAN")


def drops_out(family: str, year: float, kind: str, *, gated: bool) -> bool:
    """Return True if recipes of this family use dropout."""
    classic = not gated and kind in ("dense_gpt", "bert", "t5", "moe")
    return family in _MEGATRONS and (classic or (year < FLASH_DEFAULT and not gated))


def _recompute(row: TableRow, family: str, year: float, megatron: bool) -> str:
    mode = (row.recompute or "").lower()
    if mode.startswith("full"):
        return "full"
    if mode.startswith("sel"):
        return "selective"
    if mode:
        return "none"
    if family == "torchtitan":
        return "selective"
    if not megatron:
        return "none"
    if year < SELECTIVE_RECOMPUTE:
        return "full"
    return "selective" if year < FLASH_DEFAULT else "none"


def _date(row: TableRow) -> str:
    return row.source_date or ""


def _usual_year(device: str) -> float:
    """Approximate publication date of runs on a device: two years after its release."""
    for chip, year in _YEARS:
        if device.startswith(chip):
            return year
    return 2024.0
