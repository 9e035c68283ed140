// A mixture of experts in place of a feed-forward: a router, SwiGLUs of which each token takes some, and perhaps one
// more for every token, behind a gate of its own.
//
// Pairs of a token and an expert are sorted by expert, and all hit experts are one pass of the threads for gate and up
// and one for down: a token alone reads its own experts' weights and no others.
//
// Rounding, where the model is bfloat16, is that of the same steps as separate bfloat16 operations: the router's sums,
// then its softmax in float32 and each chance; an expert's product, the same times its chance. These are added up in
// float32, the likeliest expert first, and rounded. A row's result depends neither on the other rows nor on the number
// of threads.
#pragma once

#include "linear/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int32_t count, top_k;  // top_k up to count
  int32_t norm_top_k;    // whether the chances of a token's experts are divided by their sum
  mm_linear router;      // [count, hidden]
  // Of the first expert, without biases; each other one's packed form lies behind the one before, mm_linear_bytes
  // further on. gate_up is packed with a half.
  mm_linear gate_up, down;
  mm_linear shared_gate_up, shared_down;  // n = 0: there is none
  mm_linear shared_gate;                  // [1, hidden]
  int64_t* hits;                          // NULL, or [count]: grow by the tokens that took each expert
} mm_experts;

// y = residual + what the mixture makes of x [m, hidden]; residual (or NULL) has y's stride and may be y. Gives 0, or 1
// where memory for its rows could not be had; y is not complete then.
int32_t mm_experts_run(const mm_experts* experts, const void* x, int64_t x_stride, int32_t m, void* y, int64_t y_stride,
                       const void* residual);

#ifdef __cplusplus
}
#endif
