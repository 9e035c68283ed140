// Scratch memory for the calls of a source file.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace mm {

// Returns memory of the calling thread, or NULL if allocation fails. The memory only grows, and each source file has
// its own. Workers in the thread's parallel regions may share it.
static inline char* scratch_of_thread(int64_t bytes) {
  struct Buffer {
    char* data = nullptr;
    int64_t size = 0;
    ~Buffer() { free(data); }
  };
  static thread_local Buffer buffer;
  if (buffer.size < bytes) {
    constexpr int64_t page = 1 << 16;
    free(buffer.data);
    buffer.size = (bytes + page - 1) / page * page;
    buffer.data = (char*)aligned_alloc(64, buffer.size);
    if (!buffer.data) buffer.size = 0;
  }
  return buffer.data;
}

}  // namespace mm
