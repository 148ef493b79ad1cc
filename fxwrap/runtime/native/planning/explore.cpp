// One depth-first search for offsets: the native counterpart of `explore` in fxwrap/memory_planning/explore.py,
// step for step.
#include "planning/explore.h"

#include <algorithm>

namespace fxwrap::planning {
namespace {

// A backtracking point: a buffer that was placed, or that waits, and the sections of the part it belongs to.
struct Decision {
    Number index;
    Sections sections;
    std::size_t trail;
    bool waits;
};

struct SectionKey {
    double first;
    Number second;
    Number section;

    bool operator<(const SectionKey& other) const {
        if (first != other.first) return first < other.first;
        if (second != other.second) return second < other.second;
        return section < other.section;
    }
};

class Explorer {
  public:
    Explorer(const Subproblem& part, Order order, Number* weights)
        : part_(part), order_(order), weights_(weights), state_(part) {}

    Outcome run(Limits limits, Number* steps);
    const std::vector<Number>& offsets() const { return state_.lowest; }

  private:
    Sections pending_sections() const;
    Number choose(Sections sections);
    Number first_ready(Number section);
    bool backtrack();
    bool has_pending(Sections sections) const;

    const Subproblem& part_;
    Order order_;
    Number* weights_;
    Placement state_;
    std::vector<Decision> decisions_;
    std::vector<SectionKey> keys_;
    std::vector<Number> candidates_;
};

Outcome Explorer::run(Limits limits, Number* steps) {
    *steps = 0;
    if (!state_.start()) return Outcome::INFEASIBLE;
    for (Sections sections = pending_sections(); sections.begin < sections.end; sections = pending_sections()) {
        if (*steps >= limits.steps || (*steps % 64 == 0 && Clock::now() > limits.deadline))
            return Outcome::LIMIT_REACHED;
        ++*steps;
        const Number index = choose(sections);
        bool fits;
        if (index < 0) {
            fits = state_.raise_lowest_end(sections);
        } else {
            decisions_.push_back({index, state_.part_around(part_.first[index]), state_.trail_length(), false});
            fits = state_.place(index);
        }
        while (!fits) {
            ++weights_[state_.failed];
            if (!backtrack()) return Outcome::INFEASIBLE;
            ++*steps;
            fits = state_.postpone(decisions_.back().index);
        }
    }
    return Outcome::SOLVED;
}

bool Explorer::has_pending(Sections sections) const {
    for (Number section = sections.begin; section < sections.end; ++section)
        if (state_.is_pending(section)) return true;
    return false;
}

// Returns the sections of the latest decision's part that has buffers to place; empty if all are placed.
Sections Explorer::pending_sections() const {
    for (auto decision = decisions_.rbegin(); decision != decisions_.rend(); ++decision)
        if (has_pending(decision->sections)) return decision->sections;
    const Sections all{0, part_.sections};
    return decisions_.empty() || has_pending(all) ? all : Sections{0, 0};
}

// Returns the buffer to place next: the first candidate of the section with the fewest; -1 for no candidate.
Number Explorer::choose(Sections sections) {
    keys_.clear();
    for (Number section = sections.begin; section < sections.end; ++section) {
        if (!state_.is_pending(section)) continue;
        const double count = static_cast<double>(state_.candidate_count[section]);
        if (order_.lowest_section)
            keys_.push_back({static_cast<double>(state_.height[section]), state_.candidate_count[section], section});
        else
            keys_.push_back({count / static_cast<double>(weights_[section]), state_.height[section], section});
    }
    const auto is_later = [](const SectionKey& one, const SectionKey& other) { return other < one; };
    std::make_heap(keys_.begin(), keys_.end(), is_later);
    for (auto end = keys_.end(); end != keys_.begin(); --end) {
        std::pop_heap(keys_.begin(), end, is_later);
        const Number index = first_ready((end - 1)->section);
        if (index >= 0) return index;
    }
    return -1;
}

Number Explorer::first_ready(Number section) {
    const Number* own = state_.members(section);
    candidates_.assign(own, own + state_.member_count(section));
    std::sort(candidates_.begin(), candidates_.end(), [this](Number one, Number other) {
        if (order_.lowest_first && state_.lowest[one] != state_.lowest[other])
            return state_.lowest[one] < state_.lowest[other];
        return order_.ranks[one] < order_.ranks[other];
    });
    for (Number index : candidates_)
        if (state_.is_ready(index)) return index;
    return -1;
}

// Undoes decisions up to the last placement that the failure depends on, whose buffer waits now.
//
// A failure depends on the part around its section only. Returns false if no placement is left.
bool Explorer::backtrack() {
    Sections blamed = state_.part_around(state_.failed);
    while (!decisions_.empty()) {
        Decision& decision = decisions_.back();
        state_.undo(decision.trail);
        if (part_.last[decision.index] <= blamed.begin || part_.first[decision.index] >= blamed.end) {
            decisions_.pop_back();
            continue;
        }
        if (!decision.waits) {
            decision.waits = true;
            return true;
        }
        blamed = {std::min(blamed.begin, decision.sections.begin), std::max(blamed.end, decision.sections.end)};
        decisions_.pop_back();
    }
    return false;
}

}  // namespace

Clock::time_point deadline_in(double seconds) {
    constexpr double longest = 1e9;
    const auto limit = std::chrono::duration<double>(std::min(seconds, longest));
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
}

Outcome explore(const Subproblem& part, Order order, Number* weights, Limits limits, Number* steps,
                std::vector<Number>& offsets) {
    Explorer explorer(part, order, weights);
    const Outcome outcome = explorer.run(limits, steps);
    if (outcome == Outcome::SOLVED) offsets = explorer.offsets();
    return outcome;
}

}  // namespace fxwrap::planning
