// A beam search in the order of time. The reference is fxwrap/memory_planning/sweep.py: both take equal steps.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "planning/blocks.h"
#include "planning/orders.h"

namespace fxwrap::planning {

class Sweep {
  public:
    Sweep(const std::vector<Buffer>& buffers, Number capacity, Number width, Limits limits);

    Outcome run(Number* steps, std::vector<Number>& offsets);

  private:
    using Indices = std::vector<Number>;

    struct Exchange {
        Number cost;
        Indices ended;
        Indices started;
    };

    struct History {
        std::shared_ptr<History> earlier;
        Gathered before;
        Indices started;
    };

    struct State {
        Number section;
        Tree tree;
        Indices ended;
        Indices pending;
        Number cost;
        Number score;
        std::uint64_t key;
        std::shared_ptr<History> history;
    };

    void choose_best(std::vector<State>& states) const;
    void advance(State& state) const;
    void try_exchange(const State& state, Gathering& orders, const Exchange& exchange, Number count);
    bool foresee(Tree& tree, Number section);
    bool is_one_exchange(Number section) const;
    std::vector<Exchange> exchanges(const State& state) const;
    Number size(const Indices& indices) const;
    std::vector<Number> offsets(const State& state) const;

    const std::vector<Buffer>& buffers_;
    Number capacity_;
    Number width_;
    Limits limits_;
    Number sections_ = 0;
    std::vector<Indices> started_;
    std::vector<Indices> ended_;
    std::vector<std::vector<Indices>> whole_;
    std::vector<std::vector<State>> states_;
    std::vector<std::uint64_t> digests_;
    std::vector<char> is_chosen_;
    Number steps_ = 0;
};

}  // namespace fxwrap::planning
