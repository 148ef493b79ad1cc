// Functions of lists of numbers.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "planning/placement.h"

namespace fxwrap::planning {

// Calls a function with each combination of a number of values, in lexicographic order of positions.
template <typename Function>
void for_combinations(const std::vector<Number>& values, std::size_t number, Function&& function) {
    std::vector<std::size_t> at(number);
    std::iota(at.begin(), at.end(), 0);
    std::vector<Number> chosen(number);
    while (true) {
        for (std::size_t position = 0; position < number; ++position) chosen[position] = values[at[position]];
        function(chosen);
        std::size_t moving = number;
        while (moving > 0 && at[moving - 1] == values.size() - number + moving - 1) --moving;
        if (moving == 0) return;
        ++at[moving - 1];
        for (std::size_t position = moving; position < number; ++position) at[position] = at[position - 1] + 1;
    }
}

inline std::vector<Number> without(const std::vector<Number>& values, const std::vector<Number>& removed) {
    std::vector<Number> rest;
    for (Number value : values)
        if (std::find(removed.begin(), removed.end(), value) == removed.end()) rest.push_back(value);
    return rest;
}

}  // namespace fxwrap::planning
