// The exchanges of a sweep in one section. The reference is fxwrap/memory_planning/exchanges.py: both have equal
// results.
#pragma once

#include <vector>

#include "planning/placement.h"

namespace fxwrap::planning {

// Unit of `tolerance`.
constexpr Number TOLERANCE_UNIT = 1024;

// Positions of free leaves and of pending buffers that take over their memory, and the bytes left over as a gap; -1 for
// no gap.
struct Exchange {
    Number cost;
    std::vector<Number> ended;
    std::vector<Number> started;
    Number left;
};

// Sizes by position; those below zero are of leaves that were free before the section. `spare` bytes are free in the
// section; -1 where none is in any section.
struct ExchangeQuery {
    std::vector<Number> free;
    std::vector<Number> pending;
    Number tolerance;
    Number spare;
};

// Returns the largest difference of two sizes that are taken for equal.
Number margin(Number size, Number tolerance);

// Returns exchanges with the first pending buffer; the cheapest first.
std::vector<Exchange> find_exchanges(const ExchangeQuery& query);

}  // namespace fxwrap::planning
