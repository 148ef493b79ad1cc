"""The C++ printer: loop IR as C++ for CPUs, with OpenMP threads, vectorised loops and the runtime's `kernel.h`.

The way of a kernel, by module:

1. `printer.print_cpp_kernel` gives names that are C++ identifiers, and decomposes reductions. `flat_rows.py` makes
   short rows one long row.
2. `loop_plan.py` plans the loops: the vectorised axis, threads, parts of long reductions.
3. `printer.py` selects the printer of the loops. All extend `loops.LoopPrinter`:

   - elements: `loops.py`, with `row_blocks.py` for short rows that repeat values or have gaps, `gathered_rows.py` for
     rows of a transposed matrix at indirect indices, and `scatters.py` for values that are combined with memory;
   - rows and columns: `rows.py`, `columns.py` and `scans.py`, on the passes of `reductions.py`, which keep values in
     the memory of results (`result_buffers.py`); in other orders of axes `grouped_columns.py`, `few_columns.py`,
     `transposed_columns.py` and `transposed_rows.py`;
   - contractions: `contractions.py`, with `factor_contractions.py` for numbers that half precision represents, and
     `matrix_contractions.py` for matrix instructions;
   - streaming reductions: `streaming.py`, on the loops of `streaming_loops.py` and the tiles of `streaming_tiles.py`;
     `few_rows_streaming.py` for decoding.
4. `statements.py` prints the operations of a loop's body, by the functions of `operations.py`, with the tables of
   `axis_tables.py`, the blocks of `half_blocks.py`, and a loop for each case of `segments.py`.
"""

from fxwrap.printers.cpp.contractions import is_small_row_product as is_small_row_product
from fxwrap.printers.cpp.contractions import plan_contraction as plan_contraction
from fxwrap.printers.cpp.loop_plan import MIN_SCATTERED_COLUMNS as MIN_SCATTERED_COLUMNS
from fxwrap.printers.cpp.printer import INCLUDE as INCLUDE
from fxwrap.printers.cpp.printer import print_cpp_kernel as print_cpp_kernel
