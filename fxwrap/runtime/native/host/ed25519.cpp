// Field elements have five limbs of 51 bits, points are in extended coordinates.
#include "host/ed25519.h"

#include <algorithm>
#include <cstring>

namespace fxwrap::host {
namespace {

using Wide = unsigned __int128;

// --- SHA-512 ---------------------------------------------------------------------------------------------------------

constexpr uint64_t round_constants[80] = {
    0x428a2f98d728ae22, 0x7137449123ef65cd, 0xb5c0fbcfec4d3b2f, 0xe9b5dba58189dbbc,
    0x3956c25bf348b538, 0x59f111f1b605d019, 0x923f82a4af194f9b, 0xab1c5ed5da6d8118,
    0xd807aa98a3030242, 0x12835b0145706fbe, 0x243185be4ee4b28c, 0x550c7dc3d5ffb4e2,
    0x72be5d74f27b896f, 0x80deb1fe3b1696b1, 0x9bdc06a725c71235, 0xc19bf174cf692694,
    0xe49b69c19ef14ad2, 0xefbe4786384f25e3, 0x0fc19dc68b8cd5b5, 0x240ca1cc77ac9c65,
    0x2de92c6f592b0275, 0x4a7484aa6ea6e483, 0x5cb0a9dcbd41fbd4, 0x76f988da831153b5,
    0x983e5152ee66dfab, 0xa831c66d2db43210, 0xb00327c898fb213f, 0xbf597fc7beef0ee4,
    0xc6e00bf33da88fc2, 0xd5a79147930aa725, 0x06ca6351e003826f, 0x142929670a0e6e70,
    0x27b70a8546d22ffc, 0x2e1b21385c26c926, 0x4d2c6dfc5ac42aed, 0x53380d139d95b3df,
    0x650a73548baf63de, 0x766a0abb3c77b2a8, 0x81c2c92e47edaee6, 0x92722c851482353b,
    0xa2bfe8a14cf10364, 0xa81a664bbc423001, 0xc24b8b70d0f89791, 0xc76c51a30654be30,
    0xd192e819d6ef5218, 0xd69906245565a910, 0xf40e35855771202a, 0x106aa07032bbd1b8,
    0x19a4c116b8d2d0c8, 0x1e376c085141ab53, 0x2748774cdf8eeb99, 0x34b0bcb5e19b48a8,
    0x391c0cb3c5c95a63, 0x4ed8aa4ae3418acb, 0x5b9cca4f7763e373, 0x682e6ff3d6b2b8a3,
    0x748f82ee5defb2fc, 0x78a5636f43172f60, 0x84c87814a1f0ab72, 0x8cc702081a6439ec,
    0x90befffa23631e28, 0xa4506cebde82bde9, 0xbef9a3f7b2c67915, 0xc67178f2e372532b,
    0xca273eceea26619c, 0xd186b8c721c0c207, 0xeada7dd6cde0eb1e, 0xf57d4f7fee6ed178,
    0x06f067aa72176fba, 0x0a637dc5a2c898a6, 0x113f9804bef90dae, 0x1b710b35131c471b,
    0x28db77f523047d84, 0x32caab7b40c72493, 0x3c9ebe0a15c9bebc, 0x431d67c49c100d4c,
    0x4cc5d4becb3e42b6, 0x597f299cfc657e2a, 0x5fcb6fab3ad6faec, 0x6c44198c4a475817};
constexpr uint64_t initial_state[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

uint64_t rotated(uint64_t value, int count) { return value >> count | value << (64 - count); }

void hash_block(uint64_t* state, const uint8_t* block) {
  uint64_t words[80];
  for (int i = 0; i < 16; ++i) {
    words[i] = 0;
    for (int byte = 0; byte < 8; ++byte) words[i] = words[i] << 8 | block[8 * i + byte];
  }
  for (int i = 16; i < 80; ++i) {
    const uint64_t a = words[i - 15], b = words[i - 2];
    words[i] = words[i - 16] + (rotated(a, 1) ^ rotated(a, 8) ^ a >> 7) + words[i - 7] + (rotated(b, 19) ^ rotated(b, 61) ^ b >> 6);
  }
  uint64_t v[8];
  std::copy(state, state + 8, v);
  for (int i = 0; i < 80; ++i) {
    const uint64_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
    const uint64_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
    const uint64_t first = v[7] + (rotated(v[4], 14) ^ rotated(v[4], 18) ^ rotated(v[4], 41)) + choice + round_constants[i] + words[i];
    const uint64_t second = (rotated(v[0], 28) ^ rotated(v[0], 34) ^ rotated(v[0], 39)) + majority;
    std::copy_backward(v, v + 7, v + 8);
    v[4] += first;
    v[0] = first + second;
  }
  for (int i = 0; i < 8; ++i) state[i] += v[i];
}

void sha512(const std::string& message, uint8_t* digest) {
  std::string padded = message + '\x80';
  padded.resize((padded.size() + 16 + 127) / 128 * 128, '\0');
  for (int byte = 0; byte < 8; ++byte) padded[padded.size() - 1 - byte] = char(uint64_t(message.size()) * 8 >> (8 * byte));
  uint64_t state[8];
  std::copy(initial_state, initial_state + 8, state);
  for (size_t i = 0; i < padded.size(); i += 128) hash_block(state, reinterpret_cast<const uint8_t*>(padded.data()) + i);
  for (int i = 0; i < 64; ++i) digest[i] = uint8_t(state[i / 8] >> (56 - 8 * (i % 8)));
}

// --- the field of 2^255 - 19 -----------------------------------------------------------------------------------------

constexpr uint64_t mask = (uint64_t(1) << 51) - 1;

struct Field {
  uint64_t limbs[5];
};

constexpr Field zero = {{0, 0, 0, 0, 0}}, one = {{1, 0, 0, 0, 0}};
constexpr Field d = {{0x34dca135978a3, 0x1a8283b156ebd, 0x5e7a26001c029, 0x739c663a03cbb, 0x52036cee2b6ff}};
constexpr Field root_of_minus_one = {{0x61b274a0ea0b0, 0xd5a5fc8f189d, 0x7ef5e9cbd0c60, 0x78595a6804c9e, 0x2b8324804fc1d}};

Field carried(Field a) {
  for (int i = 0; i < 4; ++i) {
    a.limbs[i + 1] += a.limbs[i] >> 51;
    a.limbs[i] &= mask;
  }
  a.limbs[0] += 19 * (a.limbs[4] >> 51);
  a.limbs[4] &= mask;
  return a;
}

Field operator+(const Field& a, const Field& b) {
  Field result;
  for (int i = 0; i < 5; ++i) result.limbs[i] = a.limbs[i] + b.limbs[i];
  return carried(result);
}

Field operator-(const Field& a, const Field& b) {
  Field result;  // 4 p is added first
  for (int i = 0; i < 5; ++i) result.limbs[i] = a.limbs[i] + 4 * (i == 0 ? mask - 18 : mask) - b.limbs[i];
  return carried(result);
}

Field operator*(const Field& a, const Field& b) {
  Wide sums[5] = {};
  for (int i = 0; i < 5; ++i) {
    for (int j = 0; j < 5; ++j) sums[(i + j) % 5] += Wide(a.limbs[i]) * b.limbs[j] * (i + j < 5 ? 1 : 19);
  }
  Field result;
  for (int i = 0; i < 5; ++i) {
    if (i < 4) sums[i + 1] += sums[i] >> 51;
    result.limbs[i] = uint64_t(sums[i]) & mask;
  }
  const Wide first = result.limbs[0] + Wide(19) * (sums[4] >> 51);
  result.limbs[0] = uint64_t(first) & mask;
  result.limbs[1] += uint64_t(first >> 51);
  return carried(result);
}

// To the power of 2^`bits` - `minus`, whose bits above the eighth are ones.
Field power(const Field& a, int bits, int minus) {
  const int low = 256 - minus;
  Field result = one;
  for (int bit = bits - 1; bit >= 0; --bit) {
    result = result * result;
    if (bit >= 8 || (low >> bit & 1) != 0) result = result * a;
  }
  return result;
}

Field inverse(const Field& a) { return power(a, 255, 21); }

void encode(Field a, uint8_t* bytes) {
  a = carried(carried(a));
  uint64_t carry = 19;
  for (uint64_t limb : a.limbs) carry = (limb + carry) >> 51;
  a.limbs[0] += 19 * carry;
  for (int i = 0; i < 4; ++i) {
    a.limbs[i + 1] += a.limbs[i] >> 51;
    a.limbs[i] &= mask;
  }
  a.limbs[4] &= mask;
  for (int i = 0; i < 32; ++i) {
    const int limb = 8 * i / 51, shift = 8 * i % 51;
    uint64_t byte = a.limbs[limb] >> shift;
    if (shift > 43 && limb < 4) byte |= a.limbs[limb + 1] << (51 - shift);
    bytes[i] = uint8_t(byte);
  }
}

// False for a number that is not below the prime. The top bit is ignored.
bool decode(const uint8_t* bytes, Field& a) {
  a = zero;
  for (int bit = 0; bit < 255; ++bit) a.limbs[bit / 51] |= uint64_t(bytes[bit / 8] >> (bit % 8) & 1) << (bit % 51);
  uint8_t again[32];
  encode(a, again);
  again[31] |= bytes[31] & 0x80;
  return std::memcmp(again, bytes, 32) == 0;
}

bool equal(const Field& a, const Field& b) {
  uint8_t first[32], second[32];
  encode(a, first), encode(b, second);
  return std::memcmp(first, second, 32) == 0;
}

// --- points ----------------------------------------------------------------------------------------------------------

struct Point {
  Field x, y, z, t;
};

constexpr Point neutral = {zero, one, one, zero};
constexpr Point base = {{{0x62d608f25d51a, 0x412a4b4f6592a, 0x75b7171a4b31d, 0x1ff60527118fe, 0x216936d3cd6e5}},
                        {{0x6666666666658, 0x4cccccccccccc, 0x1999999999999, 0x3333333333333, 0x6666666666666}},
                        one,
                        {{0x68ab3a5b7dda3, 0xeea2a5eadbb, 0x2af8df483c27e, 0x332b375274732, 0x67875f0fd78b7}}};

Point operator+(const Point& p, const Point& q) {
  const Field a = (p.y - p.x) * (q.y - q.x), b = (p.y + p.x) * (q.y + q.x);
  const Field product = p.t * q.t * d, c = product + product, twice = p.z * q.z, e = twice + twice;
  const Field f = b - a, g = e - c, h = e + c, i = b + a;
  return {f * g, h * i, g * h, f * i};
}

using Number = std::array<uint64_t, 4>;
constexpr Number order = {{0x5812631a5cf5d3ed, 0x14def9dea2f79cd6, 0x0000000000000000, 0x1000000000000000}};

bool is_below(const Number& a, const Number& b) {
  return std::lexicographical_compare(a.rbegin(), a.rend(), b.rbegin(), b.rend());
}

Point operator*(const Number& scalar, const Point& point) {
  Point result = neutral;
  for (int bit = 255; bit >= 0; --bit) {
    result = result + result;
    if ((scalar[bit / 64] >> (bit % 64) & 1) != 0) result = result + point;
  }
  return result;
}

void encode(const Point& point, uint8_t* bytes) {
  const Field scale = inverse(point.z);
  uint8_t x[32];
  encode(point.x * scale, x);
  encode(point.y * scale, bytes);
  bytes[31] |= uint8_t(x[0] << 7);
}

bool decode(const uint8_t* bytes, Point& point) {
  point.z = one;
  if (!decode(bytes, point.y)) return false;
  const Field squared = point.y * point.y, square = (squared - one) * inverse(squared * d + one);
  point.x = power(square, 252, 2);
  if (!equal(point.x * point.x, square)) point.x = point.x * root_of_minus_one;
  if (!equal(point.x * point.x, square)) return false;
  const bool negative = bytes[31] >> 7 != 0;
  if (equal(point.x, zero) && negative) return false;
  uint8_t x[32];
  encode(point.x, x);
  if (((x[0] & 1) != 0) != negative) point.x = zero - point.x;
  point.t = point.x * point.y;
  return true;
}

// The number of 64 bytes, the lowest first, modulo the order of the base point.
Number reduced(const uint8_t* bytes) {
  Number result = {};
  for (int bit = 511; bit >= 0; --bit) {
    for (int i = 3; i >= 0; --i) result[i] = result[i] << 1 | (i > 0 ? result[i - 1] >> 63 : uint64_t(bytes[bit / 8] >> (bit % 8) & 1));
    if (is_below(result, order)) continue;
    uint64_t borrow = 0;
    for (int i = 0; i < 4; ++i) {
      const Wide difference = Wide(result[i]) - order[i] - borrow;
      result[i] = uint64_t(difference);
      borrow = uint64_t(difference >> 64) & 1;
    }
  }
  return result;
}

}  // namespace

bool verify_ed25519(const PublicKey& key, const std::string& message, const uint8_t* signature) {
  Number scalar;
  std::memcpy(scalar.data(), signature + 32, 32);
  Point point;
  if (!is_below(scalar, order) || !decode(key.data(), point)) return false;
  uint8_t digest[64], expected[32];
  sha512(std::string(reinterpret_cast<const char*>(signature), 32) + std::string(key.begin(), key.end()) + message, digest);
  point.x = zero - point.x;
  point.t = zero - point.t;
  encode(scalar * base + reduced(digest) * point, expected);
  return std::memcmp(expected, signature, 32) == 0;
}

}  // namespace fxwrap::host
