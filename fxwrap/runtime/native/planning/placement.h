// Partial placements of the search for offsets: floors, what they imply, and how they are undone. The reference is
// fxwrap/memory_planning/placement.py: both take equal steps.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace fxwrap::planning {

using Number = std::int64_t;

constexpr Number NO_END = std::numeric_limits<Number>::max();

// Buffers by index, and a capacity. Lists of lists are flat: `x_start[i]` to `x_start[i + 1]`.
struct Subproblem {
    Number count;
    Number sections;
    Number capacity;
    const Number* first;
    const Number* last;
    const Number* size;
    const Number* twin_rank;
    std::vector<Number> member_start;
    std::vector<Number> member;
    std::vector<Number> neighbour_start;
    std::vector<Number> neighbour;

    Subproblem(Number count, Number sections, Number capacity, const Number* first, const Number* last,
               const Number* size, const Number* twin_rank);
};

struct Sections {
    Number begin;
    Number end;
};

class Placement {
  public:
    explicit Placement(const Subproblem& part);

    const Subproblem& part;
    // By buffer.
    std::vector<Number> lowest;
    std::vector<Number> bound;
    // By section.
    std::vector<Number> height;
    std::vector<Number> candidate_count;
    // The section of the last failure.
    Number failed = 0;

    bool start();
    bool place(Number pick);
    bool postpone(Number pick);
    bool raise_lowest_end(Sections sections);
    bool is_ready(Number index) const;
    Sections part_around(Number section) const;
    void undo(std::size_t length);

    std::size_t trail_length() const { return trail_.size(); }
    bool is_pending(Number section) const { return member_count_[section] > 0; }
    const Number* members(Number section) const { return &members_[part.member_start[section]]; }
    Number member_count(Number section) const { return member_count_[section]; }

  private:
    // A value and its address; without an address, a member to insert into a section again.
    struct Change {
        Number* address;
        Number value;
        Number section;
    };

    void set(Number& target, Number value);
    void remove_member(Number section, Number index);
    void insert_member(Number section, Number index);
    void mark(Number section);
    void clear_marks();
    bool raise(Number index, Number bound, Number section);
    Number end_of_others(Number section, Number index) const;
    Number lowest_support(Number index);
    bool propagate();
    bool update(Number section);

    std::vector<Number> is_placed_;
    std::vector<Number> remaining_;
    std::vector<Number> crossing_;
    std::vector<Number> end_;
    std::vector<Number> end_index_;
    std::vector<Number> other_end_;
    std::vector<Number> members_;
    std::vector<Number> member_count_;
    std::vector<Number> support_section_;
    std::vector<Number> changed_;
    std::vector<char> is_changed_;
    std::vector<Change> trail_;
};

}  // namespace fxwrap::planning
