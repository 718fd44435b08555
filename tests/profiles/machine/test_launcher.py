"""Launchers detected from a process's environment."""

from __future__ import annotations

import pytest

from profiles.errors import InputError
from profiles.machine.launcher import Launcher, launcher

TORCHRUN = {
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_WORLD_SIZE": "2",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4(x4)",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launcher("plain", 0, 1, 0, 1, 1)),
        (TORCHRUN, Launcher("torchrun", 11, 16, 3, 8, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Launcher("torchrun", 1, 2, 1, 2, 1)),
        (SRUN, Launcher("slurm", 5, 16, 1, 4, 4)),
        (TORCHRUN | SRUN, Launcher("torchrun", 11, 16, 3, 8, 2)),
        # A batch script outside srun: the job has 16 tasks, this process is none of them.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, Launcher("plain")),
        (
            {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            Launcher("mpi", 2, 4, 0, 2, 2),
        ),
        (
            {
                "PMI_RANK": "3",
                "PMI_SIZE": "4",
                "MPI_LOCALRANKID": "3",
                "MPI_LOCALNRANKS": "4",
            },
            Launcher("mpi", 3, 4, 3, 4, 1),
        ),
    ],
)
def test_the_launcher_is_read_from_its_variables(
    environment: dict[str, str], expected: Launcher
) -> None:
    assert launcher(environment=environment) == expected


def test_slurm_s_short_form_gives_each_node_its_own_count() -> None:
    uneven = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8,3(x2),2", "SLURM_NODEID": "2"}
    assert launcher(environment=uneven).local_world_size == 3


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"RANK": "0", "WORLD_SIZE": "two"}, "`WORLD_SIZE` = 'two' is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        (TORCHRUN | {"LOCAL_RANK": "8"}, r"local 8 of\s+8"),
    ],
)
def test_contradictory_variables_are_refused(environment: dict[str, str], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        launcher(environment=environment)


# As Kubeflow's training operator sets them in a pod of a PyTorchJob of three replicas.
PYTORCHJOB = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
}
# ... and Kubeflow's trainer for a TrainJob of two nodes of eight, through JobSet.
TRAINJOB = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (PYTORCHJOB, Launcher("kubernetes", 2, 3, 0, 1, 3)),
        (TRAINJOB, Launcher("kubernetes", 8, 16, 0, 8, 2)),
        # The older operator sets both; RANK and WORLD_SIZE count pods there.
        (
            PYTORCHJOB | {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "2"},
            Launcher("kubernetes", 8, 12, 0, 4, 3),
        ),
        # The index of the pod where the trainer left out the rank of the node.
        (
            {key: value for key, value in TRAINJOB.items() if key != "PET_NODE_RANK"},
            Launcher("kubernetes", 8, 16, 0, 8, 2),
        ),
        # torchrun has started in the pod: its own variables win.
        (TRAINJOB | TORCHRUN, Launcher("torchrun", 11, 16, 3, 8, 2)),
        # The MPI operator's pods are MPI's ranks.
        (
            {
                "KUBERNETES_SERVICE_HOST": "10.0.0.1",
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            },
            Launcher("mpi", 1, 2, 0, 1, 2),
        ),
    ],
)
def test_a_pod_knows_its_place_in_the_job(environment: dict[str, str], expected: Launcher) -> None:
    assert launcher(environment=environment) == expected


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (TRAINJOB | {"PET_NPROC_PER_NODE": "auto"}, "`PET_NPROC_PER_NODE` = auto: only torchrun"),
        (TRAINJOB | {"PET_NNODES": "1:4"}, "`PET_NNODES` = 1:4: only torchrun"),
        ({"JOB_COMPLETION_INDEX": "3"}, "pod 3 of an indexed Kubernetes job; how many pods"),
    ],
)
def test_missing_launcher_variables_are_reported_and_not_guessed(
    environment: dict[str, str], said: str
) -> None:
    detected = launcher(environment=environment)
    assert (detected.kind, detected.world_size, detected.num_nodes) == ("plain", 1, 1)
    assert said in detected.notes[0]
    assert detected.notes[0].endswith("so only this pod is described")


def test_a_pod_s_wrong_variable_is_named() -> None:
    with pytest.raises(InputError, match="`PET_NODE_RANK` = 'one' is not a whole number"):
        launcher(environment=TRAINJOB | {"PET_NODE_RANK": "one"})
    with pytest.raises(InputError, match="rank 16 of 16"):
        launcher(environment=TRAINJOB | {"PET_NODE_RANK": "2"})
