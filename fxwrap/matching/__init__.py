"""Patterns over the data flow of lines, their matches, and the legality of replacing a match."""

from fxwrap.matching.dataflow import *
from fxwrap.matching.launches import full_name as full_name
from fxwrap.matching.launches import operands_by_role as operands_by_role
from fxwrap.matching.launches import result_order as result_order
from fxwrap.matching.legality import *
from fxwrap.matching.matcher import *
from fxwrap.matching.patterns import *
from fxwrap.matching.results import *
from fxwrap.matching.validation import *
