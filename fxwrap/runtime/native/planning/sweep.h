// A beam search in the order of time. The reference is fxwrap/memory_planning/sweep.py: both take equal steps.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "planning/blocks.h"
#include "planning/byte_flow.h"
#include "planning/exchanges.h"
#include "planning/orders.h"

namespace fxwrap::planning {

struct SweepOptions {
    Number width;
    Number tolerance;
};

class Sweep {
  public:
    Sweep(const std::vector<Buffer>& buffers, Number capacity, SweepOptions options, Limits limits);

    Outcome run(Number* steps, std::vector<Number>& offsets);

  private:
    using Indices = std::vector<Number>;

    struct History {
        std::shared_ptr<const History> earlier;
        Takeover takeover;
        Number anchor;
        bool is_anchor_left;
    };

    // Leaves from the number of buffers on are gaps.
    struct State {
        Number section;
        Tree tree;
        Indices free;
        Indices pending;
        Indices gaps;
        Number cost;
        Number score;
        std::uint64_t key;
        std::shared_ptr<const History> history;
        std::shared_ptr<const ByteFlow> flow;  // before the last takeover
    };

    struct Level {
        std::vector<State> states;
        Number worst = NO_END;
    };

    using Choices = std::map<std::pair<Indices, Indices>, std::vector<Exchange>>;

    void start();
    void expand(State state, std::size_t count, Choices& choices);
    std::vector<State> best(std::vector<State>&& states, std::size_t limit, bool is_final) const;
    bool update_flow(State& state) const;
    bool advance(State& state) const;
    bool fits(Number section, const Indices& free) const;
    void try_exchange(const State& state, Gathering& orders, const Exchange& exchange, Level& level);
    bool foresee(Tree& tree, Number section);
    bool is_one_exchange(Number section) const;
    Number total(const Indices& indices) const;
    std::vector<Number> offsets(const State& state) const;

    const std::vector<Buffer>& buffers_;
    Number count_;
    Number capacity_;
    SweepOptions options_;
    Limits limits_;
    Number sections_ = 0;
    bool is_full_ = true;
    Indices sizes_;
    Indices live_;
    std::vector<Indices> started_;
    std::vector<Indices> ended_;
    std::vector<std::vector<Indices>> whole_;
    std::vector<Level> levels_;
    std::vector<std::uint64_t> digests_;
    std::vector<char> is_chosen_;
    // Of one try, so that it allocates little.
    Indices scratch_started_;
    Gathered scratch_;
    Number steps_ = 0;
};

}  // namespace fxwrap::planning
