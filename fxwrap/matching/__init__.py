"""Patterns over the data flow of lines, their matches, and the legality of replacing a match."""

from fxwrap.matching.dataflow import *
from fxwrap.matching.legality import *
from fxwrap.matching.matcher import *
from fxwrap.matching.patterns import *
