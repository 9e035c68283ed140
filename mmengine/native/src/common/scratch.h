// Scratch memory that a source file's calls reuse.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace mm {

// Returns at least `bytes` of the calling thread's memory, or NULL if allocation fails. The memory only grows, and each
// source file has separate memory. Workers in the thread's parallel regions may use the memory.
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
