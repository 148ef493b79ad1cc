"""The report of a compiled graph: one self-contained HTML page, and a folder with its texts."""

from fxwrap.report.content import *
from fxwrap.report.drawing import *
from fxwrap.report.dump import *
from fxwrap.report.graph_text import *
from fxwrap.report.page import *
from fxwrap.report.program_json import *
from fxwrap.report.trace import *
