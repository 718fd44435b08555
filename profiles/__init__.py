"""Facts: what a model needs and what the machines have. Imports nothing of ours.

The functions that look live in their own files: `profiles.capture.capture`,
`profiles.probe.probe`, `profiles.bench.bench`, `profiles.clusters.resolve_cluster`.
"""

from typing import TYPE_CHECKING

from profiles.lazy import attach

if TYPE_CHECKING:
    from profiles.cluster import ClusterProfile as ClusterProfile
    from profiles.errors import AdvisorError as AdvisorError
    from profiles.model import ModelProfile as ModelProfile
    from profiles.model import Numerics as Numerics
    from profiles.provenance import Quantity as Quantity
    from profiles.provenance import Source as Source
    from profiles.workload import Workload as Workload

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AdvisorError": "profiles.errors",
        "ClusterProfile": "profiles.cluster",
        "ModelProfile": "profiles.model",
        "Numerics": "profiles.model",
        "Quantity": "profiles.provenance",
        "Source": "profiles.provenance",
        "Workload": "profiles.workload",
    },
)
