#include "planning/orders.h"

#include <algorithm>
#include <cmath>

namespace fxwrap::planning {

namespace {

bool is_ordered(Number header) { return (-header) % 2 == 0; }

std::size_t child_count(Number header) { return static_cast<std::size_t>((-header - 1) / 2); }

Number header_of(std::size_t children, bool is_ordered) { return -2 * static_cast<Number>(children) - 1 - is_ordered; }

Number rounded_log(std::size_t value) { return std::llrint(static_cast<double>(FREEDOM_UNIT) * std::log(static_cast<double>(value))); }

// Sums of logarithms: of the numbers of orders of that many children. Threads plan at the same time.
Number log_factorial(std::size_t count) {
    thread_local std::vector<Number> table{0, 0};
    while (table.size() <= count) table.push_back(table.back() + rounded_log(table.size()));
    return table[count];
}

std::uint64_t digest_at(const Tree& tree, std::size_t& position, const std::vector<std::uint64_t>& leaf_digests) {
    const Number header = tree[position++];
    if (header >= 0) return leaf_digests[header];
    const std::size_t count = child_count(header);
    if (!is_ordered(header)) {
        std::uint64_t sum = count;
        for (std::size_t child = 0; child < count; ++child) sum += mix(digest_at(tree, position, leaf_digests));
        return mix(sum);
    }
    std::vector<std::uint64_t> parts;
    for (std::size_t child = 0; child < count; ++child) parts.push_back(digest_at(tree, position, leaf_digests));
    std::uint64_t forward = 0, backward = 0;
    for (std::size_t child = 0; child < count; ++child) {
        forward = mix(forward ^ parts[child]) + 1;
        backward = mix(backward ^ parts[count - 1 - child]) + 1;
    }
    return std::min(forward, backward);
}

}  // namespace

std::uint64_t mix(std::uint64_t value) {
    value += 0x9E3779B97F4A7C15u;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

Tree node_of(const std::vector<Number>& leaves) {
    if (leaves.size() == 1) return leaves;
    Tree tree{header_of(leaves.size(), false)};
    tree.insert(tree.end(), leaves.begin(), leaves.end());
    return tree;
}

Number freedom(const Tree& tree) {
    static const Number log_2 = rounded_log(2);
    Number sum = 0;
    for (Number header : tree)
        if (header < 0) sum += is_ordered(header) ? log_2 : log_factorial(child_count(header));
    return sum;
}

std::uint64_t digest(const Tree& tree, const std::vector<std::uint64_t>& leaf_digests) {
    std::size_t position = 0;
    return digest_at(tree, position, leaf_digests);
}

void append_leaves(const Tree& tree, std::vector<Number>& leaves) {
    for (Number header : tree)
        if (header >= 0) leaves.push_back(header);
}

Gathering::Gathering(const Tree& tree) {
    std::size_t position = 0;
    root_ = load(tree, position);
    loaded_ = size_;
}

bool Gathering::gather(const std::vector<char>& is_chosen, const Tree* replacement, Gathered& gathered) {
    size_ = loaded_;
    count(root_, is_chosen);
    const int root = gathered_root(root_, replacement, gathered);
    if (root < 0) return false;
    gathered.tree.clear();
    write(root, gathered.tree);
    return true;
}

int Gathering::load(const Tree& tree, std::size_t& position) {
    const Number header = tree[position++];
    const int index = create();
    if (header >= 0) {
        nodes_[index].leaf = header;
        return index;
    }
    nodes_[index].is_ordered = planning::is_ordered(header);
    for (std::size_t child = 0; child < child_count(header); ++child) {
        const int loaded = load(tree, position);
        nodes_[index].children.push_back(loaded);
    }
    return index;
}

int Gathering::create() {
    if (size_ == static_cast<int>(nodes_.size())) nodes_.emplace_back();
    Node& node = nodes_[size_];
    node.is_ordered = false;
    node.leaf = -1;
    node.children.clear();
    node.replacement = nullptr;
    return size_++;
}

int Gathering::node_of(const std::vector<int>& children, bool is_ordered) {
    if (children.size() == 1) return children[0];
    const int index = create();
    nodes_[index].is_ordered = is_ordered && children.size() > 2;
    nodes_[index].children = children;
    return index;
}

void Gathering::count(int index, const std::vector<char>& is_chosen) {
    Node& node = nodes_[index];
    if (node.leaf >= 0) {
        node.count = 1;
        node.chosen = is_chosen[node.leaf] != 0;
        return;
    }
    node.count = node.chosen = 0;
    for (int child : node.children) {
        count(child, is_chosen);
        node.count += nodes_[child].count;
        node.chosen += nodes_[child].chosen;
    }
}

Number Gathering::first_leaf(int index) const {
    while (nodes_[index].leaf < 0) index = nodes_[index].children[0];
    return nodes_[index].leaf;
}

void Gathering::append_order(int index, std::vector<Number>& order) const {
    if (nodes_[index].leaf >= 0) order.push_back(nodes_[index].leaf);
    for (int child : nodes_[index].children) append_order(child, order);
}

void Gathering::write(int index, Tree& tree) const {
    const Node& node = nodes_[index];
    if (node.replacement) {
        tree.insert(tree.end(), node.replacement->begin(), node.replacement->end());
    } else if (node.leaf >= 0) {
        tree.push_back(node.leaf);
    } else {
        tree.push_back(header_of(node.children.size(), node.is_ordered));
        for (int child : node.children) write(child, tree);
    }
}

// Appends children of a Q-node, in which the chosen leaves come last: the others and these; returns false if they
// cannot.
bool Gathering::linear(int index, std::vector<int>& before, std::vector<int>& after) {
    if (is_full(index)) {
        after.push_back(index);
        return true;
    }
    if (is_empty(index)) {
        before.push_back(index);
        return true;
    }
    std::vector<int> children = nodes_[index].children;
    if (nodes_[index].is_ordered) {
        if (is_full(children.front()) || is_empty(children.back())) std::reverse(children.begin(), children.end());
    } else {
        std::vector<int> empty, partial, full;
        for (int child : children) (is_empty(child) ? empty : is_full(child) ? full : partial).push_back(child);
        if (partial.size() > 1) return false;
        if (!empty.empty()) before.push_back(node_of(empty, false));
        for (int child : partial)
            if (!linear(child, before, after)) return false;
        if (!full.empty()) after.push_back(node_of(full, false));
        return true;
    }
    std::vector<int> chosen;
    for (int child : children) {
        if (!chosen.empty() && !is_full(child)) return false;
        if (!linear(child, before, chosen)) return false;
    }
    after.insert(after.end(), chosen.begin(), chosen.end());
    return true;
}

int Gathering::gathered_root(int index, const Tree* replacement, Gathered& gathered) {
    int replaced = -1;
    if (replacement) {
        replaced = create();
        nodes_[replaced].replacement = replacement;
    }
    gathered.order.clear();
    gathered.anchor = -1;
    gathered.is_anchor_left = false;
    if (is_full(index)) {
        append_order(index, gathered.order);
        return replacement ? replaced : index;
    }
    const bool is_ordered = nodes_[index].is_ordered;
    std::vector<int> children = nodes_[index].children;
    std::vector<std::size_t> touched;
    for (std::size_t position = 0; position < children.size(); ++position)
        if (!is_empty(children[position])) touched.push_back(position);
    const std::size_t begin = touched.front(), end = touched.back() + 1;
    if (touched.size() == 1) {
        const int inner = gathered_root(children[begin], replacement, gathered);
        if (inner < 0) return -1;
        children[begin] = inner;
        return node_of(children, is_ordered);
    }
    std::vector<int> left, middle, right, outside;
    if (is_ordered) {
        for (std::size_t position = begin + 1; position + 1 < end; ++position)
            if (!is_full(children[position])) return -1;
        left.assign(children.begin(), children.begin() + begin);
        if (!linear(children[begin], left, middle)) return -1;
        middle.insert(middle.end(), children.begin() + begin + 1, children.begin() + end - 1);
        std::vector<int> last;
        if (!linear(children[end - 1], right, last)) return -1;
        std::reverse(right.begin(), right.end());
        middle.insert(middle.end(), last.rbegin(), last.rend());
        right.insert(right.end(), children.begin() + end, children.end());
    } else {
        std::vector<int> full, partial;
        for (int child : children) (is_empty(child) ? outside : is_full(child) ? full : partial).push_back(child);
        if (partial.size() > 2) return -1;
        if (partial.size() > 0 && !linear(partial[0], left, middle)) return -1;
        if (!full.empty()) middle.push_back(node_of(full, false));
        std::vector<int> last;
        if (partial.size() > 1 && !linear(partial[1], right, last)) return -1;
        std::reverse(right.begin(), right.end());
        middle.insert(middle.end(), last.rbegin(), last.rend());
    }
    for (int child : middle) append_order(child, gathered.order);
    gathered.is_anchor_left = !left.empty();
    if (!left.empty()) gathered.anchor = first_leaf(left.back());
    if (left.empty() && !right.empty()) gathered.anchor = first_leaf(right.front());
    if (replacement) middle = {replaced};
    left.insert(left.end(), middle.begin(), middle.end());
    left.insert(left.end(), right.begin(), right.end());
    const int inside = node_of(left, true);
    if (is_ordered) return inside;
    outside.push_back(inside);
    return node_of(outside, false);
}

}  // namespace fxwrap::planning
