// The container of a saved program, read as fxwrap/artifact/archive.py reads it, with the same checks and error texts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "engine/failure.h"
#include "host/json.h"

namespace fxwrap::host {

inline constexpr const char* manifest_entry = "manifest.json";
inline constexpr const char* save_again = "Save the program again";
inline constexpr const char* manifest_name = "manifest.json";

// A file in memory: a private mapping, whose pages are read when they are used; writes stay in this process.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);  // throws Failure
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// The content of an entry; it lives as long as the archive's file.
struct Content {
  const uint8_t* data = nullptr;
  size_t size = 0;
  std::string_view text() const { return {reinterpret_cast<const char*>(data), size}; }
};

// An open file with verified directory and manifest. Every function throws Failure (ArtifactError) for an invalid file.
class Archive {
 public:
  // `trust` is "full", or the public key that must have signed the file. Throws Failure (OptionError) for another text.
  Archive(std::string path, const std::string& trust);

  const std::string& path() const { return path_; }
  const Json& manifest() const { return manifest_; }
  std::string_view manifest_text() const;
  const std::shared_ptr<MappedFile>& file() const { return file_; }

  // An entry, after its hash was checked.
  Content read(const std::string& name) const;
  const std::string& content_hash_of(const std::string& name) const;  // as the manifest lists it
  bool has(const std::string& name) const { return hashes_.count(name) != 0; }

  // Checks the hashes of the entries that were not read: a damaged file is rejected as a whole.
  void check_unread_entries() const;

  // The error of an entry, or of the whole file ("").
  Failure error(const std::string& entry, const std::string& reason, const std::string& remedy = save_again) const;

 private:
  struct DirectoryEntry {
    std::string name;
    uint64_t header_offset;
    uint64_t size;
  };

  void read_directory();
  std::vector<DirectoryEntry> list_directory(uint64_t& directory_start) const;
  DirectoryEntry read_record(const uint8_t* record) const;
  void check_name(const DirectoryEntry& entry, const std::map<std::string, Content>& seen) const;
  void read_manifest(const std::string& trust);
  void check_signature(const std::string& trust) const;
  void check_entries();
  Failure damaged_directory(const std::string& reason) const;

  std::string path_;
  std::shared_ptr<MappedFile> file_;
  std::map<std::string, Content> contents_;
  std::map<std::string, std::string> hashes_;  // of the entries in the manifest
  mutable std::set<std::string> checked_;      // the entries whose hash was checked
  Json manifest_;
};

// Throws the error of a file.
Failure artifact_error(const std::string& path, const std::string& entry, const std::string& reason,
                       const std::string& remedy);

}  // namespace fxwrap::host
