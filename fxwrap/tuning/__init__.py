"""Autotuning: times the configurations of each kernel and records the fastest."""

from fxwrap.tuning.regions import *
from fxwrap.tuning.task import *
from fxwrap.tuning.tuner import *
