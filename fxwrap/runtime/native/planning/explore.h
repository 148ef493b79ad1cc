// One depth-first search for offsets.
#pragma once

#include <chrono>
#include <vector>

#include "planning/placement.h"

namespace fxwrap::planning {

using Clock = std::chrono::steady_clock;

enum class Outcome : int { SOLVED = 0, INFEASIBLE = 1, LIMIT_REACHED = 2 };

struct Order {
    bool lowest_section;
    bool lowest_first;
    const Number* ranks;
};

struct Limits {
    Number steps;
    Clock::time_point deadline;
};

// Returns the point of time in a number of seconds from now, at most some years.
Clock::time_point deadline_in(double seconds);

// Runs one search; see `explore` in fxwrap/memory_planning/explore.py. Updates `weights` and `steps`; `offsets` are
// those of the buffers if it is solved.
Outcome explore(const Subproblem& part, Order order, Number* weights, Limits limits, Number* steps,
                std::vector<Number>& offsets);

}  // namespace fxwrap::planning
