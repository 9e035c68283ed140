// Pixel normalisation, and the vision tower's activation function.
#include "common/vec.h"
#include "vision/vision.h"

namespace mm {
namespace {

constexpr int64_t kShare = 16384;  // number of values above which several threads are used

// Returns 0.5 x (1 + tanh(u)), which is x / (1 + e^(-2u)), for u = sqrt(2 / pi) (x + 0.044715 x^3).
MM_INLINE f16v gelu_tanh(f16v x) {
  f16v twice_u = 1.5957691216f * x * (1.0f + 0.044715f * x * x);
  return x / (1.0f + exp_clamped(-twice_u));
}

MM_INLINE f16v load(const void* x, int64_t at, bool bf16) {
  return bf16 ? widen(load_as<h16v>((const uint16_t*)x + at)) : load_as<f16v>((const float*)x + at);
}

MM_INLINE void store(void* x, int64_t at, f16v value, bool bf16) {
  if (bf16)
    store_as((uint16_t*)x + at, narrow(value));
  else
    store_as((float*)x + at, value);
}

// Splits `count` values into vectors of up to 16, and calls f(at, n) for each: n values from index `at`.
template <class F>
MM_INLINE void over(int64_t count, F f) {
#pragma omp parallel for schedule(static) if (count > kShare)
  for (int64_t at = 0; at < count; at += 16) f(at, count - at < 16 ? count - at : 16);
}

template <bool kBf16>
void gelu(void* x, int64_t count) {
  const int size = kBf16 ? 2 : 4;
  over(count, [=](int64_t at, int64_t n) {
    if (n == 16) return store(x, at, gelu_tanh(load(x, at, kBf16)), kBf16);
    float buffer[16] = {};
    memcpy(buffer, (char*)x + at * size, n * size);
    store(buffer, 0, gelu_tanh(load(buffer, 0, kBf16)), kBf16);
    memcpy((char*)x + at * size, buffer, n * size);
  });
}

}  // namespace
}  // namespace mm

extern "C" void mm_vision_gelu(void* x, int64_t count, int32_t dtype) {
  if (dtype == 1)
    mm::gelu<true>(x, count);
  else
    mm::gelu<false>(x, count);
}

extern "C" void mm_vision_pixels(const uint8_t* pixels, int64_t count, int32_t dtype, void* out) {
  float table[256];  // the result for each pixel value, with a rounding after each operation
  uint16_t narrow_table[256];
  for (int i = 0; i < 256; i++) {
    table[i] = ((float)i / 255.0f - 0.5f) / 0.5f;
    mm::h16v bits = mm::narrow(mm::splat(table[i]));
    narrow_table[i] = bits[0];
  }
#pragma omp parallel for schedule(static) if (count > mm::kShare)
  for (int64_t at = 0; at < count; at++) {
    if (dtype == 1)
      ((uint16_t*)out)[at] = narrow_table[pixels[at]];
    else
      ((float*)out)[at] = table[pixels[at]];
  }
}
