#include "host/constants.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include "engine/dtypes.h"

namespace fxwrap::host {
namespace {

constexpr const char* constants_entry = "constants.safetensors";
constexpr int64_t alignment = 64;  // of storages in the file that are not copied

int64_t item_bytes(DType dtype) { return find_dtype(dtype)->bytes; }

// The first byte after a constant in its storage.
int64_t end_of(const SavedConstant& constant) {
  int64_t elements = 1;
  for (size_t i = 0; i < constant.layout.sizes.size(); ++i) {
    if (constant.layout.sizes[i] == 0) return constant.start;
    elements += (constant.layout.sizes[i] - 1) * constant.layout.strides[i];
  }
  return constant.start + elements * item_bytes(constant.layout.dtype);
}

int64_t element_count(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t(1), std::multiplies<>());
}

std::string type_text(DType dtype, const std::vector<int64_t>& sizes) {
  const DTypeName* name = find_dtype(dtype);
  std::string text = (name == nullptr ? "dtype " + std::to_string(int(dtype)) : std::string(name->name)) + "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

std::string joined(const std::vector<std::string>& items) {
  std::string text;
  for (size_t i = 0; i < items.size(); ++i) text += (i ? ", " : "") + items[i];
  return text;
}

std::string quoted(const std::string& name) { return "'" + name + "'"; }

std::vector<int64_t> integers(const Json& items) {
  std::vector<int64_t> numbers;
  for (const Json& item : items.items()) numbers.push_back(item.integer());
  return numbers;
}

// A tensor in a safetensors file: bytes from `start` on.
struct FileTensor {
  std::string name;
  DType dtype;
  std::vector<int64_t> sizes;
  int64_t start, size;
};

// The tensors of a file in the safetensors format, which have no gaps. Throws JsonError.
std::vector<FileTensor> read_header(const uint8_t* data, size_t size) {
  uint64_t length = 0;
  if (size < sizeof length) throw JsonError("its table of tensors is longer than the file");
  std::memcpy(&length, data, sizeof length);
  if (length > size - sizeof length) throw JsonError("its table of tensors is longer than the file");
  const int64_t header = int64_t(length + sizeof length);
  std::vector<FileTensor> tensors;
  const Json table = Json::parse({reinterpret_cast<const char*>(data) + sizeof length, length});
  for (const auto& [name, item] : table.members()) {
    if (name == "__metadata__") continue;
    const DTypeName* dtype = find_safetensors_dtype(item.at("dtype").string());
    if (dtype == nullptr) throw JsonError("'" + name + "' has the dtype " + item.at("dtype").string() + ", which is unknown");
    const std::vector<int64_t> place = integers(item.at("data_offsets")), sizes = integers(item.at("shape"));
    const bool inside = place.size() == 2 && 0 <= place[0] && place[0] <= place[1] && place[1] <= int64_t(size) - header;
    if (!inside || place[1] - place[0] != element_count(sizes) * dtype->bytes) {
      throw JsonError("the bytes of '" + name + "' do not fit its shape");
    }
    tensors.push_back({name, dtype->dtype, sizes, header + place[0], place[1] - place[0]});
  }
  return tensors;
}

std::vector<int64_t> contiguous(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

// Memory for the bytes of a file: the mapped ones, or a copy.
TensorHandle file_memory(const uint8_t* bytes, int64_t size, const std::shared_ptr<MappedFile>& file,
                         const std::string& device, bool copied, Engine& engine) {
  if (!copied && reinterpret_cast<uintptr_t>(bytes) % alignment == 0) return engine.make_memory(bytes, size, file, device);
  auto copy = std::shared_ptr<uint8_t>(static_cast<uint8_t*>(std::aligned_alloc(alignment, size_t(size + alignment) / alignment * alignment)), std::free);
  std::memcpy(copy.get(), bytes, size_t(size));
  return engine.make_memory(copy.get(), size, copy, device);
}

std::shared_ptr<const ConstantSet> make_set(std::vector<TensorHandle> tensors) {
  auto set = std::make_shared<ConstantSet>();
  set->tensors = std::move(tensors);
  for (const TensorHandle& tensor : set->tensors) set->pointers.push_back(tensor.get());
  return set;
}

// --- replacement -----------------------------------------------------------------------------------------------------

using Replacements = std::map<size_t, TensorHandle>;  // by the constant's index

class Replacing {
 public:
  Replacing(const std::string& path, const std::vector<SavedConstant>& layout, const ConstantSet& previous, Engine& engine)
      : path_(path), layout_(layout), previous_(previous), engine_(engine) {
    for (size_t i = 0; i < layout.size(); ++i) groups_[layout[i].memory].push_back(i);
  }

  std::shared_ptr<const ConstantSet> run(const std::vector<NamedTensor>& named) {
    match(named);
    check();
    std::vector<TensorHandle> tensors = previous_.tensors;
    tensors.resize(layout_.size());
    for (const auto& [memory, group] : groups_) {
      if (std::none_of(group.begin(), group.end(), [&](size_t i) { return new_.count(i) != 0; })) continue;
      if (group.size() == 1) {
        tensors[group[0]] = engine_.with_layout(new_[group[0]], layout_[group[0]].layout, layout_[group[0]].device);
      } else {
        bind_shared(group, tensors);
      }
    }
    return make_set(std::move(tensors));
  }

 private:
  Failure error(const std::string& reason, const std::string& remedy) const {
    return artifact_error(path_, "", reason, remedy);
  }

  // The constant of a name in the program or in the model.
  const SavedConstant* find(const std::string& key) const {
    std::string plain = key;
    std::replace(plain.begin(), plain.end(), '.', '_');
    for (const std::string& name : {key, plain, "p_" + plain, "b_" + plain, "c_" + plain}) {
      for (const SavedConstant& constant : layout_) {
        if (constant.name == name) return &constant;
      }
    }
    return nullptr;
  }

  void match(const std::vector<NamedTensor>& named) {
    std::map<size_t, std::string> keys;
    for (const auto& [key, tensor] : named) {
      const SavedConstant* constant = find(key);
      if (constant == nullptr) {
        unexpected_.push_back(quoted(key));
        continue;
      }
      const size_t index = size_t(constant - layout_.data());
      if (new_.count(index) != 0) {
        throw error(quoted(keys[index]) + " and " + quoted(key) + " both name the constant " + quoted(constant->name),
                    "Pass one of them");
      }
      new_[index] = tensor;
      keys[index] = key;
    }
  }

  bool covers(size_t index, const std::vector<size_t>& group) const {
    const SavedConstant& constant = layout_[index];
    const int64_t bytes = element_count(constant.layout.sizes) * item_bytes(constant.layout.dtype);
    return bytes == end_of(constant) - constant.start && std::all_of(group.begin(), group.end(), [&](size_t other) {
      return layout_[other].start >= constant.start && end_of(layout_[other]) <= end_of(constant);
    });
  }

  std::vector<std::string> missing() const {
    std::vector<std::string> names;
    if (!previous_.tensors.empty()) return names;
    for (const auto& [memory, group] : groups_) {
      const bool covered = std::any_of(group.begin(), group.end(),
                                       [&](size_t i) { return new_.count(i) != 0 && covers(i, group); });
      for (size_t i : group) {
        if (!covered && new_.count(i) == 0) names.push_back(quoted(layout_[i].name));
      }
    }
    return names;
  }

  void check() const {
    std::vector<std::string> wrong, problems;
    for (const auto& [index, tensor] : new_) {
      const TensorLayout actual = engine_.layout_of(tensor), &wanted = layout_[index].layout;
      if (actual.dtype == wanted.dtype && actual.sizes == wanted.sizes) continue;
      wrong.push_back(quoted(layout_[index].name) + " is " + type_text(actual.dtype, actual.sizes) + ", not " +
                      type_text(wanted.dtype, wanted.sizes));
    }
    const std::vector<std::string> absent = missing();
    if (!absent.empty()) problems.push_back("missing: " + joined(absent));
    if (!unexpected_.empty()) problems.push_back("unexpected: " + joined(unexpected_));
    if (!wrong.empty()) problems.push_back("of another type: " + joined(wrong));
    if (problems.empty()) return;
    std::string texts = problems[0];
    for (size_t i = 1; i < problems.size(); ++i) texts += "; " + problems[i];
    std::vector<std::string> known;
    for (size_t i = 0; i < layout_.size() && i < 4; ++i) known.push_back(quoted(layout_[i].name));
    throw error("the constants do not fit the program; " + texts,
                "Pass a tensor for each of the program's constants (" + joined(known) +
                    (layout_.size() > 4 ? ", ...)" : ")") + ", see `program.constants`");
  }

  // New memory for constants that share some: the previous content with the new tensors copied into it.
  void bind_shared(const std::vector<size_t>& group, std::vector<TensorHandle>& tensors) {
    int64_t size = 0;
    for (size_t i : group) size = std::max(size, end_of(layout_[i]));
    const TensorHandle memory = engine_.make_empty_memory(size, layout_[group[0]].device);
    std::map<size_t, TensorHandle> views;
    for (size_t i : group) views[i] = engine_.make_view(memory, layout_[i].start, layout_[i].layout);
    for (size_t i : group) {
      if (tensors[i] != nullptr && new_.count(i) == 0) engine_.copy(views[i], tensors[i]);
    }
    std::vector<size_t> passed;
    for (size_t i : group) {
      if (new_.count(i) != 0) passed.insert(covers(i, group) ? passed.begin() : passed.end(), i);
    }
    for (size_t i : passed) engine_.copy(views[i], new_[i]);
    for (size_t i : passed) {
      if (engine_.equal(views[i], new_[i])) continue;
      std::vector<std::string> names;
      for (size_t other : group) names.push_back(quoted(layout_[other].name));
      throw error("the constants " + joined(names) + " share memory in the program, and their tensors differ",
                  "Pass equal values, or only those of " + quoted(layout_[passed[0]].name));
    }
    for (size_t i : group) tensors[i] = views[i];
  }

  const std::string& path_;
  const std::vector<SavedConstant>& layout_;
  const ConstantSet& previous_;
  Engine& engine_;
  std::map<std::string, std::vector<size_t>> groups_;  // of constants in one storage
  Replacements new_;
  std::vector<std::string> unexpected_;
};

}  // namespace

std::vector<SavedConstant> read_layout(const Archive& archive, const std::vector<std::string>& devices) {
  const Json& described = archive.manifest().at("constants");
  std::map<std::string, int64_t> sizes;
  for (const auto& [key, size] : described.at("memory").members()) sizes[key] = size.integer();
  std::vector<SavedConstant> constants;
  for (const Json& item : described.at("windows").items()) {
    const DTypeName* dtype = find_dtype(item.at("dtype").string());
    if (dtype == nullptr || constants.size() == devices.size()) throw JsonError("a constant has no known dtype or device");
    SavedConstant constant{item.at("name").string(), item.at("memory").string(), item.at("start").integer(),
                           {dtype->dtype, integers(item.at("sizes")), integers(item.at("strides"))},
                           devices[constants.size()]};
    const auto size = sizes.find(constant.memory);
    const bool is_inside = constant.start >= 0 && size != sizes.end() && end_of(constant) <= size->second &&
                           constant.layout.sizes.size() == constant.layout.strides.size();
    if (!is_inside || constant.start % dtype->bytes != 0) {
      throw archive.error(manifest_name, "constant '" + constant.name + "' is not inside its storage");
    }
    constants.push_back(std::move(constant));
  }
  return constants;
}

std::shared_ptr<const ConstantSet> load_saved(const Archive& archive, const std::vector<SavedConstant>& layout,
                                              Engine& engine, bool copied) {
  if (layout.empty()) return make_set({});
  const Content content = archive.read(constants_entry);
  std::map<std::string, FileTensor> parts;
  try {
    for (FileTensor& tensor : read_header(content.data, content.size)) parts.emplace(tensor.name, std::move(tensor));
  } catch (const JsonError& failure) {
    throw archive.error(constants_entry, failure.what());
  }
  const Json& sizes = archive.manifest().at("constants").at("memory");
  std::map<std::string, TensorHandle> memory;
  std::vector<TensorHandle> tensors;
  for (const SavedConstant& constant : layout) {
    const auto part = parts.find(constant.memory);
    if (part == parts.end() || part->second.size != sizes.at(constant.memory).integer()) {
      throw archive.error(constants_entry, "its tensors are not those of the manifest");
    }
    TensorHandle& storage = memory[constant.memory];
    if (storage == nullptr) {
      const uint8_t* bytes = content.data + part->second.start;
      storage = file_memory(bytes, part->second.size, archive.file(), constant.device, copied, engine);
    }
    tensors.push_back(engine.make_view(storage, constant.start, constant.layout));
  }
  return make_set(std::move(tensors));
}

std::shared_ptr<const ConstantSet> replaced(const std::string& path, const std::vector<SavedConstant>& layout,
                                            const ConstantSet& previous, const std::vector<NamedTensor>& tensors,
                                            Engine& engine) {
  return Replacing(path, layout, previous, engine).run(tensors);
}

Failure missing_constants(const std::string& path, const std::vector<SavedConstant>& layout) {
  std::vector<std::string> names;
  for (size_t i = 0; i < layout.size() && i < 8; ++i) names.push_back(quoted(layout[i].name));
  const std::string count = std::to_string(layout.size());
  return artifact_error(path, "", "it was saved without its " + count + " constants (" + joined(names) +
                        (layout.size() > 8 ? ", ...)" : ")"), "Bind them with load_constants first");
}

std::vector<NamedTensor> read_tensor_file(const std::string& path, Engine& engine) {
  const auto file = std::make_shared<MappedFile>(path);
  std::vector<NamedTensor> tensors;
  try {
    for (const FileTensor& tensor : read_header(file->data(), file->size())) {
      const bool aligned = tensor.start % item_bytes(tensor.dtype) == 0;
      const uint8_t* bytes = file->data() + tensor.start;
      const TensorHandle memory = aligned ? engine.make_memory(bytes, tensor.size, file, "cpu")
                                          : file_memory(bytes, tensor.size, file, "cpu", true, engine);
      tensors.push_back({tensor.name, engine.make_view(memory, 0, {tensor.dtype, tensor.sizes, contiguous(tensor.sizes)})});
    }
  } catch (const JsonError& failure) {
    throw artifact_error(path, "", failure.what(), "Pass a file in the safetensors format");
  }
  return tensors;
}

}  // namespace fxwrap::host
