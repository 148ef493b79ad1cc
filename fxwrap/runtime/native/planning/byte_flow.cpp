#include "planning/byte_flow.h"

#include <algorithm>
#include <utility>

namespace fxwrap::planning {

ByteFlow::ByteFlow(const std::vector<Number>& sizes, std::vector<Number> initial, Number gap)
    : sizes_(&sizes), initial_(std::move(initial)) {
    for (Number leaf : initial_) {
        grow(leaf);
        bytes_[leaf] = leaf < static_cast<Number>(sizes.size()) ? sizes[leaf] : gap;
    }
}

bool ByteFlow::add(const Takeover& takeover) {
    Number available = 0, needed = 0;
    for (Number leaf : takeover.ended) available += bytes_[leaf];
    for (Number leaf : takeover.started)
        if (leaf < static_cast<Number>(sizes_->size())) needed += (*sizes_)[leaf];
    if (available < needed) {
        if (!supply(takeover.ended, needed - available)) return false;
        available = needed;
    }
    const int number = static_cast<int>(takeovers_.size());
    for (Number leaf : takeover.ended) target_[leaf] = number;
    for (Number leaf : takeover.started) {
        grow(leaf);
        source_[leaf] = number;
        bytes_[leaf] = leaf < static_cast<Number>(sizes_->size()) ? (*sizes_)[leaf] : 0;
    }
    bytes_[takeover.started.back()] += available - needed;
    takeovers_.push_back(&takeover);
    return true;
}

void ByteFlow::grow(Number leaf) {
    if (leaf < static_cast<Number>(bytes_.size())) return;
    bytes_.resize(leaf + 1, 0);
    source_.resize(leaf + 1, -1);
    target_.resize(leaf + 1, -1);
}

Number ByteFlow::spare(Number leaf) const {
    return leaf < static_cast<Number>(sizes_->size()) ? bytes_[leaf] - (*sizes_)[leaf] : bytes_[leaf];
}

// Moves bytes to leaves from others that exist, along shortest paths of takeovers (Edmonds and Karp, 1972).
bool ByteFlow::supply(const std::vector<Number>& leaves, Number needed) {
    const int origin = static_cast<int>(takeovers_.size());
    const auto source = [&](Number leaf) { return source_[leaf] < 0 ? origin : source_[leaf]; };
    while (needed > 0) {
        std::vector<int> previous(origin + 1, -2), queue;
        std::vector<Number> by(origin + 1, -1);
        const auto reach = [&](int node, int from, Number leaf) {
            if (previous[node] != -2) return;
            previous[node] = from;
            by[node] = leaf;
            queue.push_back(node);
        };
        for (Number leaf : leaves) reach(source(leaf), -1, leaf);
        Number giver = -1;
        int end = -1;
        for (std::size_t head = 0; head < queue.size() && giver < 0; ++head) {
            const int node = queue[head];
            for (Number leaf : node == origin ? initial_ : takeovers_[node]->started) {
                if (spare(leaf) <= 0 || std::find(leaves.begin(), leaves.end(), leaf) != leaves.end()) continue;
                if (target_[leaf] < 0) {
                    giver = leaf;
                    end = node;
                    break;
                }
                reach(target_[leaf], node, leaf);
            }
            if (giver < 0 && node != origin)
                for (Number leaf : takeovers_[node]->ended) reach(source(leaf), node, leaf);
        }
        if (giver < 0) return false;
        const auto shrinks = [&](int node) { return previous[node] >= 0 && target_[by[node]] == node; };
        Number amount = std::min(needed, spare(giver));
        for (int node = end; node >= 0; node = previous[node])
            if (shrinks(node)) amount = std::min(amount, spare(by[node]));
        bytes_[giver] -= amount;
        for (int node = end; node >= 0; node = previous[node]) bytes_[by[node]] += shrinks(node) ? -amount : amount;
        needed -= amount;
    }
    return true;
}

}  // namespace fxwrap::planning
