"""`advise explain TERM`: every word of the documents, and its number in a plan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from advisor.cli.main import cli
from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.report.glossary import explain, terms
from advisor.report.glossary_numbers import _NUMBERS
from engines.plan import (
    Aggregation,
    Compression,
    DataParallel,
    PartialPlan,
    Schedule,
    Updates,
)
from profiles.errors import InputError, UnknownNameError
from profiles.units import GIB, format_gib
from tests.factories import chain, cpus, facts, gpus, small_llama
from tests.golden import check

# Llama-7B-like over two nodes of eight, a step of 128 x 4,096 tokens: the report 7b_2x8.
DECISION = choose(facts())
ONE = choose(facts(chain(), cpus(1), batch=8, precision="fp32"))
STAGED = choose(facts(small_llama(), gpus(1, 8), batch=64), partial=PartialPlan(pp=2))

DOCUMENTS = """
node, world size, W, local world size, L, global rank, local rank, data parallelism, model
parallelism, tensor parallelism, pipeline parallelism, hybrid parallelism, horizontal, sharded DDP,
staleness, bubble, replica, shard, stage, microbatch, accumulation, ZeRO-1, ZeRO-2, ZeRO-3, FSDP,
HSDP, DDP, DP, parameter server, ring all-reduce, all-gather, reduce-scatter, all-to-all, busbw,
MFU, recompute, offload, noise scale, critical batch, local SGD, DiLoCo, backup workers, bounded
staleness, context parallelism, expert parallelism, NVLink, InfiniBand, gloo, NCCL, synchronisation
point, straggler, asynchronous, synchronous, fragmentation, PowerSGD, hierarchical all-reduce,
scatter, gather, broadcast, replicate, reduce-broadcast, tree all-reduce, parameter device, timeout,
imbalance, split size, model parallelism by hand, pinned memory, expandable segments, large batch,
scatter-reduce, mini-batch, peer-to-peer, stream, RPC, remote procedure call, RemoteModule,
bottleneck,
divergence, convergence, iteration, gradient, gradient descent, optimizer state, Adam, momentum,
learning rate schedule, gradient clipping, loss scaling, GradScaler, fp16, fp8, tf32, prefetch,
bandwidth, contention, oversubscription, topology, arithmetic intensity, memory-bound,
compute-bound,
kernel, CUDA graph, torch.compile, fusion, attention, cross-entropy, batch norm, dropout, backward,
DTensor, torchrun, rendezvous, elastic training, fault tolerance, checkpoint, deadlock, OOM, meta
device, LoRA, adapter, strong scaling, weak scaling, Amdahl's law, speedup, load balancing, NUMA,
tensor core, HBM, GIL, thread, fork, spawn, no_sync, metric, token, unit, buffer, weight tying,
frozen,
expert, router, capacity factor, virtual stage, steady state, in-flight, error feedback, top-k,
federated learning, Hogwild, BSP, gossip, SHARP, uneven inputs, unused parameters, padding, EMA,
contrastive loss, generalization gap, small batch, utilization, goodput, determinism, parity, Pareto
"""
WORDS = [word.strip() for word in DOCUMENTS.replace("\n", " ").split(",")]


def advise(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


ASYNCHRONOUS = choose(
    facts(chain(), gpus(2, 4), batch=7, precision="fp32"),
    partial=PartialPlan.build({"updates": "asynchronous", "servers": 1, "max_staleness": 4}),
)


def test_staleness_is_that_of_the_plan() -> None:
    """Seven workers: six others' updates come between a worker's fetch and its gradient."""
    assert explain("staleness", DECISION).number == (
        "none: gradients are of the parameters that they update"
    )
    assert explain("stale gradient", ASYNCHRONOUS).number == (
        "some 6 updates a gradient, at most 4 steps ahead of the slowest"
    )
    assert explain("PowerSGD", DECISION).number == "compression=none"


class TestTerms:
    @pytest.mark.parametrize("word", WORDS)
    def test_the_words_of_the_documents_are_terms(self, word: str) -> None:
        assert explain(word).term.says

    def test_each_term_has_two_sentences(self) -> None:
        """A full stop before a space or at the end; abbreviations are no end of a sentence."""
        sentences = {
            term.name: len(term.says.replace("et al. ", "et al ").split(". ")) for term in terms()
        }
        assert {name: count for name, count in sentences.items() if count != 2} == {}
        assert [term.name for term in terms() if not term.says.endswith(".")] == []

    def test_every_word_leads_to_its_own_term(self) -> None:
        lost = [
            word
            for term in terms()
            for word in (term.name, *term.also)
            if explain(word).term is not term
        ]
        assert lost == []

    def test_every_choice_of_a_plan_is_explained(self) -> None:
        # Except values of defaults, and values whose term has another name: DP and local SGD.
        named_otherwise = {"threads", "none", "backend", "local"}
        kinds = (*Schedule, *DataParallel, *Aggregation, *Compression, *Updates)
        words = {choice.value for choice in kinds} - named_otherwise
        assert all(explain(word).term.says for word in words)

    @pytest.mark.parametrize("word", ["All_Reduce", "all reduce", "ALL-REDUCE", "allreduce"])
    def test_case_and_hyphens_do_not_matter(self, word: str) -> None:
        assert explain(word).term.name == "all-reduce"

    def test_the_plural_is_the_same_word(self) -> None:
        assert explain("nodes").term.name == "node"

    def test_a_near_miss_is_named(self) -> None:
        with pytest.raises(UnknownNameError, match="unknown term `bubbel`") as caught:
            explain("bubbel")
        assert "did you mean `bubble`" in str(caught.value)
        with pytest.raises(InputError, match="`qqq` is not in the glossary"):
            explain("qqq")


class TestNumbers:
    def test_numbers_are_of_terms_that_exist(self) -> None:
        assert set(_NUMBERS) <= {term.name for term in terms()}

    @pytest.mark.parametrize("name", _NUMBERS)
    def test_every_number_exists_for_any_plan(self, name: str) -> None:
        for decision in (DECISION, ONE, STAGED):
            assert _NUMBERS[name](decision) != ""

    @pytest.mark.parametrize(
        ("word", "number"),
        [
            ("world size", "W = 16: dp_replicate=16"),
            ("L", "L = 8"),
            ("global rank", "ranks 0 to 15"),
            ("local rank", "local ranks 0 to 7"),
            ("node", "2 nodes, 8 x H100-like each"),
            ("replica", "16, 8 samples of each step for each"),
            ("ring all-reduce", "2 (n - 1) / n = 1.875 times the gradients, n = 16"),
            ("pipeline parallelism", "pp=1"),
            ("bubble", "none: there is one stage"),
            ("process group", "1 of 16 ranks along dp_replicate"),
            ("InfiniBand", "between nodes: InfiniBand, 400 GB/s"),
            ("zero2", "this plan: ZeRO-2 over 16"),
            ("shard", "16 of each state"),
            ("split by hand", "llama-7b-like is in one piece"),
            ("steps per epoch", "give `--samples`, the size of the data set"),
            ("noise scale", "give `--samples`, the size of the data set"),
            ("accumulation", "8 rounds a step"),
            (
                "decision tree",
                "ZeRO first (no change to the model), DDP where it fits, or PP + TP + DP",
            ),
        ],
    )
    def test_numbers_are_those_of_the_plan(self, word: str, number: str) -> None:
        assert explain(word, DECISION).number == number

    @pytest.mark.parametrize(
        ("word", "settings", "number"),
        [
            ("local SGD", "updates=local sync_every=16", "updates=local sync_every=16"),
            ("staleness", "updates=local sync_every=16", "up to 16 steps of the other replicas"),
            ("backup workers", "servers=1 backup_workers=2 dp_replicate=5", "backup_workers=2"),
            ("ring", "aggregation=ring", "2 (n - 1) / n = 1.75 times the gradients, n = 8"),
            ("gradient aggregation", "aggregation=ring", "aggregation=ring"),
            ("accumulation", "dp_replicate=8 accumulation=5", "5 rounds a step"),
            (
                "split size",
                "zero=1 microbatch_size=1 accumulation=5",
                "microbatch 1 x 5 accumulation, fp32",
            ),
            ("hybrid parallelism", "pp=2 tp=2 zero=0", "PP + TP + DDP"),
            ("stage", "pp=2 stages=model.layers.2", "2 on 2 ranks, cut before `model.layers.2`"),
        ],
    )
    def test_numbers_are_those_of_the_given_settings(
        self, word: str, settings: str, number: str
    ) -> None:
        """On two nodes of four, 40 samples a step."""
        partial = PartialPlan(zero=0).fixing(**PartialPlan.parse(settings).fixed)
        known = facts(small_llama(), gpus(2, 4), batch=40, precision="fp32")
        assert explain(word, choose(known, partial=partial)).number == number

    def test_a_kind_that_was_not_chosen_is_explained(self) -> None:
        number = explain("DDP", DECISION).number
        assert number is not None
        assert number.startswith("not taken, DDP over 16: does not fit")

    def test_a_parameter_servers_link_carries_every_workers_gradients(self) -> None:
        """6.74 B gradients in fp32, 16 workers: 402 GiB, and 1.875 of 25.1 GiB around a ring."""
        size = sum(unit.gradient_bytes for unit in DECISION.facts.model.units)
        number = explain("parameter server", DECISION).number
        assert number is not None
        assert f"{16 * size / GIB:.1f} GiB in" in number
        assert number.endswith(f"a ring {1.875 * size / GIB:.1f} GiB")
        partial = PartialPlan.build({"pp": 2, "tp": 2, "dp_replicate": 2})
        split = choose(facts(small_llama(), gpus(1, 8), batch=64), partial=partial)
        number = explain("parameter server", split).number
        assert number is not None
        assert number.endswith("GiB over the ranks of each replica")

    def test_a_pipelines_bubble_is_its_share_of_the_step(self) -> None:
        share = STAGED.estimate.time.idle_s / STAGED.estimate.step_s
        number = explain("bubble", STAGED).number
        assert number is not None
        assert float(number.split("%")[0]) == pytest.approx(100 * share, abs=0.5)

    def test_steps_and_noise_need_the_size_of_the_data_set(self) -> None:
        known = facts()
        work = known.workload.model_copy(update={"dataset_samples": 1_280_000})
        decision = choose(known.model_copy(update={"workload": work}))
        assert explain("steps per epoch", decision).number == "10,000"
        noise = explain("g", decision).number
        assert noise == "N / B - 1 = 9,999.0, times rate / (1 - momentum)"

    def test_context_parallel_ranks_count_as_replicas_for_gradients(self) -> None:
        """Of 8 ranks 2 share tokens: gradients of a parameter come from all 8, and an HSDP group of
        2 x 2 ranks shards the states (`Mesh.replicas`, `Mesh.shards`)."""
        partial = PartialPlan.build({"dp_replicate": 2, "dp_shard": 2, "cp": 2})
        shared = choose(facts(small_llama(), gpus(1, 8), batch=64), partial=partial)
        assert explain("ring", shared).number == "2 (n - 1) / n = 1.75 times the gradients, n = 8"
        assert explain("shard", shared).number == "4 of each state"
        groups = {t.group_size for t in shared.estimate.traffic if t.purpose == "gradients"}
        assert groups == {4}

    def test_parameter_servers_are_ranks_outside_the_mesh(self) -> None:
        """Eight ranks: seven workers' gradients come to the server, 0.128 MB each."""
        assert explain("W", ASYNCHRONOUS).number == "W = 8: dp_replicate=7 + servers=1"
        number, carried = (
            explain("DDP", ASYNCHRONOUS).number,
            explain("server", ASYNCHRONOUS).number,
        )
        assert number is not None
        assert number.startswith("not taken")
        size = sum(unit.gradient_bytes for unit in ASYNCHRONOUS.facts.model.units)
        assert carried is not None
        assert carried.startswith(f"its link carries {format_gib(7 * size)} in and as much out")

    def test_servers_share_what_one_would_carry(self) -> None:
        """Eight ranks: gradients of six workers come to two servers, half of each."""
        asked = {"updates": "asynchronous", "servers": 2, "max_staleness": 4}
        decision = choose(
            facts(chain(), gpus(2, 4), batch=6, precision="fp32"),
            partial=PartialPlan.build(asked),
        )
        size = sum(unit.gradient_bytes for unit in decision.facts.model.units)
        number = explain("server", decision).number
        assert number is not None
        assert number.startswith(
            f"its link carries, as those of all 2, {format_gib(6 * size / 2)} in"
        )

    def test_one_rank_has_no_groups_and_no_plural(self) -> None:
        assert explain("local rank", ONE).number == "local rank 0 alone"
        assert explain("ring all-reduce", ONE).number == "none: one rank has all gradients"
        assert explain("shard", ONE).number == "none: no state is sharded over replicas"


class TestCommand:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> str:
        DECISION.save(tmp_path / "plan.json")
        return str(tmp_path / "plan.json")

    def test_without_a_word_the_terms_are_listed(self) -> None:
        check("explain_list.txt", advise("explain").stdout)

    def test_a_term_is_explained(self) -> None:
        check("explain_term.txt", advise("explain", "ring", "all-reduce").stdout)

    def test_terms_are_explained_with_numbers_of_a_plan(self, saved: str) -> None:
        words = ("world size", "sharded DDP", "critical batch", "HSDP", "all-gather", "peak")
        shown = "\n".join(advise("explain", *word.split(), saved).stdout for word in words)
        check("explain_terms_of_a_plan.txt", shown)

    def test_an_unknown_term_is_refused(self) -> None:
        result = advise("explain", "stalenes")
        assert (result.exit_code, result.stdout) == (2, "")
        check("error_unknown_term.txt", result.stderr)

    def test_why_not_needs_a_decision(self) -> None:
        result = advise("explain", "bubble", "--why-not", "zero=3")
        assert result.exit_code == 2
        check("error_why_not_without_file.txt", result.stderr)

    def test_a_file_that_is_missing_is_not_taken_for_a_term(self) -> None:
        result = advise("explain", "nothing.json")
        assert result.exit_code == 2
        assert "cannot read `nothing.json`" in result.stderr

    def test_answers_without_torch(self, saved: str) -> None:
        assert "here: none: there is one stage" in _without_torch("bubble", saved).stdout

    @pytest.mark.timed
    def test_answers_at_once(self) -> None:
        assert float(_without_torch("bubble").stderr) < 0.3


def _without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    """`advise explain` where torch cannot be imported; its CPU seconds are on stderr."""
    code = (
        "import sys, time; sys.modules['torch'] = None; start = time.process_time()\n"
        "from advisor.cli.main import cli\n"
        "try: cli(['explain', *sys.argv[1:]])\n"
        "except SystemExit as end: assert not end.code\n"
        "sys.stderr.write(str(time.process_time() - start))\n"
    )
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_numbers_survive_the_file_of_a_decision(tmp_path: Path) -> None:
    DECISION.save(tmp_path / "plan.json")
    loaded = Decision.load(tmp_path / "plan.json")
    assert all(number(loaded) == number(DECISION) for number in _NUMBERS.values())
