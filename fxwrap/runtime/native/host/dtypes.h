// The IR's names of dtypes, and those of safetensors files.
#pragma once

#include <string>

#include "bridge/bridge.h"

namespace fxwrap::host {

struct DTypeName {
  DType dtype;
  const char* name;         // the IR's
  const char* safetensors;  // the file format's, or null
  int64_t bytes;
};

inline constexpr DTypeName dtype_names[] = {
    {DType::bool_, "bool", "BOOL", 1},        {DType::uint8, "u8", "U8", 1},
    {DType::uint16, "u16", "U16", 2},         {DType::uint32, "u32", "U32", 4},
    {DType::uint64, "u64", "U64", 8},         {DType::int8, "i8", "I8", 1},
    {DType::int16, "i16", "I16", 2},          {DType::int32, "i32", "I32", 4},
    {DType::int64, "i64", "I64", 8},          {DType::float16, "f16", "F16", 2},
    {DType::bfloat16, "bf16", "BF16", 2},     {DType::float32, "f32", "F32", 4},
    {DType::float64, "f64", "F64", 8},        {DType::complex32, "c32", nullptr, 4},
    {DType::complex64, "c64", "C64", 8},      {DType::complex128, "c128", nullptr, 16},
    {DType::float8_e4m3fn, "f8e4m3fn", "F8_E4M3", 1}, {DType::float8_e5m2, "f8e5m2", "F8_E5M2", 1},
    {DType::float8_e4m3fnuz, "f8e4m3fnuz", nullptr, 1}, {DType::float8_e5m2fnuz, "f8e5m2fnuz", nullptr, 1},
    {DType::float8_e8m0fnu, "f8e8m0fnu", "F8_E8M0", 1}, {DType::float4_e2m1fn_x2, "f4e2m1fn_x2", nullptr, 1},
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

}  // namespace fxwrap::host
