// Whether the exchanges of a sweep fit the capacity. The reference is fxwrap/memory_planning/byte_flow.py: both have
// equal results.
#pragma once

#include <vector>

#include "planning/placement.h"

namespace fxwrap::planning {

// Leaves that end and leaves that take over their memory.
struct Takeover {
    std::vector<Number> ended;
    std::vector<Number> started;
};

// Bytes of each leaf, not fewer than its size, such that both sides of each takeover have equally many.
class ByteFlow {
  public:
    // `sizes` are by buffer; leaves beyond are gaps, which may be empty. The initial gap, if it has bytes, is the first.
    ByteFlow(const std::vector<Number>& sizes, std::vector<Number> initial, Number gap);

    // Adds a takeover, which the caller keeps; returns false if there are not enough bytes.
    bool add(const Takeover& takeover);

  private:
    Number spare(Number leaf) const;
    bool supply(const std::vector<Number>& leaves, Number needed);
    void grow(Number leaf);

    const std::vector<Number>* sizes_;
    std::vector<Number> initial_;
    std::vector<Number> bytes_;
    std::vector<int> source_;
    std::vector<int> target_;
    std::vector<const Takeover*> takeovers_;
};

}  // namespace fxwrap::planning
