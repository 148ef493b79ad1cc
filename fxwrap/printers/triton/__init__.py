"""The Triton printer: a kernel of the loop IR becomes the text of a Triton kernel.

The way of a kernel, by module:

1. `candidates.configurations` chooses the form of the kernel; the module for it (`*_configuration.py`, `fragments.py`)
   returns configurations, the best guess first, by what `accesses.py` and `contraction_queries.py` say of it, and by
   `shared_memory.py`. `tiling.py` has their classes, one for each schedule.
2. `printer.print_triton` prints it in one of them, with the printer that the class of the configuration selects:

   - elements and reductions: `tile_printer.py`, in tiles whose offsets `tile_offsets.py` prints, with `interleaved.py`
     for accesses of wide blocks, `row_loads.py` for loads of vectors, `one_hot.py` for sums with one-hot vectors, and
     `row_parts.py` for rows whose columns are accumulated; `schedule.py` has the order of operations;
   - contractions: `contractions.py` (dots), on the loads of `shared_elements.py` or `descriptors.py`, with
     `group_blocks.py` for rows in groups; `group_sums.py` and its variants `row_group_sums.py` and `fragment_sums.py`
     for sums of groups of quantised weights, on `fragment_blocks.py`, `fragment_operands.py`, `fragment_digits.py` and
     `fragment_loads.py`;
   - streaming reductions: `streaming.py`, on the values of `streaming_values.py`, forms of scores that
     `streaming_scores.py` finds, the blocks of `blocks.py` and the stores of `streaming_results.py`.

   All extend `kernel_writer.KernelWriter`, which has the lines, names and parameters, and use `operations.py` for
   arithmetic, `reductions.py`, `narrow_indices.py`, `fast_math.py` for its precision, and `helpers.py` with
   `helper_families.py` for functions that a text needs.
3. `kernel_text.TritonKernelText` is the result, by parts; `kernel_source.py` analyses its statements. `combo_kernel.py`
   combines texts, and `dependent_launch.py` adds programmatic dependent launch to one, for which `block_sizes.py` reads
   the bytes of loads from the text.
"""

from fxwrap.printers.triton.block_sizes import *
from fxwrap.printers.triton.candidates import *
from fxwrap.printers.triton.combo_kernel import *
from fxwrap.printers.triton.dependent_launch import *
from fxwrap.printers.triton.printer import *
from fxwrap.printers.triton.tiling import *
