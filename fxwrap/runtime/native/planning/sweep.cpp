#include "planning/sweep.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <unordered_set>

#include "planning/values.h"

namespace fxwrap::planning {

namespace {

using Indices = std::vector<Number>;

constexpr Number ITEM_COST = FREEDOM_UNIT / 10;
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
    whole_.resize(sections_);
    Indices by_size(buffers.size());
    std::iota(by_size.begin(), by_size.end(), 0);
    std::stable_sort(by_size.begin(), by_size.end(),
                     [&](Number one, Number other) { return buffers[one].size > buffers[other].size; });
    for (Number index : by_size) {
        started_[buffers[index].first].push_back(index);
        ended_[buffers[index].last].push_back(index);
    }
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
            auto entry = choices.find({state.ended, state.pending});
            if (entry == choices.end())
                entry = choices.emplace(std::make_pair(state.ended, state.pending), exchanges(state)).first;
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
    state.ended = ended_[state.section];
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
    Indices ended = without(state.ended, exchange.ended), pending = without(state.pending, exchange.started);
    if (pending.empty() && !foresee(tree, state.section)) return;
    const Number cost = state.cost + exchange.cost, score = cost - freedom(tree);
    std::uint64_t key = digest(tree, digests_);
    for (Number index : pending) key += mix(digests_[index]);
    before.tree.clear();
    auto history = std::make_shared<History>(History{state.history, std::move(before), exchange.started});
    std::vector<State>& states = states_[count];
    states.push_back({state.section, std::move(tree), std::move(ended), std::move(pending), cost, score, key,
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

// Whether no buffers that end at a section have the size of some that start there, except all of them.
bool Sweep::is_one_exchange(Number section) const {
    const Indices &ended = ended_[section], &started = started_[section];
    if (ended.size() < 2 || ended.size() > MAX_WHOLE || started.size() > MAX_WHOLE) return false;
    std::unordered_set<Number> sizes;
    for_each_set(ended, ended.size() - 1, [&](const Indices& chosen) { sizes.insert(size(chosen)); });
    bool is_one = true;
    for_each_set(started, started.size() - 1,
                 [&](const Indices& chosen) { is_one = is_one && !sizes.contains(size(chosen)); });
    return is_one;
}

// Returns the exchanges with the first pending buffer, of few ended or pending ones or of all but few; the cheapest
// first.
std::vector<Sweep::Exchange> Sweep::exchanges(const State& state) const {
    const Indices &all = state.ended, &pending = state.pending;
    const Indices others(pending.begin() + 1, pending.end());
    const std::size_t most_ended = largest_set(all.size(), MAX_ENDED_SETS);
    const std::size_t most_started = largest_set(others.size(), MAX_STARTED_SETS);
    std::unordered_map<Number, std::vector<Indices>> sets{{0, {{}}}};
    for_each_set(all, most_ended, [&](const Indices& chosen) { sets[size(chosen)].push_back(chosen); });
    const Number total = size(all);
    std::vector<Exchange> result;
    const auto add = [&](const Indices& started, std::size_t named) {
        const auto cost = [&](const Indices& chosen) { return static_cast<Number>(named + chosen.size()) * ITEM_COST; };
        if (const auto entry = sets.find(size(started)); entry != sets.end())
            for (const Indices& ended : entry->second) result.push_back({cost(ended), ended, started});
        if (const auto entry = sets.find(total - size(started)); entry != sets.end())
            for (const Indices& left : entry->second)
                if (all.size() - left.size() > most_ended)
                    result.push_back({cost(left), without(all, left), started});
    };
    const auto add_both = [&](const Indices& chosen) {
        Indices few{pending[0]};
        few.insert(few.end(), chosen.begin(), chosen.end());
        add(few, chosen.size());
        if (pending.size() - chosen.size() > most_started + 1) add(without(pending, chosen), chosen.size());
    };
    add_both({});
    for_each_set(others, most_started, add_both);
    std::stable_sort(result.begin(), result.end(),
                     [](const Exchange& one, const Exchange& other) { return one.cost < other.cost; });
    if (result.size() > MAX_EXCHANGES) result.resize(MAX_EXCHANGES);
    return result;
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
