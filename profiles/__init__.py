"""Facts: what a model needs and what the machines have. Imports nothing of ours.

The functions that look live in their own files: `profiles.capture.capture.capture`,
`profiles.machine.probe.probe`, `profiles.machine.bench.bench`,
`profiles.machine.clusters.resolve_cluster`.
"""

from typing import TYPE_CHECKING

from profiles.lazy import attach

if TYPE_CHECKING:
    from profiles.errors import AdvisorError as AdvisorError
    from profiles.machine.cluster import ClusterProfile as ClusterProfile
    from profiles.model.profile import ModelProfile as ModelProfile
    from profiles.model.profile import Numerics as Numerics
    from profiles.provenance import Quantity as Quantity
    from profiles.provenance import Source as Source
    from profiles.workload.workload import Workload as Workload

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AdvisorError": "profiles.errors",
        "ClusterProfile": "profiles.machine.cluster",
        "ModelProfile": "profiles.model.profile",
        "Numerics": "profiles.model.profile",
        "Quantity": "profiles.provenance",
        "Source": "profiles.provenance",
        "Workload": "profiles.workload.workload",
    },
)
