"""`advise verify`: plans that train like one process, and models that do not under one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from advisor.auto.verify import Verified, VerifyRequest, verify
from advisor.cli.main import cli
from profiles.errors import AdvisorError
from tests.nightly import nightly
from tests.workers import Pool

SUBJECTS = "tests.advisor.auto.verify_subjects"
ROOT = Path(__file__).resolve().parents[3]


def verified(factory: str, plan: str, precision: str | None = None) -> Verified | str | None:
    """The result or the error of rank 0; None on the others."""
    try:
        return verify(VerifyRequest(f"{SUBJECTS}:{factory}", plan, precision=precision))
    except AdvisorError as error:
        return f"{type(error).__name__}: {error.what}"


def of_two_ranks(pool: Pool, *words: str) -> Verified:
    result, other = pool.run(verified, *words, world_size=2)
    assert isinstance(result, Verified), result
    assert other is None
    return result


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan",
    ["tp=2", "dp_shard=2", *nightly("dp_replicate=2", "pp=2", "dp_replicate=2 zero=1")],
)
def test_a_plan_that_trains_like_one_process_is_equal(pool: Pool, plan: str) -> None:
    result = of_two_ranks(pool, "build", plan)
    assert result.is_equal
    assert result.rows == 8
    assert result.notes == []
    assert result.gradients.value < 1e-5 < result.tolerance.value


@pytest.mark.dist
def test_a_model_that_depends_on_its_rank_is_found_with_the_parameter(pool: Pool) -> None:
    result = of_two_ranks(pool, "of_one_rank", "dp_replicate=2")
    assert not result.is_equal
    assert result.gradients.value > 1e-3
    assert result.gradients.name in {f"{m}.{p}" for m in ("up", "down", "head") for p in PARTS}


PARTS = "weight", "bias"


@pytest.mark.dist
def test_statistics_over_a_batch_are_compared_on_the_same_microbatches(pool: Pool) -> None:
    result = of_two_ranks(pool, "with_batch_norm", "dp_replicate=2")
    assert result.is_equal
    assert len(result.notes) == 1
    assert "`middle` takes statistics over them" in result.notes[0]


@pytest.mark.dist
@pytest.mark.parametrize("precision", ["bf16", *nightly("fp16")])
def test_dropout_is_left_out_and_16_bits_have_their_own_tolerance(
    pool: Pool, precision: str
) -> None:
    result = of_two_ranks(pool, "with_dropout", "dp_shard=2", precision)
    assert result.is_equal
    assert 1e-4 < result.gradients.value < result.tolerance.value
    assert "the model draws random numbers (dropout)" in result.notes[0]


@pytest.mark.dist
@pytest.mark.parametrize(("precision", "most"), [("bf16", 0.05), ("fp8", 0.1)])
def test_one_process_casts_as_shards_do(pool: Pool, precision: str, most: float) -> None:
    """Beside autocast, which leaves norms and sums in fp32, ReLUs would differ: by 0.3."""
    if precision == "fp8":
        pytest.importorskip("torchao", reason="pip install 'parallel-advisor[fp8]'")
    result = of_two_ranks(pool, "encoder", "dp_shard=2", precision)
    assert result.gradients.value < most
    assert result.is_equal


@pytest.mark.dist
def test_rows_that_hide_an_exchange_are_named_and_too_few_are_refused(pool: Pool) -> None:
    assert (
        "all replicas have the same rows"
        in of_two_ranks(pool, "of_equal_rows", "dp_replicate=2").notes[0]
    )
    text, _ = pool.run(verified, "of_one_row", "dp_replicate=2", world_size=2)
    assert isinstance(text, str)
    assert text.startswith("InputError: the sample has 1 row, ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--plan", "compression=powersgd"), "this plan is not meant to equal one process"),
        (("--plan", "updates=local sync_every=2"), "this plan is not meant to equal one process"),
        (("--plan", "dp_shard=100000"), "100000 ranks need "),
        (("--plan", "tp=2", "--ranks", "3"), "plan `tp=2` needs 2 ranks, or a multiple; 3 are"),
    ],
)
def test_what_cannot_be_verified_is_refused_before_ranks_start(
    words: tuple[str, ...], said: str
) -> None:
    result = CliRunner().invoke(cli, ["verify", f"{SUBJECTS}:build", *words])
    assert result.exit_code == 2
    assert said in result.stderr


def _verified_in(memory_bytes: int) -> Verified | str | None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("advisor.auto.verify.machine_memory_bytes", lambda: memory_bytes)
        return verified("build", "dp_replicate=2")


@pytest.mark.dist
def test_a_model_whose_copies_do_not_fit_this_machine_is_refused(pool: Pool) -> None:
    """2,196 parameters in fp32, five times on each of two ranks and in the one process."""
    needed = 5 * 3 * 4 * 2196
    refused = pool.run(_verified_in, needed - 1, world_size=2)
    assert all("2 ranks and one process take about 129 KiB for" in str(each) for each in refused)
    assert isinstance(pool.run(_verified_in, needed, world_size=2)[0], Verified)


def _on_a_rank(folder: Path) -> tuple[int, str]:
    words = ["verify", f"{SUBJECTS}:of_one_rank", "--plan", "dp_replicate=2"]
    result = CliRunner().invoke(cli, [*words, "--exit-code", str(folder / "exit-code")])
    return result.exit_code, result.output


@pytest.mark.dist
def test_the_ranks_of_the_command_say_once_what_differs(pool: Pool, tmp_path: Path) -> None:
    ended = pool.run(_on_a_rank, tmp_path, world_size=2)
    assert [code for code, _ in ended] == [0, 0]
    said = "".join(text for _, text in ended)
    assert said.count("does NOT train like one process") == 1
    assert (tmp_path / "exit-code").read_text() == "1"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.nightly
def test_the_command_starts_its_ranks_and_ends_without_a_traceback(tmp_path: Path) -> None:
    said = "does NOT train like one process"
    words = ["verify", f"{SUBJECTS}:of_one_rank", "--plan", "dp_replicate=2"]
    ended = subprocess.run(
        [sys.executable, "-m", "advisor", *words],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 1, ended.stderr
    assert said in ended.stdout + ended.stderr
    assert (ended.stdout + ended.stderr).count(said) == 1
    assert "Traceback" not in ended.stderr
