// Pixels to numbers, and the activation of the vision tower's layers.
#include "linear_vec.h"
#include "vision.h"

namespace mm {
namespace {

constexpr int64_t kShare = 16384;  // values that are worth a thread

// 0.5 x (1 + tanh(u)) is x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
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

// f over `count` values in vectors; the last, broken one goes through a buffer.
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

typedef uint8_t b16v __attribute__((vector_size(16)));

// (x / 255 - 0.5) / 0.5. The quotient is a product and one step of Newton's, which for whole numbers up to
// 255 is the rounded quotient to the bit (a test looks at all of them); dividing takes five times as long.
MM_INLINE f16v normalised(b16v pixels) {
  f16v x = __builtin_convertvector(__builtin_convertvector(pixels, i16v), f16v);
  const float inverse = 1.0f / 255.0f;
  f16v quotient = x * inverse;
  f16v left = x - quotient * 255.0f;
  return (left * inverse + quotient - 0.5f) * 2.0f;
}

template <bool kBf16>
void normalise(const uint8_t* pixels, int64_t count, void* out) {
  const int size = kBf16 ? 2 : 4;
  over(count, [=](int64_t at, int64_t n) {
    if (n == 16) return store(out, at, normalised(load_as<b16v>(pixels + at)), kBf16);
    uint8_t grey[16] = {};
    float buffer[16];
    memcpy(grey, pixels + at, n);
    store(buffer, 0, normalised(load_as<b16v>(grey)), kBf16);
    memcpy((char*)out + at * size, buffer, n * size);
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
  if (dtype == 1)
    mm::normalise<true>(pixels, count, out);
  else
    mm::normalise<false>(pixels, count, out);
}
