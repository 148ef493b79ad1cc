// cuDNN as the tests' driver has it: descriptors that remember what they were told; it computes convolutions alone.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "fake_driver.h"
#include "fake_numbers.h"

namespace {

struct Descriptor {
  int32_t kind;
  bool finished = false;
  std::map<int32_t, std::vector<char>> told;

  template <class T>
  T at(int32_t attribute, int64_t index = 0) const {
    T value;
    std::memcpy(&value, told.at(attribute).data() + index * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void tell(int32_t attribute, T value) {
    told[attribute].resize(sizeof(T));
    std::memcpy(told[attribute].data(), &value, sizeof(T));
  }
  const Descriptor& of(int32_t attribute) const { return *at<const Descriptor*>(attribute); }
};

int64_t count = 0;  // of descriptors that are there

constexpr int32_t chosen_number = -1, chosen_graph = -2;  // what a choice is told here

// Bytes of a value, by its type.
int64_t size_of(int32_t type) { return type == 2 ? 1 : type == 3 || type == 6 || type == 15 || type == 0 ? 8 : 4; }

// Attributes that each kind of descriptor must have been told.
const std::map<int32_t, std::vector<int32_t>> needed{
    {17, {900, 901, 902, 903, 906}}, {1, {100, 101, 102, 103, 104, 105, 106}}, {10, {700, 701, 702, 703, 704, 705}},
    {15, {800, 801}},                {4, {200, 201}},                          {5, {400, 401}},
    {16, {1000, 1001, 1003}},        {0, {0, 1}},
    {13, {750, 751, 753}},           {18, {1500}},
    {19, {1520, 1521, 1522, 1523}},  {21, {1600, 1601}},
    {22, {1610, 1611, 1612}}};

struct Numbers {
  const Descriptor& like;
  int16_t* memory;
  int16_t* at(const std::array<int64_t, 5>& place, int dimensions) const {
    int64_t offset = 0;
    for (int i = 0; i < dimensions; ++i) offset += place[i] * like.at<int64_t>(903, i);
    return memory + offset;
  }
};

// A graph's operations: alignments of a convolution's tensors, other operations by what they do.
std::string described(const Descriptor& graph) {
  std::ostringstream text;
  const int64_t operations = int64_t(graph.told.at(801).size() / sizeof(void*));
  for (int64_t i = 0; i < operations; ++i) {
    const Descriptor& operation = *graph.at<const Descriptor*>(801, i);
    text << (i == 0 ? "" : " ");
    switch (operation.kind) {
      case 10:
        text << operation.of(704).at<int64_t>(900) << " " << operation.of(703).at<int64_t>(900) << " "
             << operation.of(705).at<int64_t>(900);
        break;
      case 13:
        text << "apply" << operation.of(750).at<int32_t>(0);
        if (operation.of(750).told.count(9) != 0) text << " along " << operation.of(750).at<int64_t>(9);
        break;
      case 22:
        text << "reduce" << operation.of(1612).at<int32_t>(1600);
        break;
      default:
        text << "multiply";
    }
  }
  return text.str();
}

// Counts a place up to sizes; false at the end.
bool next(std::array<int64_t, 5>& place, const std::vector<int64_t>& sizes) {
  for (int i = int(sizes.size()) - 1; i >= 0; --i) {
    if (++place[i] < sizes[i]) return true;
    place[i] = 0;
  }
  return false;
}

void convolve(const Descriptor& forward, const Numbers& x, const Numbers& w, const Numbers& y) {
  const Descriptor& how = forward.of(702);
  const int spatial = int(how.at<int64_t>(106)), dimensions = spatial + 2;
  const bool is_bfloat = x.like.at<int32_t>(901) == 9;
  std::vector<int64_t> results(dimensions), window(spatial + 1);
  for (int i = 0; i < dimensions; ++i) results[i] = y.like.at<int64_t>(902, i);
  for (int i = 0; i <= spatial; ++i) window[i] = w.like.at<int64_t>(902, i + 1);
  std::array<int64_t, 5> place{};
  do {
    float sum = 0;
    std::array<int64_t, 5> step{};
    do {
      std::array<int64_t, 5> from{place[0], step[0]}, weight{place[1], step[0]};
      bool inside = true;
      for (int i = 0; i < spatial; ++i) {
        weight[i + 2] = step[i + 1];
        from[i + 2] = place[i + 2] * how.at<int64_t>(103, i) - how.at<int64_t>(105, i) +
                      step[i + 1] * how.at<int64_t>(102, i);
        inside = inside && from[i + 2] >= 0 && from[i + 2] < x.like.at<int64_t>(902, i + 2);
      }
      if (inside) sum += read(x.at(from, dimensions), is_bfloat) * read(w.at(weight, dimensions), is_bfloat);
    } while (next(step, window));
    write(y.at(place, dimensions), is_bfloat, sum);
  } while (next(place, results));
}

}  // namespace

extern "C" {

int64_t fake_descriptors() { return count; }

int cudnnCreate(void** handle) {
  note("library for context " + std::to_string(fake_context()) + " mode " + std::to_string(fake_capture_mode()));
  *handle = reinterpret_cast<void*>(fake_context());
  return status("cudnnCreate");
}
int cudnnSetStream(void* handle, void* stream) {
  std::ostringstream line;
  line << "stream " << reinterpret_cast<int64_t>(stream) << " for " << reinterpret_cast<int64_t>(handle);
  note(line.str());
  return status("cudnnSetStream");
}
int cudnnBackendCreateDescriptor(int32_t kind, void** made) {
  *made = new Descriptor{kind};
  ++count;
  return 0;
}
int cudnnBackendDestroyDescriptor(void* descriptor) {
  delete static_cast<Descriptor*>(descriptor);
  --count;
  return 0;
}
int cudnnBackendSetAttribute(void* to, int32_t attribute, int32_t type, int64_t count, const void* values) {
  auto& descriptor = *static_cast<Descriptor*>(to);
  if (descriptor.finished) return 2000;
  const char* bytes = static_cast<const char*>(values);
  descriptor.told[attribute].assign(bytes, bytes + count * size_of(type));
  return 0;
}
int cudnnBackendFinalize(void* to) {
  auto& descriptor = *static_cast<Descriptor*>(to);
  for (int32_t attribute : needed.at(descriptor.kind)) {
    if (descriptor.told.count(attribute) == 0) return 2000;
  }
  descriptor.finished = true;
  if (descriptor.kind != 5) return 0;
  const int which = descriptor.of(401).at<int32_t>(chosen_number);
  note("plan " + std::to_string(which));
  return which < status("refused plans") ? 3000 : 0;
}
int cudnnBackendGetAttribute(void* of, int32_t attribute, int32_t, int64_t most, int64_t* given, void* values) {
  auto& descriptor = *static_cast<Descriptor*>(of);
  if (!descriptor.finished) return 2000;
  if (attribute == 402) {  // bytes of a plan's workspace
    *static_cast<int64_t*>(values) = 0;
    *given = 1;
    return 0;
  }
  note("ask about " + described(descriptor.of(201)));
  *given = std::min<int64_t>(most, 3);
  for (int32_t i = 0; i < *given; ++i) {
    Descriptor& choice = *static_cast<Descriptor**>(values)[i];
    choice.tell(chosen_number, i);
    choice.tell(chosen_graph, descriptor.at<void*>(201));
  }
  return status("heuristics");
}
int cudnnBackendExecute(void* handle, void* plan_of, void* pack_of) {
  std::ostringstream line;
  line << "convolve on " << reinterpret_cast<int64_t>(handle) << " context " << fake_context();
  note(line.str());
  const auto &plan = *static_cast<Descriptor*>(plan_of), &pack = *static_cast<Descriptor*>(pack_of);
  if (!plan.finished || !pack.finished) return 2000;
  if (const int failed = status("cudnnBackendExecute")) return failed;
  const Descriptor& forward = plan.of(401).of(chosen_graph).of(801);
  if (forward.kind != 10) return 0;
  if (forward.at<float>(700) != 1 || forward.at<float>(701) != 0) return 2000;
  const auto numbers = [&](int32_t tensor) {
    const Descriptor& like = forward.of(tensor);
    int place = 0;
    while (pack.at<int64_t>(1000, place) != like.at<int64_t>(906)) ++place;
    return Numbers{like, pack.at<int16_t*>(1001, place)};
  };
  convolve(forward, numbers(704), numbers(703), numbers(705));
  return 0;
}

}  // extern "C"
