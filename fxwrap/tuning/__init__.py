"""Autotuning: times the configurations of each kernel and records the fastest."""

from fxwrap.tuning.gpu_timer import argument_set_count as argument_set_count
from fxwrap.tuning.gpu_timer import gpu_name as gpu_name
from fxwrap.tuning.gpu_timer import remaining_candidates as remaining_candidates
from fxwrap.tuning.gpu_timer import time_on_gpu as time_on_gpu
from fxwrap.tuning.task import BufferSpec as BufferSpec
from fxwrap.tuning.task import TuningRecord as TuningRecord
from fxwrap.tuning.task import TuningRecords as TuningRecords
from fxwrap.tuning.task import TuningTask as TuningTask
from fxwrap.tuning.tuner import FirstCallAutotuner as FirstCallAutotuner
from fxwrap.tuning.tuner import Tuner as Tuner
from fxwrap.tuning.tuner import fastest as fastest
from fxwrap.tuning.tuner import fingerprint as fingerprint
from fxwrap.tuning.tuner import gpu_tuner as gpu_tuner
