// A mixture of experts: a router, SwiGLU experts, and optionally a shared SwiGLU expert with its own gate. Each token
// uses top_k experts and the shared expert.
//
// Pairs of a token and an expert are sorted by expert. The first parallel region computes gate and up for all used
// experts, and the second region computes down. The weights of unused experts are not read.
//
// bfloat16 models round each intermediate result: the router's logits, the probabilities (softmax in float32), an
// expert's output, and its product with the probability. The products are summed in float32, starting with the
// likeliest expert, and the sum is rounded. A row's result depends neither on other rows nor on the number of threads.
#pragma once

#include "linear/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int32_t count, top_k;  // number of experts; number of experts per token, at most `count`
  int32_t norm_top_k;    // whether a token's expert probabilities are divided by their sum
  mm_linear router;      // [count, hidden]
  // The first expert's layers, without biases. Its packed weights are followed by the other experts', mm_linear_bytes
  // for each. gate_up contains gate's rows, then up's rows, and is packed with half = n / 2 (mm_linear_pack).
  mm_linear gate_up, down;
  mm_linear shared_gate_up, shared_down;  // n = 0: no shared expert
  mm_linear shared_gate;  // [1, hidden]
  int64_t* hits;  // NULL, or [count]: counts the tokens that used each expert
} mm_experts;

// Computes y = residual + mixture(x), x [m, hidden]. residual has y's stride, and may be y or NULL. Returns 0, or 1 if
// scratch memory cannot be allocated. After 1, y is incomplete.
int32_t mm_experts_run(const mm_experts* experts, const void* x, int64_t x_stride, int32_t m, void* y, int64_t y_stride,
                       const void* residual);

#ifdef __cplusplus
}
#endif
