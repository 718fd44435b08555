"""The plan: a value that says how a model is spread, and its settings in words and in JSON.

Lives here: `Plan`, `PartialPlan` of what a user fixed, and their choices (`settings`). Must not:
torch, the rules of what is legal (`engines.legality`), and anything that chooses (`advisor`).
"""

from engines.plan.partial_plan import PartialPlan as PartialPlan
from engines.plan.plan import Plan as Plan
from engines.plan.plan import load_plan as load_plan
from engines.plan.plan import read_settings as read_settings
from engines.plan.settings import AXES as AXES
from engines.plan.settings import CHUNK_BYTES as CHUNK_BYTES
from engines.plan.settings import MODEL_AXES as MODEL_AXES
from engines.plan.settings import Aggregation as Aggregation
from engines.plan.settings import Compression as Compression
from engines.plan.settings import DataParallel as DataParallel
from engines.plan.settings import Offload as Offload
from engines.plan.settings import OffloadTo as OffloadTo
from engines.plan.settings import Precision as Precision
from engines.plan.settings import Recompute as Recompute
from engines.plan.settings import Schedule as Schedule
from engines.plan.settings import Updates as Updates
from engines.plan.settings import format_setting as format_setting
