#include "planning/exchanges.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "planning/orders.h"
#include "planning/values.h"

namespace fxwrap::planning {

namespace {

using Indices = std::vector<Number>;

struct SetLimits {
    Number free_sets;
    Number pending_sets;
    std::size_t exchanges;
};

constexpr SetLimits FULL_LIMITS{1000, 600, 100}, SPARE_LIMITS{300, 200, 30};
constexpr std::size_t MAX_PARTLY_FILLED = 12, MAX_PARTLY_FILLED_LEAVES = 4;
constexpr double OLD_COST = 1.0, GAP_COST = 1.0;

struct Set {
    Number size = 0;
    Indices positions;
    bool has_new = false;
    bool has_old = false;
};

// Either set may be the complement: all leaves that end in the section, or all pending buffers, but these.
struct Choice {
    Number cost;
    const Set* free;
    bool is_free_complement;
    const Set* pending;
    bool is_pending_complement;
    Number left;
};

Number in_units(double cost) { return std::llrint(static_cast<double>(FREEDOM_UNIT) * cost); }

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

double combinations(std::size_t count, std::size_t chosen) {
    double result = 1;
    for (std::size_t item = 0; item < chosen; ++item)
        result = result * static_cast<double>(count - item) / static_cast<double>(item + 1);
    return result;
}

// Returns the sets with up to a number of positions, from `first` on; the empty one first.
std::vector<Set> sets_of(const Indices& sizes, Number first, std::size_t largest) {
    std::vector<Set> sets(1);
    std::size_t begin = 0;
    for (std::size_t number = 1; number <= largest; ++number)
        for (const std::size_t end = sets.size(); begin < end; ++begin) {
            const Indices& positions = sets[begin].positions;
            Number position = positions.empty() ? first : positions.back() + 1;
            for (; position < static_cast<Number>(sizes.size()); ++position) {
                Set set = sets[begin];
                set.size += std::abs(sizes[position]);
                set.positions.push_back(position);
                set.has_new |= sizes[position] > 0;
                set.has_old |= sizes[position] < 0;
                sets.push_back(std::move(set));
            }
        }
    return sets;
}

class Finder {
  public:
    explicit Finder(const ExchangeQuery& query)
        : query_(query), limits_(query.spare < 0 ? FULL_LIMITS : SPARE_LIMITS),
          most_free_(largest_set(query.free.size(), limits_.free_sets)),
          most_pending_(largest_set(query.pending.size() - 1, limits_.pending_sets)),
          free_(sets_of(query.free, 0, most_free_)), pending_(sets_of(query.pending, 1, most_pending_)) {
        std::stable_sort(free_.begin(), free_.end(),
                         [](const Set& one, const Set& other) { return one.size < other.size; });
        for (std::size_t position = 0; position < query.free.size(); ++position)
            if (query.free[position] > 0) {
                ended_.push_back(static_cast<Number>(position));
                ended_size_ += query.free[position];
            }
        pending_size_ = std::accumulate(query.pending.begin(), query.pending.end(), Number{0});
    }

    std::vector<Exchange> run() {
        for (const Set& named : pending_) {
            add(named, false, query_.pending[0] + named.size);
            if (query_.pending.size() - named.positions.size() > most_pending_ + 1)
                add(named, true, pending_size_ - named.size);
        }
        if (query_.spare >= 0) {
            add_partly_filled(false, query_.pending[0]);
            if (query_.pending.size() > 1) add_partly_filled(true, pending_size_);
        }
        std::vector<std::size_t> order(choices_.size());
        std::iota(order.begin(), order.end(), 0);
        const std::size_t limit = std::min(order.size(), limits_.exchanges);
        std::partial_sort(order.begin(), order.begin() + static_cast<Number>(limit), order.end(),
                          [&](std::size_t one, std::size_t other) {
                              return std::pair(choices_[one].cost, one) < std::pair(choices_[other].cost, other);
                          });
        std::vector<Exchange> exchanges;
        for (std::size_t position = 0; position < limit; ++position)
            exchanges.push_back(exchange(choices_[order[position]]));
        return exchanges;
    }

  private:
    std::vector<Set>::const_iterator from(Number size) const {
        return std::lower_bound(free_.begin(), free_.end(), size,
                                [](const Set& set, Number least) { return set.size < least; });
    }

    // The logarithm of one more than the number of equally good exchanges expected by chance.
    Number cost(const Set& set, const Set& named, Number difference, Number size) const {
        const double sets = combinations(query_.free.size(), set.positions.size()) *
                            combinations(query_.pending.size() - 1, named.positions.size());
        return in_units(std::log1p(sets * static_cast<double>(2 * difference + 1) / static_cast<double>(size)));
    }

    static Number old_cost(const Set& set) { return set.has_new ? 0 : in_units(OLD_COST); }

    // Adds the sets of free leaves that have the size of some pending buffers.
    void add(const Set& named, bool is_complement, Number size) {
        const Number difference = margin(size, query_.tolerance);
        for (auto set = from(size - difference); set != free_.end() && set->size <= size + difference; ++set)
            if (!set->positions.empty())
                choices_.push_back({cost(*set, named, std::abs(set->size - size), size) + old_cost(*set), &*set, false,
                                    &named, is_complement, -1});
        if (ended_.size() <= most_free_) return;
        const Number left = ended_size_ - size;
        for (auto set = from(left - difference); set != free_.end() && set->size <= left + difference; ++set) {
            if (set->has_old || ended_.size() - set->positions.size() <= most_free_) continue;
            const Number extent = set->positions.empty() ? size : std::min(size, pending_size_ - size + 1);
            choices_.push_back({cost(*set, named, std::abs(set->size - left), extent), &*set, true, &named,
                                is_complement, -1});
        }
    }

    // Adds larger sets of free leaves, of which a gap is left over.
    void add_partly_filled(bool is_complement, Number size) {
        const Number least = size + margin(size, query_.tolerance) + 1;
        std::size_t added = 0;
        for (auto set = from(least);
             set != free_.end() && set->size - size <= query_.spare && added < MAX_PARTLY_FILLED; ++set) {
            if (set->positions.size() > MAX_PARTLY_FILLED_LEAVES) continue;
            ++added;
            add_with_gap(*set, false, is_complement, set->size - size, size);
        }
        const bool is_large = ended_.size() > MAX_PARTLY_FILLED_LEAVES;
        if (is_large && (is_complement || query_.pending.size() == 1) && least <= ended_size_ &&
            ended_size_ - size <= query_.spare)
            add_with_gap(empty_, true, is_complement, ended_size_ - size, size);
    }

    // Adds an exchange that leaves a gap. All that ended is one set, not one of many of as many leaves.
    void add_with_gap(const Set& set, bool is_free_complement, bool is_pending_complement, Number left, Number size) {
        const Set& alternatives = set.positions == ended_ ? empty_ : set;
        const Number old = is_free_complement ? 0 : old_cost(set);
        choices_.push_back({cost(alternatives, empty_, left, size) + in_units(GAP_COST) + old, &set,
                            is_free_complement, &empty_, is_pending_complement, left});
    }

    Exchange exchange(const Choice& choice) const {
        Indices ended = choice.free->positions, started = choice.pending->positions;
        if (choice.is_free_complement) ended = without(ended_, ended);
        if (choice.is_pending_complement) {
            Indices all(query_.pending.size());
            std::iota(all.begin(), all.end(), 0);
            started = without(all, started);
        } else {
            started.insert(started.begin(), 0);
        }
        return {choice.cost, std::move(ended), std::move(started), choice.left};
    }

    const ExchangeQuery& query_;
    SetLimits limits_;
    std::size_t most_free_;
    std::size_t most_pending_;
    std::vector<Set> free_;
    std::vector<Set> pending_;
    Indices ended_;
    Number ended_size_ = 0;
    Number pending_size_ = 0;
    Set empty_;
    std::vector<Choice> choices_;
};

}  // namespace

Number margin(Number size, Number tolerance) {
    return size / TOLERANCE_UNIT * tolerance + size % TOLERANCE_UNIT * tolerance / TOLERANCE_UNIT;
}

std::vector<Exchange> find_exchanges(const ExchangeQuery& query) { return Finder(query).run(); }

}  // namespace fxwrap::planning
