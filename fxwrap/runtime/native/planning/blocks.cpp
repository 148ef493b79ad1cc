#include "planning/blocks.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>

#include "planning/values.h"

namespace fxwrap::planning {
namespace {

constexpr std::size_t MAX_BLOCK = 40, MAX_EXCHANGE = 6, MAX_ENUMERATED = 14;
constexpr Number BLOCK_STEPS = 500;
constexpr std::array<std::size_t, 5> SPLIT_COUNTS{1, 2, 3, 5, 8};
constexpr std::array<Number, 5> SPLIT_DEPTHS{1, 1, 2, 3, 6};
constexpr double KEPT_APART = 0.5, SPLIT_FURTHER = 0.7, ACCEPT_MORE = 0.05;

// Replaces times by numbers of sections; returns the number of sections.
Number to_sections(std::vector<Buffer>& buffers) {
    std::vector<std::tuple<Number, int, std::size_t>> events;
    for (std::size_t index = 0; index < buffers.size(); ++index) {
        events.emplace_back(buffers[index].last, 0, index);
        events.emplace_back(buffers[index].first, 1, index);
    }
    std::sort(events.begin(), events.end());
    Number section = 0;
    bool ended = false;
    for (const auto& [time, starts, index] : events) {
        if (starts) {
            section += ended;
            ended = false;
            buffers[index].first = section;
        } else {
            buffers[index].last = section + 1;
            ended = true;
        }
    }
    return section + 1;
}

// Returns offsets of the buffers of a block; none if a short search has none.
std::vector<Number> pack(std::vector<Buffer> buffers, Number capacity) {
    const Number sections = to_sections(buffers);
    const auto count = static_cast<Number>(buffers.size());
    std::vector<Number> first, last, size, order(buffers.size()), twin_rank(buffers.size()), ranks(buffers.size());
    for (const Buffer& buffer : buffers) {
        first.push_back(buffer.first);
        last.push_back(buffer.last);
        size.push_back(buffer.size);
    }
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](Number one, Number other) { return size[one] > size[other]; });
    for (Number rank = 0; rank < count; ++rank) twin_rank[order[rank]] = rank;
    std::stable_sort(order.begin(), order.end(), [&](Number one, Number other) {
        return last[one] - first[one] > last[other] - first[other];
    });
    for (Number rank = 0; rank < count; ++rank) ranks[order[rank]] = rank;
    const Subproblem part(count, sections, capacity, first.data(), last.data(), size.data(), twin_rank.data());
    std::vector<Number> weights(sections, 1), offsets;
    Number steps = 0;
    explore(part, {false, true, ranks.data()}, weights.data(), {BLOCK_STEPS, Clock::time_point::max()}, &steps, offsets);
    return offsets;
}

}  // namespace

std::uint64_t Generator::next() {
    state_ += 0x9E3779B97F4A7C15;
    std::uint64_t value = state_;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
    return value ^ (value >> 31);
}

void Generator::shuffle(std::vector<Number>& values) {
    for (std::size_t last = values.size(); last > 1; --last) std::swap(values[last - 1], values[below(last)]);
}

Blocks::Blocks(const std::vector<Buffer>& buffers, Number capacity, const std::vector<double>& tolerances)
    : count_(static_cast<Number>(buffers.size())), end_(0), items_(buffers), members_(buffers.size()),
      at_end_(buffers.size()), at_start_(buffers.size()) {
    for (const Buffer& buffer : buffers) end_ = std::max(end_, buffer.last);
    ended_.resize(end_ + 1);
    started_.resize(end_ + 1);
    exchanges_.resize(end_ + 1);
    free_.assign(end_, capacity);
    for (Number index = 0; index < count_; ++index) keys_.push_back(random_.next());
    for (Number index = 0; index < count_; ++index) add(index);
    for (double tolerance : tolerances) {
        tolerance_ = tolerance;
        Times times;
        for (Number time = 1; time < end_; ++time) times.insert(times.end(), time);
        merge_all(std::move(times));
    }
    journal_.clear();
}

std::vector<Buffer> Blocks::roots() const {
    std::vector<Buffer> buffers;
    for (Number index : roots_) buffers.push_back(items_[index]);
    return buffers;
}

// Returns the offsets of the buffers from those of the roots.
std::vector<Number> Blocks::expand(const Number* offsets) const {
    std::vector<Number> expanded(count_);
    std::vector<Member> pending;
    for (Number index : roots_) pending.push_back({index, *offsets++});
    while (!pending.empty()) {
        const Member item = pending.back();
        pending.pop_back();
        if (item.index < count_) {
            expanded[item.index] = item.offset;
            continue;
        }
        for (const Member& member : members_[item.index])
            pending.push_back({member.index, item.offset + member.offset});
    }
    return expanded;
}

// Splits blocks near a random time and merges again, while there are steps; undoes what leaves more roots.
void Blocks::improve(Number steps, Clock::time_point deadline) {
    const Number until = steps_ + steps;
    while (static_cast<Number>(roots_.size()) < count_ && roots_.size() > 1 && steps_ < until &&
           Clock::now() < deadline) {
        const std::size_t before = roots_.size();
        merge_all(split_some());
        apart_.clear();
        if (roots_.size() <= before + (random_.unit() < ACCEPT_MORE))
            journal_.clear();
        else
            undo();
    }
}

// Splits some blocks near an end of a random root; returns the times that changed.
Blocks::Times Blocks::split_some() {
    const Indices roots(roots_.begin(), roots_.end());
    const Buffer chosen = items_[roots[random_.below(roots.size())]];
    const Number center = random_.below(2) ? chosen.last : chosen.first;
    const std::array<Number, 5> distances{0, 1, 2, 5, end_ / 20};
    const Number distance = distances[random_.below(distances.size())];
    Indices near;
    for (Number index : roots)
        if (index >= count_ && items_[index].first <= center + distance && items_[index].last >= center - distance)
            near.push_back(index);
    random_.shuffle(near);
    const Number depth = SPLIT_DEPTHS[random_.below(SPLIT_DEPTHS.size())];
    const std::size_t limit = SPLIT_COUNTS[random_.below(SPLIT_COUNTS.size())];
    Times changed{chosen.first, chosen.last};
    std::vector<std::pair<Number, Number>> pending;
    for (std::size_t position = 0; position < std::min(limit, near.size()); ++position)
        pending.emplace_back(near[position], depth);
    while (!pending.empty()) {
        const auto [index, rest] = pending.back();
        pending.pop_back();
        if (random_.unit() < KEPT_APART) apart_.insert(keys_[index]);
        split(index, changed);
        journal_.emplace_back(index, false);
        for (const Member& member : members_[index])
            if (rest > 1 && member.index >= count_ && random_.unit() < SPLIT_FURTHER)
                pending.emplace_back(member.index, rest - 1);
    }
    return changed;
}

void Blocks::undo() {
    Times changed;
    while (!journal_.empty()) {
        const auto [index, is_merged] = journal_.back();
        journal_.pop_back();
        changed.insert({items_[index].first, items_[index].last});
        if (is_merged) {
            split(index, changed);
            items_.pop_back();
            members_.pop_back();
            keys_.pop_back();
            at_end_.pop_back();
            at_start_.pop_back();
            continue;
        }
        for (const Member& member : members_[index]) {
            changed.insert({items_[member.index].first, items_[member.index].last});
            remove(member.index);
        }
        add(index);
    }
    update_exchanges(changed);
}

// Merges stacks of items with equal live ranges, else other blocks, near times that changed, until none is left.
void Blocks::merge_all(Times changed) {
    while (!changed.empty()) {
        update_exchanges(changed);
        Times times = changed;
        for (Number time : changed)
            for (const auto* ends : {&started_[time], &ended_[time]})
                for (Number index : *ends) times.insert({items_[index].first, items_[index].last});
        changed = merge_stacks(times, true);
        if (changed.empty()) changed = merge_candidates(times);
        if (changed.empty()) changed = merge_stacks(times, false);
    }
}

// Stacks items with equal live ranges, either all or those that belong together at both ends.
Blocks::Times Blocks::merge_stacks(const Times& times, bool is_linked) {
    std::map<std::tuple<Number, Number, const Exchange*, const Exchange*>, std::size_t> positions;
    std::vector<Indices> stacks;
    for (Number time : times) {
        Indices started(started_[time].begin(), started_[time].end());
        std::stable_sort(started.begin(), started.end(),
                         [this](Number one, Number other) { return items_[one].size > items_[other].size; });
        for (Number index : started) {
            const std::tuple ends{items_[index].first, items_[index].last, is_linked ? at_start_[index] : nullptr,
                                  is_linked ? at_end_[index] : nullptr};
            const auto [entry, is_new] = positions.try_emplace(ends, stacks.size());
            if (is_new) stacks.emplace_back();
            stacks[entry->second].push_back(index);
        }
    }
    Times changed;
    for (const Indices& stack : stacks) {
        if (stack.size() < 2 || apart_.contains(key(stack))) continue;
        Indices offsets;
        Number size = 0;
        for (Number index : stack) {
            offsets.push_back(size);
            size += items_[index].size;
        }
        merge(stack, offsets, size, changed);
    }
    return changed;
}

// Merges blocks, small ones first.
Blocks::Times Blocks::merge_candidates(const Times& times) {
    std::map<Indices, std::size_t> positions;
    std::vector<std::pair<Indices, double>> closures;
    for (Number time : times)
        for (const auto& exchange : exchanges_[time]) {
            ++steps_;
            Indices items = closure(*exchange);
            if (items.empty()) continue;
            const auto [entry, is_new] = positions.try_emplace(items, closures.size());
            if (is_new) closures.emplace_back(std::move(items), 0.0);
            closures[entry->second].second = random_.unit();
        }
    std::vector<Candidate> candidates;
    for (const auto& [items, tie] : closures)
        if (!apart_.contains(key(items))) candidates.push_back(candidate(items, tie));
    std::stable_sort(candidates.begin(), candidates.end(), [](const Candidate& one, const Candidate& other) {
        return std::tuple(one.items.size(), one.waste, one.tie) < std::tuple(other.items.size(), other.waste, other.tie);
    });
    std::unordered_set<Number> merged;
    Times changed;
    for (const Candidate& candidate : candidates) {
        const auto is_merged = [&merged](Number index) { return merged.contains(index); };
        if (std::any_of(candidate.items.begin(), candidate.items.end(), is_merged)) continue;
        const Indices own = offsets(candidate);
        if (own.empty()) continue;
        Number size = 0;
        for (std::size_t position = 0; position < own.size(); ++position)
            size = std::max(size, own[position] + items_[candidate.items[position]].size);
        merge(candidate.items, own, size, changed);
        merged.insert(candidate.items.begin(), candidate.items.end());
    }
    return changed;
}

Blocks::Candidate Blocks::candidate(const Indices& items, double tie) const {
    Number begin = items_[items[0]].first, end = items_[items[0]].last;
    for (Number index : items) {
        begin = std::min(begin, items_[index].first);
        end = std::max(end, items_[index].last);
    }
    std::vector<Number> live(end - begin);
    for (Number index : items)
        for (Number time = items_[index].first; time < items_[index].last; ++time) live[time - begin] += items_[index].size;
    const Number size = *std::max_element(live.begin(), live.end());
    const Number total = std::accumulate(live.begin(), live.end(), Number{0});
    const double waste =
        1 - static_cast<double>(total) / static_cast<double>(size * static_cast<Number>(live.size()));
    return {items, begin, std::move(live), size, waste, tie};
}

// Returns the offsets of the items of a block, which is padded as far as bytes are free; none if they do not fit.
Blocks::Indices Blocks::offsets(const Candidate& candidate) {
    Number spare = NO_END;
    for (std::size_t position = 0; position < candidate.live.size(); ++position)
        spare = std::min(spare, free_[candidate.begin + static_cast<Number>(position)] + candidate.live[position]);
    spare -= candidate.size;
    if (spare < 0) return {};
    std::vector<Buffer> chosen;
    std::vector<Number> packed_key{0};
    for (Number index : candidate.items) {
        chosen.push_back(items_[index]);
        packed_key.insert(packed_key.end(), {items_[index].first, items_[index].last, items_[index].size});
    }
    const auto padding = static_cast<Number>(static_cast<double>(candidate.size) * tolerance_);
    const Number padded = candidate.size + std::min(spare, padding);
    for (Number capacity : {candidate.size, padded}) {
        packed_key[0] = capacity;
        const auto [entry, is_new] = packed_.try_emplace(packed_key);
        if (is_new) entry->second = pack(chosen, capacity);
        if (!entry->second.empty() || capacity == padded) return entry->second;
    }
    return {};
}

// Returns the smallest block with an exchange; none if it is large, or if there is none.
//
// It has the exchanges of all its items that start after the first or end before the last of them.
Blocks::Indices Blocks::closure(const Exchange& exchange) const {
    std::set<Number> closure(exchange.ended.begin(), exchange.ended.end());
    closure.insert(exchange.started.begin(), exchange.started.end());
    while (closure.size() <= MAX_BLOCK) {
        Number begin = NO_END, end = 0;
        for (Number index : closure) {
            begin = std::min(begin, items_[index].first);
            end = std::max(end, items_[index].last);
        }
        std::set<Number> more;
        for (Number index : closure)
            for (const auto& [is_inner, inner] : {std::pair(items_[index].first > begin, at_start_[index]),
                                                  std::pair(items_[index].last < end, at_end_[index])}) {
                if (!is_inner) continue;
                if (!inner) return {};
                more.insert(inner->ended.begin(), inner->ended.end());
                more.insert(inner->started.begin(), inner->started.end());
            }
        const std::size_t before = closure.size();
        closure.insert(more.begin(), more.end());
        if (closure.size() == before) return {closure.begin(), closure.end()};
    }
    return {};
}

void Blocks::update_exchanges(const Times& times) {
    for (Number time : times) {
        ++steps_;
        for (const auto& exchange : exchanges_[time]) {
            for (Number index : exchange->ended)
                if (index < static_cast<Number>(items_.size())) at_end_[index] = nullptr;
            for (Number index : exchange->started)
                if (index < static_cast<Number>(items_.size())) at_start_[index] = nullptr;
        }
        exchanges_[time].clear();
        if (time <= 0 || time >= end_) continue;
        exchanges_[time] = exchanges_at(time);
        for (const auto& exchange : exchanges_[time]) {
            for (Number index : exchange->ended) at_end_[index] = exchange.get();
            for (Number index : exchange->started) at_start_[index] = exchange.get();
        }
    }
}

// Returns disjoint exchanges at one time, the smallest first, equal ones in random order.
std::vector<std::unique_ptr<Blocks::Exchange>> Blocks::exchanges_at(Number time) {
    Indices ended(ended_[time].begin(), ended_[time].end()), started(started_[time].begin(), started_[time].end());
    random_.shuffle(ended);
    random_.shuffle(started);
    const std::size_t largest = std::max(ended.size(), started.size()) > MAX_ENUMERATED ? 3 : MAX_EXCHANGE;
    std::vector<std::unique_ptr<Exchange>> exchanges;
    std::size_t count = 2;
    while (!ended.empty() && !started.empty() && count <= std::min(largest, ended.size() + started.size())) {
        auto next = exchange(time, ended, started, count);
        if (!next) {
            ++count;
            continue;
        }
        ended = without(ended, next->ended);
        started = without(started, next->started);
        exchanges.push_back(std::move(next));
    }
    return exchanges;
}

// Returns the exchange of a number of items whose sizes differ least, within the tolerance, if there is one.
std::unique_ptr<Blocks::Exchange> Blocks::exchange(Number time, const Indices& ended, const Indices& started,
                                                   std::size_t count) {
    const auto total = [this](const Indices& indices) {
        Number size = 0;
        for (Number index : indices) size += items_[index].size;
        return size;
    };
    std::unique_ptr<Exchange> best;
    double least = 2.0;
    const std::size_t fewest = count > started.size() + 1 ? count - started.size() : 1;
    for (std::size_t number = fewest; number <= std::min(count - 1, ended.size()); ++number) {
        std::vector<std::pair<Number, Indices>> table;
        for_combinations(ended, number, [&](const Indices& chosen) { table.emplace_back(total(chosen), chosen); });
        const auto is_smaller = [](const auto& one, const auto& other) { return one.first < other.first; };
        std::stable_sort(table.begin(), table.end(), is_smaller);
        for_combinations(started, count - number, [&](const Indices& chosen) {
            const Number size = total(chosen);
            const auto margin = static_cast<Number>(tolerance_ * static_cast<double>(size));
            const std::pair<Number, Indices> lowest{size - std::min(margin, free_[time - 1]), {}};
            const Number highest = size + std::min(margin, free_[time]);
            auto entry = std::lower_bound(table.begin(), table.end(), lowest, is_smaller);
            for (; entry != table.end() && entry->first <= highest; ++entry) {
                const double difference =
                    static_cast<double>(std::abs(entry->first - size)) / static_cast<double>(size);
                if (difference >= least) continue;
                best = std::make_unique<Exchange>(Exchange{entry->second, chosen});
                least = difference;
            }
        });
    }
    return best;
}

std::uint64_t Blocks::key(const Indices& indices) const {
    std::uint64_t key = 0;
    for (Number index : indices) key ^= keys_[index];
    return key;
}

// Makes a block of roots; adds its ends to the changed times.
void Blocks::merge(const Indices& indices, const Indices& offsets, Number size, Times& changed) {
    const auto block = static_cast<Number>(items_.size());
    Buffer item{items_[indices[0]].first, items_[indices[0]].last, size};
    std::vector<Member> members;
    for (std::size_t position = 0; position < indices.size(); ++position) {
        item.first = std::min(item.first, items_[indices[position]].first);
        item.last = std::max(item.last, items_[indices[position]].last);
        members.push_back({indices[position], offsets[position]});
    }
    items_.push_back(item);
    members_.push_back(std::move(members));
    keys_.push_back(key(indices));
    at_end_.push_back(nullptr);
    at_start_.push_back(nullptr);
    for (Number index : indices) remove(index);
    add(block);
    journal_.emplace_back(block, true);
    changed.insert({item.first, item.last});
}

// Makes the members of a block roots; adds their ends to the changed times.
void Blocks::split(Number block, Times& changed) {
    remove(block);
    for (const Member& member : members_[block]) {
        add(member.index);
        changed.insert({items_[member.index].first, items_[member.index].last});
    }
}

void Blocks::add(Number index) {
    const Buffer& item = items_[index];
    roots_.insert(index);
    started_[item.first].insert(index);
    ended_[item.last].insert(index);
    for (Number section = item.first; section < item.last; ++section) free_[section] -= item.size;
}

void Blocks::remove(Number index) {
    const Buffer& item = items_[index];
    roots_.erase(index);
    started_[item.first].erase(index);
    ended_[item.last].erase(index);
    at_start_[index] = nullptr;
    at_end_[index] = nullptr;
    for (Number section = item.first; section < item.last; ++section) free_[section] += item.size;
}

}  // namespace fxwrap::planning
