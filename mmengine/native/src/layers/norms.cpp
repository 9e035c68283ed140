#include "layers/norms.h"

#include "decoder/rows.h"

extern "C" void mm_rms_norm(const void* x, int64_t stride, int32_t rows, int32_t dtype, const float* weight,
                            int32_t size, float eps, int32_t once, void* out) {
  mm::rms_norm_rows({(void*)x, stride, rows, dtype}, weight, size, eps, {out, size, rows, dtype}, once);
}
