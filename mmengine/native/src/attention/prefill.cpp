// Attention of a prompt chunk over the row's KV blocks.
#include "attention/flash.h"
#include "attention/job.h"

namespace mm {
namespace {

// The inputs of one KV head. The q heads of a token that share this KV head are consecutive queries.
template <class Value>
class PagedSource {
 public:
  using T = Value;

  PagedSource(const AttentionCall& call, const AttentionTask& task)
      : call_(call), task_(task), places_(*call.step, task.row), group_(call.group()) {
    const mm_attention_step& step = *call.step;
    const int64_t token = step.query_starts[task.row] + task.query0, head = (int64_t)task.head0 * group_;
    position_ = call.first_position(task.row) + task.query0;
    kv_ = (const T*)call.kv + (int64_t)task.head0 * step.head_dim;
    q_ = (const T*)call.q + token * call.q_stride + head * step.head_dim;
    out_ = (T*)call.out + token * call.out_stride + head * step.head_dim;
  }

  int head_dim() const { return call_.step->head_dim; }
  int value_dim() const { return call_.rules.value_dim; }
  Scoring scoring() const { return call_.rules.scoring; }
  bool has_sinks() const { return call_.rules.sinks != nullptr; }
  float sink(int query) const { return call_.rules.sinks[task_.head0 * group_ + query % group_]; }
  int queries() const { return (task_.query1 - task_.query0) * group_; }
  int keys() const { return position_ + task_.query1 - task_.query0; }
  int first(int query) const { return call_.rules.first_key(position_ + query / group_); }
  int seen(int query) const { return position_ + query / group_ + 1; }
  const T* query(int i, T*) const { return q_ + i / group_ * call_.q_stride + (int64_t)(i % group_) * head_dim(); }
  const T* key(int i, T*) const { return kv_ + places_.of(i); }
  const T* value(int i) const { return kv_ + places_.of(i) + places_.v_offset; }
  T* out(int i) const { return out_ + i / group_ * call_.out_stride + (int64_t)(i % group_) * head_dim(); }

 private:
  const AttentionCall& call_;
  const AttentionTask& task_;
  Places places_;
  int group_, position_;
  const T *kv_, *q_;
  T* out_;
};

using Fp32 = Flash<VectorTiles, PagedSource<float>>;
using Bf16 = Flash<Bf16Tiles, PagedSource<uint16_t>>;

}  // namespace

int64_t prefill_scratch_bytes(const AttentionCall& call, int queries) {
  const mm_attention_step& step = *call.step;
  return (step.dtype == 0 ? Fp32::bytes : Bf16::bytes)(step.head_dim, call.rules.value_dim, queries * call.group());
}

void attention_prefill(const AttentionCall& call, const AttentionTask& task, void* scratch) {
  AttentionTask one = task;
  for (one.head0 = task.head0; one.head0 < task.head1; one.head0++) {
    one.head1 = one.head0 + 1;
    if (call.step->dtype == 0)
      Fp32::run({call, one}, scratch);
    else
      Bf16::run({call, one}, scratch);
  }
}

}  // namespace mm
