// A mixture of experts in place of a feed-forward: a router, SwiGLUs of which each token uses some, and optionally a
// shared SwiGLU for every token with its own gate.
//
// Pairs of a token and an expert are sorted by expert. All used experts run in one parallel region for gate and up and
// one for down, so a single token reads only the weights of its own experts.
//
// bfloat16 models round like the same steps as separate bfloat16 operations: the router's sums, then each probability
// of its float32 softmax; an expert's product, and the product times its probability. These are summed in float32, the
// likeliest expert first, and rounded. A row's result depends neither on other rows nor on the number of threads.
#pragma once

#include "linear/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int32_t count, top_k;  // top_k up to count
  int32_t norm_top_k;    // whether a token's expert probabilities are divided by their sum
  mm_linear router;      // [count, hidden]
  // The first expert's layers, without biases; the other experts' packed forms follow at intervals of mm_linear_bytes.
  // gate_up is packed with a half.
  mm_linear gate_up, down;
  mm_linear shared_gate_up, shared_down;  // n = 0: no shared expert
  mm_linear shared_gate;  // [1, hidden]
  int64_t* hits;  // NULL, or [count]: incremented by the tokens that use each expert
} mm_experts;

// Computes y = residual + mixture(x), x [m, hidden]; residual (or NULL) has y's stride and may be y. Returns 0, or 1 if
// scratch memory cannot be allocated; y is then incomplete.
int32_t mm_experts_run(const mm_experts* experts, const void* x, int64_t x_stride, int32_t m, void* y, int64_t y_stride,
                       const void* residual);

#ifdef __cplusplus
}
#endif
