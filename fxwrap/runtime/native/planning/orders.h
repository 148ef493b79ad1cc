// Sets of orders in which chosen leaves are consecutive (PQ-trees). The reference is fxwrap/memory_planning/orders.py:
// both have equal results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planning/placement.h"

namespace fxwrap::planning {

// `freedom` of e = 2.718... orders.
constexpr Number FREEDOM_UNIT = 1024;

// A tree in preorder: a leaf is its number, a node with n children is -2n - 1, or -2n - 2 if they are ordered.
using Tree = std::vector<Number>;

struct Gathered {
    Tree tree;
    std::vector<Number> order;
    Number anchor = -1;
    bool is_anchor_left = false;
};

// Returns 64 bits that depend on all bits of a value (SplitMix64).
std::uint64_t mix(std::uint64_t value);

// Returns a node with leaves, which is the leaf if there is only one.
Tree node_of(const std::vector<Number>& leaves);

// Returns the logarithm of the number of orders.
Number freedom(const Tree& tree);

std::uint64_t digest(const Tree& tree, const std::vector<std::uint64_t>& leaf_digests);

// Appends the leaves in one of the orders.
void append_leaves(const Tree& tree, std::vector<Number>& leaves);

// Makes leaves of one tree consecutive.
class Gathering {
  public:
    explicit Gathering(const Tree& tree);

    // `is_chosen` is by leaf. Replaces the leaves unless there is no replacement; returns false if they cannot be.
    bool gather(const std::vector<char>& is_chosen, const Tree* replacement, Gathered& gathered);

  private:
    struct Node {
        bool is_ordered;
        Number leaf;  // -1 for none
        std::vector<int> children;
        const Tree* replacement = nullptr;
        int count = 0;
        int chosen = 0;
    };

    int load(const Tree& tree, std::size_t& position);
    int create();
    int node_of(const std::vector<int>& children, bool is_ordered);
    void count(int index, const std::vector<char>& is_chosen);
    bool is_full(int index) const { return nodes_[index].chosen == nodes_[index].count; }
    bool is_empty(int index) const { return nodes_[index].chosen == 0; }
    Number first_leaf(int index) const;
    void append_order(int index, std::vector<Number>& order) const;
    void write(int index, Tree& tree) const;
    bool linear(int index, std::vector<int>& before, std::vector<int>& after);
    int gathered_root(int index, const Tree* replacement, Gathered& gathered);

    std::vector<Node> nodes_;
    int size_ = 0;
    int loaded_ = 0;
    int root_ = 0;
};

}  // namespace fxwrap::planning
