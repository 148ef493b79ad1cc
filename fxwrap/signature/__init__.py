"""What callers see of a program: names, trees, types and ranges of its inputs and outputs."""

from fxwrap.signature.convention import CallingConvention as CallingConvention
from fxwrap.signature.description import convention_from_json as convention_from_json
from fxwrap.signature.description import signature_to_json as signature_to_json
from fxwrap.signature.leaves import ProgramInput as ProgramInput
from fxwrap.signature.leaves import ProgramOutput as ProgramOutput
from fxwrap.signature.leaves import program_inputs as program_inputs
from fxwrap.signature.leaves import program_outputs as program_outputs
from fxwrap.signature.leaves import signature_text as signature_text
from fxwrap.signature.structured_call import check_no_gradients as check_no_gradients
from fxwrap.signature.structured_call import structured_call as structured_call
