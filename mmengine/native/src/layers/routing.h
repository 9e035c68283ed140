// Which experts a token takes.
#pragma once

#include <cstdint>

#include "layers/experts.h"

namespace mm {

// Of a router's logits [count]: the top_k likeliest experts, the likeliest first, and their chances, rounded where the
// model is bfloat16. Of equal ones it takes those that torch.topk does on a CPU.
void route(const mm_experts& experts, const float* logits, int32_t* chosen, float* chances);

}  // namespace mm
