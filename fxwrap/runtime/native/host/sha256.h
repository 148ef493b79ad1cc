// SHA-256, with the processor's instructions where it has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace fxwrap::host {

using Digest = std::array<uint8_t, 32>;

Digest sha256(const void* data, size_t size);

// The digest in hexadecimal digits.
std::string hex(const Digest& digest);

// The hash of an entry of a saved program: of its content, or of the hashes of its parts of 1 MiB if it has several.
// Long contents are hashed by several threads.
std::string content_hash(const void* data, size_t size);

}  // namespace fxwrap::host
