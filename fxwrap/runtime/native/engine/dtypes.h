// The IR's names of dtypes, those of safetensors files, and the codes of DLPack.
#pragma once

#include <string>

#include "bridge/bridge.h"

namespace fxwrap {

struct DTypeName {
  DType dtype;
  const char* name;         // the IR's
  const char* safetensors;  // the file format's, or null
  int64_t bytes;
  uint8_t code, bits, lanes;  // DLPack's; 0 bits for none
};

inline constexpr DTypeName dtype_names[] = {
    {DType::bool_, "bool", "BOOL", 1, 6, 8, 1},
    {DType::uint8, "u8", "U8", 1, 1, 8, 1},
    {DType::uint16, "u16", "U16", 2, 1, 16, 1},
    {DType::uint32, "u32", "U32", 4, 1, 32, 1},
    {DType::uint64, "u64", "U64", 8, 1, 64, 1},
    {DType::int8, "i8", "I8", 1, 0, 8, 1},
    {DType::int16, "i16", "I16", 2, 0, 16, 1},
    {DType::int32, "i32", "I32", 4, 0, 32, 1},
    {DType::int64, "i64", "I64", 8, 0, 64, 1},
    {DType::float16, "f16", "F16", 2, 2, 16, 1},
    {DType::bfloat16, "bf16", "BF16", 2, 4, 16, 1},
    {DType::float32, "f32", "F32", 4, 2, 32, 1},
    {DType::float64, "f64", "F64", 8, 2, 64, 1},
    {DType::complex32, "c32", nullptr, 4, 5, 32, 1},
    {DType::complex64, "c64", "C64", 8, 5, 64, 1},
    {DType::complex128, "c128", nullptr, 16, 5, 128, 1},
    {DType::float8_e4m3fn, "f8e4m3fn", "F8_E4M3", 1, 10, 8, 1},
    {DType::float8_e5m2, "f8e5m2", "F8_E5M2", 1, 12, 8, 1},
    {DType::float8_e4m3fnuz, "f8e4m3fnuz", nullptr, 1, 11, 8, 1},
    {DType::float8_e5m2fnuz, "f8e5m2fnuz", nullptr, 1, 13, 8, 1},
    {DType::float8_e8m0fnu, "f8e8m0fnu", "F8_E8M0", 1, 14, 8, 1},
    {DType::float4_e2m1fn_x2, "f4e2m1fn_x2", nullptr, 1, 17, 4, 2},
    {DType::quint8, "qu8", nullptr, 1, 0, 0, 0},
    {DType::qint8, "qi8", nullptr, 1, 0, 0, 0},
    {DType::qint32, "qi32", nullptr, 4, 0, 0, 0},
    {DType::quint4x2, "qu4x2", nullptr, 1, 0, 0, 0},
    {DType::quint2x4, "qu2x4", nullptr, 1, 0, 0, 0},
    {DType::bits8, "bits8", nullptr, 1, 0, 0, 0},
    {DType::bits16, "bits16", nullptr, 2, 0, 0, 0},
    {DType::bits1x8, "bits1x8", nullptr, 1, 0, 0, 0},
    {DType::bits2x4, "bits2x4", nullptr, 1, 0, 0, 0},
    {DType::bits4x2, "bits4x2", nullptr, 1, 0, 0, 0},
    {DType::bcomplex32, "bc32", nullptr, 4, 0, 0, 0},
};

inline const DTypeName* find_dtype(const std::string& name) {
  for (const DTypeName& item : dtype_names) {
    if (name == item.name) return &item;
  }
  return nullptr;
}

inline const DTypeName* find_safetensors_dtype(const std::string& name) {
  for (const DTypeName& item : dtype_names) {
    if (item.safetensors != nullptr && name == item.safetensors) return &item;
  }
  return nullptr;
}

inline const DTypeName* find_dtype(DType dtype) {
  for (const DTypeName& item : dtype_names) {
    if (dtype == item.dtype) return &item;
  }
  return nullptr;
}

}  // namespace fxwrap
