"""Programs as `torch.export.ExportedProgram`s."""

from fxwrap.converters.exported.exporter import to_exported_program as to_exported_program
from fxwrap.converters.exported.signature import ExportedSignature as ExportedSignature
from fxwrap.converters.exported.signature import kernel_text_inputs as kernel_text_inputs
from fxwrap.converters.exported.signature import signature_of_program as signature_of_program
