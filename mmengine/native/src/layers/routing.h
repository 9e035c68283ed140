// Chooses the experts of a token.
#pragma once

#include <cstdint>

#include "layers/experts.h"

namespace mm {

// Returns the top_k experts for a router's logits [count], the likeliest first, and their probabilities. For a
// bfloat16 model, the probabilities are rounded to bfloat16. Ties are resolved like torch.topk on a CPU.
void route(const mm_experts& experts, const float* logits, int32_t* chosen, float* chances);

}  // namespace mm
