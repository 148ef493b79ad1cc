"""Timing several ways to cut each kernel, and remembering the fastest."""

from fxwrap.tuning.first_call import FirstCall as FirstCall
from fxwrap.tuning.gpu_timer import gpu_name as gpu_name
from fxwrap.tuning.gpu_timer import set_count as set_count
from fxwrap.tuning.gpu_timer import time_on_gpu as time_on_gpu
from fxwrap.tuning.gpu_timer import worth_more as worth_more
from fxwrap.tuning.records import Choice as Choice
from fxwrap.tuning.records import TuningRecords as TuningRecords
from fxwrap.tuning.tuner import Tuner as Tuner
from fxwrap.tuning.tuner import fastest as fastest
from fxwrap.tuning.tuner import fingerprint as fingerprint
from fxwrap.tuning.tuner import gpu_tuner as gpu_tuner
from fxwrap.tuning.work import BufferFacts as BufferFacts
from fxwrap.tuning.work import TuningWork as TuningWork
