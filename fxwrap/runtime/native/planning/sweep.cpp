#include "planning/sweep.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <unordered_set>

#include "planning/values.h"

namespace fxwrap::planning {

namespace {

using Indices = std::vector<Number>;

constexpr Number TOLERANCE = 50;
constexpr Number ITEM_COST = FREEDOM_UNIT / 10, DIFFERENCE_COST = 4 * FREEDOM_UNIT, LATE_COST = FREEDOM_UNIT;
constexpr Number MAX_ENDED_SETS = 2400, MAX_STARTED_SETS = 300;
constexpr std::size_t MAX_EXCHANGES = 200, MAX_WHOLE = 12, MAX_SURPLUS = 4;

// Calls a function with the sets with up to a number of items, except the empty one.
template <typename Function>
void for_each_set(const Indices& indices, std::size_t largest, const Function& function) {
    for (std::size_t count = 1; count <= largest; ++count) for_combinations(indices, count, function);
}

// Returns the largest number of items of which there are no more sets than a limit; 1 at least.
std::size_t largest_set(std::size_t count, Number limit) {
    const Number items = static_cast<Number>(count);
    Number largest = 1, sets = items, more = items;
    while (largest < items) {
        if (more > limit) break;
        more = more * (items - largest) / (largest + 1);
        if (sets + more > limit) break;
        sets += more;
        ++largest;
    }
    return static_cast<std::size_t>(std::min(largest, items));
}

// Returns the offsets of buffers that lie on those which they are above of.
std::vector<Number> stacked(const std::vector<Buffer>& buffers, const std::vector<Indices>& above, Number sections) {
    std::vector<Number> waiting(buffers.size(), 0), offsets(buffers.size(), 0), heights(sections, 0), ready;
    for (const Indices& indices : above)
        for (Number index : indices) ++waiting[index];
    for (std::size_t index = 0; index < buffers.size(); ++index)
        if (!waiting[index]) ready.push_back(static_cast<Number>(index));
    while (!ready.empty()) {
        const Number index = ready.back();
        ready.pop_back();
        const auto [first, last, size] = buffers[index];
        offsets[index] = *std::max_element(heights.begin() + first, heights.begin() + last);
        std::fill(heights.begin() + first, heights.begin() + last, offsets[index] + size);
        for (Number upper : above[index])
            if (!--waiting[upper]) ready.push_back(upper);
    }
    return offsets;
}

}  // namespace

Sweep::Sweep(const std::vector<Buffer>& buffers, Number capacity, Number width, Limits limits)
    : buffers_(buffers), capacity_(capacity), width_(width), limits_(limits), is_chosen_(buffers.size(), 0) {
    for (const Buffer& buffer : buffers) sections_ = std::max(sections_, buffer.last);
    started_.resize(sections_ + 1);
    ended_.resize(sections_ + 1);
    spare_.assign(sections_, capacity);
    whole_.resize(sections_);
    Indices by_size(buffers.size());
    std::iota(by_size.begin(), by_size.end(), 0);
    std::stable_sort(by_size.begin(), by_size.end(),
                     [&](Number one, Number other) { return buffers[one].size > buffers[other].size; });
    for (Number index : by_size) {
        const auto [first, last, size] = buffers[index];
        started_[first].push_back(index);
        ended_[last].push_back(index);
        for (Number section = first; section < last; ++section) spare_[section] -= size;
    }
    for (Number spare : spare_)
        if (spare) tolerance_ = TOLERANCE;
    for (Number section = 1; section < sections_; ++section) {
        if (!is_one_exchange(section)) continue;
        Number latest = 0;
        for (Number index : ended_[section]) latest = std::max(latest, buffers[index].first);
        whole_[latest].push_back(ended_[section]);
    }
    for (const Buffer& buffer : buffers)
        digests_.push_back(mix(mix(static_cast<std::uint64_t>(buffer.last)) ^ static_cast<std::uint64_t>(buffer.size)));
    states_.resize(buffers.size() + 1);
}

Outcome Sweep::run(Number* steps, std::vector<Number>& solution) {
    Tree initial = node_of(started_[0]);
    if (foresee(initial, 0)) states_[started_[0].size()].push_back({0, initial, {}, {}, 0, 0, 0, nullptr});
    for (std::size_t count = 0; count < buffers_.size(); ++count) {
        std::map<std::pair<Indices, Indices>, std::vector<Exchange>> choices;
        std::vector<State> states = std::move(states_[count]);
        choose_best(states);
        for (State& state : states) {
            *steps = steps_;
            if (steps_ >= limits_.steps || Clock::now() > limits_.deadline) return Outcome::LIMIT_REACHED;
            if (state.pending.empty()) advance(state);
            auto entry = choices.find({state.free, state.pending});
            if (entry == choices.end())
                entry = choices.emplace(std::make_pair(state.free, state.pending), exchanges(state)).first;
            Gathering orders(state.tree);
            for (const Exchange& exchange : entry->second) {
                ++steps_;
                try_exchange(state, orders, exchange, static_cast<Number>(count + exchange.started.size()));
            }
        }
    }
    *steps = steps_;
    choose_best(states_.back());
    for (const State& state : states_.back()) {
        solution = offsets(state);
        Number peak = 0;
        for (std::size_t index = 0; index < buffers_.size(); ++index)
            peak = std::max(peak, solution[index] + buffers_[index].size);
        if (peak <= capacity_) return Outcome::SOLVED;
    }
    return Outcome::LIMIT_REACHED;
}

// Leaves the states with the lowest scores, of those with equal orders only one.
void Sweep::choose_best(std::vector<State>& states) const {
    std::vector<std::size_t> sorted(states.size());
    std::iota(sorted.begin(), sorted.end(), 0);
    std::stable_sort(sorted.begin(), sorted.end(),
                     [&](std::size_t one, std::size_t other) { return states[one].score < states[other].score; });
    std::unordered_set<std::uint64_t> keys;
    std::vector<State> best;
    for (std::size_t index : sorted) {
        if (static_cast<Number>(best.size()) == width_) break;
        if (keys.insert(states[index].key).second) best.push_back(std::move(states[index]));
    }
    states = std::move(best);
}

void Sweep::advance(State& state) const {
    ++state.section;
    state.free.insert(state.free.end(), ended_[state.section].begin(), ended_[state.section].end());
    state.pending = started_[state.section];
}

// Adds the state after an exchange, if there is one.
void Sweep::try_exchange(const State& state, Gathering& orders, const Exchange& exchange, Number count) {
    const Tree started = node_of(exchange.started);
    Gathered before;
    for (Number index : exchange.ended) is_chosen_[index] = 1;
    const bool is_possible = orders.gather(is_chosen_, &started, before);
    for (Number index : exchange.ended) is_chosen_[index] = 0;
    if (!is_possible) return;
    Tree tree = before.tree;
    Indices free = without(state.free, exchange.ended), pending = without(state.pending, exchange.started);
    if (pending.empty() && (!foresee(tree, state.section) || size(free) > spare_[state.section])) return;
    const Number cost = state.cost + exchange.cost, score = cost - freedom(tree);
    std::uint64_t key = digest(tree, digests_);
    for (Number index : pending) key += mix(digests_[index]);
    before.tree.clear();
    auto history = std::make_shared<History>(History{state.history, std::move(before), exchange.started});
    std::vector<State>& states = states_[count];
    states.push_back({state.section, std::move(tree), std::move(free), std::move(pending), cost, score, key,
                      std::move(history)});
    if (states.size() > MAX_SURPLUS * static_cast<std::size_t>(width_)) choose_best(states);
}

// Makes buffers consecutive that one exchange will end, now that the last of them has started: what is between them
// must end there, too.
bool Sweep::foresee(Tree& tree, Number section) {
    for (const Indices& ended : whole_[section]) {
        Gathered gathered;
        for (Number index : ended) is_chosen_[index] = 1;
        const bool is_possible = Gathering(tree).gather(is_chosen_, nullptr, gathered);
        for (Number index : ended) is_chosen_[index] = 0;
        if (!is_possible) return false;
        tree = std::move(gathered.tree);
    }
    return true;
}

// Whether all buffers that end at a section have the size of all that start there, and no others.
bool Sweep::is_one_exchange(Number section) const {
    const Indices &ended = ended_[section], &started = started_[section];
    const Number total = size(started);
    if (ended.size() < 2 || ended.size() > MAX_WHOLE || started.size() > MAX_WHOLE) return false;
    if (std::abs(size(ended) - total) > margin(total)) return false;
    std::vector<Number> sizes;
    for_each_set(ended, ended.size() - 1, [&](const Indices& chosen) { sizes.push_back(size(chosen)); });
    std::sort(sizes.begin(), sizes.end());
    bool is_one = true;
    for_each_set(started, started.size() - 1, [&](const Indices& chosen) {
        const Number own = size(chosen);
        const auto position = std::lower_bound(sizes.begin(), sizes.end(), own - margin(own));
        if (position != sizes.end() && *position <= own + margin(own)) is_one = false;
    });
    return is_one;
}

// Returns the exchanges with the first pending buffer, the cheapest first. Of the free memory and of the pending
// buffers, an exchange has few, or all but few.
std::vector<Sweep::Exchange> Sweep::exchanges(const State& state) const {
    const Indices &free = state.free, &pending = state.pending;
    const Indices others(pending.begin() + 1, pending.end());
    const std::size_t most_free = largest_set(free.size(), MAX_ENDED_SETS);
    const std::size_t most_started = largest_set(others.size(), MAX_STARTED_SETS);
    std::vector<Chosen> sets{{0, -1, {}}};
    for_each_set(free, most_free, [&](const Indices& chosen) {
        sets.push_back({size(chosen), static_cast<Number>(sets.size()), chosen});
    });
    std::sort(sets.begin(), sets.end(), [](const Chosen& one, const Chosen& other) {
        return one.size != other.size ? one.size < other.size : one.order < other.order;
    });
    const auto from = [&](Number lowest) {
        return std::lower_bound(sets.begin(), sets.end(), lowest,
                                [](const Chosen& chosen, Number value) { return chosen.size < value; });
    };
    const Number total_free = size(free);
    std::vector<Exchange> result;
    const auto add = [&](const Indices& started, std::size_t named) {
        const Number own = size(started), least = own - margin(own), target = total_free - own;
        for (auto chosen = from(least); chosen != sets.end() && chosen->size <= own + margin(own); ++chosen)
            if (!chosen->indices.empty())
                result.push_back(
                    exchange(state, chosen->indices, started, chosen->size - own, named + chosen->indices.size()));
        for (auto rest = from(target - margin(own)); rest != sets.end() && rest->size <= target + margin(own); ++rest)
            if (free.size() - rest->indices.size() > most_free)
                result.push_back(exchange(state, without(free, rest->indices), started, target - rest->size,
                                          named + rest->indices.size()));
    };
    const auto add_both = [&](const Indices& chosen) {
        Indices few{pending[0]};
        few.insert(few.end(), chosen.begin(), chosen.end());
        add(few, chosen.size());
        const Indices many = without(pending, chosen);
        if (many.size() > most_started + 1) add(many, chosen.size());
    };
    add_both({});
    for_each_set(others, most_started, add_both);
    std::stable_sort(result.begin(), result.end(),
                     [](const Exchange& one, const Exchange& other) { return one.cost < other.cost; });
    if (result.size() > MAX_EXCHANGES) result.resize(MAX_EXCHANGES);
    return result;
}

Sweep::Exchange Sweep::exchange(const State& state, Indices ended, const Indices& started, Number difference,
                                std::size_t named) const {
    bool is_late = true;
    for (Number index : ended) is_late &= buffers_[index].last != state.section;
    const Number cost = static_cast<Number>(named) * ITEM_COST + is_late * LATE_COST +
                        std::abs(difference) * DIFFERENCE_COST / (margin(size(started)) + 1);
    return {cost, std::move(ended), started};
}

Number Sweep::size(const Indices& indices) const {
    Number sum = 0;
    for (Number index : indices) sum += buffers_[index].size;
    return sum;
}

// Returns the lowest offsets of one of a state's orders, found by undoing its exchanges.
std::vector<Number> Sweep::offsets(const State& state) const {
    Indices order;
    append_leaves(state.tree, order);
    std::vector<Indices> above(buffers_.size());
    const auto position_of = [&](Number index) { return std::find(order.begin(), order.end(), index) - order.begin(); };
    for (const History* history = state.history.get();; history = history->earlier.get()) {
        for (std::size_t position = 0; position + 1 < order.size(); ++position)
            above[order[position]].push_back(order[position + 1]);
        if (!history) break;
        auto begin = position_of(history->started.front());
        for (Number index : history->started) begin = std::min(begin, position_of(index));
        Indices ended = history->before.order;
        const Number anchor = history->before.anchor;
        if (anchor >= 0 && (position_of(anchor) < begin) != history->before.is_anchor_left)
            std::reverse(ended.begin(), ended.end());
        order.erase(order.begin() + begin, order.begin() + begin + static_cast<Number>(history->started.size()));
        order.insert(order.begin() + begin, ended.begin(), ended.end());
    }
    for (Indices& indices : above) {
        std::sort(indices.begin(), indices.end());
        indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
    }
    return stacked(buffers_, above, sections_);
}

}  // namespace fxwrap::planning
