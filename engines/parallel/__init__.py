"""`ParallelModel`: a model under a plan, as its user trains, reads, saves and loads it.

Lives here: the class and its mixins, one for each thing that it can be asked. Must not: the
mechanisms themselves, which it calls, and the order in which a plan is applied (`engines.apply`).
"""

from engines.parallel.model import LossFn as LossFn
from engines.parallel.model import ParallelModel as ParallelModel
from engines.parallel.scheduling import SchedulerFactory as SchedulerFactory
