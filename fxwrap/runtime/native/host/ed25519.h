// Checks Ed25519 signatures, as RFC 8032 defines them and fxwrap/artifact/ed25519.py does.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace fxwrap::host {

using PublicKey = std::array<uint8_t, 32>;

// Whether the owner of a key has signed a message; a signature has 64 bytes.
bool verify_ed25519(const PublicKey& key, const std::string& message, const uint8_t* signature);

}  // namespace fxwrap::host
