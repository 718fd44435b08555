"""Software: what the programs of a time did where a row does not say.

Each rule goes by the kind of program and the date of its release, never by a row. A program is told
by words of `source` and, where these say nothing, by what only some programs do; its release by
that of its container, where `source_ref` names one, else by `source_date`.

recompute     Megatron and what grew from it recomputed whole layers before selective recompute came
              (arXiv 2205.05198, May 2022), selectively after; with kernels that keep no scores
              (from 2023) that repeats next to nothing. FSDP programs checkpoint when told to;
              torchtitan's recipes select operators. More where that does not fit (`recompute`).
"selective"   In Megatron and NeMo the attention core; in torchtitan and FSDP a policy over
              operators that keeps attention and every other matrix product.
sequence      Split over the tensor ranks beside the matrices: by Megatron since selective recompute
              came (the same paper), which gathers inputs again in the backward; by torchtitan
              always (its plans use SequenceParallel), which keeps what was gathered.
attention     Kernels that keep no scores: the default from 2023 (FlashAttention-2, July 2023); not
              for bert and t5, whose masks of padding such kernels did not take.
dropout       0.1 in the recipes of GPT-3, BERT and T5 (Megatron-LM's default), none where units are
              gated: recipes since LLaMA.
states        Megatron: weights and gradients of 2 + 4 bytes (gradients of 2 with fp16), fp32 master
              and moments 12, split over replicas by the distributed optimizer. The
              recipes of NeMo and Megatron-Bridge add gradients up in 2 bytes
              (grad_reduce_in_fp32=False), and for models after DeepSeek's keep both moments in 2
              bytes, as its authors did (arXiv 2412.19437, 3.3.3). DeepSpeed: gradients of 2 bytes;
              with bfloat16 (its BF16 optimizer, 2022) fp32 sums beside them. FSDP: fp32 weights,
              split; gathered and reduced in 16 bits, by torchtitan reduced in 32
              (mixed_precision_reduce).
checkpoints   DeepSpeed's example of Megatron-LM with ZeRO-3 keeps what recompute starts from in the
              host's memory (--checkpoint-in-cpu; DeepSpeedExamples, Megatron-LM-v1.1.5-ZeRO3,
              ds_pretrain_gpt2-zero3.sh), and so does Megatron-DeepSpeed, which grew from it.
fused         Megatron's kernels and compilers join chains of elementwise operations; so does
              TensorFlow's graph, which also stores maps as matrix units want them.
captured      The recipes of Megatron-Bridge launch attention and router by CUDA graphs where hosts
              are Grace (cuda_graph_scope in its scripts/performance/configs, from 2025.7 on).
experts       From its release 0.5 (container 26.06) on, fp8 recipes on Blackwell join grouped
              products, SwiGLU and conversion (CuTe DSL) and launch whole steps by CUDA graphs.
blocking      BigScience launched with CUDA_LAUNCH_BLOCKING=1 from 2022 on, against hangs
              (bigscience-workshop/bigscience, tr11-176B-ml.slurm).
overlap       DDP buckets beside the backward pass. Megatron exchanged gradients after it until
              --overlap-grad-reduce (2023); Megatron-DeepSpeed's ZeRO-1 never did. FSDP prefetches.
"""

from __future__ import annotations

import re

from advisor.predict.generations import SUPERCHIPS, generation_of
from advisor.predict.rows import Row
from advisor.predict.setup import Shape, Software

# Megatron-Core's own FSDP (0.11, early in 2025); before, who split its weights ran DeepSpeed on it.
OWN_FSDP = 2025.0
SELECTIVE_RECOMPUTE = 2022.35
BLOCKING_LAUNCHES = 2022.0
FLASH_DEFAULT = 2023.5
OVERLAP_GRADIENTS = 2023.5
SHORT_GRADIENTS = 2024.0
CAPTURED_LAYERS = 2025.6
FUSED_EXPERTS = 2026.45
_JOINED = re.compile(r"mlperf|mxnet")
# Values of the column `arch` that are networks on images. They are trained with SGD where no
# optimizer is named, but those of attention.
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
    (r"foundry|mosaic|composer|\bmpt\b", "foundry"),
    (r"torchtitan|titan", "torchtitan"),
    (r"internevo|internlm", "internevo"),
    (r"bigscience|bloom|megatron-?deepspeed", "megatron-deepspeed"),
    (r"megatron|nemo|mcore|mbridge|korthikanti|narayanan|\bmoe-?modelzoo", "megatron"),
    (r"deepspeed|\bamp\b|amp-|zero", "deepspeed"),
    (r"tensorflow|\btf\b", "tensorflow"),
    (r"fsdp|fairscale|accelerate|lightning", "fsdp"),
    (r"\bddp\b|pytorch|lambda|deeplearningexamples|horovod|gpipe", "ddp"),
)


# A container's release, YY.MM (NVIDIA's), says what ran; `source_date` when its table was read.
_RELEASE = re.compile(r"\b(?:container|nemo)[ -](2\d)\.(0[1-9]|1[0-2])\b", re.IGNORECASE)
_RECIPES = re.compile(r"nemo|bridge", re.IGNORECASE)


def family_of(row: Row) -> str:
    """The kind of program a row ran with."""
    source = (row.source or "").lower()
    for pattern, family in _WORDS:
        if re.search(pattern, source):
            lent = family == "megatron" and (row.zero_stage or "") == "3"
            return "megatron-deepspeed" if lent and (year_of(row) or 0) < OWN_FSDP else family
    if (row.zero_stage or "") in ("3", "hsdp") and (row.tp or 1) * (row.pp or 1) == 1:
        return "fsdp"
    if (row.zero_stage or "") in ("2", "3") and (row.pp or 1) == 1:
        # DeepSpeed's pipeline refuses stages beyond 1.
        return "deepspeed"
    if (row.tp or 1) * (row.pp or 1) * (row.ep or 1) > 1:
        return "megatron"
    return "ddp"


def year_of(row: Row) -> float | None:
    """The release's date in years, 2022.25 for the end of March 2022; None where none is given."""
    if (release := _RELEASE.search(f"{row.source or ''} {row.source_ref or ''}")) is not None:
        return 2000 + float(release[1]) + float(release[2]) / 12
    found = re.search(r"(20[0-4]\d)(?:-(\d\d))?", re.sub(r"\b[0-9a-f]{7,10}\b", "", _date(row)))
    if found is None:
        return None
    return float(found[1]) + (float(found[2]) / 12 if found[2] else 0.5)


def eight_bit(row: Row) -> bool:
    """Whether its optimizer keeps both moments in a byte each, as bitsandbytes' do."""
    return re.search(r"8-?bit", (row.optimizer or "").lower()) is not None


def software_of(
    row: Row, *, zero: int, dtype: str, device: str, shape: Shape | None
) -> tuple[Software, list[str]]:
    """How the program of a row works on a model of `shape`, and what of it the row does not say."""
    family, assumed = family_of(row), []
    classic = shape is not None and not shape.gated and not shape.is_hybrid
    year = year_of(row)
    if year is None:
        year = _usual_year(device)
        assumed.append(f"software of {year:g}")
    megatron = family in ("megatron", "megatron-deepspeed", "nemo")
    sharded = family in ("foundry", "torchtitan", "fsdp")
    tensor = (row.tp or 1) > 1

    flash = year >= FLASH_DEFAULT and row.arch not in ("bert", "t5", "transformer_xl")
    if row.attention is not None:
        flash = "flash" in row.attention.lower() or "cudnn" in row.attention.lower()
        flash = flash or "sdpa" in row.attention.lower()
    elif row.arch not in CONVOLUTIONAL:
        assumed.append(f"attention {'without' if flash else 'with'} kept scores")

    recompute = _recompute(row, family, year, megatron)
    if row.recompute is None:
        assumed.append(f"recompute {recompute}")
    on_host = family == "megatron-deepspeed" and zero == 3 and recompute == "full"
    if on_host:
        assumed.append("inputs of recomputed layers in the host's memory")
    sequence = tensor and family == "megatron" and year >= SELECTIVE_RECOMPUTE
    gathers = tensor and family == "torchtitan"
    sequence = sequence or gathers
    if row.sequence_parallel is not None:
        sequence = row.sequence_parallel == "y"
    elif tensor:
        assumed.append(f"sequence parallel {'on' if sequence else 'off'}")

    full = dtype in ("float32", "tfloat32")
    weight, gradient, master = (4.0, 4.0, 0.0) if full or sharded else (2.0, 2.0, 4.0)
    reduce = 4.0 if full else 2.0
    if megatron and not full and dtype != "float16":
        gradient = reduce = 4.0
    if family == "megatron-deepspeed" and dtype == "bfloat16":
        gradient = 6.0
    recipe = year >= SHORT_GRADIENTS and _RECIPES.search(row.source or "") is not None
    if family == "megatron" and recipe:
        gradient = reduce = 2.0
    if family == "megatron" and dtype == "float16" and year < SELECTIVE_RECOMPUTE:
        gradient = reduce = 2.0
    if sharded and not full:
        gradient = 4.0
        reduce = 4.0 if family == "torchtitan" else 2.0
    if family == "tensorflow" and not full:
        # Variables stay in fp32, and so do their gradients.
        weight, gradient, master, reduce = 4.0, 4.0, 0.0, 4.0
    moments = 4.0 if recipe and shape is not None and shape.latent else 8.0
    optimizer = (row.optimizer or "").lower()
    if not optimizer and row.arch in CONVOLUTIONAL - ATTENTIVE:
        moments = 0.0
        assumed.append("SGD without momentum")
    if eight_bit(row):
        moments = 2.0
    elif "sgd" in optimizer or "muon" in optimizer:
        moments = 4.0
    overlap = family in ("ddp", "fsdp", "foundry", "torchtitan", "internevo", "deepspeed")
    overlap = overlap or (family == "megatron" and year >= OVERLAP_GRADIENTS)
    # Entries to MLPerf and MXNet join norms, additions and ReLU, and keep channels last.
    joined = row.arch in CONVOLUTIONAL and bool(_JOINED.search((row.source or "").lower()))
    recipe = family == "megatron" and recipe
    captured = recipe and year >= CAPTURED_LAYERS and device.startswith(SUPERCHIPS)
    fused_experts = recipe and year >= FUSED_EXPERTS and generation_of(device) == "blackwell"
    fused_experts = fused_experts and dtype in ("float8_e4m3fn", "float4")
    fused_experts = fused_experts and shape is not None and shape.gated and shape.experts > 0
    compiled = (row.compile or "n").lower() not in ("n", "no", "none", "false", "0")
    return (
        Software(
            family=family,
            year=year,
            recompute=recompute,
            inputs_on_host=on_host,
            keeps_gathered=gathers and sequence,
            sequence_parallel=sequence,
            flash=flash,
            weight_bytes=weight,
            gradient_bytes=gradient,
            master_bytes=master,
            moment_bytes=moments,
            reduce_bytes=reduce,
            fused=megatron or compiled or family == "tensorflow" or joined,
            dropout=megatron and (year < FLASH_DEFAULT or classic),
            overlap_reduce=overlap,
            # InternEvo waits for the broadcast of updated weights.
            overlap_gather=overlap and family != "internevo",
            overlap_tensor=family == "megatron" and year >= OVERLAP_GRADIENTS,
            overlap_experts=False,
            compiled=compiled,
            captured=captured,
            fused_experts=fused_experts,
            blocking=family == "megatron-deepspeed" and year >= BLOCKING_LAUNCHES,
            attention_said=row.attention is not None,
            offload=row.offload if row.offload not in (None, "n") else "none",
        ),
        assumed,
    )


def _recompute(row: Row, family: str, year: float, megatron: bool) -> str:
    said = (row.recompute or "").lower()
    if said.startswith("full"):
        return "full"
    if said.startswith("sel"):
        return "selective" if megatron else "selective-ops"
    if said:
        return "none"
    if family == "torchtitan":
        return "selective-ops"
    if not megatron:
        return "none"
    if year < SELECTIVE_RECOMPUTE:
        return "full"
    return "selective" if year < FLASH_DEFAULT else "none"


def _date(row: Row) -> str:
    return row.source_date or ""


def _usual_year(device: str) -> float:
    """About when runs on a device were published: two years after it came."""
    for chip, year in _YEARS:
        if device.startswith(chip):
            return year
    return 2024.0
