#include "host/archive.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "host/ed25519.h"
#include "host/sha256.h"

namespace fxwrap::host {
namespace {

constexpr const char* format = "fxwrap program";
constexpr int64_t format_version = 1;
constexpr const char* manifest_hash_name = "manifest.sha256";
constexpr const char* signature_name = "manifest.signature";
constexpr size_t signature_bytes = 32 + 64;  // the public key and the signature of the manifest
constexpr size_t most_manifest_bytes = size_t(64) << 20;
constexpr size_t local_header_bytes = 30, record_bytes = 46, end_bytes = 22, end64_bytes = 56, locator_bytes = 20;

constexpr const char* copy_again = "Copy the file again, or save the program again";
constexpr const char* foreign_entry = "It was not written by fxwrap.save: do not trust it";
constexpr const char* foreign_file = "Pass the path of a file that fxwrap.save wrote";

template <class Integer> Integer little_endian(const uint8_t* data) {
  Integer value;
  std::memcpy(&value, data, sizeof value);
  return value;
}
uint16_t u16(const uint8_t* data) { return little_endian<uint16_t>(data); }
uint32_t u32(const uint8_t* data) { return little_endian<uint32_t>(data); }
uint64_t u64(const uint8_t* data) { return little_endian<uint64_t>(data); }

bool is_plain_path(const std::string& name) {
  if (name.empty() || name.find_first_of("\\:") != std::string::npos) return false;
  if (std::any_of(name.begin(), name.end(), [](char c) { return uint8_t(c) < 32 || c == 127; })) return false;
  for (size_t start = 0; start <= name.size();) {
    const size_t end = std::min(name.find('/', start), name.size());
    const std::string part = name.substr(start, end - start);
    if (part.empty() || part == "." || part == "..") return false;
    start = end + 1;
  }
  return true;
}

// The long fields of a record whose short ones are all ones, in the order of the format.
void read_long_fields(const uint8_t* extra, size_t length, std::vector<uint64_t*> fields) {
  while (length >= 4) {
    const size_t size = u16(extra + 2);
    if (size + 4 > length) return;
    if (u16(extra) == 1) {
      const uint8_t* value = extra + 4;
      for (uint64_t* field : fields) {
        if (*field != 0xFFFFFFFFu) continue;
        if (value + 8 > extra + 4 + size) return;
        *field = u64(value);
        value += 8;
      }
      return;
    }
    extra += size + 4;
    length -= size + 4;
  }
}

}  // namespace

Failure artifact_error(const std::string& path, const std::string& entry, const std::string& reason,
                       const std::string& remedy) {
  const std::string where = entry.empty() ? "" : ", entry '" + entry + "'";
  return {"ArtifactError", path + where + ": " + reason + ". " + remedy};
}

MappedFile::MappedFile(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);  // a fifo must not block
  if (file < 0) throw artifact_error(path, "", std::string("it cannot be read: ") + std::strerror(errno), foreign_file);
  struct stat status {};
  fstat(file, &status);
  if (!S_ISREG(status.st_mode)) {
    close(file);
    const char* kind = S_ISDIR(status.st_mode) ? "a directory" : "a device or a pipe";
    throw artifact_error(path, "", std::string("it cannot be read: it is ") + kind, foreign_file);
  }
  size_ = size_t(status.st_size);
  void* memory = size_ == 0 ? nullptr : mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  const int error = errno;
  close(file);
  if (memory == MAP_FAILED) {
    throw artifact_error(path, "", std::string("it cannot be mapped: ") + std::strerror(error), "Copy it to a local disk");
  }
  data_ = static_cast<uint8_t*>(memory);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

Archive::Archive(std::string path, const std::string& trust)
    : path_(std::move(path)), file_(std::make_shared<MappedFile>(path_)) {
  read_directory();
  read_manifest(trust);
  try {
    check_entries();
  } catch (const JsonError& failure) {
    throw error(manifest_name, std::string("it does not list the entries: ") + failure.what());
  }
}

Failure Archive::error(const std::string& entry, const std::string& reason, const std::string& remedy) const {
  return artifact_error(path_, entry, reason, remedy);
}

Failure Archive::damaged_directory(const std::string& reason) const {
  return error("", "its directory cannot be read (" + reason + "): it is damaged or truncated", copy_again);
}

std::string_view Archive::manifest_text() const { return contents_.at(manifest_name).text(); }

Archive::DirectoryEntry Archive::read_record(const uint8_t* record) const {
  const size_t name_length = u16(record + 28), extra_length = u16(record + 30);
  DirectoryEntry entry{std::string(reinterpret_cast<const char*>(record + record_bytes), name_length), u32(record + 42),
                       u32(record + 24)};
  uint64_t compressed = u32(record + 20);
  read_long_fields(record + record_bytes + name_length, extra_length, {&entry.size, &compressed, &entry.header_offset});
  if (u16(record + 10) != 0 || entry.size != compressed) {
    throw error(entry.name, "it is compressed from " + std::to_string(entry.size) + " to " + std::to_string(compressed) +
                " bytes", "fxwrap.save does not compress: save it again");
  }
  if ((u16(record + 8) & 1) != 0) throw error(entry.name, "it is encrypted", "fxwrap.save does not encrypt: save it again");
  return entry;
}

std::vector<Archive::DirectoryEntry> Archive::list_directory(uint64_t& directory_start) const {
  const uint8_t* data = file_->data();
  const size_t size = file_->size();
  if (size < end_bytes || std::memcmp(data + size - end_bytes, "PK\5\6", 4) != 0) {
    throw damaged_directory("File is not a zip file");
  }
  const uint8_t* end = data + size - end_bytes;
  uint64_t count = u16(end + 10), length = u32(end + 12), start = u32(end + 16);
  if (size >= end_bytes + locator_bytes + end64_bytes && std::memcmp(end - locator_bytes, "PK\6\7", 4) == 0) {
    const uint8_t* end64 = end - locator_bytes - end64_bytes;
    if (std::memcmp(end64, "PK\6\6", 4) != 0) throw damaged_directory("Bad magic number for central directory");
    count = u64(end64 + 32), length = u64(end64 + 40), start = u64(end64 + 48);
  }
  if (start > size || length > size - start) throw damaged_directory("Bad offset for central directory");
  std::vector<DirectoryEntry> entries;
  uint64_t place = start;
  for (uint64_t i = 0; i < count; ++i) {
    const uint8_t* record = data + place;
    if (place + record_bytes > start + length) throw damaged_directory("Truncated central directory");
    if (std::memcmp(record, "PK\1\2", 4) != 0) throw damaged_directory("Bad magic number for central directory");
    place += record_bytes + u16(record + 28) + u16(record + 30) + u16(record + 32);
    if (place > start + length) throw damaged_directory("Truncated central directory");
    entries.push_back(read_record(record));
  }
  directory_start = start;
  return entries;
}

void Archive::check_name(const DirectoryEntry& entry, const std::map<std::string, Content>& seen) const {
  if (!is_plain_path(entry.name)) throw error(entry.name, "its name is not a plain path", foreign_entry);
  if (seen.count(entry.name) != 0) throw error(entry.name, "its name occurs twice", foreign_entry);
}

void Archive::read_directory() {
  if (file_->size() < 4 || std::memcmp(file_->data(), "PK\3\4", 4) != 0) {
    throw error("", "it was not written by fxwrap.save", "Pass the path of a saved program");
  }
  uint64_t end = 0;
  std::vector<DirectoryEntry> entries = list_directory(end);
  std::stable_sort(entries.begin(), entries.end(),
                   [](const auto& a, const auto& b) { return a.header_offset > b.header_offset; });
  for (const DirectoryEntry& entry : entries) {
    check_name(entry, contents_);
    if (end < local_header_bytes || entry.header_offset > end - local_header_bytes) {
      throw error(entry.name, "its offset is outside of the file", copy_again);
    }
    const uint8_t* header = file_->data() + entry.header_offset;
    const size_t name_length = u16(header + 26), extra_length = u16(header + 28);
    const uint64_t start = entry.header_offset + local_header_bytes + name_length + extra_length;
    if (std::memcmp(header, "PK\3\4", 4) != 0 || start > end || entry.size > end - start) {
      throw error(entry.name, "it overlaps the next entry, or has no header: the file is damaged");
    }
    if (entry.name != std::string(reinterpret_cast<const char*>(header + local_header_bytes), name_length)) {
      throw error(entry.name, "its header has another name: the file is damaged");
    }
    contents_[entry.name] = {file_->data() + start, size_t(entry.size)};
    end = entry.header_offset;
  }
}

// The key of a text, "ed25519:" and 64 hexadecimal digits.
std::optional<PublicKey> parse_key(const std::string& text) {
  constexpr std::string_view prefix = "ed25519:", digits = "0123456789abcdef";
  if (text.size() != prefix.size() + 64 || text.compare(0, prefix.size(), prefix) != 0) return std::nullopt;
  PublicKey key{};
  for (size_t i = 0; i < 64; ++i) {
    const size_t digit = digits.find(text[prefix.size() + i]);
    if (digit == std::string_view::npos) return std::nullopt;
    key[i / 2] = uint8_t(key[i / 2] << 4 | digit);
  }
  return key;
}

void Archive::check_signature(const std::string& trust) const {
  if (trust == "full") return;
  if (trust == "none") {
    throw Failure("OptionError", "trust='none' runs programs in the interpreter, which is in Python: use fxwrap.load");
  }
  const std::optional<PublicKey> trusted = parse_key(trust);
  if (!trusted) throw Failure("OptionError", "unknown trust '" + trust + "'; known: full, a public key, 'ed25519:...'");
  constexpr const char* remedy = "Ask its author for a file that is signed by this key, or load it with trust='none'";
  const auto entry = contents_.find(signature_name);
  if (entry == contents_.end()) throw error(signature_name, "the file is not signed", remedy);
  PublicKey signer;
  std::memcpy(signer.data(), entry->second.data, signer.size());
  if (signer != *trusted) {
    throw error(signature_name, "the file is signed by ed25519:" + hex(signer) + ", not by " + trust, remedy);
  }
  const std::string message = "fxwrap saved program\n" + std::string(manifest_text());
  if (!verify_ed25519(*trusted, message, entry->second.data + signer.size())) {
    throw error(signature_name, "the signature is not that of this file", remedy);
  }
}

void Archive::read_manifest(const std::string& trust) {
  for (const char* name : {manifest_name, manifest_hash_name}) {
    if (contents_.count(name) == 0) {
      throw error(name, "there is no such entry: this is another kind of zip file", foreign_file);
    }
  }
  const Content text = contents_[manifest_name], digest = contents_[manifest_hash_name];
  if (text.size > most_manifest_bytes || digest.size != 65) {
    throw error(manifest_name, "it has " + std::to_string(text.size) + " bytes, more than the maximum of a manifest");
  }
  if (digest.text() != hex(sha256(text.data, text.size)) + "\n") {
    throw error(manifest_name, "it is damaged: its hash is wrong");
  }
  const auto signature = contents_.find(signature_name);
  if (signature != contents_.end() && signature->second.size != signature_bytes) {
    throw error(signature_name, "it has " + std::to_string(signature->second.size) + " bytes instead of " +
                std::to_string(signature_bytes));
  }
  check_signature(trust);
  const Json* name = nullptr;
  try {
    manifest_ = Json::parse(text.text());
    name = manifest_.is(Json::Kind::object) ? manifest_.find("format") : nullptr;
  } catch (const JsonError& failure) {
    throw error(manifest_name, std::string("it is not JSON: ") + failure.what());
  }
  if (name == nullptr || !name->is(Json::Kind::string) || name->string() != format) {
    throw error(manifest_name, "it is not the manifest of a saved program", foreign_file);
  }
  const Json* version = manifest_.find("format_version");
  if (version != nullptr && version->is(Json::Kind::integer) && version->integer() == format_version) return;
  const std::string shown = version != nullptr && version->is(Json::Kind::integer) ? std::to_string(version->integer()) : "?";
  const Json* writer = manifest_.find("written_by");
  const Json* package = writer != nullptr && writer->is(Json::Kind::object) ? writer->find("fxwrap") : nullptr;
  const std::string by = package != nullptr && package->is(Json::Kind::string) ? package->string() : "?";
  throw error(manifest_name,
              "the file has format " + shown + "; this fxwrap reads format " + std::to_string(format_version),
              "It was written by fxwrap " + by + ": load it with that version, or save the program again with this one");
}

void Archive::check_entries() {
  for (const auto& [name, entry] : manifest_.at("entries").members()) {
    const int64_t size = entry.at("size").integer();
    const auto content = contents_.find(name);
    if (content == contents_.end()) throw error(name, "it is missing", copy_again);
    if (int64_t(content->second.size) != size) {
      throw error(name, "it has " + std::to_string(content->second.size) + " bytes instead of " + std::to_string(size));
    }
    hashes_[name] = entry.at("sha256").string();
  }
  for (const auto& [name, content] : contents_) {
    if (hashes_.count(name) == 0 && name != manifest_name && name != manifest_hash_name && name != signature_name) {
      throw error(name, "the manifest does not list it", foreign_entry);
    }
  }
}

const std::string& Archive::content_hash_of(const std::string& name) const {
  const auto hash = hashes_.find(name);
  if (hash == hashes_.end()) throw error(name, "there is no such entry");
  return hash->second;
}

Content Archive::read(const std::string& name) const {
  const std::string& expected = content_hash_of(name);
  const Content content = contents_.at(name);
  if (checked_.count(name) != 0) return content;
  const std::string actual = content_hash(content.data, content.size);
  if (actual != expected) throw error(name, "it is damaged: its hash is " + actual + ", not " + expected);
  checked_.insert(name);
  return content;
}

void Archive::check_unread_entries() const {
  for (const auto& [name, hash] : hashes_) read(name);
}

}  // namespace fxwrap::host
