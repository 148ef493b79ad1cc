#include "planning/placement.h"

#include <algorithm>

namespace fxwrap::planning {

Subproblem::Subproblem(Number count, Number sections, Number capacity, const Number* first, const Number* last,
                       const Number* size, const Number* twin_rank)
    : count(count), sections(sections), capacity(capacity), first(first), last(last), size(size),
      twin_rank(twin_rank), member_start(sections + 1), neighbour_start{0} {
    for (Number index = 0; index < count; ++index)
        for (Number section = first[index]; section < last[index]; ++section) ++member_start[section + 1];
    for (Number section = 0; section < sections; ++section) member_start[section + 1] += member_start[section];
    member.resize(member_start[sections]);
    std::vector<Number> next(member_start.begin(), member_start.end() - 1);
    for (Number index = 0; index < count; ++index)
        for (Number section = first[index]; section < last[index]; ++section) member[next[section]++] = index;
    std::vector<Number> seen(count, -1);
    for (Number index = 0; index < count; ++index) {
        auto begin = neighbour.size();
        seen[index] = index;
        for (Number position = member_start[first[index]]; position < member_start[last[index]]; ++position) {
            Number other = member[position];
            if (seen[other] == index) continue;
            seen[other] = index;
            neighbour.push_back(other);
        }
        std::sort(neighbour.begin() + static_cast<std::ptrdiff_t>(begin), neighbour.end());
        neighbour_start.push_back(static_cast<Number>(neighbour.size()));
    }
}

Placement::Placement(const Subproblem& part)
    : part(part), lowest(part.count), bound(part.count), height(part.sections), candidate_count(part.sections),
      is_placed_(part.count), remaining_(part.sections), crossing_(part.sections), end_(part.sections),
      end_index_(part.sections, -1), other_end_(part.sections), members_(part.member), member_count_(part.sections),
      support_section_(part.first, part.first + part.count), is_changed_(part.sections) {
    for (Number section = 0; section < part.sections; ++section)
        member_count_[section] = part.member_start[section + 1] - part.member_start[section];
    for (Number index = 0; index < part.count; ++index)
        for (Number section = part.first[index]; section < part.last[index]; ++section) {
            remaining_[section] += part.size[index];
            if (section + 1 < part.last[index]) ++crossing_[section];
        }
}

// Computes the state of an empty placement; returns false if the buffers cannot fit.
bool Placement::start() {
    for (Number section = 0; section < part.sections; ++section) mark(section);
    return propagate();
}

// Undoes what was done since the trail had a length.
void Placement::undo(std::size_t length) {
    while (trail_.size() > length) {
        const Change change = trail_.back();
        trail_.pop_back();
        if (change.address)
            *change.address = change.value;
        else
            insert_member(change.section, change.value);
    }
}

// Places a buffer at its lowest offset; returns false if the others cannot fit.
bool Placement::place(Number pick) {
    const Number first = part.first[pick], last = part.last[pick], size = part.size[pick];
    const Number top = lowest[pick] + size;
    set(is_placed_[pick], 1);
    for (Number section = first; section < last; ++section) {
        set(height[section], top);
        set(remaining_[section], remaining_[section] - size);
        remove_member(section, pick);
        trail_.push_back({nullptr, pick, section});
        mark(section);
        if (section + 1 < last) set(crossing_[section], crossing_[section] - 1);
    }
    for (Number position = part.neighbour_start[pick]; position < part.neighbour_start[pick + 1]; ++position) {
        const Number index = part.neighbour[position];
        if (is_placed_[index] || lowest[index] >= top) continue;
        set(lowest[index], top);
        if (!raise(index, top, std::max(first, part.first[index]))) return false;
        // of two buffers with equal ranges, one on the other, the larger is below
        const bool is_exchangeable = part.first[index] == first && part.last[index] == last && bound[index] == top;
        if (is_exchangeable && part.twin_rank[index] < part.twin_rank[pick])
            if (!raise(index, top + 1, first)) return false;
    }
    return propagate();
}

// Makes a buffer wait, and equal ones; returns false if the pending buffers cannot fit.
bool Placement::postpone(Number pick) {
    const Number above = lowest[pick] + 1, section = part.first[pick];
    const Number* own = members(section);
    for (Number position = 0; position < member_count_[section]; ++position) {
        const Number index = own[position];
        const bool is_later_twin = part.first[index] == part.first[pick] && part.last[index] == part.last[pick] &&
                                   part.size[index] == part.size[pick] &&
                                   part.twin_rank[index] > part.twin_rank[pick];
        if ((index == pick || is_later_twin) && !raise(index, above, section)) return false;
    }
    return propagate();
}

// Raises the bound of the waiting buffer with the lowest end to the lowest end of another neighbour.
bool Placement::raise_lowest_end(Sections sections) {
    Number end = NO_END, index = -1;
    for (Number section = sections.begin; section < sections.end; ++section) {
        if (!member_count_[section]) continue;
        if (end_[section] < end || (end_[section] == end && end_index_[section] < index)) {
            end = end_[section];
            index = end_index_[section];
        }
    }
    return raise(index, lowest_support(index), part.first[index]) && propagate();
}

// Whether a pending buffer does not wait and, at its lowest offset, leaves no gap that another fits.
bool Placement::is_ready(Number index) const {
    const Number offset = lowest[index];
    if (bound[index] != offset) return false;
    const Number latest_remaining = part.capacity - offset;
    for (Number section = part.first[index]; section < part.last[index]; ++section) {
        if (remaining_[section] > latest_remaining) return false;
        if (height[section] < offset && end_of_others(section, index) <= offset) return false;
    }
    return true;
}

// Returns the sections that pending buffers connect with a section.
Sections Placement::part_around(Number section) const {
    Number first = section, last = section;
    while (first > 0 && crossing_[first - 1]) --first;
    while (crossing_[last]) ++last;
    return {first, last + 1};
}

void Placement::set(Number& target, Number value) {
    trail_.push_back({&target, target, 0});
    target = value;
}

void Placement::remove_member(Number section, Number index) {
    Number* begin = &members_[part.member_start[section]];
    Number* end = begin + member_count_[section]--;
    Number* position = std::lower_bound(begin, end, index);
    std::copy(position + 1, end, position);
}

void Placement::insert_member(Number section, Number index) {
    Number* begin = &members_[part.member_start[section]];
    Number* end = begin + member_count_[section]++;
    Number* position = std::lower_bound(begin, end, index);
    std::copy_backward(position, end, end + 1);
    *position = index;
}

void Placement::mark(Number section) {
    if (is_changed_[section]) return;
    is_changed_[section] = 1;
    changed_.push_back(section);
}

void Placement::clear_marks() {
    for (Number section : changed_) is_changed_[section] = 0;
    changed_.clear();
}

// Raises the bound of a buffer; returns false if it is beyond the capacity, a failure of the section.
bool Placement::raise(Number index, Number value, Number section) {
    const Number old = bound[index], size = part.size[index];
    if (old >= value) return true;
    if (value > part.capacity - size) {
        failed = section;
        clear_marks();
        return false;
    }
    set(bound[index], value);
    const Number old_end = old + size;
    for (Number own = part.first[index]; own < part.last[index]; ++own)
        // else neither the lowest ends nor the number of candidates change
        if (old_end <= other_end_[own] || value + remaining_[own] > part.capacity) mark(own);
    return true;
}

Number Placement::end_of_others(Number section, Number index) const {
    return end_index_[section] == index ? other_end_[section] : end_[section];
}

// Returns the lowest end of another pending buffer in a buffer's sections.
Number Placement::lowest_support(Number index) {
    Number support = NO_END;
    for (Number section = part.first[index]; section < part.last[index]; ++section) {
        const Number end = end_of_others(section, index);
        if (end < support) {
            support = end;
            support_section_[index] = section;
        }
    }
    return support;
}

// Updates changed sections; returns false if the pending buffers of one do not fit above their floor.
bool Placement::propagate() {
    while (!changed_.empty()) {
        const Number section = changed_.back();
        changed_.pop_back();
        is_changed_[section] = 0;
        if (!update(section)) {
            failed = section;
            clear_marks();
            return false;
        }
    }
    return true;
}

// Updates a section. If a pending buffer cannot be the next one in a section, because the rest does not fit above it,
// it is above one that can. If it waits, it is on top of another.
bool Placement::update(Number section) {
    const Number count = member_count_[section];
    const Number* own = members(section);
    const Number latest = part.capacity - remaining_[section];
    Number least = NO_END, end = NO_END, index_of_end = -1, other = NO_END, next_end = NO_END, candidates = 0;
    bool is_plain = true;
    for (Number position = 0; position < count; ++position) {
        const Number index = own[position], offset = bound[index], own_end = offset + part.size[index];
        least = std::min(least, offset);
        if (offset <= latest) {
            ++candidates;
            next_end = std::min(next_end, own_end);
        }
        is_plain &= offset == lowest[index];
        if (own_end < end) {
            other = end;
            end = own_end;
            index_of_end = index;
        } else if (own_end < other) {
            other = own_end;
        }
    }
    if (count && least > latest) return false;
    if (end_[section] != end) set(end_[section], end);
    if (end_index_[section] != index_of_end) set(end_index_[section], index_of_end);
    if (other_end_[section] != other) set(other_end_[section], other);
    if (!count) return true;
    if (candidate_count[section] != candidates) set(candidate_count[section], candidates);
    if (candidates == count && is_plain) return true;
    for (Number position = 0; position < count; ++position) {
        const Number index = own[position], offset = bound[index];
        Number support;
        if (offset > latest) {
            support = next_end;
        } else if (offset > lowest[index]) {
            if (end_of_others(support_section_[index], index) <= offset) continue;
            support = lowest_support(index);
        } else {
            continue;
        }
        if (support > offset && !raise(index, support, section)) return false;
    }
    return true;
}

}  // namespace fxwrap::planning
