// The C interface of the search for offsets: plain C++ without torch, called through ctypes. Numbers are 64-bit.
#include <algorithm>

#include "planning/blocks.h"
#include "planning/sweep.h"

using fxwrap::planning::Blocks;
using fxwrap::planning::Buffer;
using fxwrap::planning::Number;

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Runs one search over buffers by section; see `explore`. Returns its outcome: 0 solved, 1 infeasible, 2 a limit.
// `weights` by section and `offsets` by buffer are updated; the limit of time is in seconds from now.
EXPORTED int fxwrap_explore(Number count, Number sections, Number capacity, const Number* first, const Number* last,
                            const Number* size, const Number* twin_rank, const Number* ranks, int lowest_section,
                            int lowest_first, Number step_limit, double seconds, Number* weights, Number* offsets,
                            Number* steps) {
    using namespace fxwrap::planning;
    const Subproblem part(count, sections, capacity, first, last, size, twin_rank);
    const Order order{lowest_section != 0, lowest_first != 0, ranks};
    std::vector<Number> solution;
    const Outcome outcome = explore(part, order, weights, {step_limit, deadline_in(seconds)}, steps, solution);
    std::copy(solution.begin(), solution.end(), offsets);
    return static_cast<int>(outcome);
}

// Runs one sweep over buffers by section; see `sweep`. Results are those of `fxwrap_explore`.
EXPORTED int fxwrap_sweep(Number count, Number capacity, const Number* first, const Number* last, const Number* size,
                          Number width, Number tolerance, Number step_limit, double seconds, Number* offsets,
                          Number* steps) {
    using namespace fxwrap::planning;
    std::vector<Buffer> buffers;
    for (Number index = 0; index < count; ++index) buffers.push_back({first[index], last[index], size[index]});
    std::vector<Number> solution;
    Sweep sweep(buffers, capacity, {width, tolerance}, {step_limit, deadline_in(seconds)});
    const Outcome outcome = sweep.run(steps, solution);
    std::copy(solution.begin(), solution.end(), offsets);
    return static_cast<int>(outcome);
}

// Merges buffers into blocks; see `Blocks`. The caller destroys them.
EXPORTED Blocks* fxwrap_blocks_create(Number count, const Number* first, const Number* last, const Number* size,
                                      Number capacity, Number tolerance_count, const double* tolerances) {
    std::vector<Buffer> buffers;
    for (Number index = 0; index < count; ++index) buffers.push_back({first[index], last[index], size[index]});
    return new Blocks(buffers, capacity, {tolerances, tolerances + tolerance_count});
}

EXPORTED void fxwrap_blocks_destroy(Blocks* blocks) { delete blocks; }

EXPORTED void fxwrap_blocks_improve(Blocks* blocks, Number steps, double seconds) {
    blocks->improve(steps, fxwrap::planning::deadline_in(seconds));
}

EXPORTED Number fxwrap_blocks_steps(const Blocks* blocks) { return blocks->steps(); }

// Writes the roots, at most as many as there are buffers, and returns their number.
EXPORTED Number fxwrap_blocks_roots(const Blocks* blocks, Number* first, Number* last, Number* size) {
    const std::vector<Buffer> roots = blocks->roots();
    for (const Buffer& root : roots) {
        *first++ = root.first;
        *last++ = root.last;
        *size++ = root.size;
    }
    return static_cast<Number>(roots.size());
}

// Writes the offsets of the buffers, from those of the roots.
EXPORTED void fxwrap_blocks_expand(const Blocks* blocks, const Number* offsets, Number* expanded) {
    const std::vector<Number> result = blocks->expand(offsets);
    std::copy(result.begin(), result.end(), expanded);
}
