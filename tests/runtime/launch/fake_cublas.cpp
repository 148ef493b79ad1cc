// cuBLASLt as the tests' driver has it: matrices by columns in host memory, multiplied one number after another.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <sstream>

#include "fake_driver.h"
#include "fake_numbers.h"

namespace {

struct Operation {
  int32_t transposed[2] = {0, 0};
  int32_t epilogue = 1;
  const char* bias = nullptr;
  char* input = nullptr;  // of the activation, which the epilogue stores
  int64_t input_step = 0;
};

struct Layout {
  int32_t type;
  int64_t rows, columns, step;
};

struct Preference {
  uint64_t workspace = 0;
  uint32_t reductions = 0xffffffff;
  uint32_t alignments[4] = {};
};

struct Found {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

int16_t* place(const void* start, const Layout& layout, int64_t row, int64_t column) {
  return const_cast<int16_t*>(static_cast<const int16_t*>(start)) + column * layout.step + row;
}

float activated(float value, int32_t epilogue) {
  if (epilogue & 2) return std::fmax(value, 0.0f);
  if (epilogue & 32) return 0.5f * value * (1 + std::tanh(0.7978845608f * (value + 0.044715f * value * value * value)));
  return value;
}

}  // namespace

extern "C" {

int cublasLtCreate(void** handle) {
  note("library for context " + std::to_string(fake_context()) + " mode " + std::to_string(fake_capture_mode()));
  *handle = reinterpret_cast<void*>(fake_context());
  return status("cublasLtCreate");
}
int cublasLtMatmulDescCreate(void** made, int32_t compute, int32_t scale) {
  *made = new Operation;
  return compute == 68 && scale == 0 ? 0 : 7;
}
int cublasLtMatmulDescDestroy(void* operation) {
  delete static_cast<Operation*>(operation);
  return 0;
}
int cublasLtMatmulDescSetAttribute(void* to, int32_t attribute, const void* value, size_t size) {
  auto& operation = *static_cast<Operation*>(to);
  if (attribute == 8 || attribute == 11) {
    std::memcpy(attribute == 8 ? static_cast<void*>(&operation.bias) : &operation.input, value, size);
    return size == sizeof(void*) ? 0 : 7;
  }
  if (attribute == 12) {
    std::memcpy(&operation.input_step, value, size);
    return size == sizeof(int64_t) ? 0 : 7;
  }
  int32_t& place = attribute == 7 ? operation.epilogue : operation.transposed[attribute - 3];
  std::memcpy(&place, value, size);
  return size == sizeof(int32_t) ? 0 : 7;
}
int cublasLtMatrixLayoutCreate(void** made, int32_t type, uint64_t rows, uint64_t columns, int64_t step) {
  *made = new Layout{type, int64_t(rows), int64_t(columns), step};
  return step >= int64_t(rows) ? 0 : 7;
}
int cublasLtMatrixLayoutDestroy(void* layout) {
  delete static_cast<Layout*>(layout);
  return 0;
}
int cublasLtMatmulPreferenceCreate(void** made) {
  *made = new Preference;
  return 0;
}
int cublasLtMatmulPreferenceDestroy(void* preference) {
  delete static_cast<Preference*>(preference);
  return 0;
}
int cublasLtMatmulPreferenceSetAttribute(void* to, int32_t attribute, const void* value, size_t size) {
  auto& preference = *static_cast<Preference*>(to);
  void* place = attribute == 1   ? static_cast<void*>(&preference.workspace)
                : attribute == 3 ? static_cast<void*>(&preference.reductions)
                                 : &preference.alignments[attribute - 5];
  std::memcpy(place, value, size);
  return size == (attribute == 1 ? sizeof(uint64_t) : sizeof(uint32_t)) ? 0 : 7;
}
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void* wishes, int, Found* found, int* count) {
  const auto& preference = *static_cast<Preference*>(wishes);
  std::ostringstream line;
  line << "plan with " << (preference.workspace >> 20) << " MiB for";
  for (uint32_t alignment : preference.alignments) line << " " << alignment;
  if (preference.reductions == 2) line << " with parts in float32";
  note(line.str());
  *count = status("algorithms") == 0;
  found->algorithm[7] = 42;
  return 0;
}
int cublasLtMatmul(void* handle, void* how, const float* alpha, const void* first, void* first_layout, const void* second,
                   void* second_layout, const float* beta, const void*, void*, void* result, void* result_layout,
                   const uint64_t* algorithm, void*, size_t, void* stream) {
  std::ostringstream line;
  line << "multiply on " << reinterpret_cast<int64_t>(handle) << " stream " << reinterpret_cast<int64_t>(stream)
       << " context " << fake_context();
  note(line.str());
  if (*alpha != 1 || *beta != 0 || algorithm[7] != 42) return 7;
  if (const int failed = status("cublasLtMatmul")) return failed;
  const auto& operation = *static_cast<Operation*>(how);
  const auto &a = *static_cast<Layout*>(first_layout), &b = *static_cast<Layout*>(second_layout),
             &d = *static_cast<Layout*>(result_layout);
  const int64_t terms = operation.transposed[0] ? a.rows : a.columns;
  for (int64_t row = 0; row < d.rows; ++row) {
    for (int64_t column = 0; column < d.columns; ++column) {
      float sum = operation.epilogue & 4 ? read(reinterpret_cast<const int16_t*>(operation.bias) + row, d.type == 14) : 0;
      for (int64_t term = 0; term < terms; ++term) {
        const int16_t* x = operation.transposed[0] ? place(first, a, term, row) : place(first, a, row, term);
        const int16_t* y = operation.transposed[1] ? place(second, b, column, term) : place(second, b, term, column);
        sum += read(x, a.type == 14) * read(y, b.type == 14);
      }
      if (operation.epilogue & 128) {
        write(reinterpret_cast<int16_t*>(operation.input) + column * operation.input_step + row, d.type == 14, sum);
      }
      write(place(result, d, row, column), d.type == 14, activated(sum, operation.epilogue));
    }
  }
  return 0;
}

}  // extern "C"
