#include "planning/sweep.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <unordered_set>

#include "planning/values.h"

namespace fxwrap::planning {

namespace {

using Indices = std::vector<Number>;

constexpr std::size_t MAX_WHOLE = 12, MAX_SURPLUS = 8, SURPLUS_LEFT = 2;

Indices without_positions(const Indices& values, const Indices& removed) {
    Indices rest;
    rest.reserve(values.size());
    for (Number position = 0; position < static_cast<Number>(values.size()); ++position)
        if (std::find(removed.begin(), removed.end(), position) == removed.end()) rest.push_back(values[position]);
    return rest;
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

Sweep::Sweep(const std::vector<Buffer>& buffers, Number capacity, SweepOptions options, Limits limits)
    : buffers_(buffers), count_(static_cast<Number>(buffers.size())), capacity_(capacity), options_(options),
      limits_(limits), levels_(buffers.size() + 1), is_chosen_(2 * buffers.size() + 1, 0) {
    for (const Buffer& buffer : buffers) {
        sizes_.push_back(buffer.size);
        sections_ = std::max(sections_, buffer.last);
    }
    started_.resize(sections_ + 1);
    ended_.resize(sections_ + 1);
    whole_.resize(sections_);
    live_.assign(sections_, 0);
    Indices by_size(buffers.size());
    std::iota(by_size.begin(), by_size.end(), 0);
    std::stable_sort(by_size.begin(), by_size.end(),
                     [&](Number one, Number other) { return buffers[one].size > buffers[other].size; });
    for (Number index : by_size) {
        const auto [first, last, size] = buffers[index];
        started_[first].push_back(index);
        ended_[last].push_back(index);
        for (Number section = first; section < last; ++section) live_[section] += size;
    }
    is_full_ = std::all_of(live_.begin(), live_.end(), [&](Number live) { return live == capacity; });
    for (Number section = 1; section < sections_; ++section) {
        if (!is_one_exchange(section)) continue;
        Number latest = 0;
        for (Number index : ended_[section]) latest = std::max(latest, buffers[index].first);
        whole_[latest].push_back(ended_[section]);
    }
    for (const Buffer& buffer : buffers)
        digests_.push_back(mix(mix(static_cast<std::uint64_t>(buffer.last)) ^ static_cast<std::uint64_t>(buffer.size)));
    for (Number gap = 0; gap <= count_; ++gap) digests_.push_back(mix(~static_cast<std::uint64_t>(gap)));
}

Outcome Sweep::run(Number* steps, std::vector<Number>& solution) {
    start();
    for (std::size_t count = 0; count < buffers_.size(); ++count) {
        Choices choices;
        for (State& state : best(std::move(levels_[count].states), static_cast<std::size_t>(options_.width), true)) {
            *steps = steps_;
            if (steps_ >= limits_.steps || Clock::now() > limits_.deadline) return Outcome::LIMIT_REACHED;
            expand(std::move(state), count, choices);
        }
    }
    *steps = steps_;
    for (const State& state : best(std::move(levels_.back().states), static_cast<std::size_t>(options_.width), true)) {
        solution = offsets(state);
        Number peak = 0;
        for (std::size_t index = 0; index < buffers_.size(); ++index)
            peak = std::max(peak, solution[index] + buffers_[index].size);
        if (peak <= capacity_) return Outcome::SOLVED;
    }
    return Outcome::LIMIT_REACHED;
}

void Sweep::start() {
    State state{0, {}, {}, {}, {}, 0, 0, 0, nullptr, nullptr};
    Indices leaves = started_[0];
    const Number gap = capacity_ - live_[0];
    if (gap > 0) {
        leaves.push_back(count_);
        state.free = {count_};
        state.gaps = {gap};
    }
    state.tree = node_of(leaves);
    state.flow = std::make_shared<ByteFlow>(sizes_, leaves, gap);
    if (foresee(state.tree, 0)) levels_[started_[0].size()].states.push_back(std::move(state));
}

// Adds the states after each exchange in a state.
void Sweep::expand(State state, std::size_t count, Choices& choices) {
    if (state.pending.empty() && !advance(state)) return;
    ExchangeQuery query{{}, {}, options_.tolerance, is_full_ ? -1 : capacity_ - live_[state.section]};
    for (Number leaf : state.free) {
        const bool is_old = leaf >= count_ || buffers_[leaf].last < state.section;
        const Number size = leaf >= count_ ? state.gaps[leaf - count_] : sizes_[leaf];
        query.free.push_back(is_old ? -size : size);
    }
    for (Number index : state.pending) query.pending.push_back(sizes_[index]);
    auto entry = choices.find({query.free, query.pending});
    if (entry == choices.end())
        entry = choices.emplace(std::pair(query.free, query.pending), find_exchanges(query)).first;
    Gathering orders(state.tree);
    for (const Exchange& exchange : entry->second) {
        ++steps_;
        try_exchange(state, orders, exchange, levels_[count + exchange.started.size()]);
    }
}

// Returns the states with the lowest scores, of those with equal orders only one; finally those that fit.
std::vector<Sweep::State> Sweep::best(std::vector<State>&& states, std::size_t limit, bool is_final) const {
    std::vector<std::size_t> sorted(states.size());
    std::iota(sorted.begin(), sorted.end(), 0);
    std::stable_sort(sorted.begin(), sorted.end(),
                     [&](std::size_t one, std::size_t other) { return states[one].score < states[other].score; });
    std::unordered_set<std::uint64_t> keys;
    std::vector<State> result;
    for (std::size_t index : sorted) {
        if (result.size() == limit) break;
        if (!keys.insert(states[index].key).second) continue;
        if (!is_final || is_full_ || update_flow(states[index])) result.push_back(std::move(states[index]));
    }
    return result;
}

bool Sweep::update_flow(State& state) const {
    if (!state.history) return true;
    const auto flow = std::make_shared<ByteFlow>(*state.flow);
    if (!flow->add(state.history->takeover)) return false;
    state.flow = flow;
    return true;
}

// Goes to the next section in which buffers start; returns false if free leaves do not fit before it.
bool Sweep::advance(State& state) const {
    while (state.pending.empty()) {
        if (++state.section >= sections_) return false;
        state.free.insert(state.free.end(), ended_[state.section].begin(), ended_[state.section].end());
        state.pending = started_[state.section];
        if (state.pending.empty() && !fits(state.section, state.free)) return false;
    }
    return true;
}

// Whether the buffers whose memory is not in use again fit beside the live ones.
bool Sweep::fits(Number section, const Indices& free) const {
    Number sum = 0;
    for (Number leaf : free) sum += leaf < count_ ? sizes_[leaf] : 0;
    return sum <= capacity_ - live_[section];
}

// Adds the state after an exchange, if there is one.
void Sweep::try_exchange(const State& state, Gathering& orders, const Exchange& exchange, Level& level) {
    Indices& started = scratch_started_;
    started.clear();
    for (Number position : exchange.started) started.push_back(state.pending[position]);
    const bool has_gap = exchange.left >= 0, is_last = started.size() == state.pending.size();
    if (has_gap && static_cast<Number>(state.gaps.size()) > count_) return;
    if (has_gap) started.push_back(count_ + static_cast<Number>(state.gaps.size()));
    Gathered& after = scratch_;
    const Tree replacement = node_of(started);
    for (Number position : exchange.ended) is_chosen_[state.free[position]] = 1;
    bool is_possible = orders.gather(is_chosen_, &replacement, after);
    Number unused = 0;
    for (Number leaf : state.free) unused += leaf < count_ && !is_chosen_[leaf] ? sizes_[leaf] : 0;
    for (Number position : exchange.ended) is_chosen_[state.free[position]] = 0;
    is_possible = is_possible && (!is_last || unused <= capacity_ - live_[state.section]);
    if (!is_possible || (is_last && !foresee(after.tree, state.section))) return;
    const Number cost = state.cost + exchange.cost, score = cost - freedom(after.tree) / (is_full_ ? 1 : 2);
    if (score >= level.worst) return;
    Indices pending = without_positions(state.pending, exchange.started);
    Indices free = without_positions(state.free, exchange.ended), gaps = state.gaps;
    if (has_gap) {
        free.push_back(started.back());
        gaps.push_back(exchange.left);
    }
    std::uint64_t key = digest(after.tree, digests_);
    for (Number index : pending) key += mix(digests_[index]);
    const auto history = std::make_shared<History>(
        History{state.history, {after.order, started}, after.anchor, after.is_anchor_left});
    level.states.push_back(
        {state.section, after.tree, std::move(free), std::move(pending), std::move(gaps), cost, score, key, history,
         state.flow});
    const auto width = static_cast<std::size_t>(options_.width);
    if (level.states.size() <= MAX_SURPLUS * width) return;
    level.states = best(std::move(level.states), SURPLUS_LEFT * width, false);
    if (level.states.size() == SURPLUS_LEFT * width) level.worst = level.states.back().score;
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
    if (ended.size() < 2 || ended.size() > MAX_WHOLE || started.empty() || started.size() > MAX_WHOLE) return false;
    const Number size = total(started);
    if (std::abs(total(ended) - size) > margin(size, options_.tolerance)) return false;
    const auto sums = [&](const Indices& indices) {  // of the sets that are neither empty nor whole
        Indices result(std::size_t{1} << indices.size(), 0);
        for (std::size_t set = 1; set < result.size(); ++set)
            result[set] = result[set & (set - 1)] + sizes_[indices[std::countr_zero(set)]];
        result.pop_back();
        result.erase(result.begin());
        std::sort(result.begin(), result.end());
        return result;
    };
    const Indices ended_sums = sums(ended);
    for (Number sum : sums(started)) {
        const Number difference = margin(sum, options_.tolerance);
        const auto nearest = std::lower_bound(ended_sums.begin(), ended_sums.end(), sum - difference);
        if (nearest != ended_sums.end() && *nearest <= sum + difference) return false;
    }
    return true;
}

Number Sweep::total(const Indices& indices) const {
    Number sum = 0;
    for (Number index : indices) sum += sizes_[index];
    return sum;
}

// Returns the lowest offsets of one of a state's orders, found by undoing its exchanges.
std::vector<Number> Sweep::offsets(const State& state) const {
    Indices order;
    append_leaves(state.tree, order);
    std::vector<Indices> above(buffers_.size());
    const auto position_of = [&](Number leaf) { return std::find(order.begin(), order.end(), leaf) - order.begin(); };
    for (const History* history = state.history.get();; history = history->earlier.get()) {
        Number lower = -1;
        for (Number leaf : order) {
            if (leaf >= count_) continue;
            if (lower >= 0) above[lower].push_back(leaf);
            lower = leaf;
        }
        if (!history) break;
        const Indices& started = history->takeover.started;
        Indices ended = history->takeover.ended;
        auto begin = position_of(started.front());
        for (Number leaf : started) begin = std::min(begin, position_of(leaf));
        if (history->anchor >= 0 && (position_of(history->anchor) < begin) != history->is_anchor_left)
            std::reverse(ended.begin(), ended.end());
        order.erase(order.begin() + begin, order.begin() + begin + static_cast<Number>(started.size()));
        order.insert(order.begin() + begin, ended.begin(), ended.end());
    }
    for (Indices& indices : above) {
        std::sort(indices.begin(), indices.end());
        indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
    }
    return stacked(buffers_, above, sections_);
}

}  // namespace fxwrap::planning
