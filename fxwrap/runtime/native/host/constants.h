// The constants of an open model: tensors over the memory of its file, and their replacement.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "host/archive.h"

namespace fxwrap::host {

// A constant: its storage in the file, its first byte there, its type, and its device.
struct SavedConstant {
  std::string name;
  std::string memory;
  int64_t start;
  TensorLayout layout;
  std::string device;
};

// The constants of one moment, which a call sees as a whole. `tensors` is empty for a file that was saved without.
struct ConstantSet {
  std::vector<TensorHandle> tensors;
  std::vector<void*> pointers;  // of the tensors
};

// A named tensor for a constant.
struct NamedTensor {
  std::string name;
  TensorHandle tensor;
};

// The constants in a manifest; throws JsonError, or Failure for one outside of its storage.
std::vector<SavedConstant> read_layout(const Archive& archive, const std::vector<std::string>& devices);

// The constants of a file; with `copied`, in memory of their own. Throws Failure.
std::shared_ptr<const ConstantSet> load_saved(const Archive& archive, const std::vector<SavedConstant>& layout,
                                              Engine& engine, bool copied);

// The set with some constants replaced; throws Failure for tensors that do not fit.
std::shared_ptr<const ConstantSet> replaced(const std::string& path, const std::vector<SavedConstant>& layout,
                                            const ConstantSet& previous, const std::vector<NamedTensor>& tensors,
                                            Engine& engine);

// The error of a file without its constants, as Python's.
Failure missing_constants(const std::string& path, const std::vector<SavedConstant>& layout);

// The tensors of a safetensors file, mapped. Throws Failure.
std::vector<NamedTensor> read_tensor_file(const std::string& path, Engine& engine);

}  // namespace fxwrap::host
