// Merging of buffers into blocks. The reference is fxwrap/memory_planning/blocks.py: both take equal steps.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <unordered_set>
#include <utility>
#include <vector>

#include "planning/explore.h"

namespace fxwrap::planning {

struct Buffer {
    Number first;
    Number last;
    Number size;
};

// SplitMix64 (Steele, Lea and Flood, 2014).
class Generator {
  public:
    std::uint64_t next();
    std::size_t below(std::size_t count) { return static_cast<std::size_t>(next() % count); }
    double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
    void shuffle(std::vector<Number>& values);

  private:
    std::uint64_t state_ = 0;
};

class Blocks {
  public:
    Blocks(const std::vector<Buffer>& buffers, Number capacity, const std::vector<double>& tolerances);

    Number steps() const { return steps_; }
    std::vector<Buffer> roots() const;
    std::vector<Number> expand(const Number* offsets) const;
    void improve(Number steps, Clock::time_point deadline);

  private:
    using Indices = std::vector<Number>;
    using Times = std::set<Number>;

    // Items that end at a time, and items of the same total size that start there and take over their memory.
    struct Exchange {
        Indices ended;
        Indices started;
    };

    // A block that may be merged: items, their first time, and their live bytes at each time from there on.
    struct Candidate {
        Indices items;
        Number begin;
        std::vector<Number> live;
        Number size;
        double waste;
        double tie;
    };

    struct Member {
        Number index;
        Number offset;
    };

    Times split_some();
    void undo();
    void merge_all(Times changed);
    Times merge_stacks(const Times& times, bool is_linked);
    Times merge_candidates(const Times& times);
    Candidate candidate(const Indices& items, double tie) const;
    Indices offsets(const Candidate& candidate);
    Indices closure(const Exchange& exchange) const;
    void update_exchanges(const Times& times);
    std::vector<std::unique_ptr<Exchange>> exchanges_at(Number time);
    std::unique_ptr<Exchange> exchange(Number time, const Indices& ended, const Indices& started, std::size_t count);
    std::uint64_t key(const Indices& indices) const;
    void merge(const Indices& indices, const Indices& offsets, Number size, Times& changed);
    void split(Number block, Times& changed);
    void add(Number index);
    void remove(Number index);

    Number count_;
    Number end_;
    Number steps_ = 0;
    double tolerance_ = 0;
    Generator random_;
    // By item; `members_` of blocks only.
    std::vector<Buffer> items_;
    std::vector<std::vector<Member>> members_;
    std::vector<std::uint64_t> keys_;
    std::vector<const Exchange*> at_end_;
    std::vector<const Exchange*> at_start_;
    // By time.
    std::vector<std::set<Number>> ended_;
    std::vector<std::set<Number>> started_;
    std::vector<std::vector<std::unique_ptr<Exchange>>> exchanges_;
    std::vector<Number> free_;
    std::set<Number> roots_;
    std::map<std::vector<Number>, Indices> packed_;
    std::unordered_set<std::uint64_t> apart_;
    std::vector<std::pair<Number, bool>> journal_;
};

}  // namespace fxwrap::planning
