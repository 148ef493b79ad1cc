"""What callers see of a program: names, trees, types and ranges of its inputs and outputs."""

from fxwrap.signature.convention import CallingConvention as CallingConvention
from fxwrap.signature.description import convention_from_json as convention_from_json
from fxwrap.signature.description import signature_to_json as signature_to_json
from fxwrap.signature.kernel_errors import locate_kernel_error as locate_kernel_error
from fxwrap.signature.leaves import ProgramInput as ProgramInput
from fxwrap.signature.leaves import ProgramOutput as ProgramOutput
from fxwrap.signature.structured_program import StructuredProgram as StructuredProgram
from fxwrap.signature.structured_program import gradient_error as gradient_error
